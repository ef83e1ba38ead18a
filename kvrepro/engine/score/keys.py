"""Scorers that look at keys: their length, direction and likeness, and the expected direction of later queries; and
scorers that look only at positions.

float32 `[batch, kv_heads, tokens]`, large = keep. No tensor is tokens x tokens: likeness is computed in blocks of rows.
"""

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvrepro.engine.allocate import select, tally
from kvrepro.engine.condition import Count, Odd, Share, Size
from kvrepro.engine.observe import Observation
from kvrepro.engine.score.learned import QUERIES, fitting, frequencies, pairs
from kvrepro.engine.shapes import Counts, Mask, Probabilities, RowInts, Scores
from kvrepro.errors import InputError

FLOOR = 1e-8  # least length by which keys are divided
Anchor = Literal["unit", "plain"]
Alone = Literal["nothing", "first"]
Cosine = Annotated[float, Ge(-1), Le(1)]


def k_norm(o: Observation) -> Scores:
    """s_j = -||k_j||_2, which a rotation leaves as it is. Source: Devoto et al. 2024; kvpress KnormPress. The authors
    leave layers 0 and 1 whole (`learned.whole`)."""
    return -torch.linalg.vector_norm(o.keys.float(), dim=-1)


def key_diff(o: Observation, anchor: Anchor = "unit") -> Scores:
    """s_j = -cos(k_j, mu), mu = mean of k_i / ||k_i||: keys unlike the others stay. anchor: "unit", or "plain" for mu =
    mean of k_i (DropKV, Table 11). Source: Park et al. 2025; kvpress KeyDiffPress."""
    return _unlike(o, o.alive, anchor)


def key_diff_blocks(
    o: Observation, scores: Scores, counts: Counts, protected: Mask, anchor: Anchor = "unit", block: Count = 128
) -> tuple[Scores, Mask]:
    """KeyDiff under a fixed cache: the first `counts` tokens, then block by block the best `counts` of survivors and
    block, each time around an anchor of their own; protected tokens always survive. block 0: one shot. Tokens that
    leave in an earlier block score 3 less than usual, below all survivors. Source: Park et al. 2025; kvpress
    BlockPress."""
    if block == 0:
        return scores, torch.zeros_like(protected)
    place = o.alive.cumsum(-1)
    kept = o.alive & (place <= counts[..., None])
    for passed in range(0, int((place[..., -1] - counts).max()), block):
        fresh = o.alive & (place > counts[..., None] + passed) & (place <= counts[..., None] + passed + block)
        if not bool(fresh.any()):
            continue
        candidates = kept | fresh
        scores = torch.where(candidates, _unlike(o, candidates, anchor), scores)
        best = select(scores.masked_fill(~candidates, -torch.inf), protected, counts)
        kept = torch.where(fresh.any(-1, keepdim=True), best, kept)  # heads without further tokens stay as they are
    return torch.where(kept, scores, scores - 3), torch.zeros_like(kept)


def _unlike(o: Observation, among: Mask, anchor: str) -> Scores:
    keys = o.keys.float()
    unit = torch.nn.functional.normalize(keys, dim=-1, eps=FLOOR)
    mean = ((unit if anchor == "unit" else keys) * among[..., None]).sum(-2) / among.sum(-1, keepdim=True).clamp(min=1)
    return -torch.einsum("bgnd,bgd->bgn", unit, torch.nn.functional.normalize(mean, dim=-1, eps=FLOOR))


def r_kv(
    o: Observation, mix: Share = 0.1, kernel: Odd = 7, threshold: Cosine = 0.5, alone: Alone = "nothing"
) -> Scores:
    """Z_j = mix I_j - (1 - mix) S_j: attention of the window against likeness to other keys. I: `past_attention`, its
    mean over the window's queries, max-pooled over `kernel` tokens. S: `likeness`. Source: Cai et al. 2025; R-KV's
    rkv/compression/r1_kv.py, whose default mix is 0.07 where paper and README say 0.1."""
    p = past_attention(o)
    queries = (o.query_positions >= 0).sum(1).clamp(min=1)[:, None, None]
    importance = torch.nn.functional.max_pool1d(p[:, :, 0].sum(2) / queries, kernel, 1, kernel // 2)
    return mix * importance - (1 - mix) * likeness(o, threshold, alone)


def past_attention(o: Observation) -> Probabilities:
    """Softmax over the tokens before the window of each query's logits, the largest of the group, which is then 1."""
    batch, kv_heads, _, dim = o.keys.shape
    q = o.queries.view(batch, kv_heads, o.group, -1, dim).float()
    logits = torch.einsum("bgrwd,bgnd->bgrwn", q, o.keys.float()).amax(2) * o.scaling
    return logits.masked_fill(~o.visible | o.window[:, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)[:, :, None]


def likeness(o: Observation, threshold: Cosine = 0.5, alone: Alone = "nothing", block: int = 64) -> Scores:
    """S: softmax over tokens j of the mean over i of cos(k_i, k_j). Row i leaves out k_i and the last key whose cosine
    with k_i exceeds `threshold`, so that the newest of near duplicates is spared. alone: what a row without such a key
    leaves out, "nothing" or, as in R-KV's code, the "first" key. `block` rows are computed at a time. Source: Cai et
    al. 2025; R-KV's rkv/utils.py."""
    unit = torch.nn.functional.normalize(o.keys.float(), dim=-1, eps=FLOOR) * o.alive[..., None]
    place = torch.arange(o.keys.shape[2], dtype=torch.int32, device=o.keys.device)
    first = o.alive.int().argmax(-1)[..., None, None]
    total = torch.zeros_like(unit[..., 0])
    for a in range(0, len(place), block):
        like = unit[:, :, a : a + block] @ unit.mT  # [batch, kv_heads, block, tokens]
        like.diagonal(a, -2, -1).zero_()
        last = torch.where(like > threshold, place, -1).amax(-1, keepdim=True).long()
        spared = torch.where(last < 0, first, last) if alone == "first" else last
        place_or_first = spared.clamp(min=0)
        like.scatter_(-1, place_or_first, like.gather(-1, place_or_first).masked_fill(spared >= 0, 0.0))
        total += like.sum(-2)
    mean = total / o.alive.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~o.alive, -torch.inf).softmax(-1).nan_to_num(0.0)


def tri_attention(o: Observation, calibration: str = QUERIES, horizon: Size = 65536) -> Scores:
    """s_j = z-scored mean over distances d = 1, 2, 4, .. `horizon` of sum_f |E q_f||k_f| cos(w_f (T + d - j) + phi_f),
    plus sum_f (E|q_f| - |E q_f|) |k_f|, the largest of the group.

    k_f: pair f of the key before its rotation, phi_f the angle from it to E q_f, T the tokens seen, w_f radians per
    position. The first sum equals the mean query, rotated to T + d, times the cached key, so that no key's rotation
    must be undone. calibration: file of `studies.calibrate`, made for this model. Raises
    InputError for another model's, and for a layer without a rotation. Source: Mao et al. 2026;
    triattention/methods/pruning_utils.py.
    """
    batch, kv_heads, _, dim = o.keys.shape
    numbers = fitting(calibration, [] if o.output is None else [o.output], o.layer)
    if o.inverse_frequencies is None:
        raise InputError(f"layer {o.layer} has no rotation that is known: take a policy other than tri_attention")
    every_mean = torch.complex(numbers["mean_real"], numbers["mean_imaginary"])
    mean, length = (numbers_of[o.layer].to(o.keys.device) for numbers_of in (every_mean, numbers["length"]))
    speed = frequencies(o.inverse_frequencies, dim)
    ahead = 2.0 ** torch.arange(horizon.bit_length(), dtype=torch.float64, device=speed.device)
    turn = torch.polar(torch.ones((), dtype=torch.float64).to(speed), torch.outer(ahead, speed)).mean(0)
    now = torch.polar(torch.ones((), dtype=torch.float64).to(speed), o.seen.double()[:, None] * speed)
    towards = (mean * (now * turn)[:, None]).to(torch.complex64).view(batch, kv_heads, o.group, -1)
    spread = (length - mean.abs()).view(kv_heads, o.group, -1)
    k = pairs(o.keys, 2 * len(o.inverse_frequencies))
    s = torch.einsum("bgrf,bgnf->bgrn", towards.real, k.real) + torch.einsum("bgrf,bgnf->bgrn", towards.imag, k.imag)
    s += torch.einsum("grf,bgnf->bgrn", spread, k.abs())
    alive = o.alive[:, :, None]
    n = alive.sum(-1, keepdim=True).clamp(min=1)
    s = (s - (s * alive).sum(-1, keepdim=True) / n) * alive
    return (s / (s.square().sum(-1, keepdim=True) / n).sqrt().clamp(min=1e-6)).amax(2)


def shared_by_layers(scores: list[Scores], protected: list[Mask], budget: RowInts) -> tuple[list[Scores], list[Counts]]:
    """A KV head's mean score over the layers, for all of them: head g keeps the same tokens in every layer. Source:
    triattention/methods/triattention.py, `per_head`. Raises InputError if layers hold unequal numbers of tokens."""
    if len(held := sorted({s.shape[-1] for s in scores})) > 1:
        raise InputError(f"layers hold {held[0]} to {held[-1]} tokens: take tri_attention_layer, each layer for itself")
    mean = torch.stack(scores).mean(0)
    return [mean] * len(scores), [budget[:, None].expand(-1, mean.shape[1])] * len(scores)


# ---- positions alone


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
    sizes, span = tally(o, free), o.span(o.positions)
    spread = torch.nn.functional.one_hot(span, sizes.shape[-1]) & free[..., None]
    place = (spread.cumsum(2) * spread).sum(-1) - 1  # of each token among its span's
    ramp = 0.1 + 0.8 * place / (sizes.gather(2, span) - 1).clamp(min=1)
    return torch.where(free, ramp, 1.0).float()


def random(o: Observation, draw: Literal["float32", "keys"] = "float32") -> Scores:
    """s_j ~ U[0, 1), one draw per (seed, layer, KV head, position), whatever the batch, the order or the calls before.
    draw: "float32" (24 random bits), or "keys": as many bits as the keys' dtype has, so that bf16 (8 bits) makes many
    ties. Source: kvpress RandomPress, which draws in the keys' dtype."""
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
