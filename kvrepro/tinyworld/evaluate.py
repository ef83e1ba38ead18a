"""Exact match of the embedded model per task and prompt length: `python -m kvrepro.tinyworld.evaluate data/models/tiny-gqa`.

Answers are read under teacher forcing: all tokens right there is the same as a right greedy answer, at the cost of one forward pass.
"""

import csv
import multiprocessing as mp
from pathlib import Path

import torch
import typer
from statsmodels.stats.proportion import proportion_confint

from kvrepro.tinyworld.train import evaluate, evaluation_set
from kvrepro.tinyworld.world import ALL

LENGTHS = (500, 1000, 1900, 3800)


def main(model_path: Path, n: int = 200, seed: int = 2026, device: str = "cpu", workers: int = 2) -> None:
    """Write evaluation.csv beside the weights: task, tokens, n, exact_match, low, high (Wilson, 95%)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(device).eval()
    with mp.get_context("spawn").Pool(workers) as pool:
        jobs = {(t, L): pool.apply_async(evaluation_set, (t, L, n, seed)) for L in LENGTHS for t in ALL}
        with open(model_path / "evaluation.csv", "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["task", "tokens", "n", "exact_match", "low", "high"])
            for (task, length), job in jobs.items():
                rate = evaluate(model, {0: job.get()}, device, autocast=False)[0]
                low, high = proportion_confint(round(rate * n), n, method="wilson")
                out.writerow([task, length, n, f"{rate:.4f}", f"{low:.4f}", f"{high:.4f}"])
                file.flush()
                print(f"{task:24s} {length:5d}  {rate:.3f} [{low:.3f}, {high:.3f}]", flush=True)


if __name__ == "__main__":
    typer.run(main)
