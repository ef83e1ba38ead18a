"""Who stays in each head, once scores, protected tokens and counts are known."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from kvrepro.engine.shapes import Counts, Mask, Scores
from kvrepro.errors import InputError

Doubt = tuple[Tensor, Callable[[], InputError]]  # is it so? what to say then
_later: ContextVar[list[Doubt] | None] = ContextVar("later", default=None)
_kernels: ContextVar[bool] = ContextVar("kernels", default=False)


@contextmanager
def ensured_later(kernels: bool = False) -> Iterator[list[Doubt]]:
    """What `ensure_none` would ask a GPU, which would have to be waited for, is noted instead.

    kernels: `largest` is one launch.
    """
    doubts: list[Doubt] = []
    later, by = _later.set(doubts), _kernels.set(kernels)
    try:
        yield doubts
    finally:
        _later.reset(later)
        _kernels.reset(by)


def ensure_none(wrong: Tensor, error: Callable[[], InputError]) -> None:
    """Raise `error` if any of `wrong` is True, or note it (`ensured_later`)."""
    doubts = _later.get()
    if doubts is not None:
        doubts.append((wrong.any(), error))
    elif wrong.any():
        raise error()


def settle(doubts: Sequence[Doubt]) -> None:
    """Raise the error of the first doubt that is so; a GPU is waited for once."""
    if doubts:
        found = torch.stack([wrong.to(doubts[0][0].device) for wrong, _ in doubts]).tolist()
        if True in found:
            raise doubts[found.index(True)][1]()


def select(scores: Scores, protected: Mask, counts: Counts, ties: Tensor | None = None) -> Mask:
    """The protected tokens of each head, then its best-scored; among equals the later token, or that of the larger
    `ties`, int64, distinct. bool, as `scores`.

    Exactly `counts` [batch, kv_heads] tokens per head. A slot scored -inf is dead and never kept; a head with fewer
    tokens than its count keeps them all. Raises InputError for a count below the protected tokens, and for NaN scores.
    """
    dead = scores.isneginf()
    ensure_room(counts, (protected & ~dead).sum(-1))
    ensure_numbers(scores)
    scores = scores.masked_fill(protected & ~dead, torch.inf)
    if ties is not None:
        rank = lexsort(scores, ties).argsort(dim=-1)
        return (rank >= scores.shape[-1] - counts[..., None]) & ~dead
    return largest(scores, counts)


def largest(scores: Tensor, counts: Tensor) -> Tensor:
    """The `counts` [...] largest of scores [..., tokens], -inf never among them; among equals the later.

    All rows are sorted as one, a row's number in front of each key: a GPU sorts rows one after another.
    """
    n = scores.shape[-1]
    if _kernels.get():
        from kvrepro_kernels import LONGEST
        from kvrepro_kernels import largest as by_kernel

        if n <= LONGEST:
            return by_kernel(scores.flatten(0, -2).contiguous(), counts.flatten()).view_as(scores)
    order = _ordered(scores)
    place = n.bit_length()
    order = (order >> 32) + 2**31 << place | (order & 2**32 - 1)  # as few bits as there are places
    order += (torch.arange(counts.numel(), device=order.device) << 32 + place).view(*counts.shape, 1)
    best = order.flatten().sort().values.view_as(order)
    last = best.gather(-1, (n - counts[..., None]).clamp(0, n - 1))
    return (order >= last) & (counts > 0)[..., None] & ~scores.isneginf()


def ensure_room(counts: Tensor | int, needed: Tensor, whose: str = "") -> None:
    """Raise InputError naming both numbers where more tokens are protected than a count has room for."""

    def error() -> InputError:
        worst = (needed - counts).argmax()
        room = torch.as_tensor(counts, device=needed.device).expand_as(needed)
        both = f"budget {int(room.flatten()[worst])} < {int(needed.flatten()[worst])} protected tokens"
        return InputError(f"{both}{whose}: raise the budget, or protect less")

    ensure_none(needed > counts, error)


def ensure_numbers(scores: Scores) -> None:
    """Raise InputError where a score is NaN: such a token is neither better nor worse than any other."""
    strange = scores.isnan()

    def error() -> InputError:
        return InputError(f"{int(strange.sum())} of {strange.numel()} scores are NaN: mend the scorer")

    ensure_none(strange, error)


def lexsort(*keys: Tensor) -> Tensor:
    """Places along the last axis in ascending order of the first key, among its equals of the next; stable."""
    order = keys[-1].argsort(dim=-1, stable=True)
    for key in reversed(keys[:-1]):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order


def best(scores: Scores, protected: Mask, count: int) -> Tensor:
    """What `select` keeps where every head keeps `count` living tokens: their places, int64 [batch, kv_heads, count],
    ascending."""
    ensure_room(count, protected.sum(-1))
    ensure_numbers(scores)
    order = _ordered(scores.masked_fill(protected, torch.inf))
    return order.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values


def _ordered(scores: Scores) -> Tensor:
    """Distinct int64 keys in the order of the scores, the later token above its equals: the float's bits made monotone,
    then its place."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0: one zero
    bits = torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits)
    return bits.long() << 32 | torch.arange(scores.shape[-1], device=scores.device)
