"""Guards are masks of retained positions, wherever their slots lie."""

from dataclasses import replace

import torch
from tiny import after_prefill

from kvrepro.chapters.protection import guard
from kvrepro.engine.condition import Condition


def row(positions: list[int], alive: list[bool], prompt_tokens: int):
    o = after_prefill(len(positions), Condition("lru", 8))
    return replace(
        o, positions=torch.tensor([positions]), alive=torch.tensor([alive]), prompt_tokens=torch.tensor([prompt_tokens])
    )


def guarded(o, prefix: int, suffix: int, static: bool = False) -> list[int]:
    mask = guard.ends(o, torch.tensor([prefix]), torch.tensor([suffix]), static)
    return sorted(o.positions[mask].tolist())


def test_ends_are_lowest_and_highest_retained_positions_whatever_their_slot():
    o = row([9, 3, 4, 12, 7, 0, 10], [True, True, True, True, True, False, True], 8)
    assert guarded(o, 2, 3) == [3, 4, 9, 10, 12]
    assert guarded(o, 0, 0) == []
    assert guarded(o, 6, 6) == [3, 4, 7, 9, 10, 12]


def test_a_static_suffix_stays_at_the_prompts_end():
    o = row([9, 3, 4, 12, 7, 0, 10], [True, True, True, True, True, False, True], 8)
    assert guarded(o, 1, 2, static=True) == [3, 7]  # 6, the other one, is long gone
