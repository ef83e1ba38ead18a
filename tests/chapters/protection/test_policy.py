"""Who stays: the protection paper's harness, position by position, in both readings."""

from dataclasses import replace
from random import Random

import pytest
import torch
from tiny import after_prefill

from kvrepro.chapters.protection import policy
from kvrepro.chapters.protection.observe import append
from kvrepro.chapters.protection.policy import POLICIES, PROTECTION_SEVEN, Limits, check
from kvrepro.engine.condition import Condition
from kvrepro.errors import InputError


def kept(condition: Condition, n: int, signal: torch.Tensor | None = None) -> list[int]:
    o = after_prefill(n, condition, signal)
    keep = policy.reduce(POLICIES[condition.policy], o, Limits.of([condition], torch.get_default_device()))
    return keep[0].any(0).nonzero()[:, 0].tolist()


def ranges(text: str) -> list[int]:
    """`"8-9, 77-99"` as positions."""
    spans = [part.split("-") for part in text.split(", ")]
    return [i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)]


AS_RUN_LRU = [
    (1919, 128, "9, 89-99, 884-999", "0-11, 91-99, 905-999, 1907-1918"),
    (1919, 256, "8-9, 77-99, 769-999", "0-24, 82-99, 812-999, 1894-1918"),
    (1919, 512, "6-9, 54-99, 538-999", "0-50, 63-99, 627-999, 1868-1918"),
    (8056, 1024, "8-9, 74-99, 733-999, 7327-8055", "0-101, 740-999, 7394-8055"),
    (32717, 4096, "7-9, 64-99, 632-999, 6311-9999", "0-408, 702-999, 7020-9999, 32308-32716"),
    (65406, 4096, "7-9, 66-99, 652-999, 6518-9999, 65177-65405", "0-408, 702-999, 7020-9999, 64997-65405"),
]


@pytest.mark.parametrize(("n", "capacity", "unprotected", "protected"), AS_RUN_LRU)
def test_as_run_lru_keeps_the_band_of_large_decimal_strings(n, capacity, unprotected, protected):
    assert kept(Condition("lru", capacity), n) == ranges(unprotected)
    assert kept(Condition("lru", capacity, prefix=0.1, suffix=0.1), n) == ranges(protected)


def test_as_described_lru_keeps_the_newest():
    assert kept(Condition("lru", 256, reading="as_described"), 1919) == ranges("1663-1918")
    protected = Condition("lru", 256, prefix=0.1, suffix=0.1, reading="as_described")
    assert kept(protected, 1919) == ranges("0-25, 1689-1918")


def test_streaming_llm_shields_strings_as_run_and_positions_as_described():
    assert kept(Condition("streaming_llm", 256), 1919)[:2] == [0, 1]
    assert set(kept(Condition("streaming_llm", 256), 1919)) >= {0, 1, 10, 100, 999}
    assert len(kept(Condition("streaming_llm", 256), 1919)) == 256
    assert kept(Condition("streaming_llm", 256, reading="as_described"), 1919) == ranges("0-3, 1667-1918")


def test_guardrail_deletes_streaming_llms_protected_prefix_as_run_only():
    c = Condition("streaming_llm", 256, prefix=0.1, suffix=0.1)
    assert kept(c, 1919) == ranges("772-1002, 1894-1918")
    honoured = Condition("streaming_llm", 256, prefix=0.1, suffix=0.1, switches=(("guardrail", "honours"),))
    assert set(kept(honoured, 1919)) >= set(ranges("0-24, 1894-1918"))


@pytest.mark.parametrize(("capacity", "floor", "ceil"), [
    (64, 6, 7), (96, 9, 10), (128, 12, 13), (256, 25, 26), (512, 51, 52), (1024, 102, 103), (4096, 409, 410),
])  # fmt: skip
def test_guard_sizes_round_down_as_run_and_up_as_described(capacity, floor, ceil):
    assert Condition("lru", capacity, 0.1, 0.1).guards() == (floor, floor)
    assert Condition("lru", capacity, 0.1, 0.1, reading="as_described").guards() == (ceil, ceil)


def test_guards_are_at_least_four_and_exact_products_do_not_round_up():
    assert Condition("lru", 32, 0.01, 0.0).guards() == (4, 0)
    assert Condition("lru", 70, 0.1, 0.1, reading="as_described").guards() == (7, 7)


def test_prefix_without_suffix_keeps_only_the_newest_as_run():
    assert kept(Condition("lru", 256, prefix=0.1), 1919) == ranges("1663-1918")
    right = Condition("lru", 256, prefix=0.1, switches=(("empty_suffix", "right"),))
    assert kept(right, 1919)[:25] == ranges("0-24")
    assert kept(Condition("lru", 256, suffix=0.1), 1919)[-25:] == ranges("1894-1918")


def test_attention_policies_rank_alike_after_the_prefill_as_run():
    signal = torch.rand(1919, generator=torch.Generator(torch.get_default_device()).manual_seed(3))
    same = [kept(Condition(p, 256, 0.1, 0.1), 1919, signal)
            for p in ("h2o", "snapkv", "ada_kv", "quest", "h2o_faithful", "snapkv_faithful")]  # fmt: skip
    assert all(s == same[0] for s in same)
    best = set(signal[25:1894].topk(206).indices.add(25).tolist())
    assert set(same[0]) == best | set(ranges("0-24, 1894-1918"))


def test_random_restarts_for_every_item_as_run():
    c = Condition("random", 256)
    lost = set(Random(42).sample(range(1919), 1919 - 256))
    o = replace(after_prefill(1919, c), draws=(Random(42),))
    keep = policy.reduce(POLICIES["random"], o, Limits.of([c], torch.get_default_device()))
    assert set(keep[0, 0].nonzero()[:, 0].tolist()) == set(range(1919)) - lost


@pytest.mark.parametrize("name", list(POLICIES))
def test_full_capacity_keeps_everything(name):
    assert kept(Condition(name, 60, 0.1, 0.1), 60, torch.rand(60)) == list(range(60))


def test_the_papers_seven_are_in_the_catalogue():
    assert set(PROTECTION_SEVEN) <= set(POLICIES)


@pytest.mark.parametrize(("condition", "says"), [
    (Condition("lruu", 64), "unknown policy 'lruu': choose one of full, lru"),
    (Condition("lru", 32, 0.5, 0.6), "budget 32 < 35 protected tokens"),
    (Condition("lru", 7, 0.1, 0.1), "budget 7 < 8 protected tokens"),
    (Condition("streaming_llm", 4), "budget 4 < 5 protected tokens"),
    (Condition("lru"), "capacity None"),
    (Condition("lru", 64, reading="as_told"), "unknown reading 'as_told'"),
    (Condition("lru", 64, switches=(("tiebreak", "x"),)), "unknown switch 'tiebreak'"),
    (Condition("lru", 64, switches=(("tie_break", "x"),)), "choose one of string, integer"),
    (Condition("lru", 64, execution="virtual"), "unknown execution"),
    (Condition("lru", 64, 0.1, 0.1, suffix_mode="static"), "static_suffix"),
    (Condition("lru", 64, 0.1, 0.0, switches=(("guardrail", "honours"),)), "nothing can leave"),
    (Condition("full", 64), "policy full keeps every token"),
])  # fmt: skip
def test_bad_conditions_get_one_line(condition, says):
    with pytest.raises(InputError) as error:
        check(condition, 100)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prompt_shorter_than_its_guards_is_refused():
    with pytest.raises(InputError, match="prompt of 7 tokens < 8 protected"):
        check(Condition("lru", 64, 0.05, 0.05), 7)


@pytest.mark.parametrize(
    ("name", "stays"), [("h2o", False), ("snapkv", False), ("ada_kv", False), ("quest", False), ("lru", True)]
)
def test_attention_policies_give_up_the_newest_token_before_it_was_ever_seen(name, stays):
    c = Condition(name, 40)
    o = after_prefill(40, c, torch.rand(40) + 0.01).map_slots(lambda v: torch.nn.functional.pad(v, (0, 1)))
    o = append(replace(o, step=8), 40, torch.tensor([True]))
    keep = policy.reduce(POLICIES[name], o, Limits.of([c], torch.get_default_device()))
    assert bool(keep[0, 0, 40]) is stays
