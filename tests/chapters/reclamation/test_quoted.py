"""What the guide quotes: answers are read, and rows are held against what is printed."""

import itertools
from types import SimpleNamespace

import pandas as pd
import pytest

from kvrepro.chapters.reclamation import study
from kvrepro.chapters.reclamation.study import Settings
from kvrepro.experiment import verdict


@pytest.mark.parametrize(
    ("text", "right"),
    [(r"so 3, and \boxed{042}.", 1), (r"\boxed{7} rather than 42", 0), ("first 7, then 42", 1), ("none", 0), ("", 0)],
)
def test_the_boxed_number_counts_or_else_the_last(text, right):
    assert study.solved(text, "42") == right


def rows(items=40):
    """All problems solved by the full cache, half under TriAttention; none by the others."""
    cases = [("full", None), *study.BUDGETS]
    columns = ["item", "policy", "capacity", "prediction", "decode_seconds", "bytes_held"]
    table = []
    for i, (name, budget) in itertools.product(range(items), cases):
        prediction = "5" if name == "full" or (name == "tri_attention" and i % 2) else "6"
        seconds, held = 1.0 if budget == 3072 else 3.0, 3072 if budget else 32_768
        table.append((f"p{i}", name, budget, prediction, seconds, held))
    return pd.DataFrame(table, columns=columns).assign(task="AIME 2025", answer="5", n_generated=100)


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    tables = {"quoted": study.quoted_table(rows)}
    return verdict.verdicts("reclamation", tables, SimpleNamespace(name="Qwen3-8B"), Settings()).set_index("claim")


def test_the_quoted_claims_are_judged_once_there_are_rows():
    frame = judged(rows())
    assert frame.verdict["R5"] == "not testable here"  # no problem of 2024
    assert frame.verdict["R5c"] == "not reproduced"
    for longest, expected in ((32_000, "reproduced"), (12_000, "not reproduced")):  # tokens of full answers
        ended = rows().assign(bytes_held=lambda x, n=longest: x.bytes_held.where(x.policy != "full", n + x.index))
        frame = judged(ended)
        assert frame.verdict["R5e"] == expected
    same = rows().assign(prediction="5", decode_seconds=[1.0 + 0.01 * (i % 7) for i in range(200)])
    frame = judged(same)
    assert frame.verdict["R5d"] == "not reproduced"
