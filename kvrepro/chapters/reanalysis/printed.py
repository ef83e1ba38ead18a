"""The paper's printed numbers, and the same numbers computed from its public scores, in three measures; and what these
scores are made of: the first word, which the full cache chooses under every policy, and all later words. And every
comparison that the public scores allow, with its interval and its tests.

A printed number (`data/published/protection_*.csv`) names the result files behind it. Where it is rounded from other
rounded numbers, or where its file is not public, the row says so.
"""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from annotated_types import Len

from kvrepro.engine.condition import Positive, ensure_all
from kvrepro.experiment import artifact, claims, stats

TABLES = {
    "3": "protection_t03_policies_qwen25_3b.csv",
    "8": "protection_t08_protection_sweep_qwen25_3b.csv",
    "10": "protection_t10_cross_architecture.csv",
    "11": "protection_t11_n481.csv",
    "13": "protection_t13_longctx_11k.csv",
    "14": "protection_t14_ctx32k.csv",
    "15": "protection_t15_niah64k.csv",
    "17": "protection_t17_niah64k_position.csv",
    "22": "protection_t22_niah_short_phi35.csv",
    "23": "protection_t23_credit_v2.csv",
    "25": "protection_t25_temperature.csv",
    "A": "protection_tA_latency.csv",
}
MEASURES = {"token_f1": "token F1", "token_f1_longbench": "LongBench's F1", "rouge_l": "ROUGE-L"}
WORDS = {"token_f1": "token F1", "first_f1": "F1 of the first word alone", "rest_f1": "F1 after the first word"}
CONTROL = "first word of the answer"
UNCOMPUTED = ("wilcoxon_vs", "step_significance", "retention")  # labels without numbers; a ratio of two settings
CEILING = {  # the run that is 100%, for tables that do not name it; in table 25 it is protected
    "15": "q3-4b-2507-niah-64k/q3-4b-2507-64k-fullcache-lru-noprot",
    "25": "q3-4b-2507-robustness/q3-4b-2507-rob-c256-lru-prot-greedy",
}


def check(measure: object, margin: object, tables: object) -> None:
    """Raise one InputError for all of the notebook's parameters that nothing can be computed with."""
    named: Any = Annotated[list[Literal[tuple(TABLES)]], Len(1), f"some of {list(TABLES)}"]  # type: ignore[valid-type]
    ensure_all([("measure", tuple(MEASURES), measure), ("margin", Positive, margin), ("tables", named, tables)])


def beside(scores: pd.DataFrame, tables: Sequence[str]) -> pd.DataFrame:
    """A row for every printed number of these tables: what was printed, what the scores give in each of `MEASURES`, its
    95% interval in token F1, whether both are the same in the printed digits, and why not.

    scores: `artifact.scores()`.
    """
    files = dict(tuple(scores.groupby("name", sort=False)))
    cells = pd.concat([claims.published(TABLES[table]) for table in tables], ignore_index=True)
    cells = cells[~cells.metric.str.startswith(UNCOMPUTED) & (cells.value != "")]
    return pd.DataFrame([_row(cell, files) for _, cell in cells.iterrows()])


def words(scores: pd.DataFrame, tables: Sequence[str]) -> pd.DataFrame:
    """Per table and kind of run, each of `WORDS` with its interval over items; and the control.

    The control answers with the right answer's first word only: its token F1 is what one right word is worth. Columns:
    table, who, value, low, high, n, measure. Answers of one word have no words after the first. The rows that several
    runs have for an item are one cluster.
    """
    files, runs = dict(tuple(scores.groupby("name", sort=False))), []
    for table in tables:
        patterns = {name for _, cell in claims.published(TABLES[table]).iterrows() for name in _patterns(cell)}
        runs.append(_rows(sorted(patterns), files).assign(table=table))
    rows = pd.concat(runs)
    policy = np.where(rows.policy == "lru", "LRU, ", "other policies, ")
    kind = pd.Series(policy, rows.index) + np.where(rows.prefix > 0, "protected", "unprotected")
    rows = rows.assign(who=kind.mask(rows.policy == "full", "full cache"))
    by = ["table", "who"]
    parts = [stats.means(rows, by, column, clusters="item").assign(measure=name) for column, name in WORDS.items()]
    control = rows.drop_duplicates(["table", "item"]).assign(who=CONTROL)
    return pd.concat([*parts, stats.means(control, by, "first_gold_f1").assign(measure="token F1")], ignore_index=True)


def _row(cell: pd.Series, files: Mapping[str, pd.DataFrame]) -> dict:
    sides = [_rows([pattern], files) for pattern in _patterns(cell)]
    estimates = {name: _value(cell.metric, sides, column) for column, name in MEASURES.items()}
    values = {name: estimate.value for name, estimate in estimates.items()}
    shown = {"guard": cell.protect_frac, "protected": cell.protected == "True", "printed": float(cell.value)}
    f1 = estimates["token F1"]
    whose = cell[["table", "model", "policy", "capacity", "metric"]].to_dict()
    return whose | shown | values | {"low": f1.low, "high": f1.high, "n": f1.n} | _judged(cell, f1.value, sides)


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
    if not sides:
        return _alone(math.nan, 0)
    rows = sides[0][sides[0].task == part] if part in ("early", "middle", "late") else sides[0]
    if step := re.fullmatch(r"median_over_items_of_decode_step_(\w+)_ms", kind):
        value = rows[rows["item"].str[-3:] != "000"][f"step_ms_{step[1]}"].median()  # the first item compiles
        return _alone(value, 0) if column == "token_f1" else _alone(math.nan, 0)
    if kind == "spread":
        means = rows.groupby("name")[column].mean()
        return _alone(means.max() - means.min(), len(means))
    if kind == "se":
        return _alone(rows[column].sem(), len(rows))
    if kind == "token_f1":
        return stats.interval(rows[column], rows["item"], bounds=stats.UNIT)
    other = sides[-1].groupby("item")[column].mean().reindex(rows["item"]).to_numpy()
    if kind.startswith("wilcoxon"):
        return _alone(stats.wilcoxon(rows[column], other), len(rows))
    ratio = kind == "pct_of_ceiling"
    pair = pd.DataFrame({"a": rows[column].to_numpy(), "full" if ratio else "b": other})
    name, scale = ("share_of_ceiling", 100) if ratio else ("difference", 1)
    e = stats.contrast(pair, name, rows["item"], bounds=stats.UNIT)
    return stats.Estimate(scale * e.value, scale * e.low, scale * e.high, e.n)


def _alone(value: float, n: int) -> stats.Estimate:
    """A number without an interval."""
    return stats.Estimate(value, math.nan, math.nan, n)


def _judged(cell: pd.Series, value: float, sides: Sequence[pd.DataFrame]) -> dict:
    """`same`: equal in the printed digits, three at most; `why`: the reason if they are not. sides: rows of the
    number's files."""
    if not sides:
        return {"same": None, "why": "its per-item results are not public"}
    printed, digits = float(cell.value), min(3, len(cell.value.partition(".")[2]))

    def fits(number: float) -> bool:
        return abs(number - printed) <= 0.5 * 10**-digits + 1e-9

    if fits(value) or (cell.metric.startswith("wilcoxon") and value < 0.001 and fits(0.001)):  # "< 0.001"
        return {"same": True, "why": ""}
    mean, ceiling = sides[0].token_f1.mean(), round(sides[-1].token_f1.mean(), 3)
    if cell.metric.startswith("pct") and (fits(100 * mean / ceiling) or fits(100 * round(mean, 3) / ceiling)):
        return {"same": False, "why": "printed from rounded means"}
    return {"same": False, "why": "rounded twice" if fits(round(value, 4)) else "it differs"}


# ---------------------------------------------------------------- comparisons

KV_HEADS = {model: heads for model, (_, heads) in artifact.CHECKPOINTS.items()}
OLDER = ("sweep-20260309-202648/", "n481/qwen25-3b/q25-c256-lru-prot10")  # second runs of a condition
DEFAULT = 0.1  # of the capacity, protected at each end


def panels(scores: pd.DataFrame) -> pd.DataFrame:
    """The scores with the columns `items`, `model_name` and `protected`: one run of each condition, without latency
    probes."""
    rows = scores[~scores["name"].str.startswith((*OLDER, "jit-latency-probe/"))]
    items = rows["item"].str.rsplit("-", n=1).str[0]
    return rows.assign(items=items, model_name=rows.model.str.rpartition("/")[2], protected=rows.prefix > 0)


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Which runs are compared: columns family, items, model_name, what, policy, capacity, a, b.

    a and b name all runs of a condition, which has several seeds at a temperature. Holm's correction is over a family:
    one question about one model on one set of items, at all capacities.
    """
    keys = ["items", "model_name", "policy", "capacity", "prefix", "temperature"]
    runs = {key: tuple(group) for key, group in rows.groupby(keys, dropna=False)["name"].unique().items()}
    table = []
    for (items, model, policy, capacity, prefix, heat), names in runs.items():
        for family, other, other_prefix in _against(policy, prefix):
            if partner := runs.get((items, model, other, capacity, other_prefix, heat)):
                table.append((family, items, model, policy, prefix, capacity, heat, names, partner))
    return pd.DataFrame(table, columns="family items model_name policy prefix capacity temperature a b".split())


def _against(policy: str, prefix: float) -> list[tuple[str, str, float]]:
    """What a run is compared with: (family, policy, share protected at each end)."""
    if policy == "full" or not prefix:
        return []
    if prefix != DEFAULT:
        return [("guards", policy, DEFAULT)]
    rival = "learned credit" if policy == "online_credit" else "policies"
    return [("protection", policy, 0.0), *([(rival, "lru", DEFAULT)] if policy != "lru" else [])]


def compare(rows: pd.DataFrame, measure: str = "token_f1", margin: float = 0.02) -> pd.DataFrame:
    """A row for each of `pairs`: the paired difference of a measure (a column of scores), its interval and tests.

    value, low, high: mean difference, 95% interval. wilcoxon: two-sided p; wilcoxon_holm: corrected within the family.
    tost: p of |difference| < margin. untied: items whose scores differ. Several runs of an item count once, by their
    mean.
    """
    by_run = rows.pivot_table(index="item", columns="name", values=measure)
    table, tested = pairs(rows), []
    for a, b in zip(table.a, table.b, strict=True):
        pair = pd.DataFrame({"a": by_run[list(a)].mean(axis=1), "b": by_run[list(b)].mean(axis=1)}).dropna()
        difference = stats.contrast(pair, "difference", bounds=stats.UNIT)
        gap = (pair.a - pair.b).round(5)  # scores have six decimals: ties between differences would be lost
        tests = stats.wilcoxon(gap, 0 * gap), stats.tost(pair.a, pair.b, margin)
        tested.append((*difference[:3], difference.n, int((gap != 0).sum()), *tests))
    table = table.join(pd.DataFrame(tested, columns="value low high n untied wilcoxon tost".split()))
    family = table.groupby(["family", "items", "model_name"]).wilcoxon
    holm = family.transform(lambda p: stats.holm(p.to_numpy()))
    return table.assign(wilcoxon_holm=holm).drop(columns=["a", "b"])


def of_seeds(rows: pd.DataFrame, measure: str = "token_f1") -> tuple[stats.Estimate, stats.Estimate]:
    """LRU's lift by protection where answers are sampled: if every seed of an item counts as an item, and if each item
    counts once."""
    hot = rows[rows.temperature > 0]
    pairs = hot[hot.prefix > 0].merge(hot[hot.prefix == 0], on=["item", "seed"], suffixes=("_a", "_b"))
    both = pairs[[f"{measure}_a", f"{measure}_b"]].set_axis(["a", "b"], axis=1)
    by_seed = stats.contrast(both, "difference", bounds=stats.UNIT)
    return by_seed, stats.contrast(both, "difference", pairs["item"], bounds=stats.UNIT)


def identical(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of items for which H2O and SnapKV write the same output, by model, capacity and protection."""
    keys = ["model_name", "model", "capacity", "protected"]
    first, second = (rows[rows.policy == name] for name in ("h2o_simple", "snapkv_simple"))
    both = first.merge(second, on=[*keys, "item"])
    both = both.assign(same=(both.output_x == both.output_y).astype(float), kv_heads=both.model.map(KV_HEADS))
    return stats.means(both, ["model_name", "kv_heads", "capacity", "protected"], "same")


def by_eviction(rows: pd.DataFrame, policy: str, measure: str = "token_f1") -> pd.DataFrame:
    """A policy minus protected LRU, separately for items in which the policy never evicted a token (column `never`):
    their answers ended before its first reduction, so that the full cache gave them."""
    policy_rows = rows[rows.policy == policy].assign(never=lambda t: t.evicted == 0)
    lru = rows[(rows.policy == "lru") & (rows.prefix == DEFAULT) & (rows.temperature == 0)]
    keys = ["items", "model_name", "capacity"]
    return stats.contrasts(policy_rows, lru, [*keys, "never"], measure, on=["item", *keys])
