"""The backend of a condition: Triton kernels, or plain PyTorch, the reference that kernels are tested against.

With backend "triton", kernels compute attention, sums, and the window scores that `windowed` knows by name. On a GPU
they also compute norms and rotations where they give exactly the numbers of the model's class (`in_few_launches`).
Everything else that a policy computes stays as it is. Whole prompts attend by torch's fastest function that keeps the
log-sum-exp, and decode steps are captured. Plain PyTorch still reads a question after the compressed prompt, prompts
that `SharedCap` watches, and sliding layers once a text exceeds their window.

"torch" and "triton" are used as given. "auto" gives a condition to the kernels if they support it (`obstacle`) and run
on this GPU (`ready`). Otherwise plain PyTorch computes the condition, and the reason is reported.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.condition import Condition
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import REPEATED, find
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import error_line

BACKENDS = ("torch", "triton", "auto")
SUMS_BY_KERNELS = {"mass", "span_mass", "marked_mass"}
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
    if c.bits is not None or (policy is not None and not policy.frees):
        return "kernels do not pack or page tokens"
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
    failure, facts = ready(model.device), ModelFacts.of(model)
    return [failure or obstacle(model, c, facts) for c in conditions]


@cache
def ready(device: torch.device) -> str | None:
    """The error of a first, small kernel on a device, such as a compiler's; None: it runs."""
    try:
        from kvrepro_kernels import rms_norm

        rms_norm(torch.ones(2, 32, device=device), torch.ones(32, device=device), 1e-6)
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
    norms = [
        module
        for module in model.modules()
        if type(module).__name__.endswith("RMSNorm")
        and "forward" not in vars(module)  # patched by others
        and _same(type(module).forward, "LlamaRMSNorm.forward")
    ]
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
    plain: Callable[..., tuple[Tensor, Tensor]] | None = getattr(module, ROTATION, None)
    if plain is None or not _same(plain, ROTATION):
        return

    @wraps(plain)
    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        """By the kernel, or by the `plain` function in a thread without kernels and where only a part of a row is
        rotated, the precisions differ or further arguments are given."""
        if not _by_kernel.get() or more or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype:
            return plain(query, key, cos, sin, *more)
        from kvrepro_kernels import rotary

        turned: tuple[Tensor, Tensor] = rotary(query, key, cos, sin)
        return turned

    setattr(module, ROTATION, rotated)


def _norm(module: Any, x: Tensor) -> Tensor:
    """The norm by the kernel, or by the module itself if its weights have another precision than x."""
    from kvrepro_kernels import rms_norm

    if module.weight.dtype != x.dtype:
        return type(module).forward(module, x)
    return rms_norm(x.contiguous(), module.weight, module.variance_epsilon)


@cache
def _same(function: Any, of_llama: str) -> bool:
    """Is a family's function, word for word, the one of Llama that a kernel computes? Wrappers are looked through."""
    from transformers.models.llama import modeling_llama

    return inspect.getsource(function) == inspect.getsource(attrgetter(of_llama)(modeling_llama))
