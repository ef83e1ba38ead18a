"""Selects the tokens that stay in each head, given scores, protected tokens and counts."""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from kvrepro.engine.shapes import Counts, Mask, Scores
from kvrepro.errors import InputError

Doubt = tuple[Tensor, Callable[[], InputError]]  # a check: the error to raise unless the tensor is all 0 or False
_later: ContextVar[list[Doubt] | None] = ContextVar("later", default=None)
_kernels: ContextVar[bool] = ContextVar("kernels", default=False)


@contextmanager
def ensured_later(kernels: bool = False) -> Iterator[list[Doubt]]:
    """Inside the block `ensure_none` adds its checks to the list, because running them would wait for a GPU.

    kernels: let kernels select where they can.
    """
    doubts: list[Doubt] = []
    later_before, kernels_before = _later.set(doubts), _kernels.set(kernels)
    try:
        yield doubts
    finally:
        _later.reset(later_before)
        _kernels.reset(kernels_before)


def ensure_none(wrong: Tensor, error: Callable[[], InputError]) -> None:
    """Raise `error` unless all of `wrong` is False or 0; inside `ensured_later` only note the check."""
    doubts = _later.get()
    if doubts is not None:
        doubts.append((wrong, error))
    elif wrong.any():
        raise error()


def settle(doubts: Sequence[Doubt]) -> None:
    """Raise the error of the first noted check that fails; waits for a GPU once."""
    if not doubts:
        return
    wrong_places = torch.cat([wrong.flatten().to(doubts[0][0].device) for wrong, _ in doubts]).nonzero()
    if len(wrong_places):
        ends = list(itertools.accumulate(wrong.numel() for wrong, _ in doubts))
        raise doubts[bisect.bisect_right(ends, int(wrong_places[0, 0]))][1]()


def select(scores: Scores, protected: Mask, counts: Counts, ties: Tensor | None = None) -> Mask:
    """A mask of the protected tokens of each head, then its best-scored; among equals the later token, or the one with
    the larger `ties`, int64, distinct.

    Exactly `counts` [batch, kv_heads] tokens per head. A slot scored -inf is dead and never kept; a head with fewer
    tokens than its count keeps them all. Raises InputError for a count below the protected tokens, and for NaN scores.
    """
    if ties is None and _by_kernel(scores):  # one launch, which also finds what `ensure_room` and `ensure_numbers` do
        problems, total = scores.new_zeros(counts.numel(), 3, dtype=torch.int32), scores.numel()
        kept = _launched(scores, counts, protected, problems=problems)
        nan_counts, missing, held = problems.unbind(1)
        ensure_none(missing, lambda: _no_room(held - missing, held))
        ensure_none(nan_counts, lambda: _no_numbers(int(nan_counts.sum()), total))
        return kept
    dead = scores.isneginf()
    firm = protected & ~dead
    ensure_room(counts, firm.sum(-1))
    ensure_numbers(scores)
    scores = scores.masked_fill(firm, torch.inf)
    if ties is not None:
        rank = lexsort(scores, ties).argsort(dim=-1)
        return (rank >= scores.shape[-1] - counts[..., None]) & ~dead
    return largest(scores, counts)


def largest(scores: Tensor, counts: Tensor, firm: Mask | None = None) -> Tensor:
    """A mask of the `counts` [...] largest of scores [..., tokens], never -inf; `firm` tokens come first, and among
    equals the later one.

    All rows are sorted as one, with the row's number in front of each key, because a GPU sorts rows one after another.
    """
    if _by_kernel(scores):
        return _launched(scores, counts, firm)
    if firm is not None:
        scores = scores.masked_fill(firm & ~scores.isneginf(), torch.inf)
    n = scores.shape[-1]
    order = _ordered(scores)
    place = n.bit_length()
    order = (order >> 32) + 2**31 << place | (order & 2**32 - 1)  # as few bits as there are places
    order += (torch.arange(counts.numel(), device=order.device) << 32 + place).view(*counts.shape, 1)
    best = order.flatten().sort().values.view_as(order)
    last = best.gather(-1, (n - counts[..., None]).clamp(0, n - 1))
    return (order >= last) & (counts > 0)[..., None] & ~scores.isneginf()


def _by_kernel(scores: Tensor) -> bool:
    """May a kernel select by these scores?"""
    if not _kernels.get():
        return False
    from kvrepro_kernels import LONGEST

    return scores.dtype == torch.float32 and bool(scores.shape[-1] <= LONGEST)


def _launched(scores: Tensor, counts: Tensor, firm: Mask | None, **more: Tensor) -> Mask:
    """`largest` by its kernel, one row for each count."""
    from kvrepro_kernels import largest as by_kernel

    rows = None if firm is None else firm.flatten(0, -2).contiguous()
    return by_kernel(scores.flatten(0, -2).contiguous(), counts.flatten(), rows, **more).view_as(scores)


def ensure_room(counts: Tensor | int, needed: Tensor, whose: str = "") -> None:
    """Raise InputError, with both numbers, if more tokens are protected than a count has room for."""
    ensure_none(needed > counts, lambda: _no_room(counts, needed, whose))


def _no_room(counts: Tensor | int, needed: Tensor, whose: str = "") -> InputError:
    worst = (needed - counts).argmax()
    room = torch.as_tensor(counts, device=needed.device).expand_as(needed)
    message = f"budget {int(room.flatten()[worst])} < {int(needed.flatten()[worst])} protected tokens"
    return InputError(f"{message}{whose}: raise the budget, or protect less")


def ensure_numbers(scores: Scores) -> None:
    """Raise InputError if a score is NaN: such a token cannot be ranked."""
    nan_count, total = scores.isnan().sum(), scores.numel()
    ensure_none(nan_count, lambda: _no_numbers(int(nan_count), total))


def _no_numbers(nan_count: int, total: int) -> InputError:
    return InputError(f"{nan_count} of {total} scores are NaN: mend the scorer")


def lexsort(*keys: Tensor) -> Tensor:
    """Places along the last axis in ascending order of the first key, equals in the order of the next key; stable."""
    order = keys[-1].argsort(dim=-1, stable=True)
    for key in reversed(keys[:-1]):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order


def _ordered(scores: Scores) -> Tensor:
    """Distinct int64 keys in the order of scores, then places: the float's bits made monotone, then the place."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    bits = torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits)
    return bits.long() << 32 | torch.arange(scores.shape[-1], device=scores.device)
