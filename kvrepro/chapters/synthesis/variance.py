"""How much of the spread of scores each factor explains: a mixed model of items x conditions.

    score = mean + factors + interactions of two factors + item + rest

Items are drawn, conditions are chosen: the item is the random effect (`mixed`). Every item is asked under every
condition, so that the fixed effects of the mixed model are the mean of each item's own least squares. That gives shares
without bias: if c_i is what a term explains of item i's scores, a vector over conditions, then the mean of <c_i, c_k>
over pairs of different items is what they have in common, and noise has no part in it. Over pairs of one task it is
larger where a term acts otherwise in each task; what then remains of <c_i, c_i> is an item's own.

The grid is a fraction of all cells, so that terms overlap. What the columns of one take up of another's effects, and
of differences that no term explains, follows from the columns alone, if effects have no direction of their own; these
moment equations are solved (as in Henderson's methods for variance components; in a full table it is omega squared).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from statsmodels.regression.mixed_linear_model import MixedLM
from statsmodels.tools.sm_exceptions import ConvergenceWarning

from kvrepro.errors import InputError
from kvrepro.experiment import stats
from kvrepro.paths import DATA

Term = tuple[str, ...]  # one factor, or two
SMALL = 1e-8  # of a column that others explain
BEYOND = "conditions, beyond these"


@dataclass(frozen=True)
class Design:
    """Orthonormal columns [conditions, columns] of each term.

    bases: where a term is looked for. A main effect is free of the other factors, an interaction of all main effects.
    carriers: where its effect may lie, an interaction free of its own two factors only. main: all main effects.
    """

    bases: dict[Term, np.ndarray]
    carriers: dict[Term, np.ndarray]
    main: np.ndarray

    @property
    def unmixed(self) -> np.ndarray:
        """[terms + 1, terms + 1]: a term's variance over conditions, and last that beyond all terms, from what the
        bases take up, and last from all differences between conditions."""
        rows = len(self.main)
        taken = [[float(((basis.T @ c) ** 2).sum()) for c in self.carriers.values()] for basis in self.bases.values()]
        sizes = np.array([c.shape[1] for c in self.carriers.values()] + [rows - 1], float)
        mixing = np.zeros((len(sizes), len(sizes)))
        mixing[:-1, :-1], mixing[-1] = taken, sizes
        mixing[:-1, -1] = [basis.shape[1] for basis in self.bases.values()]
        return sizes[:, None] * np.linalg.pinv(mixing)


def coded(levels: pd.Series) -> tuple[np.ndarray, list]:
    """Columns of a factor, [conditions, levels - 1], each level against the last (sum coding), and the levels' names;
    0 where a condition does not have the factor."""
    code, names = pd.factorize(levels, sort=False)
    one = np.eye(len(names))[code] * (code >= 0)[:, None]
    return one[:, :-1] - one[:, -1:], list(names)


def design(conditions: pd.DataFrame, interactions: Sequence[Term] | None = None) -> Design:
    """Columns of every factor (a column of `conditions`) that varies, and of interactions; None: of all pairs."""
    own = {name: columns for name in conditions if (columns := coded(conditions[name])[0]).shape[1]}
    one = np.ones((len(conditions), 1))
    main = np.concatenate([one, *own.values()], 1)
    bases: dict[Term, np.ndarray] = {}
    carriers: dict[Term, np.ndarray] = {}
    for name, columns in own.items():
        carriers[name,] = _free(columns, one)
        bases[name,] = _free(columns, np.concatenate([one, *(c for other, c in own.items() if other != name)], 1))
    pairs = [(a, b) for i, a in enumerate(own) for b in list(own)[i + 1 :]] if interactions is None else interactions
    for a, b in pairs:
        products = (own[a][:, :, None] * own[b][:, None, :]).reshape(len(conditions), -1)
        if (basis := _free(products, main)).shape[1]:
            bases[a, b], carriers[a, b] = basis, _free(products, np.concatenate([one, own[a], own[b]], 1))
    return Design(bases, carriers, _free(main, one))


def _free(columns: np.ndarray, of: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what `columns` have beyond those of `of`."""
    rest = columns - of @ np.linalg.lstsq(of, columns, rcond=None)[0]
    left, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    return left[:, sizes > SMALL * max(1.0, float(np.abs(columns).max()))]


def wide(rows: pd.DataFrame, factors: Sequence[str], score: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(conditions, scores [conditions, items]): those conditions that every item has. Raises InputError for twins."""
    rows = rows.dropna(subset=[score])  # answers of one word have nothing after it
    if (twice := rows.duplicated([*factors, "item"])).any():
        raise InputError(f"{int(twice.sum())} rows share their item and all of {', '.join(factors)}: name more factors")
    filled = rows.assign(**{name: rows[name].astype(object).where(rows[name].notna(), "-") for name in factors})
    table = filled.pivot_table(score, list(factors), "item", aggfunc="first", sort=False).dropna()
    conditions = table.index.to_frame(index=False)
    return conditions.where(conditions != "-", None), table.reset_index(drop=True)


# ---- shares of variance


def shares(d: Design, scores: pd.DataFrame, tasks: Mapping[str, str], draws: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Of the variance of scores [conditions, items], the share of each term: columns term, value (in common to all
    items), low, high, n, by_task (more of it, each task for itself) and of_conditions (the share of what differs
    between conditions in all items alike).

    Beside the terms: "item", its mean over conditions, and what differs between conditions beyond the terms.
    Intervals: the book's for what is no mean, spread over resamples of whole items. On made-up tables of 6 to 24 items
    they held the truth in nine of ten; the item's own share, which has heavy tails, in eight.
    """
    y, n = scores.to_numpy(float), scores.shape[1]
    task = pd.factorize(pd.Series([tasks[item] for item in scores]))[0]
    grams = _grams(d, y)
    picks = np.random.default_rng(seed).integers(0, n, (draws, n))
    weights = np.stack([np.ones(n), *(np.bincount(pick, minlength=n) for pick in picks)])
    found = _shares(d, grams, y, weights, np.ones((n, n)))
    same = _shares(d, grams, y, weights[:1], (task[:, None] == task).astype(float))
    rows = []
    for i, term in enumerate([*(" x ".join(term) for term in d.bases), BEYOND, "item"]):
        estimate = stats.spread_of(float(found[0, i]), found[1:, i], n, limits=stats.UNIT)
        more = 0.0 if term == "item" else float(same[0, i] - found[0, i])
        rows.append((term, *estimate.triple, n, more))
    table = pd.DataFrame(rows, columns=["term", "value", "low", "high", "n", "by_task"])
    between = table.value[table.term != "item"].sum()
    return table.assign(of_conditions=(table.value / between).where(table.term != "item"))


def _grams(d: Design, y: np.ndarray) -> list[np.ndarray]:
    """<c_i, c_k> / conditions, [items, items], of each term, and of all but items' means."""
    within = y - y.mean(0)
    parts = [basis.T @ within for basis in d.bases.values()]
    return [part.T @ part / len(y) for part in (*parts, within)]


def _shares(
    d: Design, grams: Sequence[np.ndarray], y: np.ndarray, weights: np.ndarray, pairs: np.ndarray
) -> np.ndarray:
    """Shares of total variance [draws, terms + 2] for items counted `weights` [draws, items] times, over `pairs` of
    different items."""
    others = pairs * (1 - np.eye(len(pairs)))
    together = np.einsum("di,ik,dk->d", weights, others, weights)
    with np.errstate(invalid="ignore"):  # tasks of one item have no pair
        common = np.stack([np.einsum("di,ik,dk->d", weights, gram * others, weights) / together for gram in grams], 1)
    mean = weights @ y.mean(0) / weights.sum(1)
    item = weights @ (y.mean(0) ** 2) / weights.sum(1) - mean**2
    total = weights @ np.diag(grams[-1]) / weights.sum(1) + item
    return np.column_stack([common @ d.unmixed.T, item]) / np.where(total > SMALL, total, np.nan)[:, None]


# ---- of a chapter's rows

ENOUGH = 100  # conditions, from which on interactions of two factors are told apart


def by_model(
    rows: pd.DataFrame, factors: Sequence[str], score: str, draws: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(shares, effects, mixed) of each model's rows, with a column `model`; interactions where conditions suffice."""
    found: list[list[pd.DataFrame]] = [[], [], []]
    tasks = rows.drop_duplicates("item").set_index("item").task.to_dict()
    for name, mine in rows.groupby("model", sort=False):
        conditions, scores = wide(mine, factors, score)
        d = design(conditions, None if len(conditions) >= ENOUGH else ())
        tables = (shares(d, scores, tasks, draws), effects(conditions, scores), pd.DataFrame([mixed(d, scores)]))
        for parts, table in zip(found, tables, strict=True):
            parts.append(table.assign(model=name, conditions=len(conditions)))
    shared, added, fitted = (pd.concat(parts, ignore_index=True) for parts in found)
    return shared, added, fitted


def pooled(rows: pd.DataFrame, factors: Sequence[str], score: str, draws: int = 1000) -> pd.DataFrame:
    """`shares` with the model as a factor, over the conditions that all models have, and what it does to the others."""
    tasks = rows.drop_duplicates("item").set_index("item").task.to_dict()
    everywhere = rows.groupby(list(factors), dropna=False).model.transform("nunique") == rows.model.nunique()
    conditions, scores = wide(rows[everywhere], ["model", *factors], score)
    varied = [name for name in ("model", *factors) if len(coded(conditions[name])[1]) > 1]
    pairs = [("model", name) for name in varied[1:] if "model" in varied]
    return shares(design(conditions, pairs), scores, tasks, draws)


# ---- effects


def effects(conditions: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """What each level adds to the mean of its factor's: factor, level, value, low, high, n; main effects together.

    The fixed effects of the mixed model; intervals over items, each with its own least squares.
    """
    own = {name: coded(conditions[name]) for name in conditions}
    columns = np.concatenate([np.ones((len(conditions), 1)), *(c for c, _ in own.values())], 1)
    each = np.linalg.lstsq(columns, scores.to_numpy(float), rcond=None)[0][1:]  # [columns, items]
    rows, at = [], 0
    for name, (mine, levels) in own.items():
        of = each[at : at + mine.shape[1]]
        at += mine.shape[1]
        for level, values in zip(levels, [*of, -of.sum(0)], strict=True):
            rows.append((name, level, *stats.interval(values).triple, scores.shape[1]))
    return pd.DataFrame(rows, columns=["factor", "level", "value", "low", "high", "n"])


def mixed(d: Design, scores: pd.DataFrame) -> dict[str, float]:
    """The mixed model with main effects, the item as random effect (statsmodels, REML): variances of `item` and `rest`,
    `marginal` and `conditional` R squared: what the factors explain, and what they and the items do. Scores that are
    all alike, and those of one item, have none.

    Source of the last two: Nakagawa and Schielzeth 2013, equations 26 and 30.
    """
    y = scores.to_numpy(float)
    columns = np.concatenate([np.full((len(y), 1), 1.0), d.main * len(y) ** 0.5], 1)
    groups = np.repeat(np.arange(y.shape[1]), len(y))
    if y.shape[1] < 2 or y.std() < SMALL:
        return dict.fromkeys(("item", "rest", "marginal", "conditional"), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # items that do not differ: a variance of zero is an answer
        fit = MixedLM(y.T.ravel(), np.tile(columns, (y.shape[1], 1)), groups).fit(reml=True)
    item, rest = float(fit.cov_re[0, 0]), float(fit.scale)
    fixed = float(((columns @ fit.fe_params) ** 2).mean() - (columns @ fit.fe_params).mean() ** 2)
    total = fixed + item + rest
    return {"item": item, "rest": rest, "marginal": fixed / total, "conditional": (fixed + item) / total}


def full_profile() -> pd.DataFrame:
    """`by_model` of the full profile, run once on another machine (`data/synthesis.csv`): a row per model and term,
    with its items and conditions, the machine and the date. It is what the chapter calls `explained`, with
    `profile="full"`."""
    return pd.read_csv(DATA / "synthesis.csv")
