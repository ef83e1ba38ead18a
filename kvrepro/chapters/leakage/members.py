"""The leakage chapter's answers as its claims choose them (`kvrepro.experiment.members`), and what they compute.

A system prompt counts once and is resampled whole: its two requests, its rules and all its conditions stay together.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.leakage import scores
from kvrepro.chapters.leakage.cells import DIAL, FIVE, ORDERS, Settings
from kvrepro.chapters.leakage.scores import CELL
from kvrepro.experiment import claims, stats
from kvrepro.experiment.judge import Drawn, NotTestable, Sample
from kvrepro.experiment.members import Case
from kvrepro.experiment.stats import MIN_ITEMS

MIDDLE = (0.3, 0.7)  # the middle ratios; figures 2 and 3 of the paper start at the first
LOW = 0.2  # greatest ratio that counts as low
ABLE = 0.5  # share of the instructions that an uncompressed model must follow, and may tell at most
ROOM = 0.05  # if neither of two measures exceeds this, there is nothing to compare
UNBIASED = 0.10  # greatest difference between the keep rates of an unbiased policy (L5b)
MEASURES = ["followed", "following", "told", "tells_defense"]
DIALS = {"main": (["streaming_llm"], ORDERS), "examples": (["snapkv", "tova"], ("normal",))}
TABLES = {"main": "pitfalls_t01_debias_ifeval.csv", "examples": "pitfalls_t02_debias_longbench.csv"}  # as printed


# ---------------------------------------------------------------- what claims choose from


def tidied(tables: Mapping[str, pd.DataFrame | None], loaded: Any, settings: Settings) -> dict[str, pd.DataFrame]:
    """The tables of a run (main, other, alone, examples, controls, timing) in its readings, a row per system prompt and
    cell: `following` and `leakage` (one table), of the second model `other`; keep rates `kept`; `classes` of rules;
    `dial`; uncompressed `examples`. `printed` are the paper's own numbers, `timing` are medians."""
    run = {name: table for name, table in tables.items() if table is not None}
    readings = [_in_reading(run, reading) for reading in settings.readings]
    tidy = {name: pd.concat([tables[name] for tables in readings], ignore_index=True) for name in readings[0]}
    tidy |= {"leakage": tidy["following"], "printed": printed()}
    if "timing" in run:
        tidy["timing"] = run["timing"].groupby(["item", "variant"], as_index=False)[["compress", "decode"]].median()
    return tidy


def _in_reading(run: Mapping[str, pd.DataFrame], reading: str) -> dict[str, pd.DataFrame]:
    as_run, tidy = reading == "as_run", {}
    refused = run["controls"].query("control == 'refusal'") if "controls" in run else run["main"].head(0)
    for study, name in (("main", "following"), ("other", "other")):
        if study in run:
            answers = scores.in_reading(run[study], reading)
            answers = answers.assign(following=scores.following(answers, pooled=as_run))
            asked = answers.asked[answers.ratio == 0].mean() if as_run else 1.0
            tidy[name] = of_answers(answers, asked, scores.told(refused, as_run).mean())
    tidy["kept"] = of_layers(scores.keep_rates(scores.in_reading(run["main"], reading)))
    tidy["dial"] = pd.concat([of_dial(run[name], reading).assign(study=name) for name in DIALS if name in run])
    if "alone" in run:
        rules = scores.by_class(scores.in_reading(run["alone"], reading))
        tidy["classes"] = rules.groupby([*CELL, "rules", "kind", "system"], as_index=False).passed.mean()
    if "examples" in run:
        examples = scores.in_reading(run["examples"], reading)
        tidy["examples"] = examples[(examples.ratio == 0) & examples.told.notna()].drop_duplicates("system")
    return {name: table.assign(reading=reading) for name, table in tidy.items()}


def of_answers(answers: pd.DataFrame, asked: float = 1.0, floor: float = math.nan) -> pd.DataFrame:
    """Means over the requests of each system prompt in each cell, with what claims choose by: `middle`, a ratio from
    0.3 to 0.7; `much`, one from 0.3; `lowest`, the first of a curve, if it is low. `above`: leakage beyond floor, that
    of a refusal. asked: the mean number of rules, as run; 1 as described, where classes are counted. `most`: the
    largest value of following, above 1 where a prompt of many rules counts more than others."""
    means = answers.groupby([*CELL, "system"], as_index=False)[MEASURES].mean()
    lowest = means[(means.ratio > 0) & means.told.notna()].groupby(CELL[:3]).ratio.min().rename("lowest")
    means = means.join(lowest[lowest <= LOW], on=CELL[:3])
    return means.assign(
        middle=means.ratio.between(*MIDDLE),
        much=means.ratio >= MIDDLE[0],
        lowest=means.ratio == means.lowest,
        above=means.told - floor,
        least_above=-floor,
        most_above=1 - floor,
        asked=asked,
        most=max(1.0, means.following.max()),
    )


def of_layers(kept: pd.DataFrame) -> pd.DataFrame:
    """Keep rates of each part (directive, defense) as means over `layers`: all of them, and from three on those of the
    middle third and the others. `place`: whether the part stands earlier or later."""
    n = 1 + kept.layer.max() if len(kept) else 0
    inner = kept.layer.between(n // 3, n - n // 3 - 1)
    groups = {"all": kept} | ({"middle": kept[inner], "outer": kept[~inner]} if n >= 3 else {})
    by = [*CELL, "system", "part"]
    means = pd.concat([g.groupby(by, as_index=False).kept.mean().assign(layers=name) for name, g in groups.items()])
    later = (means.part == "directive") == (means.order == "normal")
    return means.assign(place=np.where(later, "later", "earlier"), middle=means.ratio.between(*MIDDLE))


def of_dial(rows: pd.DataFrame, reading: str) -> pd.DataFrame:
    """A study of the dial, whose cells are as described in both readings. Following is the mean over classes, of
    labelled examples, which have none, the share of right labels."""
    rows = scores.in_reading(rows, reading, "as_described")
    following = scores.following(rows, pooled=False) if rows.passed.notna().any() else rows.followed
    rows = rows.assign(following=following)[rows.variant.isin(DIAL.values())]
    return rows.groupby([*CELL, "system"], as_index=False)[["following", "told"]].mean()


def printed() -> pd.DataFrame:
    """The paper's own averages of the dial: columns study, λ, share, gain (on the share of λ = 0)."""
    parts = []
    for study, file in TABLES.items():
        rows = claims.published(file)
        found = rows.metric.str.extract(r"^avg optimality %, lambda=(.*)$")[0].dropna().astype(float)
        share = rows.value[found.index].astype(float) / 100
        gain = share - share[found == 0].iloc[0]
        parts.append(pd.DataFrame({"study": study, "λ": found, "share": share, "gain": gain}))
    return pd.concat(parts, ignore_index=True)


# ---------------------------------------------------------------- what a claim needs


def _reading(case: Case) -> dict[str, Any]:
    return {"reading": case.claim["filter"].get("reading")}


def _uncompressed(case: Case, column: str) -> float:
    rows = case.tables["following"].fitting({"order": "normal", "ratio": 0.0} | _reading(case))
    return float(rows[column].mean())


def check_follows(case: Case) -> None:
    """The model follows its instructions: one that answers nothing keeps every secret."""
    value = _uncompressed(case, "followed" if case.claim.get("column") == "followed" else "following")
    if not value >= ABLE:
        raise NotTestable(f"the uncompressed model itself follows too few instructions ({value:.2f})")


def check_keeps(case: Case) -> None:
    if _uncompressed(case, "told") > ABLE:
        raise NotTestable("the uncompressed model itself tells its instructions")


def check_something(case: Case) -> None:
    """Something is followed, or told, on one side at least, of the ratios that are compared."""
    if not case.frame().mean().max() > ROOM:
        what = "followed" if case.claim["rows"] == "following" else "told"
        raise NotTestable(f"nothing is {what} on either side under {case.claim['filter']['policy']}")


def check_unbiased(case: Case) -> None:
    cell = {name: case.claim["filter"][name] for name in ("policy", "order", "variant", "reading")}
    kept = case.tables["kept"].fitting(cell | {"middle": True, "layers": "all"})
    wide = kept.pivot_table(index=["system", "ratio"], columns="part", values="kept")
    gap = float((wide.directive - wide.defense).mean()) if len(wide) else math.nan
    if not abs(gap) <= UNBIASED:
        raise NotTestable(f"its keep rates differ by {gap:.2f}: what is lost may be due to that")


REQUIRES: dict[str, Callable[[Case], None]] = {"follows": check_follows, "keeps_secret": check_keeps}
REQUIRES |= {"something": check_something, "unbiased": check_unbiased}


# ---------------------------------------------------------------- resamples of whole system prompts


def drawn(values: np.ndarray) -> np.ndarray:
    """Means over system prompts, [1 + DRAWS, cells]: of the sample, then of resamples. values: [systems, cells], nan
    where a prompt has none. A cell of fewer than six prompts has no resamples."""
    systems, finite = len(values), np.isfinite(values)
    picks = np.random.default_rng(42).multinomial(systems, np.full(systems, 1 / systems), size=stats.DRAWS)
    weights = np.concatenate([np.ones((1, systems)), picks])
    with np.errstate(invalid="ignore"):
        series = (weights @ np.where(finite, values, 0)) / (weights @ finite)
    series[1:, finite.sum(0) < MIN_ITEMS] = np.nan
    return series


def optimal(follow: np.ndarray, leak: np.ndarray, both: bool = False) -> np.ndarray:
    """Mask of the points that no other beats, [..., points], by being better in one measure (more followed, or less
    told) and no worse in the other. both: by being better in both, as the paper words it."""
    more, less = (x[..., None, :] - x[..., :, None] for x in (follow, -leak))
    least, most = np.minimum(more, less), np.maximum(more, less)
    return ~((least > 1e-9) if both else (least > -1e-9) & (most > 1e-9)).any(-1)


def optimality(rows: pd.DataFrame, study: str, *, both: bool = False, start: bool = True) -> dict[float, Drawn]:
    """The share of (ratio, order, policy) cells of a dial in which each setting is Pareto-optimal. both: as in
    `optimal`. start: count ratio 0 as well, as the paper does; all settings are the same there."""
    by, best = ["policy", "order", "ratio", "variant"], []
    wide = rows.pivot_table(index="system", columns=by, values=["following", "told"])
    wide = wide.reindex(sorted(rows.system.unique()))
    known = set(wide["following"]) & set(wide["told"])
    for policy, order in itertools.product(*DIALS[study]):
        dials = [[(policy, order, ratio, variant) for variant in DIAL.values()] for ratio in sorted(set(rows.ratio))]
        dials = [dial for dial in dials if set(dial) <= known and (start or dial[0][2])]
        if not dials:
            raise NotTestable(f"no setting between default and fair was run for {policy}")
        for dial in dials:
            followed, told = (drawn(wide[name][dial].to_numpy()) for name in ("following", "told"))
            finite = np.isfinite(followed + told).all(-1, keepdims=True)
            best.append(np.where(finite, optimal(followed, told, both), np.nan))
    n = rows[rows.told.notna()].system.nunique()
    return {x: Drawn(float(s[0]), s[1:], n, (-1.0, 1.0)) for x, s in zip(DIAL, np.mean(best, 0).T, strict=True)}


# ---------------------------------------------------------------- what a claim computes


def model_spread(case: Case) -> dict[str, Sample]:
    """`spread` of this model and a second one."""
    if "other" not in case.tables:
        raise NotTestable("one run has one model: name a second checkpoint in options, as compare")
    first, second = (case.tables[name].fitting(_reading(case)) for name in ("following", "other"))
    return spread(first, second, case.claim["column"])


def spread(first: pd.DataFrame, second: pd.DataFrame, column: str = "following") -> dict[str, Sample]:
    """By policy, the loss of following in one model against that in another, paired by system prompt."""
    parts, most = {}, max(1.0, first[column].max(), second[column].max())
    for name in FIVE:
        cell = f"order == 'normal' and variant == 'default' and policy == '{name}'"
        a, b = (m.query(cell).pivot_table(index="system", columns="ratio", values=column) for m in (first, second))
        if ratios := [ratio for ratio in a if ratio in b and ratio >= MIDDLE[0]]:
            lost = [wide[0.0] - wide[ratios].mean(axis=1, skipna=False) for wide in (a, b)]
            data = pd.concat(lost, axis=1, keys=["a", "b"]).dropna()
            parts[name] = Sample(data, "difference", bounds=(-most, most), each=first.asked.mean())
    if not parts:
        raise NotTestable("the two models share no policy and ratio")
    return parts


def class_spread(case: Case) -> dict[str, Sample]:
    """Losses of each pair of classes that six system prompts or more hold; unpaired, since few prompts hold both."""
    wide = case.rows(rules="multi").pivot_table(index=["kind", "system"], columns="ratio", values="passed")
    ratios = [ratio for ratio in wide if ratio >= MIDDLE[0]]
    losses = (wide[0.0] - wide[ratios].mean(axis=1)).dropna()
    lost = {kind: values for kind, values in losses.groupby("kind") if len(values) >= MIN_ITEMS}
    if len(lost) < 2:
        raise NotTestable(f"{len(lost)} classes are held by six system prompts: a spread needs two")
    pairs = {f"{a} against {b}": pd.DataFrame({"a": lost[a], "b": lost[b]}) for a, b in itertools.combinations(lost, 2)}
    return {name: Sample(two, "unpaired", bounds=(-1.0, 1.0), each=len(ratios)) for name, two in pairs.items()}


def rank_gap(case: Case) -> Drawn:
    """Rank correlation with the uncompressed order of the classes: prompts with one rule minus those with several."""
    gaps, systems = [], sorted(case.table.fitting(_reading(case)).system.unique())
    for rules in ("single", "multi"):
        rows = case.rows(rules=rules)
        wide = rows.pivot_table(index="system", columns=["ratio", "kind"], values="passed")
        gaps.append(rank_curves(wide.reindex(systems)).mean(axis=1).to_numpy())
    single, multi = gaps
    if not (np.isfinite(single[0]) and np.isfinite(multi[0])):
        raise NotTestable("uncompressed, every class is followed equally well: there is no order to lose")
    n = rows.system.nunique()  # of prompts with several
    return Drawn(float(single[0] - multi[0]), (single - multi)[1:], n, limits=(-2.0, 2.0))  # of two rank correlations


def rank_curves(wide: pd.DataFrame) -> pd.DataFrame:
    """Spearman's correlation of the classes' accuracies with the uncompressed ones, [1 + DRAWS, ratios from 0.3]; nan
    where all classes tie. Classes that fewer than six prompts hold are left out. wide: systems by ratio and kind."""
    series = pd.DataFrame(drawn(wide.to_numpy()), columns=wide.columns)
    series.loc[:, series[1:].isna().all()] = np.nan
    ranks = {ratio: series[ratio].rank(axis=1) for ratio in wide.columns.unique("ratio")}
    curves = {ratio: curve.corrwith(ranks[0.0], axis=1) for ratio, curve in ranks.items() if ratio >= MIDDLE[0]}
    return pd.DataFrame(curves, index=series.index)


def optimal_gain(case: Case) -> dict[str, Drawn]:
    """How much more often settings of the dial are Pareto-optimal than the setting `against`. settings: which; all
    above 0 if none are named."""
    claim, rows = case.claim, case.rows()
    share = optimality(rows, claim["filter"]["study"], both=claim.get("both", False), start=claim.get("start", True))
    if min(setting.value for setting in share.values()) == 1:
        raise NotTestable("every setting is optimal in every cell: none beats another")
    other, chosen = share[claim.get("against", 0.0)], [x for x in claim.get("settings", share) if x]
    gains = {x: (share[x].value - other.value, share[x].draws - other.draws) for x in chosen}
    return {f"λ = {x:g}": Drawn(*gain, other.n, other.limits) for x, gain in gains.items()}


def optimal_shares(tables: Mapping[str, pd.DataFrame | None], settings: Settings) -> pd.DataFrame:
    """How often each setting is optimal, as printed, in the usual sense, and in the paper's words: columns study,
    source, setting, value, low, high. In the last of the readings."""
    dials = tidied(tables, None, settings)["dial"]
    rows = [(study, "printed", x, share, math.nan, math.nan) for _, study, x, share, _ in printed().itertuples()]
    for study, dial in dials[dials.reading == settings.readings[-1]].groupby("study", sort=False):
        for source, both in (("here", False), ("here, in the paper's words", True)):
            with suppress(NotTestable):
                shares = optimality(dial, study, both=both)
                rows += [(study, source, x, *share.estimate()[:3]) for x, share in shares.items()]
    return pd.DataFrame(rows, columns=["study", "source", "setting", "value", "low", "high"])


def relative_difference(case: Case) -> Sample:
    """(a - b) / x, of medians over items."""

    def statistic(values: np.ndarray) -> float:
        a, b, x = np.median(values, 0)
        return float((a - b) / x)

    return case.sample(statistic, case.frame()[["a", "b", "x"]].dropna())


CONTRASTS: dict[str, Callable[[Case], Any]] = {"model_spread": model_spread, "class_spread": class_spread}
CONTRASTS |= {"rank_gap": rank_gap, "optimal_gain": optimal_gain, "relative_difference": relative_difference}
