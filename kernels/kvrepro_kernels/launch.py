"""What every wrapper asks before a launch."""

from functools import cache

import torch
import triton
from torch import Tensor


def check_device(kernel: object, name: str, tensors: tuple[Tensor, ...]) -> None:
    """Raises ValueError if `tensors` lie apart, lie on the CPU uninterpreted, or hold bfloat16 for the interpreter."""
    device = tensors[0].device
    if any(x.device != device for x in tensors):
        raise ValueError(f"{name} needs its tensors on one device, not on {sorted({str(x.device) for x in tensors})}")
    compiled = isinstance(kernel, triton.JITFunction)
    if device.type == "cpu" and compiled:
        raise ValueError(f"{name} needs GPU tensors; on the CPU, set TRITON_INTERPRET=1 before triton is imported")
    if not compiled and any(x.dtype == torch.bfloat16 for x in tensors):
        raise ValueError(f"{name}: Triton's interpreter computes bfloat16 wrongly; use float32 or float16 there")


def check_innermost(**tensors: Tensor) -> None:
    """Raises ValueError if the last axis of one of `tensors` is not contiguous."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: dim must be innermost, but its stride is {x.stride(-1)}; call .contiguous()")


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 for the interpreter, so that splits are exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def precision(dtype: torch.dtype) -> str:
    """tl.dot's input_precision: float32 stays float32, never tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def scores_into(out: Tensor | None, keys: Tensor, heads: int | None = None) -> Tensor:
    """`out`, or a new tensor: contiguous float32 [batch, heads, tokens] for keys [batch, kv_heads, tokens, dim].

    heads: by default kv_heads. Raises ValueError for an `out` of another kind.
    """
    shape = (keys.shape[0], heads or keys.shape[1], keys.shape[2])
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=keys.device)
    if out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 of shape {shape}")
    return out
