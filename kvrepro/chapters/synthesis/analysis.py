"""How much of the spread of scores each factor explains, and what a score costs.

The spread is that of a mixed model of items x conditions:

    score = mean + factors + interactions of two factors + item + rest

Items are a random sample and conditions are not, so that the item is the random effect. Every item is run under every
condition, so that the fixed effects are the mean of each item's own least squares. That gives unbiased shares: let c_i
be what a term explains of item i's scores, a vector over conditions. The mean of <c_i, c_k> over pairs of different
items is what the items have in common, free of noise.

The grid is a fraction of all cells, so that terms overlap. How much one term's columns take up of another's effects,
and of differences that no term explains, follows from the columns alone if effects have no preferred direction. We
solve these moment equations (as in Henderson's methods for variance components; in a full table it is omega squared).
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from kvrepro.experiment import figure, stats

Columns = dict[tuple[str, ...], np.ndarray]  # of a factor, or of two
SMALL = 1e-8  # of a column that others explain
BEYOND = "conditions, beyond these"
ENOUGH = 100  # from so many conditions on, interactions of two factors can be told apart
COSTS = {"held": "keys and values held", "unfreed": "blocks not freed"}  # shares; less is better


# ---- what explains the scores


def by_model(
    rows: pd.DataFrame, factors: Sequence[str], score: str, draws: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(`shares`, `effects`) of each model's rows, with a column `model`; interactions where conditions suffice."""
    all_shares, all_effects = [], []
    for name, model_rows in rows.groupby("model", sort=False):
        conditions, scores = wide(model_rows, factors, score)
        d = design(conditions, interactions=len(conditions) >= ENOUGH)
        all_shares.append(shares(d, scores, draws).assign(model=name))
        all_effects.append(effects(conditions, scores).assign(model=name))
    if not all_shares:  # no answer has words after the first
        return pd.DataFrame(columns=["term", "value", "low", "high", "n", "model"]), pd.DataFrame()
    return pd.concat(all_shares, ignore_index=True), pd.concat(all_effects, ignore_index=True)


def wide(rows: pd.DataFrame, factors: Sequence[str], score: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(conditions, scores [conditions, items]): the conditions that every item has."""
    rows = rows.dropna(subset=[score])  # answers of one word have no score of the words after it
    filled = rows.assign(**{name: rows[name].astype(object).where(rows[name].notna(), "-") for name in factors})
    table = filled.pivot_table(score, list(factors), "item", aggfunc="first", sort=False).dropna()
    conditions = table.index.to_frame(index=False)
    return conditions.where(conditions != "-", None), table.reset_index(drop=True)


def coded(levels: pd.Series) -> tuple[np.ndarray, list]:
    """Columns of a factor, [conditions, levels - 1], each level against the last (sum coding), and the levels' names;
    0 where a condition does not have the factor."""
    code, names = pd.factorize(levels, sort=False)
    indicators = np.eye(len(names))[code] * (code >= 0)[:, None]
    return indicators[:, :-1] - indicators[:, -1:], list(names)


def design(conditions: pd.DataFrame, interactions: bool = True) -> tuple[Columns, Columns]:
    """Orthonormal columns [conditions, columns] of every factor (a column of `conditions`) that varies, and of the
    interactions of two: (those that measure it, those in which its effect may lie).

    What measures a factor is free of the other factors, and an interaction of all main effects. The effect of an
    interaction is free of its own two factors only.
    """
    columns_of = {name: columns for name in conditions if (columns := coded(conditions[name])[0]).shape[1]}
    constant = np.ones((len(conditions), 1))
    bases: Columns = {}
    carriers: Columns = {}
    for name, columns in columns_of.items():
        others = [other for other_name, other in columns_of.items() if other_name != name]
        carriers[name,] = _free(columns, constant)
        bases[name,] = _free(columns, constant, *others)
    for a, b in itertools.combinations(columns_of, 2) if interactions else ():
        products = (columns_of[a][:, :, None] * columns_of[b][:, None, :]).reshape(len(conditions), -1)
        if (basis := _free(products, constant, *columns_of.values())).shape[1]:
            bases[a, b], carriers[a, b] = basis, _free(products, constant, columns_of[a], columns_of[b])
    return bases, carriers


def _free(columns: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the part of `columns` that `others` do not explain."""
    rest = columns - (known := np.concatenate(others, 1)) @ np.linalg.lstsq(known, columns, rcond=None)[0]
    left, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    return left[:, sizes > SMALL * max(1.0, float(np.abs(columns).max()))]


def shares(d: tuple[Columns, Columns], scores: pd.DataFrame, draws: int = 1000, seed: int = 0) -> pd.DataFrame:
    """The share of each term in the variance of scores [conditions, items]: columns term, value (what all items have in
    common), low, high, n.

    There are two rows more: "item", its mean over conditions, and what differs between conditions beyond the terms.
    Intervals are the book's for values that are no means, by resampling whole items. On simulated tables of 6 to 24
    items they held the truth in nine of ten; those of the item's share, which has heavy tails, in eight.
    """
    (bases, carriers), y, n = d, scores.to_numpy(float), scores.shape[1]
    picks = np.random.default_rng(seed).integers(0, n, (draws, n))
    weights = np.stack([np.ones(n), *(np.bincount(pick, minlength=n) for pick in picks)])  # how often an item counts
    within, mean = y - y.mean(0), y.mean(0)
    parts = [*(basis.T @ within for basis in bases.values()), within]
    grams = [part.T @ part / len(y) for part in parts]  # <c_i, c_k> / conditions, [items, items]; last: all differences
    others = 1 - np.eye(n)
    pairs = np.einsum("di,ik,dk->d", weights, others, weights)
    with np.errstate(invalid="ignore"):  # a single item has no pair
        common = np.stack([np.einsum("di,ik,dk->d", weights, gram * others, weights) / pairs for gram in grams], 1)
    item = weights @ mean**2 / n - (weights @ mean / n) ** 2
    total = weights @ np.diag(grams[-1]) / n + item
    # What the bases take up (last: all differences) of each term's variance (last: the variance beyond all terms).
    taken = [[float(((basis.T @ c) ** 2).sum()) for c in carriers.values()] for basis in bases.values()]
    own = [[basis.shape[1]] for basis in bases.values()]
    sizes = np.array([*(c.shape[1] for c in carriers.values()), len(y) - 1], float)
    unmixed = sizes[:, None] * np.linalg.pinv(np.vstack([np.hstack([taken, own]), sizes]))
    values = np.column_stack([common @ unmixed.T, item]) / np.where(total > SMALL, total, np.nan)[:, None]
    rows = []
    for i, term in enumerate([*(" x ".join(term) for term in bases), BEYOND, "item"]):
        estimate = stats.spread_of(float(values[0, i]), values[1:, i], n, limits=stats.UNIT)
        rows.append((term, *estimate[:3], n))
    return pd.DataFrame(rows, columns=["term", "value", "low", "high", "n"])


def effects(conditions: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """The main effect of each level, against the mean of its factor's levels: factor, level, value, low, high, n.

    These are the fixed effects of the mixed model; intervals are over items, each with its own least squares.
    """
    coding = {name: coded(conditions[name]) for name in conditions}
    columns = np.concatenate([np.ones((len(conditions), 1)), *(c for c, _ in coding.values())], 1)
    fitted = np.linalg.lstsq(columns, scores.to_numpy(float), rcond=None)[0][1:]  # [columns, items]
    rows, at = [], 0
    for name, (factor_columns, levels) in coding.items():
        coefficients = fitted[at : at + factor_columns.shape[1]]
        at += factor_columns.shape[1]
        for level, values in zip(levels, [*coefficients, -coefficients.sum(0)], strict=True):
            rows.append((name, level, *stats.interval(values)[:3], scores.shape[1]))
    return pd.DataFrame(rows, columns=["factor", "level", "value", "low", "high", "n"])


# ---- what a score costs


def costs(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """A row per model and condition: `name`, kind, scorer, mean score with its interval, and means of its `COSTS`."""
    keys = ["model", "name", "kind", "scorer"]
    frame = rows.assign(name=[_name(row) for row in rows.to_dict("records")], unfreed=1 - rows.freed)
    means = frame.groupby(keys, sort=False, dropna=False)[list(COSTS)].mean()
    return stats.means(frame, keys, score).merge(means, on=keys)


def _name(row: Mapping[str, object]) -> str:
    """A row's condition as text: a published method, or the levels of a cell without those that mean "none"."""
    if row["kind"] == "full":
        return "full cache"
    if row["kind"] == "published":
        return f"{figure.look(row['method']).name}, {row['kept']:.0%}"
    of_window = f" ({row['aggregator']}, pooled: {row['pooling']})" if row["aggregator"] else ""
    guard = f"guard: {row['guard']}" if row["guard"] != "none" else ""
    quota = "quota" if row["quota"] == "parts" else ""
    words = (f"{row['scorer']}{of_window}", guard, row["split"], quota, row["regime"], f"{row['kept']:.0%}")
    return ", ".join(str(word) for word in words if word)


def frontier(table: pd.DataFrame, cost: str) -> pd.DataFrame:
    """The rows that no other row beats, by cost: no other is at least as good in score and cost and better in one."""
    ordered = table.sort_values([cost, "value"], ascending=[True, False], kind="stable")
    return ordered[ordered.value > ordered.value.cummax().shift(fill_value=-np.inf)]
