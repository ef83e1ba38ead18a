"""RMS norm of rows in one launch; a captured step of one token runs it more often than any other kernel.

    y[r, d] = w[d] * round(x[r, d] / sqrt(mean_d x[r, d]^2 + eps))        round: to x's dtype, the mean in float32

as transformers' Llama, Mistral, Qwen and Phi compute it in eight launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device, next_power_of_2


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference: x [..., dim], weight [dim], in x's dtype."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


@triton.jit
def _rms_norm(x, weight, out, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * DIM
    dim = tl.arange(0, BLOCK)
    valid = dim < DIM
    value = tl.load(x + row + dim, mask=valid, other=0.0).to(tl.float32)  # [D]
    scaled = value * tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + dim, mask=valid, other=0.0).to(tl.float32)  # [D]
    tl.store(out + row + dim, (factor * scaled).to(out.dtype.element_ty), mask=valid)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x, contiguous [..., dim], weight [dim] of the same dtype. Raises ValueError for other tensors."""
    dim = x.shape[-1]
    if weight.shape != (dim,) or weight.dtype != x.dtype or not x.is_contiguous():
        given = f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"{given}: x must be contiguous, the weight [{dim}] and of one dtype with it")
    out = torch.empty_like(x)
    check_device(_rms_norm, "rms_norm", (x, weight, out))
    block = next_power_of_2(dim)
    _rms_norm[(x.numel() // dim,)](x, weight, out, eps, DIM=dim, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out
