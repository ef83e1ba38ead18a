"""The paged cache: its books always balance, the engine generates on it as on its own, and compaction does not change
what it says."""

import numpy as np
import pytest
import tiny
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrepro.chapters.reclamation.paged import Entry, Ledger, PagedRows, empty
from kvrepro.chapters.reclamation.survivors import while_decoding
from kvrepro.engine import generate as engine
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition, DecodeCap, Prefill
from kvrepro.errors import InputError

# ---- the books against a naive model


class Books(RuleBasedStateMachine):
    """Random append, fork, evict, compact and free; a naive model keeps each token's content."""

    BLOCKS, SIZE, HEADS = 12, 4, 2

    def __init__(self):
        super().__init__()
        self.slots = torch.zeros(self.BLOCKS * self.SIZE, dtype=torch.long)  # what each slot holds
        self.ledger = Ledger(self.BLOCKS, self.SIZE, [self.slots])
        self.naive: dict[Entry, dict[int, tuple[int, tuple[bool, ...]]]] = {}  # position -> content, heads
        self.next = 1

    def pick(self, data) -> Entry:
        return data.draw(st.sampled_from(list(self.naive)))

    @rule()
    def new(self):
        self.naive[self.ledger.new()] = {}

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def append(self, data, tokens):
        s = self.pick(data)
        seen, blocks, references = s.seen, s.blocks, self.ledger.references.copy()
        try:
            slots = self.ledger.append(s, tokens)
        except InputError:
            assert (s.seen, s.blocks.tolist()) == (seen, blocks.tolist())
            assert (self.ledger.references == references).all()
            return
        assert (self.ledger.references[slots // self.SIZE] == 1).all()  # nothing is written into a shared block
        self.slots[slots] = torch.arange(self.next, self.next + tokens)
        for i in range(tokens):
            self.naive[s][seen + i] = (self.next + i, (True,) * self.HEADS)
        self.next += tokens

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data)
        share, free = data.draw(st.integers(0, len(parent.blocks))), len(self.ledger.free_list)
        try:
            self.naive[self.ledger.fork(parent, share)] = dict(self.naive[parent])
        except InputError:
            assert len(self.ledger.free_list) == free

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), per_head=st.booleans(), share=st.floats(0, 1))
    def evict(self, data, per_head, share):
        s = self.pick(data)
        heads = self.HEADS if per_head else 1
        keep = np.random.default_rng(data.draw(st.integers(0, 99))).random((1, heads, s.seen)) < share
        free = len(self.ledger.free_list)
        assert self.ledger.evict(s, keep) == len(self.ledger.free_list) - free
        kept = np.broadcast_to(keep[0], (self.HEADS, s.seen))
        self.naive[s] = {
            p: (content, both)
            for p, (content, heads) in self.naive[s].items()
            if any(both := tuple(bool(h and k) for h, k in zip(heads, kept[:, p], strict=True)))
        }

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), how=st.sampled_from(["repack", "fill"]))
    def compact(self, data, how):
        s = self.pick(data)
        before, free = set(s.blocks), len(self.ledger.free_list)
        shared = np.flatnonzero(self.ledger.references > 1)
        order = self.ledger.living(s)[1].tolist()
        freed, copies = self.ledger.compact(s, how)
        assert freed == len(self.ledger.free_list) - free
        assert not np.isin(copies // self.SIZE, shared).any()  # none shared moved
        assert set(shared) & before == set(shared) & set(s.blocks)
        after = self.ledger.living(s)[1].tolist()
        assert after == order if how == "repack" else sorted(after) == sorted(order)
        if not len(shared):
            assert len(s.blocks) == -(-(s.positions >= 0).sum() // self.SIZE)  # nothing else can be freed

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def free(self, data):
        s = self.pick(data)
        self.ledger.release(s.blocks)
        del self.naive[s]

    @invariant()
    def no_block_is_lost_and_none_freed_twice(self):
        held = [b for s in self.naive for b in s.blocks.tolist()]
        assert np.bincount(held, minlength=self.BLOCKS).tolist() == self.ledger.references.tolist()
        free = self.ledger.free_list
        assert len(set(free)) == len(free)
        assert sorted(free + sorted(set(held))) == list(range(self.BLOCKS))

    @invariant()
    def every_token_is_found_where_the_map_says(self):
        for s, tokens in self.naive.items():
            flat, positions, alive = self.ledger.living(s)
            heads = np.broadcast_to(alive[0], (self.HEADS, len(flat))).T.tolist()
            content = self.slots[flat].tolist()
            found = {p: (c, tuple(h)) for p, c, h in zip(positions.tolist(), content, heads, strict=True)}
            assert found == tokens


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- generation


def logits(model, rows: PagedRows, ids: list[int]) -> torch.Tensor:
    """Of the last of `ids`, which the model reads."""
    with installed(model):
        return rows.extend(ids)


def decoded(model, ids: list[int], condition: Condition, layout: str, tokens: int) -> tuple[list[int], PagedRows]:
    """What is generated on a paged cache, the first of whose blocks another sequence shares."""
    parent = empty(model, 64, 8)
    logits(model, parent, ids[:40])
    rows = parent.fork(5, layouts=[layout])
    last = logits(model, rows, ids[40:])
    steps = rows.generate(last, while_decoding(model, ids, condition, tokens - 1), tokens - 1)
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
    assert [p["seen"] for p in rows.passes[0]] == [90, *range(90 + (condition.every or 99), 104, condition.every or 99)]
    assert rows.passes[0][0]["living"] == len(ragged.kept_positions)
    assert [round(held) for held in rows.entries[0].alive.sum(-1).mean(1)] == ragged.kept
    if layout != "none":
        assert all(p["freed"] == p["predicted"] for p in rows.passes[0])
    assert not any(p["foreign"] for p in rows.passes[0])


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 12}], ids=["full attention", "sliding window"])
def test_a_full_cache_decodes_as_the_model_without_one(changes):
    model, [ids] = tiny.model("mistral", **changes), tiny.prompts(50)
    rows = empty(model, 32, 8)
    logits(model, rows, ids[:30])
    ours = logits(model, rows, ids[30:])
    torch.testing.assert_close(ours, model(torch.tensor([ids])).logits[:, -1], rtol=0, atol=1e-4)
