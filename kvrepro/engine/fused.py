"""Small parts of a model in one launch each: norms and rotations that compute the very numbers of a kernel are computed
by it, in passes of kernels. A prompt's pass spends a fifth of its time on them otherwise."""

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
from transformers import PreTrainedModel

ROTATION = "apply_rotary_pos_emb"  # what transformers calls it in each family's module
_by_kernel: ContextVar[bool] = ContextVar("by_kernel", default=False)  # of the pass that runs in this thread
_passes, _turns = Counter[str](), Lock()  # of each family's module, in all threads


@contextmanager
def in_few_launches(model: PreTrainedModel) -> Iterator[None]:
    """The model with its RMS norms and rotations by kernels, where its class computes the very numbers. One that lies
    on several devices stays as it is: hooks of its modules move its tensors."""
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        yield
        return
    plain_norms = (module for module in model.modules() if _plain_norm(type(module)))  # type: ignore[arg-type]
    norms = [module for module in plain_norms if "forward" not in vars(module)]  # not what somebody else has changed
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
    """The rotations of this thread by the kernel. Threads share the function of a family: who comes first puts it in
    its place, who leaves last takes it away."""
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
    """By the kernel, but for weights of another precision."""
    from kvrepro_kernels import rms_norm

    if module.weight.dtype != x.dtype:
        return type(module).forward(module, x)
    return rms_norm(x.contiguous(), module.weight, module.variance_epsilon)


def _rotated(
    plain: Callable[..., tuple[Tensor, Tensor]], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *how: Any
) -> tuple[Tensor, Tensor]:
    """By the kernel, but for rows of which a part is turned, for another order of axes, and for another thread's."""
    from kvrepro_kernels import rotary

    if how or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype or not _by_kernel.get():
        return plain(query, key, cos, sin, *how)
    return rotary(query, key, cos, sin)


@cache
def _plain_norm(kind: Any) -> bool:
    """Whether modules of this class are RMS norms as `kvrepro_kernels.rms_norm` defines them: tried on a few rows."""
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
    except (TypeError, AttributeError):  # made or called otherwise
        return False


@cache
def _plain_rotation(function: Any) -> bool:
    """Whether a function turns queries and keys as `kvrepro_kernels.rotary` defines it: tried on a few rows."""
    from kvrepro_kernels.rotary import rotary_reference

    query, key = torch.linspace(-2, 3, 96).view(1, 4, 3, 8), torch.linspace(4, -1, 48).view(1, 2, 3, 8)
    cos, sin = torch.linspace(-1, 1, 24).view(1, 3, 8), torch.linspace(1, -0.5, 24).view(1, 3, 8)
    try:
        return all(
            torch.equal(turned, theirs)
            for given in zip(*map(_both, (query, key, cos, sin)), strict=True)
            for turned, theirs in zip(function(*given), rotary_reference(*given), strict=True)
        )
    except (TypeError, ValueError, RuntimeError):  # no such function, or one that takes something else
        return False


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    """In single precision, and in 16 bits, where the order of roundings shows."""
    return x, x.bfloat16()
