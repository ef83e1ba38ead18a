"""data/artifact/scores.parquet: the numbers of the protection paper's public per-item results (a minute)."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from kvrepro.experiment import artifact, data, measure

NAMES = {"prompt_tokens": "n_prompt_tokens", "n_generated": "n_generated_tokens", "evicted": "eviction_count"}
NAMES |= {"policy_calls": "policy_call_count", "gate_open": "gate_open_count"}


def results(under: str = "") -> pd.DataFrame:
    """The rows of `artifact.scores`, with their texts, from the paper's files below a folder of its results."""
    folder = data.fetch("artifact")
    task = _tasks(folder / "data")
    files = [p for p in data.sources()["artifact"]["files"] if p.startswith(f"results/{under}")]
    rows = []
    for path in (p for p in files if p.endswith(".jsonl")):
        entries = [json.loads(line) for line in (folder / path).read_text(encoding="utf-8").splitlines()]
        items = artifact.ITEMS[len(entries)]
        name = path.removeprefix("results/").removesuffix(".jsonl")
        for entry in entries:
            head = {"name": name, "item": f"{items}-{entry['idx']:03d}", "task": task(items, entry["idx"])}
            timed = artifact.TIMES if items == artifact.ITEMS[6] else {}
            rows.append(head | _row(entry) | {ours: entry[theirs] for theirs, ours in timed.items()})
    return artifact.scores(pd.DataFrame(rows))


def _tasks(folder: Path) -> Callable[[str, int], str]:
    """(items, number) -> an item's task: its set in LongBench, the place of its needle, or else the items' name.

    The 64K needles are not public; the paper has twenty of each place, in this order (table 15).
    """

    def entries(name: str) -> list[Any]:
        return [json.loads(line) for line in (folder / f"{name}.jsonl").open(encoding="utf-8")]

    tasks = {
        "longbench-balanced": [entry["domain"] for entry in entries("longbench-balanced")],
        "longbench-longctx": [entry["dataset"] for entry in entries("longbench-longctx")],
        "niah-benchmark": [entry["meta"]["needle_position"] for entry in entries("niah-benchmark")],
        "niah-64k": [place for place in ("early", "middle", "late") for _ in range(20)],
    }
    return lambda items, number: tasks[items][number] if items in tasks else items


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    prediction, answer = entry["prediction"], entry["reference"]
    first, first_gold = (" ".join(text.split()[:1]) for text in (prediction, answer))
    row = {name: entry[name] for name in ("prediction", "token_f1", "exact_match")} | {"answer": answer}
    row |= {ours: entry[theirs] for ours, theirs in NAMES.items()}
    return row | {
        "token_f1_longbench": measure.token_f1_longbench(prediction, answer, papers=True),
        "rouge_l": measure.rouge_l(prediction, answer, papers=True),
        "repetition_4gram": measure.repetition_4gram(prediction),
        "kept_mean": entry.get("positions_retained", math.nan),
        "cut": len(prediction) >= 500 or len(answer) >= 500,
        "output": int(hashlib.sha256(prediction.encode()).hexdigest()[:8], 16),
        "begins": ord((prediction or "\0")[0]),
        **measure.after_first(prediction, answer),
        "first_f1": measure.token_f1(first, answer, papers=True),  # the full cache chooses it under every policy
        "first_gold_f1": measure.token_f1(first_gold, answer, papers=True),
    }


if __name__ == "__main__":  # the shipped table: numbers only, reals to six decimals as in the artifact
    rows = results()[artifact.SHIPPED].round(6).astype({"output": "uint32"})
    rows.to_parquet(artifact.SCORES, compression="zstd", index=False)
