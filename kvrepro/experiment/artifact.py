"""The protection paper's public per-item results, in the columns of our own.

`results` fetches the paper's files and reads them with their texts. `scores` reads only the numbers, from a table that
the project ships: data/artifact/scores.parquet, which `python -m kvrepro.experiment.artifact` writes (a minute).
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvrepro.errors import InputError
from kvrepro.experiment import data, measure
from kvrepro.experiment.store import COLUMNS
from kvrepro.paths import DATA

NAMES = yaml.safe_load((DATA / "artifact" / "names.yml").read_text(encoding="utf-8"))
MODELS, CHECKPOINTS, POLICIES, ITEMS = (NAMES[part] for part in ("models", "checkpoints", "policies", "items"))


def condition(path: str) -> dict[str, Any]:
    """Model, policy, capacity and protection of a result file, read from its name.

    Three names hide their protection: `oc` files are protected at 10% per side, `-protected` and the `probe` files too
    (paper, tables 23 and A). A file that names no policy is LRU (table 13). 32768 held every prompt of its files.
    """
    stem = Path(path).stem
    model = next(MODELS[key] for key in sorted(MODELS, key=len, reverse=True) if stem.startswith(key))
    policy = re.search(r"(adakv_faithful|quest_faithful|h2o|snapkv|lru|random|oc)(?=-|$)", stem)
    capacity = re.search(r"-c(\d+)", stem)
    fraction = re.search(r"-prot(\d+)$", stem)
    protected = "-prot" in stem or stem.startswith("probe") or (policy is not None and policy[1] == "oc")
    side = int(fraction[1]) / 100 if fraction else 0.1 if protected else 0.0
    sampling = re.search(r"-t07-s(\d+)$", stem)
    if "fullcache" in stem or "c32768" in stem:
        return {"model": model, "policy": "full", "capacity": None, "prefix": 0.0, "suffix": 0.0, "temperature": 0.0}
    name = policy[1] if policy else "lru"
    return {
        "model": model, "policy": POLICIES.get(name, name), "capacity": int(capacity[1]) if capacity else None,
        "prefix": side, "suffix": side, "temperature": 0.7 if sampling else 0.0,
        "seed": int(sampling[1]) if sampling else None,
    }  # fmt: skip


SCORES = DATA / "artifact" / "scores.parquet"
SAME = {  # columns that are the same in all rows
    "chapter": "protection", "suffix_mode": "dynamic", "interval": 8, "reading": "as_run", "execution": "masked",
    "backend": "artifact", "dtype": "bfloat16",
}  # fmt: skip
TIMES = {f"decode_step_{name}_ms": f"step_ms_{name}" for name in ("mean", "p50", "p95", "p99")}
SHIPPED = [
    "name", "item", "task", "prompt_tokens", "n_generated", "kept_mean", "evicted", "policy_calls", "cut", "token_f1",
    "token_f1_longbench", "exact_match", "rouge_l", "repetition_4gram", "output", "begins", "first_right", "rest_f1",
    "first_f1", "first_gold_f1", "gate_open", *TIMES.values(),
]  # fmt: skip


def results(under: str = "", rouge: bool = False) -> pd.DataFrame:
    """The protection paper's public per-item rows in the columns of our own results (see
    `kvrepro.experiment.store.COLUMNS`), and those that only this paper's rows have:

    - output: 32 bits of the text's hash, so that equal outputs can be counted. begins: the code of the text's first
      character, 0 where it is empty.
    - first_right, rest_f1: whether the first word is the answer's, and token F1 of the words after it; null for
      one-word answers.
    - first_f1: token F1 of the prediction's first word alone; first_gold_f1: of the answer's first word alone.
    - gate_open: calls that learned credit influenced. step_ms_*: milliseconds of a step, only of the latency probe.

    under: only files whose path below results/ starts with this, e.g. "n481/qwen25-3b". token_f1, exact_match, counts
    and times are those that the artifact stores; the other measures are computed here from the stored text. The
    artifact keeps 500 characters of prediction and reference; `cut` says where that may matter. `rouge` adds rouge_l
    (about 1 ms a row). Columns that the artifact does not have are null. Raises InputError where no file matches.
    """
    folder = data.fetch("artifact")
    task = _tasks(folder / "data")
    files = [p for p in data.sources()["artifact"]["files"] if p.startswith(f"results/{under}")]
    files = [p for p in files if p.endswith(".jsonl")]
    if not files:
        raise InputError(f"no result files under results/{under} of the artifact: see `kvrepro data`")
    rows = []
    for path in files:
        entries = [json.loads(line) for line in (folder / path).read_text(encoding="utf-8").splitlines()]
        items = ITEMS[len(entries)]
        name = path.removeprefix("results/").removesuffix(".jsonl")
        for entry in entries:
            head = {"name": name, "item": f"{items}-{entry['idx']:03d}", "task": task(items, entry["idx"])}
            times = {ours: entry[theirs] for theirs, ours in TIMES.items()} if items == ITEMS[6] else {}
            rows.append(head | _row(entry, rouge) | times)
    return _with_conditions(pd.DataFrame(rows))


def scores(under: str = "") -> pd.DataFrame:
    """The rows of `results(under, rouge=True)` without their texts, from the table that the project ships: no download.

    Raises InputError where no file matches.
    """
    rows = pd.read_parquet(SCORES)
    rows = rows[rows["name"].str.startswith(under)].reset_index(drop=True)
    if rows.empty:
        raise InputError(f"no scores of a file under {under}: see the column name of {SCORES}")
    return _with_conditions(rows)


def _with_conditions(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with the conditions that their files' names give, in the order of our own columns."""
    conditions = pd.DataFrame([condition(name) | {"name": name} for name in rows["name"].unique()])
    rows = rows.merge(conditions, on="name").assign(**SAME)
    return rows.reindex(columns=list(dict.fromkeys([*COLUMNS, *SHIPPED, *conditions])))


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


def _row(entry: dict[str, Any], rouge: bool) -> dict[str, Any]:
    prediction, answer = entry["prediction"], entry["reference"]
    return {
        "prompt_tokens": entry["n_prompt_tokens"], "n_generated": entry["n_generated_tokens"],
        "prediction": prediction, "answer": answer, "token_f1": entry["token_f1"], "exact_match": entry["exact_match"],
        "token_f1_longbench": measure.token_f1_longbench(prediction, answer, papers=True),
        "rouge_l": measure.rouge_l(prediction, answer, papers=True) if rouge else math.nan,
        "repetition_4gram": measure.repetition_4gram(prediction),
        "kept_mean": entry.get("positions_retained", math.nan), "evicted": entry["eviction_count"],
        "policy_calls": entry["policy_call_count"],
        "cut": len(prediction) >= 500 or len(answer) >= 500, "gate_open": entry["gate_open_count"],
        "output": int(hashlib.sha256(prediction.encode()).hexdigest()[:8], 16),
        "begins": ord((prediction or "\0")[0]),
    } | _first_word(prediction, answer)  # fmt: skip


def _first_word(prediction: str, answer: str) -> dict[str, float]:
    """Scores of the first word, which the full cache chooses under every policy."""
    first, first_gold = (" ".join(text.split()[:1]) for text in (prediction, answer))
    return measure.after_first(prediction, answer) | {
        "first_f1": measure.token_f1(first, answer, papers=True),
        "first_gold_f1": measure.token_f1(first_gold, answer, papers=True),
    }


def write(path: Path = SCORES) -> None:
    """Write the shipped table from the fetched files: numbers only, reals to six decimals as in the artifact."""
    rows = results(rouge=True)[SHIPPED].round(6).astype({"output": "uint32"})
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_parquet(path, compression="zstd", index=False)


if __name__ == "__main__":
    write()
