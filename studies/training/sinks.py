"""Attention sink of a model: `python -m studies.training.sinks` writes sinks.csv beside the weights.

The mass of a head is the share of attention that position 0 gets, the mean over all queries of a prompt but the first.
"""

from typing import Annotated

import pandas as pd
import torch
import typer

from kvrepro.engine.attention import watch_prompt
from kvrepro.experiment import models, stats
from kvrepro.paths import write_table
from studies.calibrate import TASKS, prompts


def sink_mass(model, ids: list[int]) -> torch.Tensor:
    """[layers, heads]: mean attention of the queries 1 .. n - 1 to position 0. Evenly spread it is about ln(n) / n."""
    received: dict[int, torch.Tensor] = {}

    def see(layer: int, p: torch.Tensor, queries: slice) -> None:
        first = p[0, ..., 0].flatten(0, 1).sum(1)
        received[layer] = received[layer] + first if layer in received else first

    watch_prompt(model, ids, see)
    return (torch.stack([received[layer] for layer in sorted(received)]) - 1) / (len(ids) - 1)  # query 0 sees itself


def measure(loaded: models.Loaded, texts: list[list[int]]) -> pd.DataFrame:
    """layer, head (a number, or "mean" over heads), mass, low, high: mean over prompts, interval, 95%."""
    masses = torch.stack([sink_mass(loaded.model, ids) for ids in texts]).cpu().double().numpy()
    rows = []
    for layer, heads in enumerate(masses.transpose(1, 2, 0)):
        for head, values in [*enumerate(heads), ("mean", heads.mean(0))]:
            e = stats.interval(values, bounds=stats.UNIT)
            rows.append({"layer": layer, "head": head, "mass": e.value, "low": e.low, "high": e.high})
    return pd.DataFrame(rows)


def main(
    model: Annotated[str, typer.Option(help="small-gqa, or the folder of a checkpoint")] = models.DEFAULT,
    n: Annotated[int, typer.Option(help="prompts")] = 16,
    tokens: int = 1900,
    seed: int = 2026,
) -> None:
    """Measure in float32 on the CPU, over eight tasks."""
    loaded = models.load(model)
    table = measure(loaded, prompts(loaded, f"tinyworld:{TASKS}", n, seed, tokens))
    write_table(loaded.path / "sinks.csv", table, "%.5f")


if __name__ == "__main__":
    typer.run(main)
