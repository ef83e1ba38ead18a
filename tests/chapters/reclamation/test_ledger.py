"""The books of a paged cache: the guide's numbers, and that they always balance."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrepro.chapters.reclamation.ledger import Ledger
from kvrepro.errors import InputError

# ---- what is refused, and what stays when it is


def test_too_few_blocks_are_refused_before_anything_changes():
    ledger = Ledger(2, 4)
    number = ledger.new()
    ledger.append(number, 5)
    with pytest.raises(InputError, match="1 blocks are needed, 0 of 2 are free"):
        ledger.append(number, 4)
    assert ledger.sequences[number].seen == 5
    ledger.append(number, 3)
    with pytest.raises(InputError, match="keep has 7 positions, the sequence has seen 8"):
        ledger.evict(number, np.ones(7, bool))
    with pytest.raises(InputError, match="layout 'head': "):
        ledger.compact(number, "head")


# ---- the books against a naive model


class Books(RuleBasedStateMachine):
    """Random append, fork, evict, compact and free; a naive model keeps each token's content."""

    BLOCKS, SIZE, HEADS = 12, 4, 2

    def __init__(self):
        super().__init__()
        self.ledger = Ledger(self.BLOCKS, self.SIZE)
        self.slots = np.zeros(self.BLOCKS * self.SIZE, np.int64)  # what each slot holds
        self.naive: dict[int, dict[int, tuple[int, tuple[bool, ...]]]] = {}  # sequence -> position -> content, heads
        self.seen: dict[int, int] = {}
        self.next = 1

    def copy(self, copies):
        self.slots[copies[1]] = self.slots[copies[0]]

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.naive)))

    @rule()
    def new(self):
        number = self.ledger.new()
        assert number not in self.seen
        self.naive[number], self.seen[number] = {}, 0

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), tokens=st.integers(1, 9))
    def append(self, data, tokens):
        number = self.pick(data)
        before = [self.slots.copy(), dict(self.ledger.sequences), self.ledger.references.copy()]
        try:
            slots, copies = self.ledger.append(number, tokens)
        except InputError:
            assert self.ledger.sequences == before[1]
            assert (self.ledger.references == before[2]).all()
            return
        self.copy(copies)
        assert (self.ledger.references[slots // self.SIZE] == 1).all()  # nothing is written into a shared block
        self.slots[slots] = np.arange(self.next, self.next + tokens)
        for i in range(tokens):
            self.naive[number][self.seen[number] + i] = (self.next + i, (True,) * self.HEADS)
        self.seen[number] += tokens
        self.next += tokens

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data)
        share = data.draw(st.none() | st.integers(0, len(self.ledger.sequences[parent].blocks)))
        free = len(self.ledger.free_list)
        try:
            child, copies = self.ledger.fork(parent, share)
        except InputError:
            assert len(self.ledger.free_list) == free
            return
        self.copy(copies)
        self.naive[child], self.seen[child] = dict(self.naive[parent]), self.seen[parent]

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), per_head=st.booleans(), share=st.floats(0, 1))
    def evict(self, data, per_head, share):
        number = self.pick(data)
        heads = self.HEADS if per_head else 1
        random = np.random.default_rng(data.draw(st.integers(0, 99)))
        keep = random.random((1, heads, self.seen[number])) < share
        free = len(self.ledger.free_list)
        assert self.ledger.evict(number, keep) == len(self.ledger.free_list) - free
        kept = np.broadcast_to(keep[0], (self.HEADS, self.seen[number]))
        self.naive[number] = {
            p: (content, both)
            for p, (content, heads) in self.naive[number].items()
            if any(both := tuple(bool(h and k) for h, k in zip(heads, kept[:, p], strict=True)))
        }

    @precondition(lambda self: self.naive)
    @rule(data=st.data(), how=st.sampled_from(["repack", "fill"]))
    def compact(self, data, how):
        number = self.pick(data)
        before, free = self.ledger.sequences[number], len(self.ledger.free_list)
        shared = np.flatnonzero(self.ledger.references > 1)
        order = self.ledger.living(number)[1].tolist()
        freed, copies = self.ledger.compact(number, how)
        assert freed == len(self.ledger.free_list) - free
        assert not np.isin(np.concatenate(copies) // self.SIZE, shared).any()  # none shared moved
        assert set(shared) & set(before.blocks) == set(shared) & set(self.ledger.sequences[number].blocks)
        self.copy(copies)
        after = self.ledger.living(number)[1].tolist()
        assert after == order if how == "repack" else sorted(after) == sorted(order)
        unshared = np.setdiff1d(self.ledger.sequences[number].blocks, shared)
        living = (self.ledger.sequences[number].positions >= 0).sum()
        if not len(shared):
            assert len(unshared) == -(-living // self.SIZE)  # nothing else can be freed

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def free(self, data):
        number = self.pick(data)
        self.ledger.free(number)
        del self.naive[number]

    @invariant()
    def no_block_is_lost_and_none_freed_twice(self):
        held = [b for s in self.ledger.sequences.values() for b in s.blocks.tolist()]
        assert np.bincount(held, minlength=self.BLOCKS).tolist() == self.ledger.references.tolist()
        free = self.ledger.free_list
        assert len(set(free)) == len(free)
        assert sorted(free + sorted(set(held))) == list(range(self.BLOCKS))

    @invariant()
    def every_token_is_found_where_the_map_says(self):
        for number, tokens in self.naive.items():
            flat, positions, alive = self.ledger.living(number)
            heads = np.broadcast_to(alive[0], (self.HEADS, len(flat))).T.tolist()
            by_position = {
                p: (c, tuple(h)) for p, c, h in zip(positions.tolist(), self.slots[flat], heads, strict=True)
            }
            assert by_position == tokens


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
