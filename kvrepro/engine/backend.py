"""The backend of a condition: Triton kernels, or plain PyTorch, the reference that kernels are tested against.

With backend "triton", kernels compute attention, sums, and the window scores that `windowed` knows by name. On a GPU
they also compute norms and rotations where they give exactly the numbers of the model's class (`in_few_launches`).
Everything else that a policy computes stays as it is. Whole prompts attend by torch's fastest function that keeps the
log-sum-exp, and decode steps are captured. Plain PyTorch still reads a question after the compressed prompt, prompts
that `SharedCap` watches, and sliding layers once a text exceeds their window.

"torch" and "triton" are used as given. "auto" gives a condition to the kernels if they support it (`obstacle`) and run
on this GPU (`ready`). Otherwise plain PyTorch computes the condition, and the reason is reported.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.condition import Condition
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import REPEATED, find
from kvrepro.engine.prefill import SUMS_BY_KERNELS
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import error_line

BACKENDS = ("torch", "triton", "auto")
ON_CPU = "kernels need a GPU, this model is on the cpu"
ROTATION = "apply_rotary_pos_emb"  # transformers' name for it in each family's module
_by_kernel: ContextVar[bool] = ContextVar("by_kernel", default=False)  # does this thread's pass use kernels?


def obstacle(model: PreTrainedModel, c: Condition, facts: ModelFacts | None = None) -> str | None:
    """Why kernels cannot compute a condition; None: they can. facts: those of this model, if the caller has them."""
    if model.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return ON_CPU
    facts = facts or ModelFacts.of(model)
    if facts.own_softmax:
        return "kernels have no softmax with a cap or sinks"
    policy = find(c.policy) if c.policy != "full" else None
    if c.execution == "masked" or c.bits is not None or (policy is not None and not policy.frees):
        return "kernels do not hide, pack or page tokens"
    if policy is None or policy.shared:  # prompts of `SharedCap` are read by plain PyTorch, its steps are captured
        return None
    sums = policy.needed(policy.reading(c.reading, c.switches)) - REPEATED
    if missing := sums - SUMS_BY_KERNELS:
        return f"kernels do not sum {sorted(missing)[0]!r}, which {c.policy} needs"
    looks = sums or policy.parameters.get("window")
    return "kernels score no layer that slides" if looks and facts.sliding.keys() & set(facts.evictable) else None


def obstacles(model: PreTrainedModel, conditions: Sequence[Condition]) -> list[str | None]:
    """Why "auto" leaves each condition to plain PyTorch; None where kernels take it."""
    if model.device.type == "cpu":
        return [ON_CPU] * len(conditions)
    facts = ModelFacts.of(model)
    dims = {output.shape[1] for output in facts.outputs.values()}
    failure = next(filter(None, (ready(model.device, model.dtype, dim) for dim in dims)), None)
    return [failure or obstacle(model, c, facts) for c in conditions]


@cache
def ready(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """The error of the first kernel that does not run on a device, such as a compiler's; None: each was launched once.
    dim: of the heads."""
    try:
        import kvrepro_kernels as kernels

        x = torch.ones(1, 1, 32, dim, dtype=dtype, device=device)
        flat, angles = x[0, 0], x[0]
        log_sums = kernels.prefill_attention(x, x, x).lse
        kernels.window_attention(x, x, x)
        kernels.window_scores(x, x, x, log_sums, x, indicator="attention", aggregate="mean", reduction="mean")
        kernels.column_mass(x, x, log_sums)
        kernels.projected_norm(x, flat.T[None].contiguous())
        kernels.ragged_decode(x[:, :, -1:], flat, flat, torch.tensor([0, 32], device=device), kv_heads=1)
        kernels.largest(log_sums[0], torch.tensor([9], device=device))
        kernels.rms_norm(flat, flat[0], 1e-6)
        kernels.rotary(x, x, angles, angles)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as raised:  # whatever a compiler raises on a machine of its own
        return error_line(raised)
    return None


# ---- norms and rotations, a fifth of a prompt's pass without kernels


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
    _dispatch_rotations(type(model).__module__)
    before = _by_kernel.set(True)
    try:
        yield
    finally:
        _by_kernel.reset(before)
        for module in norms:
            vars(module).pop("forward", None)


@cache
def _dispatch_rotations(family: str) -> None:
    """Let the rotation in a family's module, which all threads share, ask its thread for kernels from now on."""
    module = import_module(family)
    plain = getattr(module, ROTATION, None)
    if plain is not None and _plain_rotation(plain):
        setattr(module, ROTATION, partial(_rotated, plain))


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
    if not _by_kernel.get() or more or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype:
        return plain(query, key, cos, sin, *more)
    from kvrepro_kernels import rotary

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
