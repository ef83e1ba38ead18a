"""The protection paper's public per-item results, in the columns of our own: numbers only, from a table that ships.

`studies.scores` makes the table from the paper's files.
"""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

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
    row = {"model": model, "policy": POLICIES.get(name, name), "capacity": int(capacity[1]) if capacity else None}
    row |= {"prefix": side, "suffix": side, "temperature": 0.7 if sampling else 0.0}
    return row | {"seed": int(sampling[1]) if sampling else None}


SCORES = DATA / "artifact" / "scores.parquet"
TIMES = {f"decode_step_{name}_ms": f"step_ms_{name}" for name in ("mean", "p50", "p95", "p99")}
SHIPPED = """name item task prompt_tokens n_generated kept_mean evicted policy_calls cut token_f1 token_f1_longbench
    exact_match rouge_l repetition_4gram output begins first_right rest_f1 first_f1 first_gold_f1 gate_open""".split()
SHIPPED += TIMES.values()


def scores(rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of all result files in the columns of our own results (`kvrepro.experiment.store.COLUMNS`), and others.

    output: 32 bits of the text's hash. begins: the code of its first character, 0 where it is empty. first_right,
    rest_f1: whether the first word is the answer's, and token F1 of the words after it; null for one-word answers.
    first_f1, first_gold_f1: token F1 of the first word alone, of the prediction and of the answer. gate_open: calls
    that learned credit influenced. step_ms_*: milliseconds of a step, only of the latency probe. token_f1, exact_match,
    counts and times are those that the artifact stores; the other measures are of its text, of which it keeps 500
    characters: `cut` says where that may matter.
    """
    rows = pd.read_parquet(SCORES) if rows is None else rows
    conditions = pd.DataFrame([condition(name) | {"name": name} for name in rows["name"].unique()])
    rows = rows.merge(conditions, on="name").assign(suffix_mode="dynamic", reading="as_run")
    return rows.reindex(columns=list(dict.fromkeys([*COLUMNS, *SHIPPED, *conditions])))
