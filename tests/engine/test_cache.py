"""The ragged cache against lists of lists; freed memory is really free."""

from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conditions import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from optimum.quanto import MaxOptimizer, qint4
from optimum.quanto.tensor.grouped import ungroup
from tiny import model as tiny_model
from tiny import prompts as tiny_prompts
from watched import watched_ends

from kvrepro.engine import generate as engine
from kvrepro.engine.cache import GROUP, EngineCache, Packed, RaggedLayer, concatenated, joined_caches
from kvrepro.engine.condition import Condition
from kvrepro.errors import InputError

DIM, HEADS = 4, 2


def stamped(position: int, row: int, head: int) -> float:
    """A number that identifies a key by its position, row and head."""
    return position + 1000 * row + 100_000 * head


def tensors(rows: list[int], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [batch, HEADS, new, DIM] of tokens at `positions` [batch, new]."""
    keys = torch.empty(*positions.shape[:1], HEADS, positions.shape[1], DIM)
    for b, row in enumerate(rows):
        for head in range(HEADS):
            stamp = torch.tensor([stamped(int(p), row, head) for p in positions[b]])
            keys[b, head] = stamp[:, None] + torch.arange(DIM) / 8
    return keys, -keys


class Lists:
    """The same cache as lists: tokens[row][head] = [(position, sums)], rows by name."""

    def __init__(self, rows: list[int]):
        self.names, self.tokens = rows, [[[] for _ in range(HEADS)] for _ in rows]


def assert_equal(layer: RaggedLayer, lists: Lists) -> None:
    """What it holds, what a query attends to and, in a copy, whose tail holds no padding, what a policy is shown."""
    assert layer.held().flatten().tolist() == [len(head) for row in lists.tokens for head in row]
    parts = layer.parts()
    seen = [torch.cat([x.expand(*layer.shape, *x.shape[2:]) for x in part], 2) for part in zip(*parts, strict=True)]
    if layer.slot is not None:  # free room does not count
        assert layer.bytes == 2 * DIM * 4 * int(layer.held().sum())
    shown = layer.rows(torch.arange(layer.shape[0])).shown()
    assert ((shown.positions >= 0) == (shown.places >= 0)).all()
    for b, name in enumerate(lists.names):
        for head, tokens in enumerate(lists.tokens[b]):
            at = torch.tensor([[t[0] for t in tokens]], dtype=torch.long)
            dead = shown.positions.shape[2] - len(tokens)
            assert shown.positions[b, head].tolist() == [-1] * dead + at[0].tolist()
            for keys, values, where in [seen, shown[:3]] if parts else [shown[:3]]:
                alive = where[b, head] >= 0
                assert where[b, head][alive].tolist() == at[0].tolist()
                if tokens:
                    assert torch.equal(keys[b, head][alive], tensors([name], at)[0][0, head])
                    assert torch.equal(values[b, head][alive], tensors([name], at)[1][0, head])
            for k, s in shown.sums.items():
                assert s[b, head].tolist() == [0.0] * dead + [t[1][k] for t in tokens]


OPERATIONS = ["append", "append one", "add", "settle", "evict", "rows", "concatenated", "slide", "fix"]
ALONE = ("append one", "evict", "settle", "rows", "fix")  # operations on a fixed layer, which others loosen first


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=9), st.integers(0, 10**6))
def test_any_course_of_operations_equals_lists(operations, seed):
    g = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    def new(names: list[int]) -> tuple[RaggedLayer, Lists]:
        n, lists = 3 + below(5), Lists(list(names))
        positions = torch.arange(n).expand(len(names), n).clone()
        keep = torch.rand(len(names), HEADS, n, generator=g) < 0.7
        keys, values = tensors(names, positions)
        sums = {k: torch.randint(9, keep.shape, generator=g).float() for k in ("mass", "low")}
        where = positions[:, None].expand(keep.shape)
        for b, head in product(range(len(names)), range(HEADS)):
            lists.tokens[b][head] = [
                (p, {k: float(s[b, head, p]) for k, s in sums.items()}) for p in range(n) if keep[b, head, p]
            ]
        return RaggedLayer.of(keys, values, where, keep, sums), lists

    layer, lists = new([0, 1])
    last = [20, 20]  # next position of each row
    names = 2
    for operation in operations:
        batch = len(lists.names)
        loose = operation == "add" and layer.slot is None
        if not (loose or operation in ALONE or (operation == "slide" and layer.width)):
            layer.settle(loosen=True)
        if operation == "fix":
            slot = torch.arange(2)
            layer.fix(slot, 20, below(9), bool(below(2)), 0)
        elif operation.startswith("append"):
            many = 1 if operation == "append one" else 1 + below(20)
            pads = [below(many) if many > 1 else 0 for _ in range(batch)]
            positions = torch.tensor(
                [[-1] * p + [x + i for i in range(many - p)] for p, x in zip(pads, last, strict=True)]
            )
            layer.append(*tensors(lists.names, positions), positions)
            if layer.slot is not None:  # as a captured step does
                slot.add_(1)
                layer.tail += 1
            for b in range(batch):
                for p in positions[b][pads[b] :].tolist():
                    for head in range(HEADS):
                        lists.tokens[b][head].append((p, {"mass": 0.0, "low": 0.0}))
                last[b] += many - pads[b]
        elif operation == "add":
            parts = layer.parts()
            if not parts:
                continue
            where = torch.cat([w.expand(*layer.shape, -1) for _, _, w in parts], 2)
            p = torch.randint(9, where.shape, generator=g).float().masked_fill(where < 0, 0.0)
            layer.add("mass", p)
            for b, head in product(range(batch), range(HEADS)):
                more = {int(x): float(y) for x, y in zip(where[b, head], p[b, head], strict=True) if x >= 0}
                lists.tokens[b][head] = [(x, {**s, "mass": s["mass"] + more[x]}) for x, s in lists.tokens[b][head]]
        elif operation == "settle":
            layer.settle()
            assert layer.tail == 0
        elif operation == "evict":
            _, _, where, _, places = layer.shown()
            keep = torch.rand(where.shape, generator=g) < 0.6
            layer.keep(places, keep & (places >= 0))
            for b, head in product(range(batch), range(HEADS)):
                stay = {int(x) for x, k in zip(where[b, head], keep[b, head], strict=True) if k and x >= 0}
                lists.tokens[b][head] = [t for t in lists.tokens[b][head] if t[0] in stay]
        elif operation == "rows":
            chosen = [below(batch) for _ in range(1 + below(3))]
            layer = layer.rows(torch.tensor(chosen))
            lists.tokens = [[list(h) for h in lists.tokens[i]] for i in chosen]
            lists.names, last = [lists.names[i] for i in chosen], [last[i] for i in chosen]
        elif operation == "concatenated":
            other, more = new([names])
            names += 1
            layer = concatenated([layer, other])
            lists.names, lists.tokens, last = lists.names + more.names, lists.tokens + more.tokens, [*last, 20]
        else:
            oldest = [below(x) for x in last]
            layer.slide(torch.tensor(oldest))
            for b in range(batch):
                lists.tokens[b] = [[t for t in head if t[0] >= oldest[b]] for head in lists.tokens[b]]
        if not layer.tail and layer.slot is not None:
            torch.arange(2, out=slot)
        assert_equal(layer, lists)


def test_layers_are_split_as_they_were_joined():
    g, where = torch.Generator().manual_seed(0), torch.arange(7).expand(6, HEADS, 7)
    keys, values = tensors([*range(6)], where[:, 0])
    keep, mass = torch.rand(where.shape, generator=g) < 0.6, torch.rand(where.shape, generator=g)
    whole = RaggedLayer.of(keys, values, where, keep, {"mass": mass})
    for i, layer in enumerate(whole.layers(3)):
        rows = slice(2 * i, 2 * i + 2)
        alone = RaggedLayer.of(keys[rows], values[rows], where[rows], keep[rows], {"mass": mass[rows]})
        assert layer.shape == alone.shape == (2, HEADS)
        for name in ("keys", "values", "positions", "offsets"):
            assert torch.equal(getattr(layer, name), getattr(alone, name))
        assert torch.equal(layer.sums["mass"], alone.sums["mass"])
    assert whole.layers(1)[0] is whole


def test_the_last_queries_are_remembered_row_by_row():
    def queries(at: torch.Tensor) -> torch.Tensor:
        return at.clamp(min=0)[:, None, :, None].expand(-1, 4, -1, DIM).float()

    def remembers(layer: RaggedLayer, *rows: list[int]) -> None:
        assert layer.query_positions.tolist() == [*rows]
        assert torch.equal(layer.queries, queries(torch.tensor(rows)))

    def new(rows: int) -> RaggedLayer:
        where = torch.arange(3).expand(rows, HEADS, 3)
        return RaggedLayer.of(*tensors([*range(rows)], where[:, 0]), where, where >= 0, {})

    layer, seen = new(2), torch.tensor([[-1, 3, 4, 5], [0, -1, -1, 1]])
    layer.remember(queries(seen), seen, 3)
    remembers(layer, [3, 4, 5], [-1, 0, 1])
    layer.remember(queries(seen[:, 3:] + 1), seen[:, 3:] + 1, 3, alone=True)
    remembers(layer, [4, 5, 6], [0, 1, 2])
    short, first = new(1), torch.tensor([[4]])
    for _ in range(2):
        short.remember(queries(first), first, 5, alone=True)
    remembers(short, [4, 4])
    layer = concatenated([new(1), layer.rows(torch.tensor([1, 0]))])
    remembers(layer, [-1, -1, -1], [0, 1, 2], [4, 5, 6])
    layer.fix(torch.arange(2), 4, 0, True, 5)
    remembers(layer, [-1, -1, -1, -1, -1], [-1, -1, 0, 1, 2], [-1, -1, 4, 5, 6])
    place, at = layer.queries.data_ptr(), torch.tensor([[1], [3], [7]])
    layer.remember(queries(at), at, 5, alone=True)
    remembers(layer, [-1, -1, -1, -1, 1], [-1, 0, 1, 2, 3], [-1, 4, 5, 6, 7])
    assert layer.queries.data_ptr() == place
    without = new(1)
    without.fix(torch.arange(2), 4, 0, True, 5)
    without.remember(queries(at[:1]), at[:1], 5, alone=True)
    assert without.queries is None


@pytest.mark.parametrize(("kept", "most", "fixed"), [(8, 0, True), (4, 0, True), (3, 0, False), (3, 4, True)])
def test_a_fixed_layer_keeps_its_tensors_unless_they_are_twice_too_large(kept, most, fixed):
    """One head of 8 tokens, then `kept`; `most`, for which there must be room, after later evictions."""
    where = torch.arange(8)[None, None]
    layer = RaggedLayer.of(*(x[:, :1] for x in tensors([0], where[0])), where, where >= 0, {})
    layer.fix(torch.arange(2), 4, 2 * most, False, 0)
    place = layer.keys.data_ptr()
    layer.keep(*(x[..., :kept] for x in (where, where >= 0)))
    assert (layer.slot is not None, layer.keys.data_ptr() == place) == (fixed, fixed)
    assert layer.held().tolist() == [[kept]]
    with torch.device("meta"):  # whatever the default, all is made on the device of what is held
        layer.append(*(torch.ones(1, 1, 1, DIM, device="cpu") for _ in range(2)), torch.zeros_like(where[0, :, :1]))
        assert layer.held().tolist() == [[kept + 1]]
        layer.tail = 1
        layer.settle()
        assert ((layer.slot is not None), layer.tail, layer.held().tolist()) == (fixed and kept < 8, 0, [[kept + 1]])
        layer.fix(torch.zeros_like(layer.offsets), 4, 9, True, 0)
        assert layer.places()[1].shape == (1, 1, max(9, kept + 1))


def test_rows_of_layers_with_states_are_taken_and_joined():
    """Recurrent layers have states in the place of tokens, one of which is missing at first."""

    def new(*rows: int) -> EngineCache:
        cache, recurrent = EngineCache(tiny_model("llama").config), SimpleNamespace()
        where = torch.arange(3).expand(len(rows), HEADS, 3)
        cache.ragged = {1: RaggedLayer.of(*tensors([*rows], where[:, 0]), where, where >= 0, {})}
        recurrent.conv_states = {0: torch.tensor(rows)[:, None], 1: None}
        recurrent.recurrent_states = {0: torch.tensor(rows)[:, None, None] + 10}
        cache.layers = [recurrent, SimpleNamespace(keys=1)]
        return cache

    cache = new(0, 1)
    assert cache.recurrent
    taken = cache.rows(torch.tensor([1, 1, 0]))
    whole = joined_caches([taken, new(5)])
    for each, rows in ((cache, [0, 1]), (whole, [1, 1, 0, 5])):
        assert each.layers[0].conv_states[0][:, 0].tolist() == rows
        assert each.layers[0].recurrent_states[0][:, 0, 0].tolist() == [row + 10 for row in rows]
        assert each.layers[0].conv_states[1] is None
        assert each.layers[1].keys == 1
    assert whole.ragged[1].held().tolist() == [[3] * HEADS] * 4
    assert whole.ragged[1].keys[:: 3 * HEADS, 0].tolist() == [1000.0, 1000.0, 0.0, 5000.0]
    assert [*cache.ragged, *cache.rows(torch.tensor([0]), spend=True).ragged, *cache.ragged, *taken.ragged] == [1, 1]


def test_sums_that_a_cache_lacks_are_zeros_where_it_is_joined():
    where = torch.arange(3)[None, None].expand(1, HEADS, 3)
    of = *tensors([0], where[:, 0]), where, where >= 0
    joined = concatenated([RaggedLayer.of(*of, {}), RaggedLayer.of(*of, {"mass": torch.ones(1, HEADS, 3)})])
    assert joined.sums["mass"].tolist() == [0.0] * 6 + [1.0] * 6
    assert joined.sums["mass"].dtype == torch.float32


def test_packed_layers_hold_their_newest_as_they_are():
    keys, values = torch.randn(2, 1, HEADS, 10, GROUP, generator=torch.Generator().manual_seed(0))
    where, ones = torch.arange(10).expand(1, HEADS, 10), torch.ones(1, HEADS, 128, GROUP)
    layer = RaggedLayer.of(keys, values, where, where >= 0, {})
    plain_keys, plain_bytes = layer.keys, layer.bytes
    layer.quantise()
    assert type(layer.keys) is type(layer.values) is Packed
    torch.testing.assert_close(layer.keys.dense(), plain_keys, atol=0.4, rtol=0)
    assert layer.bytes < plain_bytes / 4
    assert layer.rows(torch.tensor([0])).keys is layer.keys
    assert layer.rows(torch.tensor([0, 0])).keys.shape == (4 * 10, GROUP)
    for new, left in ((127, 127), (1, 0)):  # with 128 the tail is packed too
        at = torch.arange(10, 10 + new)[None] + layer.tail
        layer.append(ones[:, :, :new], ones[:, :, :new], at)
        layer.quantise()
        assert layer.tail == left
    torch.testing.assert_close(layer.keys.dense()[10], torch.ones(GROUP))
    layer.slide(torch.tensor([100]))
    assert (type(layer.keys), layer.positions.tolist()) == (Packed, [*range(100, 138)] * HEADS)
    places, positions = layer.places()
    layer.keep(places, positions >= 137)
    torch.testing.assert_close(layer.values.dense(), torch.ones(HEADS, GROUP))


# ---- four bits, against optimum-quanto's own code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_those_of_quanto(dtype):
    dense = torch.randn(137, 2 * GROUP, generator=torch.Generator("cpu").manual_seed(0)).to(dtype)
    dense[5, :GROUP] = 0.25  # a group of equals has no scale
    packed = Packed(dense)
    scale, shift = MaxOptimizer()(dense, qint4, 0, GROUP)
    levels = torch.ops.quanto.quantize_affine(dense, bits=4, axis=0, group_size=GROUP, scale=scale, shift=shift)
    assert torch.equal(packed.dense(), ungroup(scale * levels - shift, 0, dense.shape))
    assert (packed.dense().dtype, packed.dtype) == (dtype, dtype)
    assert torch.equal(packed.dense()[5, :GROUP], dense[5, :GROUP])
    assert packed.nbytes == dense.numel() // 2 + 2 * dense.itemsize * dense.numel() // GROUP


def test_no_tokens_and_heads_that_do_not_fit():
    assert Packed(torch.zeros(0, GROUP)).dense().shape == (0, GROUP)
    with pytest.raises(InputError, match="head dim 48 is no multiple of 64, which share a scale: use bits=None"):
        Packed(torch.zeros(3, 48))


# ---- bytes


@cache
def with_wide_heads(dtype: torch.dtype):
    return tiny_model("llama", dtype, hidden_size=96, head_dim=64, num_key_value_heads=2, num_hidden_layers=2)


HELD = [("streaming_llm", torch.bfloat16), ("ada_kv", torch.float32), ("h2o", torch.float32)]


@pytest.mark.parametrize("regime", ["prefill", "chunked", "offline", "decode cap", "per step"])
@pytest.mark.parametrize(("policy", "dtype"), HELD)
def test_bytes_held_are_within_two_percent_of_the_theoretical_count(policy, regime, dtype):
    """Heads of 64 numbers, as the embedded model has them; everything that the cache holds counts. In theory: keys and
    values of the tokens held, and what the policy must know at its next eviction, which only some regimes have."""
    model, number, new = with_wide_heads(dtype), dtype.itemsize, 10
    window = (("window", 8),) if policy == "ada_kv" else ()
    c = flat(policy, 0.5, regime=regime, reading="as_described", switches=window, chunk=100)
    caches, given = {}, {"max_new_tokens": new, "stop_ids": (), "batch_rows": 1}
    with watched_ends(lambda rows, done: caches.update({rows.tags[done[0]]: rows.cache})):
        [[full, ours]] = engine.generate(model, tiny_prompts(300), [Condition(), c], **given)
    cache = caches[0, 1]
    held = sum(int(layer.held().sum()) for layer in cache.ragged.values())
    again = regime in ("decode cap", "per step")
    sums = held * 4 if again and policy == "h2o" else 0
    queries = 2 * 6 * 8 * 64 * number if again and window else 0
    theory = held * 2 * 64 * number + sums + queries
    fields = [fields for layer in cache.ragged.values() for fields in (vars(layer), layer.sums, layer.tail_sums)]
    storages = [t.untyped_storage() for each in fields for t in each.values() if isinstance(t, torch.Tensor)]
    really = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # layers may share one
    assert theory <= really <= 1.02 * theory
    assert ours.bytes_held == pytest.approx(really, rel=1e-3)
    assert held == 2 * sum(ours.kept)
    assert full.bytes_full == ours.bytes_full == 2 * 2 * (299 + new) * 2 * 64 * number
    assert full.bytes_full <= full.bytes_held <= 1.02 * full.bytes_full
    assert ours.bytes_held < 0.6 * full.bytes_held
