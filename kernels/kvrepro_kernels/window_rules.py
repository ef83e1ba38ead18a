"""The rules of window scores (formula: `window_scores.py`): their names, their reference and their checks."""

import torch
from torch import Tensor

from kvrepro_kernels.window import visible_keys

NAMES = {
    "indicator": ("attention", "value", "perturbation", "anchor", "entropy"),
    "aggregate": ("mean", "sum", "max", "variance"),
    "reduction": ("mean", "max", "sum", "none"),
    "pool_by": ("average", "max"),
}


def window_scores_reference(
    query: Tensor, keys: Tensor, values: Tensor, lse: Tensor, outputs: Tensor,
    indicator: str, aggregate: str, reduction: str, scale: float, last: Tensor, starts: Tensor,
    norms: Tensor | None = None, eps: float = 1e-6, present: Tensor | None = None, pool: int = 1,
    pool_by: str = "average", round_p: bool = False,
) -> Tensor:  # fmt: skip
    """The reference, in the inputs' dtype (upcast them first). Shapes as in `window_scores`; last: [batch, kv_heads,
    window]; starts: [batch, kv_heads]."""
    kv_heads, tokens = keys.shape[1:3]
    q, a = (x.unflatten(1, (kv_heads, -1)) for x in (query, outputs))  # [batch, kv_heads, group, window, dim]
    log_sum = lse.unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    finite = log_sum.isfinite()
    a = torch.where(finite, a, 0.0)
    seen = visible_keys(tokens, last, starts) & finite
    p = torch.exp(scale * torch.einsum("bgrtd,bgjd->bgrtj", q, keys) - log_sum)
    if pool > 1:
        around = torch.nn.functional.pad(torch.where(seen, p, 0.0), (pool // 2, pool // 2)).unfold(-1, pool, 1)
        p = around.mean(-1) if pool_by == "average" else around.amax(-1)
        seen = (torch.arange(tokens, device=keys.device) >= starts[:, :, None])[:, :, None, None]
    if indicator == "attention":
        x = p
    elif indicator == "value":
        x = p * (values.norm(dim=-1) if norms is None else norms)[:, :, None, None]
    elif indicator == "entropy":
        x = -p * (p + 1e-10).log()
    elif indicator == "anchor":
        x = p * torch.einsum("bgrtd,bgjd->bgrtj", a, values)
    else:
        square = a.square().sum(-1, keepdim=True) + values.square().sum(-1)[:, :, None, None]
        distance = (square - 2 * torch.einsum("bgrtd,bgjd->bgrtj", a, values)).clamp(min=0.0)
        p = p.clamp(max=1.0).bfloat16().to(p) if round_p else p.clamp(max=1.0)
        x = (p / (1 - p + eps)).square() * distance
    x = torch.where(seen, x, 0.0)
    absent = [0] * len(x) if present is None else (query.shape[2] - present).tolist()  # number of padding queries
    over = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "variance": torch.var}
    per_head = torch.stack([over[aggregate](row[:, :, n:], -2) for row, n in zip(x, absent, strict=True)])
    return per_head.flatten(1, 2) if reduction == "none" else over[reduction](per_head, 2)


def check_rule(
    keys: Tensor, window: int, norms: Tensor | None, present: Tensor | None, pool: int, **names: str
) -> None:
    """Raises ValueError for unknown names, and for settings that do not go together."""
    batch, kv_heads, tokens = keys.shape[:3]
    for kind, name in names.items():
        if name not in NAMES[kind]:
            raise ValueError(f"{kind} {name!r} is not one of {', '.join(NAMES[kind])}")
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"pool is {pool}: give an odd number of tokens, 1 for none")
    if present is not None and present.shape != (batch,):
        raise ValueError(f"present must be ({batch},), not {tuple(present.shape)}")
    if names["aggregate"] == "variance" and window < 2:
        raise ValueError(f"a variance needs a window of at least 2 queries, not {window}")
    if norms is not None and (names["indicator"] != "value" or norms.shape != (batch, kv_heads, tokens)):
        wanted = f"({batch}, {kv_heads}, {tokens}) with the indicator value"
        raise ValueError(f"norms must be {wanted}, not {tuple(norms.shape)} with {names['indicator']}")
