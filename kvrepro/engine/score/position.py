"""Scorers that look only at a token's position: float32 `[batch, kv_heads, tokens]`, large = keep."""

from typing import Literal

import torch
from torch import Tensor

from kvrepro.engine import quota
from kvrepro.engine.allowed import Count
from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Scores

Draw = Literal["float32", "keys"]


def streaming_llm(o: Observation, sinks: Count = 4, ramps: bool = False) -> Scores:
    """s_j = j, the newest tokens, behind the `sinks` oldest, which are protected.

    ramps: under `span_local`, in place of quotas, 1 for the first `sinks` positions, then in every span a ramp from 0.1
    (its oldest) to 0.9 (its newest). So the leakage paper's public code takes the best of the whole prompt, which sets
    no quota; the paper's variant (E.3) is s_j = j with the sinks `apart` and `rounding="round"`.
    Exact for positions below 2^24. Source: Xiao et al. 2023, section 3.2 (4 sinks); kvpress StreamingLLMPress.
    Keys keep their rotation here and in kvpress; the authors' code counts positions inside the cache instead.
    """
    if not (ramps and o.span_local):
        return o.positions.float()
    free = o.alive & (o.positions >= sinks)
    sizes, span = quota.tally(o, free), o.span(o.positions)
    spread = torch.nn.functional.one_hot(span, sizes.shape[-1]) & free[..., None]
    place = (spread.cumsum(2) * spread).sum(-1) - 1  # of each token among its span's
    ramp = 0.1 + 0.8 * place / (sizes.gather(2, span) - 1).clamp(min=1)
    return torch.where(free, ramp, 1.0).float()


def random(o: Observation, draw: Draw = "float32") -> Scores:
    """s_j ~ U[0, 1), one draw per (seed, layer, KV head, position), whatever the batch, the order or the calls before.

    draw: "float32" (24 random bits), or "keys": as many bits as the keys' dtype has, so that bf16 (8 bits) makes many
    ties. Source: kvpress RandomPress, which draws in the keys' dtype.
    """
    heads = torch.arange(o.positions.shape[1], device=o.positions.device)[:, None]
    x = _mixed(torch.as_tensor(o.seed, device=heads.device).view(-1, 1, 1) + torch.zeros_like(heads))
    for part in (torch.full_like(heads, o.layer), heads, o.positions):
        x = _mixed(x + part)
    bits = 24 if draw == "float32" else 1 - round(torch.tensor(torch.finfo(o.keys.dtype).eps).log2().item())
    return (x >> (64 - bits) & (1 << bits) - 1).float() / (1 << bits)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's step, int64 that wraps around: neighbours land far apart (Steele, Lea and Flood 2014)."""
    x = x + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ (x >> 31 & (1 << 33) - 1)
