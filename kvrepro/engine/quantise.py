"""Keys and values in 4 bits, with the numbers of the caches that transformers quantises by optimum-quanto."""

import torch
from torch import Tensor

from kvrepro.errors import InputError

GROUP = 64  # numbers that share a scale and a shift, transformers' default
RESIDUAL = 128  # newest tokens stay in the model's dtype until there are so many, transformers' default


class Packed:
    """A tensor `[tokens, dim]` in 4 bits, a scale and a shift for each 64 numbers; `dense()` gives it back, with every
    number rounded to one of its group's 16 levels. Raises InputError for a head whose dim does not fit the groups."""

    def __init__(self, dense: Tensor):
        if dense.shape[1] % GROUP:
            raise InputError(f"head dim {dense.shape[1]} is no multiple of {GROUP}, which share a scale: use bits=None")
        self.shape, self.dtype, groups = dense.shape, dense.dtype, dense.reshape(-1, GROUP)
        self.shift = -groups.amin(1, keepdim=True)
        self.scale = (groups.amax(1, keepdim=True) + self.shift) / 15
        levels = ((groups + self.shift) / self.scale).round().clamp(0, 15).to(torch.uint8)
        self.codes = levels[:, ::2] << 4 | levels[:, 1::2]

    def dense(self) -> Tensor:
        levels = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten(1)
        return (self.scale * levels - self.shift).view(self.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and shifts."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.shift))
