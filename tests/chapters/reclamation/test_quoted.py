"""Sums of memory against numbers worked out by hand; what the guide quotes: answers are read, and rows are held against
what is printed."""

from types import SimpleNamespace

import pandas as pd
import pytest

from kvrepro.chapters.reclamation import quoted
from kvrepro.chapters.reclamation.study import Settings
from kvrepro.experiment import verdict


@pytest.mark.parametrize(
    ("text", "right"),
    [(r"so 3, and \boxed{042}.", 1), (r"\boxed{7} rather than 42", 0), ("first 7, then 42", 1), ("none", 0), ("", 0)],
)
def test_the_boxed_number_counts_or_else_the_last(text, right):
    assert quoted.solved(text, "42") == right


def rows(items=40):
    """All problems solved by the full cache, half under TriAttention; none by the others."""
    cases = [("full", None), *quoted.BUDGETS]
    return pd.DataFrame([
        {"item": f"p{i}", "task": "AIME 2025", "policy": name, "capacity": budget, "answer": "5", "n_generated": 100,
         "prediction": "5" if name == "full" or (name == "tri_attention" and i % 2) else "6",
         "decode_seconds": 1.0 if budget == 3072 else 3.0, "bytes_held": 3072 if budget else 32_768}
        for i in range(items) for name, budget in cases
    ])  # fmt: skip


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    tables = {"quoted": quoted.table(rows)}
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


def test_bytes_of_a_token_and_tokens_beside_the_weights():
    token = 2 * 64 * 8 * 128 * 2  # keys and values, layers, KV heads, dimensions, bytes
    rows = quoted.memory().set_index("check").value
    assert rows["tokens in 24 x 10^9 bytes, four bits for every weight"] == (24_000_000_000 - 16_400_000_000) // token
    ends = 2 * 151_936 * 5_120  # embeddings and output layer, two bytes a weight; the others 4.15625 bits
    held = 2 * ends + (32_800_000_000 - ends) * 4.15625 / 8
    assert rows["tokens in 24 x 2^30 bytes"] == (24 * 2**30 - held) // token == 24_512
    assert rows["smaller by GQA"].tolist()[0] == 32 / 8


def test_one_model_with_four_times_as_many_query_heads_refutes_eight_and_is_named():
    table, model = quoted.memory(), SimpleNamespace(name="none")
    few = table[(table.check != "smaller by GQA") | (table.value >= 8)]
    for rows, expected in ((table, "not reproduced"), (few, "reproduced")):
        frame = verdict.verdicts("reclamation", {"memory": rows}, model, Settings(), ["R8"])
        assert frame.verdict.tolist() == [expected]
