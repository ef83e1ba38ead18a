"""The backend of a condition: Triton kernels, or plain PyTorch, the reference that kernels are tested against.

With backend "triton", kernels compute attention, sums, and the window scores that `windowed` knows by name, on a GPU
also norms and rotations where they give exactly the numbers of the model's class (`in_few_launches`), and decode steps
are captured. Plain PyTorch still reads a question after the compressed prompt, prompts that `SharedCap` watches, and
sliding layers once a text exceeds their window.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib import import_module
from inspect import getsource
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.condition import Condition, ensure
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import REPEATED, find
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError, error_line

BACKENDS = ("torch", "triton", "auto")
SUMS_BY_KERNELS = {"mass", "span_mass", "marked_mass"}
ROTATION = "apply_rotary_pos_emb"  # transformers' name for it in each family's module
_by_kernel: ContextVar[bool] = ContextVar("by_kernel", default=False)  # does this thread's pass use kernels?


def choose(backend: str, model: PreTrainedModel, c: Condition, facts: ModelFacts) -> str:
    """The backend of a condition. "auto": the kernels if they can compute it on this GPU. Raises InputError for a
    condition that is given to the kernels and that they cannot compute: they never fall back."""
    ensure(BACKENDS, backend=backend)
    if backend == "auto":
        cannot = model.device.type == "cpu" or launch_error(model.device) or obstacle(model, c, facts)
        return "torch" if cannot else "triton"
    if backend == "triton" and (why := obstacle(model, c, facts)):
        raise InputError(f"backend triton: {why} ({c.label}): use backend torch, or auto")
    return backend


def obstacle(model: PreTrainedModel, c: Condition, facts: ModelFacts | None = None) -> str | None:
    """Why kernels cannot compute a condition; None: they can. facts: those of this model, if the caller has them."""
    if model.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels need a GPU, this model is on the cpu"
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


@cache
def launch_error(device: torch.device) -> str | None:
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
    alone = len(set(getattr(model, "hf_device_map", {}).values())) <= 1
    if alone:
        _dispatch(type(model).__module__)
    before = _by_kernel.set(alone)
    try:
        yield
    finally:
        _by_kernel.reset(before)


@cache
def _dispatch(family: str) -> None:
    """Let the norms and rotations of a family's module, which all threads share, ask their thread for kernels from now
    on, if they are word for word those of Llama, which the kernels compute."""
    from transformers.models.llama import modeling_llama

    module = import_module(family)
    for name, kind in vars(module).items():
        if name.endswith("RMSNorm") and getsource(kind.forward) == getsource(modeling_llama.LlamaRMSNorm.forward):
            kind.forward = _normed(kind.forward)
    turn = getattr(module, ROTATION, None)
    if turn is not None and getsource(turn) == getsource(getattr(modeling_llama, ROTATION)):
        setattr(module, ROTATION, _rotated(turn))


def _normed(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(plain)
    def forward(self: Any, x: Tensor) -> Tensor:
        if not _by_kernel.get() or self.weight.dtype != x.dtype:
            return plain(self, x)
        from kvrepro_kernels import rms_norm

        return rms_norm(x.contiguous(), self.weight, self.variance_epsilon)

    return forward


def _rotated(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *more: Any) -> Any:
        if not _by_kernel.get() or more or cos.shape[-1] != query.shape[-1] or cos.dtype != query.dtype:
            return plain(query, key, cos, sin, *more)  # also a rotation of a part of each row
        from kvrepro_kernels import rotary

        return rotary(query, key, cos, sin)

    return rotated
