"""Keys and values in 4 bits, by the library that transformers quantises its caches with (optimum-quanto)."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import QuantoQuantizedLayer

from kvrepro.errors import InputError

GROUP = 64  # numbers that share a scale and a shift, transformers' default
RESIDUAL = 128  # newest tokens stay in the model's dtype until there are so many, transformers' default


class Packed:
    """A tensor `[tokens, dim]` in 4 bits, a scale and a shift for each 64 numbers; `dense()` gives it back."""

    def __init__(self, dense: Tensor):
        """Raises InputError for a head whose dim does not fit the groups."""
        if dense.shape[1] % GROUP:
            raise InputError(f"head dim {dense.shape[1]} is no multiple of {GROUP}, which share a scale: use bits=None")
        self.dtype, self.shape = dense.dtype, dense.shape
        self._codec = QuantoQuantizedLayer(nbits=4, q_group_size=GROUP, residual_length=RESIDUAL)
        self._codes = self._codec._quantize(dense.contiguous(), axis=0) if len(dense) else None

    def dense(self) -> Tensor:
        """The tensor with every number rounded to one of its group's 16 levels."""
        if self._codes is None:
            return torch.empty(self.shape, dtype=self.dtype)
        with _without_compiler():
            return self._codec._dequantize(self._codes).to(self.dtype)

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and shifts."""
        return sum(t.numel() * t.element_size() for t in _inner(self._codes)) if self._codes is not None else 0


def _inner(tensor: Any) -> list[Tensor]:
    """The plain tensors inside a tensor subclass."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [t for name in tensor.__tensor_flatten__()[0] for t in _inner(getattr(tensor, name))]


def unpack(codes: Tensor, bits: int) -> Tensor:
    """Unpack numbers of `bits` bits from bytes [rows, ...]: uint8 [8 / bits * rows, ...], all lowest bits first."""
    return torch.cat([codes >> bits * i & 2**bits - 1 for i in range(8 // bits)])


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Keep Quanto from compiling a helper at its first unpacking, which takes minutes and needs a compiler or the CUDA
    toolkit: `unpack` does the same with shifts. Afterwards Quanto's extensions are as before."""
    from optimum.quanto.library.extensions.extension import _extensions

    waiting = [extension for extension in _extensions.values() if extension._lib is None]
    for extension in waiting:
        extension._lib = SimpleNamespace(unpack=unpack)
    try:
        yield
    finally:
        for extension in waiting:
            extension._lib = None
