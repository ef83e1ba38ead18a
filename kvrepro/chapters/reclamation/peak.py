"""Measures the peak memory of a block of code on the CPU."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Peak(TorchDispatchMode):
    """`with Peak() as peak: ...`, then `peak.bytes`: the most bytes that the block had allocated at once on the CPU.

    It counts the storages that operations return for the first time, until they are freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.bytes = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in tree_iter(result):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._known:
                    self._known[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, key)
        self.bytes = max(self.bytes, self.now)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)
