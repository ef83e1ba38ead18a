"""Helpers of all wrappers: they check that tensors fit each other, and divide the work."""

import math
from functools import cache
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

Tuning: TypeAlias = dict[str, int] | None  # a wrapper's block sizes, where they differ from the usual ones
LOG2_E = math.log2(math.e)


def check_device(kernel: object, name: str, tensors: tuple[Tensor, ...], moves: bool = False) -> None:
    """Raises ValueError if `tensors` lie on different devices, lie on the CPU without the interpreter, or are bfloat16
    with it. moves: the kernel only moves numbers, so the interpreter handles bfloat16 correctly."""
    device = tensors[0].device
    if any(x.device != device for x in tensors):
        raise ValueError(f"{name} needs its tensors on one device, not on {sorted({str(x.device) for x in tensors})}")
    compiled = isinstance(kernel, triton.JITFunction)
    if device.type == "cpu" and compiled:
        raise ValueError(f"{name} needs GPU tensors; on the CPU, set TRITON_INTERPRET=1 before triton is imported")
    if not (compiled or moves) and any(x.dtype == torch.bfloat16 for x in tensors):
        raise ValueError(f"{name}: Triton's interpreter computes bfloat16 wrongly; use float32 or float16 there")


def check_innermost(**tensors: Tensor) -> None:
    """Raises ValueError if the last axis of one of `tensors` is not contiguous."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: dim must be innermost, but its stride is {x.stride(-1)}; call .contiguous()")


def check_pair(keys: Tensor, values: Tensor, shape: str, fits: bool = True) -> None:
    """Raises ValueError unless keys and values have one shape and dtype, and `fits`. shape: for the message."""
    if not fits or values.shape != keys.shape or values.dtype != keys.dtype:
        first, second = (f"{tuple(x.shape)} {x.dtype}" for x in (keys, values))
        raise ValueError(f"keys {first} and values {second} must both be {shape}, of one dtype")


def check_query(query: Tensor, keys: Tensor) -> None:
    """Raises ValueError unless query [batch, heads, queries, dim] fits keys [batch, kv_heads, tokens, dim]."""
    if query.dim() != 4 or query.shape[::3] != keys.shape[::3] or query.shape[1] % keys.shape[1]:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)}")
    if query.dtype != keys.dtype:
        raise ValueError(f"query is {query.dtype}, keys are {keys.dtype}; cast one")


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 for the interpreter, so that splits are exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def cdiv(length: int, block: int) -> int:
    """How many blocks cover a length. `triton.cdiv`, made for kernels, takes microseconds in each launch."""
    return -(-length // block)


def next_power_of_2(n: int) -> int:
    """The least power of two that is no less than n >= 1; quick, like `cdiv`."""
    return 1 << (n - 1).bit_length()


def even_share(tokens: int, lists: int, device: torch.device, tuned: dict[str, int], most: int = 1 << 30) -> int:
    """Tokens per program, in whole blocks, if `lists` share the device evenly. most: programs per list."""
    programs = min(most, multiprocessors(device) * tuned["per_multiprocessor"] // lists)
    return max(1, cdiv(cdiv(tokens, max(1, programs)), tuned["block_t"])) * tuned["block_t"]


def base_2(scale: float | None, dim: int) -> float:
    """`scale` of the logits, by default dim**-0.5, times log2(e), so that a kernel can use powers of two."""
    return (dim**-0.5 if scale is None else scale) * LOG2_E


def constants(dim: int, dtype: torch.dtype, tuned: dict[str, int]) -> dict[str, Any]:
    """The constants of a kernel with matrix products over `dim`. float32 products are exact, never tf32."""
    precision = "ieee" if dtype == torch.float32 else "tf32"
    sizes = {"DIM": dim, "BLOCK_D": next_power_of_2(dim), "PRECISION": precision}
    return sizes | {"STAGES": tuned["stages"], "num_warps": tuned["warps"]}


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
