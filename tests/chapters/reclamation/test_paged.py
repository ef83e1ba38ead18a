"""The paged cache: the engine generates on it as on its own, and compaction does not change what it says."""

import numpy as np
import pytest
import tiny
import torch

from kvrepro.chapters.reclamation.paged import PagedCache, PagedRows, call_for, extend, generate
from kvrepro.engine import generate as engine
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import find
from kvrepro.engine.regime import DecodeCap, Prefill


def sequence(model, blocks: int = 32, size: int = 8, **given) -> PagedRows:
    return PagedRows(PagedCache(model, blocks, size), **given)


def logits(model, rows: PagedRows, ids: list[int], window: int = 0) -> torch.Tensor:
    """Of the last of `ids`, which the model reads."""
    with installed(model):
        return extend(call_for(model, ids), rows, ids, window)


def answer(model, rows: PagedRows, ids: list[int], tokens: int) -> list[int]:
    """Greedy tokens after `ids`."""
    generated: list[int] = []
    while len(generated) < tokens:
        generated.append(int(logits(model, rows, generated[-1:] or ids).argmax()))
    return generated


def decoded(model, ids: list[int], condition: Condition, layout: str, tokens: int) -> tuple[list[int], PagedRows]:
    """What the engine's loop generates on a paged cache, the first of whose blocks another sequence shares."""
    parent, call = sequence(model, 64, sums=find(condition.policy).needs), call_for(model, ids, tokens)
    with installed(model):
        extend(call, parent, ids[:40], 16)
        rows = parent.fork(layouts=[layout])
        last = extend(call, rows, ids[40:], 16)
    [generation] = generate(call, rows, last, [condition])
    return generation.tokens, rows


WINDOW = (("window", 12),)
CONDITIONS = [
    Condition("h2o_online", 40, DecodeCap(4), reading="as_described"),
    Condition("snapkv", 40, DecodeCap(4), switches=WINDOW),
    Condition("r_kv", 40, DecodeCap(4), reading="as_described"),
    Condition("streaming_llm", 40, DecodeCap(3), reading="as_described"),
    Condition("scissorhands", 40, DecodeCap(4), reading="as_described"),
    Condition("layer_defensive_kv", 40, Prefill(), reading="as_described", switches=WINDOW),
]


@pytest.mark.parametrize("layout", ["none", "repack", "fill"])
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda c: c.policy)
def test_the_engine_generates_on_a_paged_cache_what_it_generates_on_its_own(condition, layout):
    model, [ids] = tiny.model(), tiny.prompts(90)
    [[ragged]] = engine.generate(model, [ids], [condition], max_new_tokens=14, stop_ids=())
    tokens, rows = decoded(model, ids, condition, layout, 14)
    assert tokens == ragged.tokens
    assert [p.seen for p in rows.passes[0]] == [90, *range(90 + (condition.every or 99), 104, condition.every or 99)]
    assert rows.passes[0][0].survivors.any((0, 1)).nonzero()[0].tolist() == ragged.kept_positions
    assert [round(held) for held in rows.survivors()[0].sum(-1).mean(1)] == ragged.kept
    if layout != "none":
        assert all(p.freed == p.predicted for p in rows.passes[0])
    assert not any(p.foreign for p in rows.passes[0])


# ---- generation


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 12}], ids=["full attention", "sliding window"])
def test_a_full_cache_decodes_as_the_model_without_one(changes):
    model, [ids] = tiny.model("mistral", **changes), tiny.prompts(50)
    rows = sequence(model)
    logits(model, rows, ids[:30])
    ours = logits(model, rows, ids[30:])
    torch.testing.assert_close(ours, model(torch.tensor([ids])).logits[:, -1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("compact", ["repack", "fill"])
def test_two_questions_share_a_prefix_and_neither_sees_the_other(compact):
    model, prefix, first, second = tiny.model(), *tiny.prompts(37, 11, 14)

    def reply(rows: PagedRows, ids: list[int]) -> list[int]:
        tokens = answer(model, rows, ids, 1)
        keep = np.arange(rows.seen) % 3 != 1
        keep[8:16] = False  # a whole block of the prefix
        rows.ledger.evict(rows.numbers[0], keep)
        rows.pages.compact(rows.numbers[0], compact)
        return tokens + answer(model, rows, tokens[-1:], 10)

    parent = sequence(model)
    answer(model, parent, prefix, 1)
    pages, held = parent.pages, parent.entries[0].blocks.copy()
    before = [x.clone() for x in pages.keys]
    children = [parent.fork(), parent.fork(2)]
    together = [reply(child, q) for child, q in zip(children, (first, second), strict=True)]
    assert together == [reply(sequence(model), prefix + first), reply(sequence(model), prefix + second)]
    assert all(torch.equal(a[held], b[held]) for a, b in zip(before, pages.keys, strict=True))
    assert parent.entries[0].blocks.tolist() == held.tolist()
    for sequences in (parent, *children):
        sequences.free()
    assert len(pages.ledger.free_list) == 32


def test_sums_are_the_column_sums_of_eager_attention_and_each_fork_has_its_own():
    model, [ids] = tiny.model(), tiny.prompts(40)
    parent = sequence(model, sums=["mass"])
    logits(model, parent, ids[:33])
    before = parent.ragged[0].sums["mass"].clone()
    child = parent.fork()
    for token in ids[33:]:
        logits(model, child, [token])
    p = torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]  # [layers, heads, n, n]
    exact = p.unflatten(1, (2, 3)).mean(2).sum(2)
    for layer in range(3):
        torch.testing.assert_close(child.ragged[layer].sums["mass"][0], exact[layer], rtol=0, atol=1e-4)
    assert torch.equal(parent.ragged[0].sums["mass"], before)
