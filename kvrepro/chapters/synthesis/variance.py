"""How much of the spread of scores each factor explains: a mixed model of items x conditions.

    score = mean + factors + interactions of two factors + item + rest

Items are a random sample and conditions are not, so that the item is the random effect (`mixed`). Every item is run
under every condition, so that the fixed effects of the mixed model are the mean of each item's own least squares. That
gives unbiased shares: let c_i be what a term explains of item i's scores, a vector over conditions. The mean of
<c_i, c_k> over pairs of different items is what the items have in common, free of noise. Over pairs of the same task it
is larger if a term acts differently in each task. The rest of <c_i, c_i> is particular to the item.

The grid is a fraction of all cells, so that terms overlap. How much one term's columns take up of another's effects,
and of differences that no term explains, follows from the columns alone if effects have no preferred direction. We
solve these moment equations (as in Henderson's methods for variance components; in a full table it is omega squared).
"""

import itertools
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

    bases: the columns that measure a term; a main effect's are free of the other factors, an interaction's of all main
    effects. carriers: the columns in which its effect may lie; an interaction's are free of its own two factors only.
    main: all main effects.
    """

    bases: dict[Term, np.ndarray]
    carriers: dict[Term, np.ndarray]
    main: np.ndarray

    @property
    def unmixed(self) -> np.ndarray:
        """[terms + 1, terms + 1]: a matrix from what the bases take up (last: all differences between conditions) to
        each term's variance over conditions (last: the variance beyond all terms)."""
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
    indicators = np.eye(len(names))[code] * (code >= 0)[:, None]
    return indicators[:, :-1] - indicators[:, -1:], list(names)


def design(conditions: pd.DataFrame, interactions: Sequence[Term] | None = None) -> Design:
    """Columns of every factor (a column of `conditions`) that varies, and of interactions (None: of all pairs)."""
    columns_of = {name: columns for name in conditions if (columns := coded(conditions[name])[0]).shape[1]}
    constant = np.ones((len(conditions), 1))
    main = np.concatenate([constant, *columns_of.values()], 1)
    bases: dict[Term, np.ndarray] = {}
    carriers: dict[Term, np.ndarray] = {}
    for name, columns in columns_of.items():
        others = [other for other_name, other in columns_of.items() if other_name != name]
        carriers[name,] = _free(columns, constant)
        bases[name,] = _free(columns, np.concatenate([constant, *others], 1))
    for a, b in itertools.combinations(columns_of, 2) if interactions is None else interactions:
        products = (columns_of[a][:, :, None] * columns_of[b][:, None, :]).reshape(len(conditions), -1)
        if (basis := _free(products, main)).shape[1]:
            factors = np.concatenate([constant, columns_of[a], columns_of[b]], 1)
            bases[a, b], carriers[a, b] = basis, _free(products, factors)
    return Design(bases, carriers, _free(main, constant))


def _free(columns: np.ndarray, others: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the part of `columns` that `others` do not explain."""
    rest = columns - others @ np.linalg.lstsq(others, columns, rcond=None)[0]
    left, sizes, _ = np.linalg.svd(rest, full_matrices=False)
    return left[:, sizes > SMALL * max(1.0, float(np.abs(columns).max()))]


def wide(rows: pd.DataFrame, factors: Sequence[str], score: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(conditions, scores [conditions, items]): the conditions that every item has. Raises InputError where two rows
    have the same item and condition."""
    rows = rows.dropna(subset=[score])  # answers of one word have no score of the words after it
    if (repeated := rows.duplicated([*factors, "item"])).any():
        count = int(repeated.sum())
        raise InputError(f"{count} rows share their item and all of {', '.join(factors)}: name more factors")
    filled = rows.assign(**{name: rows[name].astype(object).where(rows[name].notna(), "-") for name in factors})
    table = filled.pivot_table(score, list(factors), "item", aggfunc="first", sort=False).dropna()
    conditions = table.index.to_frame(index=False)
    return conditions.where(conditions != "-", None), table.reset_index(drop=True)


# ---- shares of variance


def shares(d: Design, scores: pd.DataFrame, tasks: Mapping[str, str], draws: int = 1000, seed: int = 0) -> pd.DataFrame:
    """The share of each term in the variance of scores [conditions, items]: columns term, value (what all items have in
    common), low, high, n, by_task (how much more it is within each task) and of_conditions (the value over those of all
    differences between conditions).

    There are two rows more: "item", its mean over conditions, and what differs between conditions beyond the terms.
    Intervals are the book's for values that are no means, by resampling whole items. On simulated tables of 6 to 24
    items they held the truth in nine of ten; those of the item's share, which has heavy tails, in eight.
    """
    y, n = scores.to_numpy(float), scores.shape[1]
    task = pd.factorize(pd.Series([tasks[item] for item in scores]))[0]
    grams = _grams(d, y)
    picks = np.random.default_rng(seed).integers(0, n, (draws, n))
    weights = np.stack([np.ones(n), *(np.bincount(pick, minlength=n) for pick in picks)])
    all_pairs = _shares(d, grams, y, weights, np.ones((n, n)))
    same_task = _shares(d, grams, y, weights[:1], (task[:, None] == task).astype(float))
    rows = []
    for i, term in enumerate([*(" x ".join(term) for term in d.bases), BEYOND, "item"]):
        estimate = stats.spread_of(float(all_pairs[0, i]), all_pairs[1:, i], n, limits=stats.UNIT)
        more = 0.0 if term == "item" else float(same_task[0, i] - all_pairs[0, i])
        rows.append((term, *estimate.triple, n, more))
    table = pd.DataFrame(rows, columns=["term", "value", "low", "high", "n", "by_task"])
    between = table.value[table.term != "item"].sum()
    return table.assign(of_conditions=(table.value / between).where(table.term != "item"))


def _grams(d: Design, y: np.ndarray) -> list[np.ndarray]:
    """<c_i, c_k> / conditions, [items, items], of each term, and last of all that differs from the items' means."""
    within = y - y.mean(0)
    parts = [basis.T @ within for basis in d.bases.values()]
    return [part.T @ part / len(y) for part in (*parts, within)]


def _shares(
    d: Design, grams: Sequence[np.ndarray], y: np.ndarray, weights: np.ndarray, pairs: np.ndarray
) -> np.ndarray:
    """Shares of total variance [draws, terms + 2]. weights [draws, items]: how often each item counts; pairs [items,
    items]: 1 for the pairs that count."""
    others = pairs * (1 - np.eye(len(pairs)))
    together = np.einsum("di,ik,dk->d", weights, others, weights)
    with np.errstate(invalid="ignore"):  # tasks of one item have no pair
        common = np.stack([np.einsum("di,ik,dk->d", weights, gram * others, weights) / together for gram in grams], 1)
    mean = weights @ y.mean(0) / weights.sum(1)
    item = weights @ (y.mean(0) ** 2) / weights.sum(1) - mean**2
    total = weights @ np.diag(grams[-1]) / weights.sum(1) + item
    return np.column_stack([common @ d.unmixed.T, item]) / np.where(total > SMALL, total, np.nan)[:, None]


# ---- of a chapter's rows

ENOUGH = 100  # from so many conditions on, interactions of two factors can be told apart


def by_model(
    rows: pd.DataFrame, factors: Sequence[str], score: str, draws: int = 1000
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(shares, effects, mixed) of each model's rows, with a column `model`; interactions where conditions suffice."""
    tables = []
    tasks = rows.drop_duplicates("item").set_index("item").task.to_dict()
    for name, model_rows in rows.groupby("model", sort=False):
        conditions, scores = wide(model_rows, factors, score)
        d = design(conditions, None if len(conditions) >= ENOUGH else ())
        of_model = (shares(d, scores, tasks, draws), effects(conditions, scores), pd.DataFrame([mixed(d, scores)]))
        tables.append([table.assign(model=name, conditions=len(conditions)) for table in of_model])
    all_shares, all_effects, all_mixed = (pd.concat(parts, ignore_index=True) for parts in zip(*tables, strict=True))
    return all_shares, all_effects, all_mixed


def pooled(rows: pd.DataFrame, factors: Sequence[str], score: str, draws: int = 1000) -> pd.DataFrame:
    """`shares` over the conditions that all models have, with the model as a factor and its interactions with the
    others."""
    tasks = rows.drop_duplicates("item").set_index("item").task.to_dict()
    everywhere = rows.groupby(list(factors), dropna=False).model.transform("nunique") == rows.model.nunique()
    conditions, scores = wide(rows[everywhere], ["model", *factors], score)
    varied = [name for name in ("model", *factors) if len(coded(conditions[name])[1]) > 1]
    pairs = [("model", name) for name in varied[1:] if "model" in varied]
    return shares(design(conditions, pairs), scores, tasks, draws)


# ---- effects


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
            rows.append((name, level, *stats.interval(values).triple, scores.shape[1]))
    return pd.DataFrame(rows, columns=["factor", "level", "value", "low", "high", "n"])


def mixed(d: Design, scores: pd.DataFrame) -> dict[str, float]:
    """The mixed model with main effects and the item as random effect (statsmodels, REML): variances of `item` and
    `rest`, `marginal` R squared (what the factors explain) and `conditional` (what factors and items explain). All are
    nan for scores that are all alike, and for those of one item.

    Source of the last two: Nakagawa and Schielzeth 2013, equations 26 and 30.
    """
    y = scores.to_numpy(float)
    columns = np.concatenate([np.full((len(y), 1), 1.0), d.main * len(y) ** 0.5], 1)
    groups = np.repeat(np.arange(y.shape[1]), len(y))
    if y.shape[1] < 2 or y.std() < SMALL:
        return dict.fromkeys(("item", "rest", "marginal", "conditional"), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of items that do not differ: zero is the right variance
        fit = MixedLM(y.T.ravel(), np.tile(columns, (y.shape[1], 1)), groups).fit(reml=True)
    item, rest = float(fit.cov_re[0, 0]), float(fit.scale)
    fixed = float(((columns @ fit.fe_params) ** 2).mean() - (columns @ fit.fe_params).mean() ** 2)
    total = fixed + item + rest
    return {"item": item, "rest": rest, "marginal": fixed / total, "conditional": (fixed + item) / total}


def full_profile() -> pd.DataFrame:
    """`by_model`'s shares of the full profile, run once on another machine (`data/synthesis.csv`): a row per model and
    term, with its items and conditions, the machine and the date. The notebook calls this table `explained`."""
    return pd.read_csv(DATA / "synthesis.csv")
