"""Accuracy and speed that the guide quotes from elsewhere, for readers who have the model, the problems and the time.

It needs a .jsonl of problems whose `task` is "AIME 2024" or "AIME 2025" and whose answer is a number, and room for long
answers: options={"quoted": "aime.jsonl"} with Qwen/Qwen3-8B on a GPU.
"""

import re
from collections.abc import Sequence

import pandas as pd

from kvrepro.engine.condition import Condition, DecodeCap
from kvrepro.experiment.claims import published
from kvrepro.experiment.run import Answers
from kvrepro.item import Item

BUDGETS = (("snapkv", 2048), ("r_kv", 2048), ("tri_attention", 2048), ("tri_attention", 3072))
NAMES = {"full": "Full attention", "snapkv": "SnapKV", "r_kv": "R-KV", "tri_attention": "TriAttention"}
NEEDS = (
    "the numbers are of Qwen3-8B with answers of 32,768 tokens: give such a model, calibrated for TriAttention (python "
    '-m studies.calibrate), and the problems as options={"quoted": "<aime>.jsonl"}'
)


def study(items: Sequence[Item], tokens: int) -> Answers:
    """Every problem with the full cache and under each of `BUDGETS`, to which it evicts every 128 generated tokens."""
    conditions = [Condition(), *(Condition(name, budget, DecodeCap(128)) for name, budget in BUDGETS)]
    return Answers("reclamation", "quoted", items, conditions, max_new_tokens=tokens)


def solved(prediction: str, answer: str) -> float:
    """1 where the boxed number, or else the last one, is the answer."""
    numbers = re.findall(r"\\boxed\{\s*(-?[\d,]+)", prediction) or re.findall(r"-?\d[\d,]*", prediction)
    return float(bool(numbers) and numbers[-1].replace(",", "").lstrip("0") == answer.strip().lstrip("0"))


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows (item, task, policy, budget): solved, 0 or 1; beyond_print, solved less the printed accuracy; lost, solved
    with the full cache less solved here; faster, tokens per second over those of the full cache; smaller, bytes of the
    full cache at the end of the answer over those held here."""
    problems = pd.DataFrame({
        "item": rows["item"], "task": rows.task, "policy": rows.policy.map(NAMES), "budget": rows.capacity.fillna(0),
        "solved": rows.apply(lambda row: solved(row.prediction or "", row.answer), axis=1),
        "speed": rows.n_generated / rows.decode_seconds, "bytes_held": rows.bytes_held,
    })  # fmt: skip
    printed = published("guide003_numbers.csv").query("metric == 'accuracy %'")
    printed = printed.assign(budget=printed.budget.str.extract(r"^(\d+)")[0].fillna("0").astype(float))
    printed = printed.assign(share=printed.value.astype(float) / 100).set_index(["task", "method", "budget"]).share
    cells = pd.MultiIndex.from_frame(problems[["task", "policy", "budget"]])
    full = problems[problems.policy == NAMES["full"]].set_index("item")
    return problems.assign(
        beyond_print=problems.solved - printed.reindex(cells).to_numpy(),
        lost=problems["item"].map(full.solved) - problems.solved,
        faster=problems.speed / problems["item"].map(full.speed),
        smaller=problems["item"].map(full.bytes_held) / problems.bytes_held,
    )
