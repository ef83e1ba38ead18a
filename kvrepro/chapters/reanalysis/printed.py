"""The paper's printed numbers, and the same numbers computed from its public scores, in three measures.

A printed number (`data/published/protection_*.csv`) names the result files behind it. Where it is rounded from other
rounded numbers, or where its file is not public, the row says so.
"""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence

import pandas as pd

from kvrepro.experiment import claims, stats

TABLES = {
    "3": "protection_t03_policies_qwen25_3b.csv", "8": "protection_t08_protection_sweep_qwen25_3b.csv",
    "10": "protection_t10_cross_architecture.csv", "11": "protection_t11_n481.csv",
    "13": "protection_t13_longctx_11k.csv", "14": "protection_t14_ctx32k.csv", "15": "protection_t15_niah64k.csv",
    "17": "protection_t17_niah64k_position.csv", "22": "protection_t22_niah_short_phi35.csv",
    "23": "protection_t23_credit_v2.csv", "25": "protection_t25_temperature.csv", "A": "protection_tA_latency.csv",
}  # fmt: skip
MEASURES = {"token_f1": "token F1", "token_f1_longbench": "LongBench's F1", "rouge_l": "ROUGE-L"}
UNCOMPUTED = ("wilcoxon_vs", "step_significance", "retention")  # labels without numbers; a ratio of two settings
CEILING = {  # the run that is 100%, for tables that do not name it; in table 25 it is protected
    "15": "q3-4b-2507-niah-64k/q3-4b-2507-64k-fullcache-lru-noprot",
    "25": "q3-4b-2507-robustness/q3-4b-2507-rob-c256-lru-prot-greedy",
}


def beside(scores: pd.DataFrame, tables: Sequence[str]) -> pd.DataFrame:
    """A row for every printed number of these tables: what was printed, what the scores give in each of `MEASURES`, its
    95% interval in token F1, whether both are the same in the printed digits, and why not.

    scores: `artifact.scores()`.
    """
    files = dict(tuple(scores.groupby("name", sort=False)))
    cells = pd.concat([claims.published(TABLES[table]) for table in tables], ignore_index=True)
    cells = cells[~cells.metric.str.startswith(UNCOMPUTED) & (cells.value != "")]
    return pd.DataFrame([_row(cell, files) for _, cell in cells.iterrows()])


def runs(scores: pd.DataFrame, table: str) -> pd.DataFrame:
    """The rows of all result files that a table names."""
    files = dict(tuple(scores.groupby("name", sort=False)))
    patterns = {name for _, cell in claims.published(TABLES[table]).iterrows() for name in _patterns(cell)}
    return _rows(sorted(patterns), files)


def _row(cell: pd.Series, files: Mapping[str, pd.DataFrame]) -> dict:
    sides = [_rows([pattern], files) for pattern in _patterns(cell)]
    estimates = {name: _value(cell.metric, sides, column) for column, name in MEASURES.items()}
    f1 = estimates["token F1"]
    return {
        "table": cell.table, "model": cell.model, "policy": cell.policy, "protected": cell.protected == "True",
        "capacity": cell.capacity, "guard": cell.protect_frac, "metric": cell.metric, "printed": float(cell.value),
        **{name: estimate.value for name, estimate in estimates.items()}, "low": f1.low, "high": f1.high, "n": f1.n,
        **_judged(cell, f1.value, sides),
    }  # fmt: skip


def _patterns(cell: pd.Series) -> list[str]:
    """Names of the files behind a number, with `*` for any text; of a ratio or a difference the first operand first."""
    texts = cell.artifact_file.replace("s42,s123,s456", "s*").split(";") if cell.artifact_file else []
    names = [text.removeprefix("results/").removesuffix(".jsonl") for text in texts]
    return [*names, CEILING[cell.table]] if names and cell.metric.startswith("pct") and cell.table in CEILING else names


def _rows(patterns: Sequence[str], files: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    names = {name for pattern in patterns for name in fnmatch.filter(files, pattern)}
    return pd.concat([rows for name, rows in files.items() if name in names])


def _value(metric: str, sides: Sequence[pd.DataFrame], column: str) -> stats.Estimate:
    """A printed number from its files' rows, in one measure; nan where it has none."""
    kind, _, part = metric.removesuffix("]").partition("[")
    nothing = stats.Estimate(math.nan, math.nan, math.nan, 0)
    if not sides:
        return nothing
    rows = sides[0][sides[0].task == part] if part in ("early", "middle", "late") else sides[0]
    if step := re.fullmatch(r"median_over_items_of_decode_step_(\w+)_ms", kind):
        value = rows[rows["item"].str[-3:] != "000"][f"step_ms_{step[1]}"].median()  # the first item compiles
        return stats.Estimate(value, math.nan, math.nan, 0) if column == "token_f1" else nothing
    if kind == "spread":
        means = rows.groupby("name")[column].mean()
        return stats.Estimate(means.max() - means.min(), math.nan, math.nan, len(means))
    if kind == "se":
        return stats.Estimate(rows[column].sem(), math.nan, math.nan, len(rows))
    if kind == "token_f1":
        return stats.interval(rows[column], rows["item"], bounds=stats.UNIT)
    other = sides[-1].groupby("item")[column].mean().reindex(rows["item"]).to_numpy()
    if kind.startswith("wilcoxon"):
        return stats.Estimate(stats.wilcoxon(rows[column], other), math.nan, math.nan, len(rows))
    ratio = kind == "pct_of_ceiling"
    pair = pd.DataFrame({"a": rows[column].to_numpy(), "full" if ratio else "b": other})
    name, scale = ("share_of_ceiling", 100) if ratio else ("difference", 1)
    estimate = stats.contrast(pair, name, rows["item"], bounds=stats.UNIT)
    return stats.Estimate(scale * estimate.value, scale * estimate.low, scale * estimate.high, estimate.n)


def _judged(cell: pd.Series, value: float, sides: Sequence[pd.DataFrame]) -> dict:
    """`same`: equal in the printed digits, three at most; `why`: the reason if they are not. sides: rows of the
    number's files."""
    if not sides:
        return {"same": None, "why": "its per-item results are not public"}
    digits = min(3, len(cell.value.partition(".")[2]))
    fits = lambda number: abs(number - float(cell.value)) <= 0.5 * 10**-digits + 1e-9  # noqa: E731
    if fits(value) or (cell.metric.startswith("wilcoxon") and value < 0.001 and fits(0.001)):  # "< 0.001"
        return {"same": True, "why": ""}
    mean, ceiling = sides[0].token_f1.mean(), round(sides[-1].token_f1.mean(), 3)
    if cell.metric.startswith("pct") and (fits(100 * mean / ceiling) or fits(100 * round(mean, 3) / ceiling)):
        return {"same": False, "why": "printed from rounded means"}
    return {"same": False, "why": "rounded twice" if fits(round(value, 4)) else "it differs"}
