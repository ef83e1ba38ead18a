"""The protection chapter's rows as its claims choose them (`kvrepro.experiment.members`), and what they compute."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.protection.study import Settings
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import is_own
from kvrepro.errors import counted
from kvrepro.experiment import judge
from kvrepro.experiment.judge import NotTestable, Sample
from kvrepro.experiment.members import Case

CONDITION = ["policy", "capacity", "prefix", "suffix", "suffix_mode"]  # columns of a row that tell conditions apart
OPEN = [*CONDITION[1:], "reading", "regime", "temperature", "guarded", "main", "smallest", "middle", "largest"]
MIN_CONDITIONS = 4  # of one cluster, for a correlation over its conditions
MIN_SINK = 0.10  # attention mass on position 0, in some layer, from which on a model is said to have a sink


def tidied(
    tables: Mapping[str, pd.DataFrame], loaded: Any, settings: Settings, kv_heads: int | None = None
) -> dict[str, pd.DataFrame]:
    """The tables of a run (main, scaling, attention, real, once and those of `study.of_full_profile`) as claims choose
    from them. kv_heads: of the model, if it is not loaded."""
    heads = kv_heads if loaded is None else max(ModelFacts.of(loaded.model).kv_heads.values())
    return {
        name: _of_attention(rows) if name == "attention" else _of_answers(rows, settings).assign(kv_heads=heads)
        for name, rows in tables.items()
    }


def _of_answers(rows: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """Guards in units of `protect_frac`; `guarded`; whether a capacity is the smallest, middle or largest of the `main`
    grid. The full cache has one row per item, and no condition."""
    full, per = rows.policy == "full", ["item", *({"length"} & set(rows))]
    rows = rows[~full | ~rows.assign(full=full).duplicated(["full", *per])]
    units = {side: (rows[side] / settings.protect_frac).round(4) for side in ("prefix", "suffix")}
    guarded = np.where((rows.prefix > 0) | (rows.suffix > 0), "protected", "unprotected")
    rows = rows.assign(**units, guarded=guarded, share_of_limit=rows.n_generated / settings.max_new_tokens)
    grouped = rows.groupby([*({"length"} & set(rows)), "reading"], dropna=False, group_keys=False)
    rows = pd.concat([_sized(group) for _, group in grouped]).sort_index() if len(rows) else rows
    opened = rows[[name for name in OPEN if name in rows]]
    return rows.assign(**opened.astype(object).mask(rows.policy == "full", np.nan))


def _sized(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with columns main, smallest, middle, largest. The main grid's capacities are those at which the most
    policies were run with both sides protected; with one alone none is smallest or largest."""
    both = rows[(rows.prefix == 1) & (rows.suffix == 1) & ~rows.policy.str.endswith("_faithful")]
    policies = both.groupby("capacity").policy.nunique()
    sizes = sorted(policies.index[policies == policies.max()])
    ends = sizes if len(sizes) > 1 else []
    named = {"main": sizes, "smallest": ends[:1], "middle": sizes[len(sizes) // 2 :][:1], "largest": ends[-1:]}
    return rows.assign(**{name: rows.capacity.isin(of_name) for name, of_name in named.items()})


def _of_attention(attention: pd.DataFrame) -> pd.DataFrame:
    """Means over layers and heads: a row per item, region and kind (mass, uniform), with a region of sink and prefix.
    `largest_sink`: the most that position 0 gets in a layer. attention: rows (item, layer, head, region, mass,
    uniform)."""
    means = attention.pivot_table(index="item", columns="region", values=["mass", "uniform"], aggfunc="mean")
    means["mass", "sink and prefix"] = means["mass", "sink"] + means["mass", "prefix"]
    long = means.melt(ignore_index=False, value_name="value", var_name=["kind", "region"]).reset_index()
    sinks = attention[attention.region == "sink"].groupby("layer").mass.mean()
    return long.assign(largest_sink=sinks.max())


# ---------------------------------------------------------------- what a claim needs


def check_heads(case: Case) -> None:
    """The statement is about models with so many KV heads (`kv_heads`), or about others (`kv_heads_not`)."""
    heads = case.tables["main"].rows.kv_heads.iloc[0]
    if "kv_heads" in case.claim and heads not in case.claim["kv_heads"]:
        numbers = " or ".join(map(str, case.claim["kv_heads"]))
        raise NotTestable(f"said of models with {numbers} KV heads; this one has {heads or 'an unknown number'}")
    if heads is not None and heads == case.claim.get("kv_heads_not"):
        raise NotTestable(f"said of models without {heads} KV heads")


def check_answers(case: Case) -> None:
    """The model answers with its full cache, or with protected LRU where the full cache was never run, as in several
    published files."""
    table, cell = case.table, case.claim["filter"]
    if "policy" not in table.rows:
        table, cell = case.tables["main"], {}
    part = {name: cell[name] for name in ("reading", "task", "length", "guarded") if name in cell}
    full = table.fitting(part | {"policy": "full"})
    if full.empty:
        full = table.fitting(part | {"policy": "lru", "prefix": {"above": 0}, "suffix": {"above": 0}})
        full = full.drop_duplicates("item")
    judge.answers_enough(full.token_f1, full.get("error"))


def check_domains(case: Case) -> None:
    """Items of several domains."""
    if len(domains := case.table.rows.task.unique()) < 2:
        raise NotTestable(f"items of one domain alone ({domains[0]}): it needs several")


def check_sink(case: Case) -> None:
    """Some layer attends to position 0."""
    if not case.table.rows.largest_sink.iloc[0] >= MIN_SINK:
        raise NotTestable("position 0 gets less than a tenth of the attention in every layer")


REQUIRES = {"heads": check_heads, "answers": check_answers, "domains": check_domains, "sink": check_sink}


# ---------------------------------------------------------------- what a claim computes


def correlation(case: Case) -> Sample:
    """Correlation of two measures over the evicting conditions, those of a reader's own policies left out. The full
    cache stays out: conditions that score far above the others would bring any correlation near 1."""
    rows, both = case.rows(), case.claim["column"]
    if rows[both].dropna().empty:
        raise NotTestable(f"no row has {both[0]} and {both[1]}")
    evicting = rows[(rows.policy != "full") & ~rows.policy.map(is_own)]
    wide = evicting.pivot_table(index="item", columns=CONDITION, values=both)
    shared = wide[both[0]].columns.intersection(wide[both[1]].columns)
    if len(shared) < MIN_CONDITIONS:
        few = counted(len(shared), "condition")
        raise NotTestable(f"{few}: a correlation over conditions needs {MIN_CONDITIONS}")
    values = pd.concat([wide[measure][shared] for measure in both], axis=1).dropna()

    def of_means(x: np.ndarray) -> float:
        first, second = map(pd.Series, np.split(x.mean(0), 2))
        return first.corr(second)

    return case.sample(of_means, values)


def same_output(case: Case) -> Sample:
    """Whether a and b write the same text, for items on which either evicts a second time: at the first time both rank
    tokens alike."""
    texts = case.table.rows.get("prediction")
    column = "output" if texts is None or texts.isna().all() else "prediction"
    text = pd.DataFrame({side: case.values(side, column) for side in "ab"}).dropna()
    calls = pd.DataFrame({side: case.values(side, "policy_calls") for side in "ab"})
    again = (calls.reindex(text.index) >= 2).any(axis=1)
    return case.sample("mean", (text.a == text.b)[again].astype(float).to_frame("a"))


def difference_of_lifts(case: Case) -> Sample:
    """a - b against x - y, per item, each the mean of an item's rows."""
    means = pd.DataFrame({side: case.rows(**cell).groupby("item").token_f1.mean() for side, cell in case.sides.items()})
    lifts = pd.DataFrame({"a": means.a - means.b, "b": means.x - means.y}).dropna()
    return case.sample("difference", lifts)


CONTRASTS = {"correlation": correlation, "same_output": same_output, "difference_of_lifts": difference_of_lifts}
