"""What the guide says of attention: a fifth of the tokens gets most of it, and only the newest queries tell where it
goes next. And of Quest: it holds the whole cache.

Attention is measured per layer while a model reads prompts; nothing is evicted.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from kvrepro.engine import generate as engine
from kvrepro.engine.attention import watch_prompt
from kvrepro.engine.condition import Condition, Prefill
from kvrepro.engine.facts import ModelFacts
from kvrepro.experiment.models import Loaded

WINDOWS = (1, 4, 8, 16, 25, 50, 100)  # queries; the guide says about 25
AHEAD = 16  # queries that come next


def sparsity(
    loaded: Loaded, ids: list[int], windows: Sequence[int] = WINDOWS, ahead: int = AHEAD, share: float = 0.2
) -> pd.DataFrame:
    """Rows (what, layer, window, value), each a mean over KV heads; layers that slide are left out.

    what "heavy hitters": share of all attention on the `share` of tokens that get the most of it. "window": of the
    attention that the last `ahead` queries pay to the history, the share on the `share` of its tokens to which the
    `window` queries before them attend most. "best": the most that as many tokens could get. The history ends where the
    largest window begins; windows for which the prompt is too short are left out. `gain`: value less that of the window
    of 25.
    """
    windows = [w for w in windows if 2 * (w + ahead) <= len(ids)]
    most = max(windows, default=0)
    mass: dict[int, Tensor] = {}  # [kv_heads, tokens], by layer
    newest: dict[int, Tensor] = {}  # of the last queries [kv_heads, most + ahead, tokens], by layer

    def see(layer: int, p: Tensor, queries: slice) -> None:
        p = p[0].sum(1)  # [kv_heads, queries, tokens]
        mass[layer] = mass.get(layer, 0) + p.sum(1)
        newest[layer] = torch.cat([newest.get(layer, p[:, :0]), p], 1)[:, -most - ahead :]

    watch_prompt(loaded.model, ids, see)
    sliding, rows = ModelFacts.of(loaded.model).sliding, []
    for layer, received in mass.items():
        if sliding.get(layer, len(ids) + 1) <= len(ids):
            continue
        rows.append(("heavy hitters", layer, 0, _held(received, received, share)))
        if windows:
            p = newest[layer][..., : len(ids) - most - ahead]  # [kv_heads, queries, history]
            wanted = p[:, -ahead:].sum(1)
            rows.append(("best", layer, 0, _held(wanted, wanted, share)))
            rows += [("window", layer, w, _held(p[:, -ahead - w : -ahead].sum(1), wanted, share)) for w in windows]
    table = pd.DataFrame(rows, columns=["what", "layer", "window", "value"])
    of_25 = table[table.window == 25].set_index("layer").value
    return table.assign(gain=table.value.where(table.what == "window") - table.layer.map(of_25))


def _held(scores: Tensor, mass: Tensor, share: float) -> float:
    """Share of `mass` [kv_heads, tokens] on the `share` of tokens with the largest scores, mean over heads."""
    chosen = scores.topk(max(1, round(share * scores.shape[1])), -1).indices
    return float((mass.gather(1, chosen).sum(1) / mass.sum(1)).mean())


def pages(loaded: Loaded, ids: list[int], kept: Sequence[float] = (0.1, 0.5), block_size: int = 16) -> pd.DataFrame:
    """Quest, which selects pages: rows (kept) with `held`, its bytes over those of a cache that evicts nothing, and
    `read`, the share of the tokens that a query reads."""
    page = (("page", block_size),)
    conditions = [Condition(), *(Condition("quest_pages", round(n * len(ids)), Prefill(), switches=page) for n in kept)]
    [[full, *answers]] = engine.generate(loaded.model, [ids], conditions, max_new_tokens=2, stop_ids=())
    return pd.DataFrame([
        {"kept": share, "held": g.bytes_held / full.bytes_held, "read": (g.pages or 0) * block_size / len(ids)}
        for share, g in zip(kept, answers, strict=True)
    ])  # fmt: skip
