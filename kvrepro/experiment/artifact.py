"""The protection paper's public per-item results, in the columns of our own."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from kvrepro.errors import InputError
from kvrepro.experiment import data, measure, store

MODELS = {
    **dict.fromkeys(("q25", "q3b"), "Qwen/Qwen2.5-3B-Instruct"), "q7b": "Qwen/Qwen2.5-7B-Instruct",
    **dict.fromkeys(("q3-4b", "probe"), "Qwen/Qwen3-4B-Instruct-2507"), "gemma3": "google/gemma-3-4b-it",
    "phi35": "microsoft/Phi-3.5-mini-instruct", "phi4mini": "microsoft/Phi-4-mini-instruct",
    "mistral7b": "mistralai/Mistral-7B-Instruct-v0.3",
}  # fmt: skip
POLICIES = {
    "adakv_faithful": "ada_kv_faithful", "oc": "online_credit", "h2o": "h2o_simple", "snapkv": "snapkv_simple",
    "random": "random_sample",
}  # fmt: skip
ITEMS = {  # rows of a file -> the items it ran on; the pool of 481 and the long needles are not public
    6: "jit-probe-bench", 48: "longbench-longctx", 58: "longbench-32k", 60: "niah-64k", 63: "niah-benchmark",
    162: "longbench-balanced", 481: "longbench-pool",
}  # fmt: skip


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


def results(under: str = "", rouge: bool = False) -> pd.DataFrame:
    """The protection paper's public per-item rows in the columns of our own results (see
    `kvrepro.experiment.store.COLUMNS`).

    under: only files whose path below results/ starts so, e.g. "n481/qwen25-3b". As the artifact stored them: token_f1,
    exact_match and the counts. Computed here from the stored text: the other measures. The artifact keeps 500
    characters of prediction and reference, `cut` says where that may matter. `rouge` adds rouge_l (about 1 ms a row).
    What the artifact does not tell is null.
    """
    folder = data.fetch("artifact")
    domains = [item.task for item in data.read_jsonl(folder / "data" / "longbench-balanced.jsonl")]
    files = [
        p for p in data.sources()["artifact"]["files"] if p.startswith(f"results/{under}") and p.endswith(".jsonl")
    ]
    if not files:
        raise InputError(f"no result files under results/{under} of the artifact: see kvrepro.experiment.data list")
    rows = []
    for path in files:
        entries = [json.loads(line) for line in (folder / path).read_text(encoding="utf-8").splitlines()]
        items = ITEMS[len(entries)]
        same = condition(path) | {"name": path.removeprefix("results/").removesuffix(".jsonl")}
        for entry in entries:
            task = domains[entry["idx"]] if items == "longbench-balanced" else items
            rows.append(same | {"item": f"{items}-{entry['idx']:03d}", "task": task} | _row(entry, rouge))
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=[*store.COLUMNS, *(c for c in frame.columns if c not in store.COLUMNS)])


def _row(entry: dict[str, Any], rouge: bool) -> dict[str, Any]:
    prediction, answer = entry["prediction"], entry["reference"]
    return {
        "chapter": "protection", "suffix_mode": "dynamic", "interval": 8, "reading": "as_run", "execution": "masked",
        "prompt_tokens": entry["n_prompt_tokens"], "n_generated": entry["n_generated_tokens"],
        "prediction": prediction, "answer": answer, "token_f1": entry["token_f1"], "exact_match": entry["exact_match"],
        "token_f1_longbench": measure.token_f1_longbench(prediction, answer),
        "rouge_l": measure.rouge_l(prediction, answer) if rouge else None,
        "repetition_4gram": measure.repetition_4gram(prediction), "kept_mean": entry.get("positions_retained"),
        "evicted": entry["eviction_count"], "policy_calls": entry["policy_call_count"], "backend": "artifact",
        "dtype": "bfloat16", "cut": len(prediction) >= 500 or len(answer) >= 500,
    }  # fmt: skip
