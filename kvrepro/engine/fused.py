"""A model's norms and rotations by kernels, in one launch each, in passes with backend triton.

A kernel replaces only a norm or rotation that computes exactly the same numbers. Without this, a prompt's pass spends a
fifth of its time on them.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.shapes import PreTrainedModel

ROTATION = "apply_rotary_pos_emb"  # transformers' name for it in each family's module
_by_kernel: ContextVar[bool] = ContextVar("by_kernel", default=False)  # does this thread's pass use kernels?
_passes, _turns = Counter[str](), Lock()  # running passes of each family's module, in all threads; guards the count


@contextmanager
def in_few_launches(model: PreTrainedModel) -> Iterator[None]:
    """Compute the model's RMS norms and rotations by kernels where these give exactly the same numbers. A model on
    several devices stays as it is, because hooks of its modules move tensors."""
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        yield
        return
    plain_norms = (module for module in model.modules() if _plain_norm(type(module)))  # type: ignore[arg-type]
    norms = [module for module in plain_norms if "forward" not in vars(module)]  # not those that others have patched
    for module in norms:
        vars(module)["forward"] = partial(_norm, module)
    try:
        with _rotations(sys.modules[type(model).__module__]):
            yield
    finally:
        for module in norms:
            del vars(module)["forward"]


@contextmanager
def _rotations(family: ModuleType) -> Iterator[None]:
    """Compute this thread's rotations by the kernel. Threads share the function in a family's module: the first one
    replaces it, the last one restores it."""
    with _turns:
        plain = vars(family).get(ROTATION)
        plain = plain.args[0] if isinstance(plain, partial) else plain
        if replaceable := plain is not None and _plain_rotation(plain):
            _passes[family.__name__] += 1
            vars(family)[ROTATION] = partial(_rotated, plain)
    before = _by_kernel.set(True)
    try:
        yield
    finally:
        _by_kernel.reset(before)
        with _turns:
            _passes[family.__name__] -= replaceable
            if replaceable and not _passes[family.__name__]:
                vars(family)[ROTATION] = plain


def _norm(module: Any, x: Tensor) -> Tensor:
    """The norm by the kernel, or by the module itself if its weights have another precision than x."""
    from kvrepro_kernels import rms_norm

    if module.weight.dtype != x.dtype:
        return type(module).forward(module, x)
    return rms_norm(x.contiguous(), module.weight, module.variance_epsilon)


def _rotated(
    plain: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any
) -> tuple[Tensor, Tensor]:
    """The rotation by the kernel, or by the `plain` function in a thread without kernels and where only a part of a row
    is rotated, the precisions differ or further arguments are given."""
    from kvrepro_kernels import rotary

    if more or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype or not _by_kernel.get():
        return plain(query, key, cos, sin, *more)
    return rotary(query, key, cos, sin)


@cache
def _plain_norm(kind: Any) -> bool:
    """Whether modules of this class are RMS norms as `kvrepro_kernels.rms_norm` defines them; tested on a few rows."""
    from kvrepro_kernels.rms_norm import rms_norm_reference

    if not kind.__name__.endswith("RMSNorm"):
        return False
    try:
        module = kind(16, eps=1e-5)
        with torch.no_grad():
            module.weight.copy_(torch.linspace(-2, 2, 16))
        same_settings = module.variance_epsilon == 1e-5 and module.weight.dtype == torch.float32
        return same_settings and all(
            torch.equal(module.to(x.dtype)(x), rms_norm_reference(x, module.weight, 1e-5))
            for x in _both(torch.linspace(-3, 5, 48).view(3, 16))
        )
    except (TypeError, AttributeError):  # a class with other arguments or fields
        return False


@cache
def _plain_rotation(function: Any) -> bool:
    """Whether a function rotates queries and keys as `kvrepro_kernels.rotary` does; tested on a few rows."""
    from kvrepro_kernels.rotary import rotary_reference

    query, key = torch.linspace(-2, 3, 96).view(1, 4, 3, 8), torch.linspace(4, -1, 48).view(1, 2, 3, 8)
    cos, sin = torch.linspace(-1, 1, 24).view(1, 3, 8), torch.linspace(1, -0.5, 24).view(1, 3, 8)
    try:
        return all(
            torch.equal(turned, theirs)
            for given in zip(*map(_both, (query, key, cos, sin)), strict=True)
            for turned, theirs in zip(function(*given), rotary_reference(*given), strict=True)
        )
    except (TypeError, ValueError, RuntimeError):  # a function with other arguments or shapes
        return False


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    """In single precision, and in 16 bits, where the order of roundings shows."""
    return x, x.bfloat16()
