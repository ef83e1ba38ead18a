"""What the claims about DropKV's bound are tested on: triples and records by prompt, answers by item, timings."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from kvrepro.chapters.dropkv_bound import quality, timings
from kvrepro.chapters.dropkv_bound.study import Study
from kvrepro.chapters.dropkv_bound.tables import HARD_K, by_pool, disagreement, selected, with_factor
from kvrepro.chapters.dropkv_bound.triples import RULES, STRATA
from kvrepro.errors import InputError
from kvrepro.experiment import claims, data, judge
from kvrepro.experiment.judge import Facts, Measured, Member, NotTestable, Sample
from kvrepro.experiment.stats import UNIT

POINTS = (0.0, 100.0)  # bounds of F1 in points


def _median(values: np.ndarray) -> float:
    return float(np.median(values[:, 0]))


def _p95(values: np.ndarray) -> float:
    return float(np.quantile(values[:, 0], 0.95))


def _tail(values: np.ndarray) -> float:
    return _p95(values) / _median(values)


def _median_difference(values: np.ndarray) -> float:
    return float(np.median(values[:, 0]) - np.median(values[:, 1]))


def _over(frame: pd.DataFrame, statistic: Callable[[np.ndarray], float], *columns: str) -> Sample:
    """A statistic of all rows; whole prompts are resampled."""
    return Sample(frame[list(columns)], statistic, frame["item"])


def _mean(values: pd.Series, items: pd.Series, bounds: tuple[float, float] | None = UNIT) -> Sample:
    """A mean over prompts."""
    return Sample(values.astype(float).to_frame("a"), clusters=items, bounds=bounds)


# ---------------------------------------------------------------- assumptions, per pool


def _of_pool(contrast: str, f: pd.DataFrame) -> Sample:
    if contrast == "cone_first_layer":
        f = f.assign(holds=(f.c_low > 1e-9).astype(float), side=np.where(f.layer == 0, "a", "b"))
        share = f.pivot_table(index="item", columns="side", values="holds")
        if len(share.columns) < 2:
            raise NotTestable("the first layer and others have to be run")
        return Sample(share, "difference", each=(f.side == "a").sum() / len(share))
    finite = f[np.isfinite(f.factor)]
    made: dict[str, Callable[[], Sample]] = {
        "cone_share": lambda: _mean(f.c_low > 1e-9, f["item"]),
        "cone_median": lambda: _over(f, _median, "c_low"),
        "eps_median": lambda: _over(f.assign(even=f.eps * f.tokens), _median, "even"),
        "factor_finite": lambda: _mean(np.isfinite(f.factor), f["item"]),
        "factor_median": lambda: _over(finite, _median, "factor"),
        "factor_tail": lambda: _over(finite, _tail, "factor"),
    }
    return made[contrast]()


OF_POOL = (
    "cone_share",
    "cone_median",
    "cone_first_layer",
    "eps_median",
    "factor_finite",
    "factor_median",
    "factor_tail",
)


# ---------------------------------------------------------------- records


def _cells(records: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(f"{stratum}, k={k}", f) for (k, stratum), f in records.groupby(["k", "stratum"], sort=False)]


def _paired(study: Study, rule: str, queries: int, ours: pd.DataFrame) -> pd.DataFrame:
    """Our records with `ratio_other`, the same triple's by another rule, and `log`, its log ratio minus ours."""
    keys = ["item", "layer", "head", "position", "stratum", "k", "objective"]
    r = study.records
    other = r[(r.rule == rule) & (r.queries == queries) & (r.kernel == 1)]
    pairs = ours.merge(other[[*keys, "ratio"]], on=keys, suffixes=("", "_other"))
    return pairs.assign(log=np.log(pairs.ratio_other) - np.log(pairs.ratio))


def _hardest(ours: pd.DataFrame) -> Member:
    """Median ratio near the threshold minus that of each other stratum."""
    r = ours[ours.k == HARD_K]
    near = np.float64(STRATA.index("threshold"))
    r = r.assign(number=r.stratum.map(STRATA.index).astype(float))

    def gap(values: np.ndarray) -> float:
        first = values[:, 1] == near
        return float(np.median(values[first, 0]) - np.median(values[~first, 0])) if 0 < first.mean() < 1 else np.nan

    parts = {
        f"against {name}": _over(r[r.stratum.isin(["threshold", name])], gap, "ratio", "number")
        for name in STRATA
        if name != "threshold"
    }
    return Member("all", parts)


def _case(f: pd.DataFrame, values: pd.Series) -> Facts:
    """A value per record, named by its triple."""
    names = f[["item", "layer", "head", "position", "stratum", "k"]].itertuples(index=False)
    return Facts(
        values.set_axis([f"{i}, layer {la}, head {h}, position {p}, {s}, k={k}" for i, la, h, p, s, k in names])
    )


def _of_records(claim: Mapping, study: Study) -> list[Member]:
    contrast, ours = claim["contrast"], selected(study.records)
    if contrast in ("ratio_median", "ratio_p95"):
        statistic = _median if contrast == "ratio_median" else _p95
        return [Member(name, _over(f, statistic, "ratio")) for name, f in _cells(ours)]
    if contrast in ("attention_minus_dropkv", "random_minus_dropkv"):
        pairs = _paired(study, contrast.removesuffix("_minus_dropkv"), 1, ours[ours.k.isin(claim.get("ks", ours.k))])
        strata = STRATA if claim["over"] == "cells" else claim["over"]
        found = _cells(pairs[pairs.stratum.isin(list(strata))])
        return [Member(name, _over(f, _median_difference, "ratio_other", "ratio")) for name, f in found]
    if contrast == "peer_minus_dropkv":
        members = []
        for objective in ("query", "window"):
            drop = selected(study.records, "dropkv", study.settings.window, objective=objective)
            for rule in (rule for rule in RULES if rule not in ("dropkv", "pyramidkv")):  # whose score is SnapKV's
                f = _paired(study, rule, study.settings.window, drop[drop.k == HARD_K])
                members.append(Member(f"{rule}, F of the {objective}", _mean(f.log, f["item"], bounds=None)))
        return members
    if contrast == "hardest_stratum":
        return [_hardest(ours)]
    if contrast == "ratio_worst":
        return [Member("all", _case(ours, ours.ratio))]
    finite = ours[np.isfinite(ours.bound)]
    if contrast == "violations":
        return [Member("all", _case(finite, finite.ratio / finite.bound))]
    if contrast == "slack_median":
        return [Member("all", _over(finite.assign(slack=finite.bound / finite.ratio), _median, "slack"))]
    if contrast == "andpro_keeps":
        f = disagreement(study)
        return [Member("all", _mean(f.kept, f["item"]))]
    if contrast == "aligned_andpro_minus_dropkv":
        r = study.records
        r = r[(r.rule == "dropkv") & (r.queries == 1) & (r.stratum == "aligned") & (r.k == HARD_K)]
        f = _paired(study, "andpro", 1, r)
        return [Member("all", _mean(f.log, f["item"], bounds=None))]
    raise InputError(f"claim {claim['id']}: unknown contrast {contrast!r}")


# ---------------------------------------------------------------- answers and timings


def _answered(claim: Mapping, answers: pd.DataFrame | None) -> Member:
    """F1 in points, per item: DropKV's beside another's, or beside that of each peer."""
    if answers is None:
        raise NotTestable("no answers were generated: run quality.answers")
    here, needs = answers[answers.length == quality.main_length(answers)], claim.get("needs", {})
    if "items" in needs and not set(here.task) <= set(data.LONGBENCH_QA):
        raise NotTestable(f"{claim['why']} Give -p items {needs['items']} with a model of the hub.")
    if here.prompt_tokens.mean() < needs.get("prompt_tokens", 0):
        asked = f"{needs['prompt_tokens']} tokens wanted, {here.prompt_tokens.mean():.0f} run"
        raise NotTestable(f"{claim['why']} Prompts of {asked}: give such a file with -p items, and -p tokens.")
    full = here[here.method == "full"]
    judge.answers_enough(full[quality.MEASURE], full.get("error"))
    if claim["contrast"] == "quality_lead":
        wide = 100 * quality.at_share(answers, claim["share"])
        others = [name for name in wide if name != "dropkv"]
        frames = {f"over {name}": wide[["dropkv", name]].set_axis(["a", "b"], axis=1) for name in others}
        return Member("all", {name: Sample(f.dropna(), "difference", bounds=POINTS) for name, f in frames.items()})
    pair = 100 * quality.pair(answers, claim["against"], claim["share"])
    return Member("all", Sample(pair, "difference", bounds=POINTS))


def _timed(claim: Mapping) -> list[Member]:
    compute, file, _ = timings.CONTRASTS[claim["contrast"]]
    if not file.is_file():
        raise NotTestable(f"no timings: data/gpu/{file.name} is missing")
    found = compute(file, **{"tokens": claim["tokens"]} if "tokens" in claim else {})
    if claim.get("exact"):
        return [Member(m.member, Facts(pd.Series([m.value], index=[file.name]))) for m in found.itertuples()]
    return [Member(m.member, Measured(m.value, m.low, m.high)) for m in found.itertuples()]


def members(claim: Mapping, study: Study, answers: pd.DataFrame | None = None) -> Sequence[Member]:
    """What a claim is tested on. Raises NotTestable where answers or timings are needed and are not there."""
    contrast = claim["contrast"]
    if contrast in timings.CONTRASTS:
        return _timed(claim)
    if contrast in ("quality_difference", "quality_lead"):
        return [_answered(claim, answers)]
    if contrast in OF_POOL:
        return [Member(pool, _of_pool(contrast, with_factor(f))) for pool, f in by_pool(study)]
    return _of_records(claim, study)


def evaluate(study: Study, answers: pd.DataFrame | None = None, *, model: str, profile: str) -> pd.DataFrame:
    """Verdict of every claim (`judge.verdicts`). answers: rows of `quality.answers`."""
    book = claims.load_claims("dropkv_bound")["claims"]
    frame = judge.verdicts(book, lambda claim, _: members(claim, study, answers), model=model, profile=profile)
    timed = {
        claim["id"]: timings.CONTRASTS[claim["contrast"]][2] for claim in book if claim["contrast"] in timings.CONTRASTS
    }
    return frame.assign(test=frame.claim.map(timed).where(frame.test != "none").fillna(frame.test))
