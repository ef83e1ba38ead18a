"""Numbers of the guide that rest on large models: sums of memory, computed from printed shapes, and the accuracy and
speed that it quotes from elsewhere, for readers who have the model, the problems and the time.

The latter need a .jsonl of problems whose `task` is "AIME 2024" or "AIME 2025" and whose answer is a number, and room
for long answers: options={"quoted": "aime.jsonl"} with Qwen/Qwen3-8B on a GPU.
"""

import re
from collections.abc import Sequence

import pandas as pd

from kvrepro.engine.condition import Condition, DecodeCap
from kvrepro.experiment.claims import published
from kvrepro.experiment.run import Answers
from kvrepro.item import Item

SHAPES = {  # layers, query heads, KV heads, dimension of a head, parameters; from the models' published configurations
    "Qwen3-8B": (36, 32, 8, 128, 8.19e9),
    "Qwen3-32B": (64, 64, 8, 128, 32.8e9),
    "Llama-3.1-8B": (32, 32, 8, 128, 8.03e9),
    "Llama-3.1-70B": (80, 64, 8, 128, 70.6e9),
    "Qwen2.5-3B": (36, 16, 2, 128, 3.09e9),
    "Qwen2.5-14B": (48, 40, 8, 128, 14.8e9),
}
UNITS = {"24 x 10^9 bytes": 24e9, "24 x 2^30 bytes": 24 * 2**30}
VOCABULARY, WIDTH = 151_936, 5_120  # of Qwen3-32B, whose embeddings and output layer are two matrices
GROUP = 128  # weights that share a scale of 16 bits and a zero of four. Source: AWQ, Lin et al. 2024
BUDGETS = (("snapkv", 2048), ("r_kv", 2048), ("tri_attention", 2048), ("tri_attention", 3072))
NAMES = {"full": "Full attention", "snapkv": "SnapKV", "r_kv": "R-KV", "tri_attention": "TriAttention"}


def memory() -> pd.DataFrame:
    """Rows (check, model, value). "smaller by GQA": the cache if there were as many KV heads as query heads, over the
    model's. "tokens in <memory>": tokens that fit beside Qwen3-32B's weights at four bits, with nothing else in memory.
    Either all weights have four bits, or as in checkpoints the embeddings and the output layer have 16, and the others
    have scales and zeros."""
    rows = [("smaller by GQA", model, heads / kv) for model, (_, heads, kv, _, _) in SHAPES.items()]
    layers, _, kv_heads, dim, parameters = SHAPES["Qwen3-32B"]
    token = 2 * 2 * layers * kv_heads * dim  # bytes of its keys and values
    ends = 2 * VOCABULARY * WIDTH
    weights = {"": 2 * ends + (parameters - ends) * (4 + 20 / GROUP) / 8}
    weights[", four bits for every weight"] = parameters / 2
    for variant, held in weights.items():
        rows += [(f"tokens in {name}{variant}", "Qwen3-32B", (room - held) // token) for name, room in UNITS.items()]
    return pd.DataFrame(rows, columns=["check", "model", "value"])


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
    problems = rows[["item", "task", "bytes_held"]].assign(
        policy=rows.policy.map(NAMES),
        budget=rows.capacity.fillna(0),
        solved=rows.apply(lambda row: solved(row.prediction or "", row.answer), axis=1),
        speed=rows.n_generated / rows.decode_seconds,
    )
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
