"""The paged cache: the engine generates on it as on its own, and compaction does not change what it says."""

import numpy as np
import pytest
import tiny
import torch

from kvrepro.chapters.reclamation.paged import PagedCache, PagedRows, call_for, extend, generate
from kvrepro.chapters.reclamation.survivors import while_decoding
from kvrepro.engine import generate as engine
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition, DecodeCap, Prefill


def sequence(model, blocks: int = 32, size: int = 8) -> PagedRows:
    return PagedRows(PagedCache(model, blocks, size))


def logits(model, rows: PagedRows, ids: list[int]) -> torch.Tensor:
    """Of the last of `ids`, which the model reads."""
    with installed(model):
        return extend(call_for(model), rows, ids)


def answer(model, rows: PagedRows, ids: list[int], tokens: int) -> list[int]:
    """Greedy tokens after `ids`."""
    generated: list[int] = []
    while len(generated) < tokens:
        generated.append(int(logits(model, rows, generated[-1:] or ids).argmax()))
    return generated


def decoded(model, ids: list[int], condition: Condition, layout: str, tokens: int) -> tuple[list[int], PagedRows]:
    """What is generated on a paged cache, the first of whose blocks another sequence shares."""
    parent, call = sequence(model, 64), call_for(model)
    with installed(model):
        extend(call, parent, ids[:40])
        rows = parent.fork(layouts=[layout])
        last = extend(call, rows, ids[40:])
    kept = while_decoding(model, ids, condition, tokens - 1)
    steps = generate(call, rows, last, kept, tokens - 1)
    return [int(last.argmax()), *steps[0].argmax(1).tolist()], rows


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
    assert rows.passes[0][0].living == len(ragged.kept_positions)
    assert [round(held) for held in rows.entries[0].alive.sum(-1).mean(1)] == ragged.kept
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
