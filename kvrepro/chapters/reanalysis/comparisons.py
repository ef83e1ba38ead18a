"""Every comparison that the paper's public scores allow: its interval, its tests, the least effect it could detect."""

from collections.abc import Iterator

import pandas as pd
from scipy import stats as scipy_stats

from kvrepro.experiment import artifact, stats

KV_HEADS = {model: heads for model, (_, heads) in artifact.CHECKPOINTS.items()}
OLDER = ("sweep-20260309-202648/", "n481/qwen25-3b/q25-c256-lru-prot10")  # second runs of a condition
DEFAULT = 0.1  # of the capacity, protected at each end
REACH = scipy_stats.norm.ppf(0.975) + scipy_stats.norm.ppf(0.8)  # standard errors: 80% power at 5%, two-sided


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
        for family, other, other_prefix, what in _against(policy, prefix):
            if partner := runs.get((items, model, other, capacity, other_prefix, heat)):
                label = what + (f", temperature {heat:g}" if heat else "")
                table.append((family, items, model, label, policy, capacity, names, partner))
    return pd.DataFrame(table, columns=["family", "items", "model_name", "what", "policy", "capacity", "a", "b"])


def _against(policy: str, prefix: float) -> Iterator[tuple[str, str, float, str]]:
    """What a run is compared with: (family, policy, share protected at each end, the comparison's name)."""
    if policy == "full":
        return
    if prefix == DEFAULT:
        yield "protection", policy, 0.0, f"{policy}, protected - unprotected"
        if policy == "online_credit":
            yield "learned credit", "lru", DEFAULT, "online_credit - lru, protected"
        elif policy != "lru":
            yield "policies", "lru", DEFAULT, f"{policy} - lru, protected"
        if policy == "h2o_simple":
            yield "H2O and SnapKV", "snapkv_simple", DEFAULT, "h2o_simple - snapkv_simple, protected"
    elif prefix:
        yield "guards", policy, DEFAULT, f"{policy}, {prefix:.0%} - {DEFAULT:.0%} at each end"


def compare(rows: pd.DataFrame, measure: str = "token_f1", margin: float = 0.02) -> pd.DataFrame:
    """A row for each of `pairs`: the paired difference of a measure (a column of scores), its interval and tests.

    value, low, high: mean difference, 95% interval. wilcoxon: two-sided p; greater: one-sided, that a is larger;
    `_holm`: corrected within the family. tost: p of |difference| < margin. detectable: the true difference that a
    two-sided test at 5% would find in four of five repeats. untied: items whose scores differ. Several runs of an item
    count once, by their mean.
    """
    by_run = rows.pivot_table(index="item", columns="name", values=measure)
    table = pairs(rows)
    tested = [_tested(by_run, a, b, margin) for a, b in zip(table.a, table.b, strict=True)]
    table = pd.concat([table, pd.DataFrame(tested)], axis=1)
    for name in ("wilcoxon", "greater"):
        family = table.groupby(["family", "items", "model_name"])[name]
        table[f"{name}_holm"] = family.transform(lambda p: stats.holm(p.to_numpy()))
    return table.drop(columns=["a", "b"])


def _tested(by_run: pd.DataFrame, a: tuple[str, ...], b: tuple[str, ...], margin: float) -> dict[str, float]:
    pair = pd.DataFrame({"a": by_run[list(a)].mean(axis=1), "b": by_run[list(b)].mean(axis=1)}).dropna()
    difference = stats.contrast(pair, "difference", bounds=stats.UNIT)
    gap = (pair.a - pair.b).round(5)  # scores have six decimals: without it, ties between differences would be lost
    return {
        "value": difference.value, "low": difference.low, "high": difference.high, "n": difference.n,
        "untied": int((gap != 0).sum()),
        "wilcoxon": stats.wilcoxon(gap, 0 * gap), "greater": stats.wilcoxon(gap, 0 * gap, greater=True),
        "tost": stats.tost(pair.a, pair.b, margin, bounds=stats.UNIT), "detectable": REACH * difference.error,
    }  # fmt: skip


def of_seeds(rows: pd.DataFrame, measure: str = "token_f1") -> tuple[stats.Estimate, stats.Estimate]:
    """LRU's lift by protection where answers are sampled: if every seed of an item counts as an item, and if each item
    counts once."""
    hot = rows[rows.temperature > 0]
    pairs = hot[hot.prefix > 0].merge(hot[hot.prefix == 0], on=["item", "seed"], suffixes=("_a", "_b"))
    both = pairs[[f"{measure}_a", f"{measure}_b"]].set_axis(["a", "b"], axis=1)
    by_seed = stats.contrast(both, "difference", bounds=stats.UNIT)
    return by_seed, stats.contrast(both, "difference", pairs["item"], bounds=stats.UNIT)


def identical(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of items for which H2O and SnapKV write the same output, by model, items, capacity and protection.

    once: share of items that end before a second reduction; once_same: the share of these that are the same.
    """
    keys = ["items", "model_name", "model", "capacity", "protected"]
    first, second = (rows[rows.policy == name] for name in ("h2o_simple", "snapkv_simple"))
    both = first.merge(second, on=[*keys, "item"])
    both = both.assign(same=(both.output_x == both.output_y).astype(float), kv_heads=both.model.map(KV_HEADS))
    both = both.assign(once=both.policy_calls_x <= 1)
    table = stats.means(both, [*keys, "kv_heads"], "same").merge(both.groupby(keys, as_index=False).once.mean())
    once_same = both[both.once].groupby(keys, as_index=False).same.mean().rename(columns={"same": "once_same"})
    return table.merge(once_same, on=keys, how="left").drop(columns="model")


def by_eviction(rows: pd.DataFrame, policy: str = "ada_kv_faithful", measure: str = "token_f1") -> pd.DataFrame:
    """A policy minus protected LRU, separately for items in which the policy never evicted a token (column `never`):
    their answers ended before its first reduction, so that the full cache gave them."""
    policy_rows = rows[rows.policy == policy].assign(never=lambda t: t.evicted == 0)
    lru = rows[(rows.policy == "lru") & (rows.prefix == DEFAULT) & (rows.temperature == 0)]
    keys = ["items", "model_name", "capacity"]
    return stats.contrasts(policy_rows, lru, [*keys, "never"], measure, on=["item", *keys])
