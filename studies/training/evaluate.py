"""Exact match of a model on the world's tasks: `python -m studies.training.evaluate --n 20 --tokens 1900`.

Answers are read under teacher forcing: each token the most likely one is a right greedy answer, for one forward pass.
"""

import random
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import typer
from statsmodels.stats.proportion import proportion_confint

from kvrepro.experiment import models
from kvrepro.paths import write_table
from studies.training import rows as R

LENGTHS = (500, 1000, 1900, 3800)  # prompt and answer together
Sets = dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]  # (task, length) -> ids, turn


def evaluation_set(task: str, length: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and turn, int16 [n, length], of n held-out conversations with one question each."""
    rng = random.Random(f"eval-{seed}-{task}-{length}")
    shares = np.asarray([float(name == task) for name in R.TASK_NAMES])
    ids, turn, _ = R.batch(rng, shares, length, length * n, evaluation=True, turns=1)
    return torch.from_numpy(ids), torch.from_numpy(turn)


def exact(correct: torch.Tensor, turn: torch.Tensor, n_turns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: (answers wholly right, answers), from the correctness of each token, bool [rows, tokens]."""
    total = torch.zeros(turn.shape[0], n_turns + 1, device=turn.device)
    right = total.clone().scatter_add_(1, turn.long(), correct.float())
    total.scatter_add_(1, turn.long(), torch.ones_like(correct, dtype=torch.float32))
    seen = total[:, 1:] > 0
    return ((right[:, 1:] == total[:, 1:]) & seen).sum(1), seen.sum(1)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def exact_match(model, sets: Sets, device: str = "cpu", rows: int = 50) -> dict[tuple[str, int], float]:
    """Share of answers wholly right in each set; bf16 autocast on a GPU, the model's own precision on a CPU."""
    out = {}
    for key, (ids, turn) in sets.items():
        good = n = 0
        for x, y in zip(ids.split(rows), turn.split(rows), strict=True):
            x, y = x.to(device).long(), y.to(device)
            with torch.autocast("cuda", torch.bfloat16, enabled=str(device).startswith("cuda")):
                guess = model(x, use_cache=False).logits[:, :-1].argmax(-1)
            a, b = exact(guess == x[:, 1:], y[:, 1:], int(y.max()))
            good, n = good + int(a.sum()), n + int(b.sum())
        out[key] = good / n
    return out


def write(path: Path, result: dict[tuple[str, int], float], n: int) -> None:
    """CSV: task, tokens, n, exact_match, low, high (Wilson interval, 95%)."""
    rows = [(*key, n, rate, *proportion_confint(round(rate * n), n, method="wilson")) for key, rate in result.items()]
    table = pd.DataFrame(rows, columns=["task", "tokens", "n", "exact_match", "low", "high"])
    write_table(path, table, "%.4f")


def main(model: str = models.DEFAULT, n: int = 20, tokens: int = 1900) -> None:
    """Evaluate on the CPU in float32 and write evaluation.csv."""
    sets = {(name, tokens): evaluation_set(name, tokens, n, 2026) for name in R.TASK_NAMES}
    write(Path("evaluation.csv"), exact_match(models.load(model).model, sets, rows=4), n)


if __name__ == "__main__":
    typer.run(main)
