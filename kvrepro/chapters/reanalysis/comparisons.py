"""Every comparison that the paper's public scores allow, with its interval and its tests."""

import pandas as pd

from kvrepro.experiment import artifact, stats

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
        tests = stats.wilcoxon(gap, 0 * gap), stats.tost(pair.a, pair.b, margin, bounds=stats.UNIT)
        tested.append((*difference.triple, difference.n, int((gap != 0).sum()), *tests))
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
