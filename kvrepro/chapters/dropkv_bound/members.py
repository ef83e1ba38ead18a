"""What the claims about DropKV's bound are tested on: triples and records by prompt, answers by item, timings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.dropkv_bound import quality, timings
from kvrepro.chapters.dropkv_bound.cone import ORIGIN
from kvrepro.chapters.dropkv_bound.estimates import disagreement, median_gap, selected, statistic, with_factor
from kvrepro.chapters.dropkv_bound.settings import Settings
from kvrepro.chapters.dropkv_bound.study import WHERE, Study
from kvrepro.chapters.dropkv_bound.triples import RULES, STRATA, why_no_score
from kvrepro.engine.policy import find
from kvrepro.errors import InputError
from kvrepro.experiment import claims, history, judge, longbench
from kvrepro.experiment.judge import Facts, Measured, Member, NotTestable, Sample, Unpaired
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.stats import MIN_ITEMS, UNIT
from kvrepro.world import ruler

POINTS = (0.0, 100.0)  # bounds of F1 in points
K = 200  # in the claims about theorem 1's factor, whatever `Settings.k` is
HARD_K = 10  # in the claims about records
NEAR = 0.5  # ||a - v|| / ||a|| of values near the output: removing one costs less than half of what a value of 0 would
ITEMS: dict[str, Iterable[str]] = {"longbench": longbench.SETS, "ruler": ruler.TASKS}
GENERAL = ("peer_minus_dropkv", "quality_lead")  # contrasts of claims about other policies in general


def _median(values: np.ndarray) -> float:
    return float(np.median(values[:, 0]))


def _p95(values: np.ndarray) -> float:
    return float(np.quantile(values[:, 0], 0.95))


def _median_difference(values: np.ndarray) -> float:
    return float(np.median(values[:, 0]) - np.median(values[:, 1]))


def _mean_over_prompts(values: pd.Series, items: pd.Series, bounds: tuple[float, float] | None = UNIT) -> Sample:
    """A mean over prompts."""
    return Sample(values.astype(float).to_frame("a"), clusters=items, bounds=bounds)


# ---------------------------------------------------------------- assumptions, per pool


def _first_layer(f: pd.DataFrame) -> Sample:
    """Share of triples with a cone in layer 0, minus that in the others."""
    f = f.assign(holds=(f.c_low > ORIGIN).astype(float), side=np.where(f.layer == 0, "a", "b"))
    share = f.pivot_table(index="item", columns="side", values="holds")
    if len(share.columns) < 2:
        raise NotTestable("the first layer and others have to be run")
    return Sample(share, "difference", each=(f.side == "a").sum() / len(share))


def _given_cone(f: pd.DataFrame) -> Sample:
    """Of the triples with a cone, the share whose factor is finite."""
    f = f[f.c_low > ORIGIN]
    if f.empty:
        raise NotTestable("no triple has a cone")
    return _mean_over_prompts(np.isfinite(f.factor), f["item"])


OF_POOL: dict[str, Callable[[pd.DataFrame], Sample]] = {
    "cone_share": lambda f: _mean_over_prompts(f.c_low > ORIGIN, f["item"]),
    "cone_median": lambda f: statistic(f, _median, "c_low"),
    "cone_first_layer": _first_layer,
    "eps_median": lambda f: statistic(f.assign(even=f.eps * f.tokens), _median, "even"),
    "factor_finite": lambda f: _mean_over_prompts(np.isfinite(f.factor), f["item"]),
    "factor_given_cone": _given_cone,
    "factor_median": lambda f: statistic(f[np.isfinite(f.factor)], _median, "factor"),
    "factor_tail": lambda f: statistic(f[np.isfinite(f.factor)], lambda v: _p95(v) / _median(v), "factor"),
}


# ---------------------------------------------------------------- records


def _cells(records: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(f"{stratum}, k={k}", f) for (k, stratum), f in records.groupby(["k", "stratum"], sort=False)]


def _with_other_rule(study: Study, rule: str, queries: int, ours: pd.DataFrame) -> pd.DataFrame:
    """Our records with `ratio_other`, the triple's ratio by another rule, and `log`, its log minus that of ours."""
    keys = ["item", *WHERE, "stratum", "k", "objective"]
    r = study.records
    other = r[(r.rule == rule) & (r.queries == queries) & (r.kernel == 1)]
    pairs = ours.merge(other[[*keys, "ratio"]], on=keys, suffixes=("", "_other"))
    return pairs.assign(log=np.log(pairs.ratio_other) - np.log(pairs.ratio))


def _threshold_gaps(ours: pd.DataFrame) -> Member:
    """Median ratio of the threshold stratum minus that of each other stratum."""
    r = ours[ours.k == HARD_K].assign(near=ours.stratum == "threshold")
    others = [name for name in STRATA if name != "threshold"]
    parts = {name: statistic(r[r.stratum.isin(["threshold", name])], median_gap, "ratio", "near") for name in others}
    return Member("all", {f"against {name}": part for name, part in parts.items()})


def _facts_by_record(f: pd.DataFrame, values: pd.Series) -> Member:
    """A value per record, named for its triple."""
    names = f[["item", *WHERE, "stratum", "k"]].itertuples(index=False)
    named = [f"{i}, layer {la}, head {h}, position {p}, {s}, k={k}" for i, la, h, p, s, k in names]
    return Member("all", Facts(values.set_axis(named)))


def _peers(claim: Mapping, study: Study) -> list[Member]:
    """Log ratio of each rule minus DropKV's, both observing the window. Without PyramidKV: its score is SnapKV's."""
    rules = _policies(claim) or [rule for rule in RULES if rule not in ("dropkv", "pyramid_kv")]
    peers, window = [], int(study.records.queries.max())
    for rule in rules:
        if why := "" if rule in RULES else why_no_score(find(rule)):
            raise NotTestable(f"the choice of {find(rule).title} among twenty keys has no score to go by: {why}")
    for objective in claim.get("objectives", ("query", "window")):
        ours = selected(study.records, "dropkv", window, objective=objective)
        for rule in rules:
            f = _with_other_rule(study, rule, window, ours[ours.k == HARD_K])
            name = f"{rule}, shift of the {objective}"
            peers.append(Member(name, _mean_over_prompts(f.log, f["item"], bounds=None)))
    return peers


def _pool_slack(study: Study, ours: pd.DataFrame) -> list[Member]:
    """Theorem 1's factor of the triple's pool, where it is finite, over the realised ratio on twenty of its keys."""
    pools = []
    for pool, f in study.assumptions.groupby("pool", sort=False):
        merged = ours.merge(with_factor(f, K)[["item", *WHERE, "factor"]], on=["item", *WHERE])
        merged = merged[np.isfinite(merged.factor)]
        pools.append(Member(str(pool), statistic(merged.assign(slack=merged.factor / merged.ratio), _median, "slack")))
    return pools


def _of_weights(claim: Mapping, study: Study) -> list[Member]:
    """Two ways to weigh a key: log of the shift that one way's sets cause over the other's, ten of twenty keys evicted.
    Or, for each set of the linear way, whether it is DropKV's."""
    f = study.weights
    if claim["contrast"] == "same_alone":
        linear = f[f.way == "linear"]
        return [_facts_by_record(linear, linear.same_alone.astype(float))]
    first_way, second_way, shift = claim["weights"]
    wide = f[f.k == HARD_K].pivot_table(index=["item", *WHERE, "stratum"], columns="way", values=shift).reset_index()
    log = np.log(wide[first_way].clip(lower=1e-300)) - np.log(wide[second_way].clip(lower=1e-300))
    return [Member("all", _mean_over_prompts(log, wide["item"], bounds=None))]


def _near(claim: Mapping, study: Study) -> pd.DataFrame:
    """A row per triple that `disagreement` gives for the claim's stratum. The nearest keys count where all twenty lie
    within `NEAR`; raises NotTestable, with what was measured, where too few prompts have such keys."""
    ranks = disagreement(study.alignment)
    f = ranks[ranks.stratum == claim["over"]]
    if claim["over"] != "near":
        return f
    near = f[f.distance <= NEAR]
    if (prompts := near["item"].nunique()) < MIN_ITEMS:
        found = f"{len(near)} of {len(f)} triples, of {prompts} prompts, have twenty keys with |a - v| <= {NEAR:g} |a|"
        middle = f"the median distance of the twentieth is {f.distance.median():.2f} |a|"
        raise NotTestable(f"{found} ({middle}): at least {MIN_ITEMS} prompts are needed")
    return near


def _policies(claim: Mapping) -> list[str]:
    """The reader's own policies that a general claim is tested on."""
    return claim["over"]["policy"] if isinstance(claim["over"], Mapping) else []


def _of_records(claim: Mapping, study: Study) -> list[Member]:
    contrast, ours = claim["contrast"], selected(study.records)
    if contrast in ("ratio_median", "ratio_p95"):
        quantile = _median if contrast == "ratio_median" else _p95
        return [Member(name, statistic(f, quantile, "ratio")) for name, f in _cells(ours)]
    if contrast in ("attention_minus_dropkv", "random_minus_dropkv"):
        pairs = _with_other_rule(
            study, contrast.removesuffix("_minus_dropkv"), 1, ours[ours.k.isin(claim.get("ks", ours.k))]
        )
        strata = STRATA if claim["over"] == "cells" else claim["over"]
        cells = _cells(pairs[pairs.stratum.isin(list(strata))])
        return [Member(name, statistic(f, _median_difference, "ratio_other", "ratio")) for name, f in cells]
    if contrast == "peer_minus_dropkv":
        return _peers(claim, study)
    if contrast == "hardest_stratum":
        return [_threshold_gaps(ours)]
    if contrast == "ratio_worst":
        return [_facts_by_record(ours, ours.ratio)]
    finite = ours[np.isfinite(ours.bound)]
    if contrast == "violations":
        return [_facts_by_record(finite, finite.ratio / finite.bound)]
    if contrast == "pool_slack":
        return _pool_slack(study, ours)
    if contrast == "slack_median":
        return [Member("all", statistic(finite.assign(slack=finite.bound / finite.ratio), _median, "slack"))]
    if contrast == "andpro_keeps":
        f = _near(claim, study)
        return [Member("all", _mean_over_prompts(f.kept, f["item"]))]
    if contrast == "aligned_andpro_minus_dropkv":
        r = study.records.query("rule == 'dropkv' and queries == 1 and k == @HARD_K")
        r = r.merge(_near(claim, study)[["item", *WHERE, "stratum"]])
        f = _with_other_rule(study, "andpro", 1, r)
        return [Member("all", _mean_over_prompts(f.log, f["item"], bounds=None))]
    raise InputError(f"claim {claim['id']}: unknown contrast {contrast!r}")


# ---------------------------------------------------------------- answers and timings


def _from_answers(claim: Mapping, answers: pd.DataFrame | None) -> list[Member | NotTestable]:
    """Scores of each item in points: DropKV's paired with each method's that the claim names, or with each peer's."""
    if answers is None:
        raise NotTestable("no answers were generated: run quality.answers")
    main = quality.main(answers)
    needs = claim.get("needs", {})
    if "items" in needs and not set(main.task) <= set(ITEMS[needs["items"]]):
        raise NotTestable(f"{claim['why']} Give -p items {needs['items']} with a model of the hub.")
    if main.prompt_tokens.mean() < needs.get("prompt_tokens", 0):
        lengths = f"{needs['prompt_tokens']} tokens wanted, {main.prompt_tokens.mean():.0f} run"
        raise NotTestable(f"{claim['why']} Prompts of {lengths}: give such a file with -p items, and -p tokens.")
    full = main[main.method == "full"]
    judge.answers_enough(full[quality.MEASURE], full.get("error"))

    def lead(name: str) -> Sample:
        return Sample(100 * quality.pair(answers, name, claim["share"]), "difference", bounds=POINTS)

    if claim["contrast"] == "quality_lead":
        others = _policies(claim) or [name for name in quality.PEERS if name in set(main.method)]
        return [Member("all", {f"over {name}": lead(name) for name in others})]
    pairs: list[Member | NotTestable] = []
    for name in claim["against"]:
        try:
            pairs.append(Member(f"against {name}", lead(name)))
        except NotTestable as reason:
            pairs.append(reason)
    return pairs


def _lead_growth(claim: Mapping, answers: pd.DataFrame | None) -> list[Member]:
    """DropKV's lead over another at the longest prompts minus that at the shortest; unpaired, since items differ."""
    if answers is None or answers.length.nunique() < 2:
        raise NotTestable("answers at two lengths are needed, -p lengths")
    of_share = answers[(answers["share"] == claim["share"]) & answers.method.isin(["dropkv", claim["against"]])]
    if set(of_share.method) != {"dropkv", claim["against"]}:
        raise NotTestable(f"not run: dropkv and {claim['against']} at {claim['share']:.0%}")
    wide = of_share.pivot_table(index=["length", "item"], columns="method", values=quality.MEASURE)
    lead = 100 * (wide["dropkv"] - wide[claim["against"]]).dropna()
    ends = [lead[length] for length in (max(answers.length), min(answers.length))]
    return [Member("all", Unpaired(*ends, bounds=(-100.0, 100.0)))]


def _from_timings(claim: Mapping) -> list[Member]:
    compute, file, _ = timings.CONTRASTS[claim["contrast"]]
    table = compute(file, **{name: claim[name] for name in ("tokens", "kernel") if name in claim})
    if claim.get("exact"):
        return [Member(m.member, Facts(pd.Series([m.value], index=[file.name]))) for m in table.itertuples()]
    table = table.astype({"n": object}).where(table.notna(), None)
    return [Member(m.member, Measured(m.value, m.low, m.high, m.n)) for m in table.itertuples()]


def members(
    claim: Mapping, study: Study | None, answers: pd.DataFrame | None = None
) -> Sequence[Member | NotTestable]:
    """What a claim is tested on. Raises NotTestable where triples, answers or timings are needed and missing."""
    contrast = claim["contrast"]
    if contrast in timings.CONTRASTS:
        return _from_timings(claim)
    if contrast in ("quality_difference", "quality_lead"):
        return _from_answers(claim, answers)
    if contrast == "quality_growth":
        return _lead_growth(claim, answers)
    if study is None:
        raise NotTestable("no triples were computed: run study.triples_of")
    if contrast in ("way_gap", "same_alone"):
        return _of_weights(claim, study)
    if contrast in OF_POOL:
        pools = list(study.assumptions.groupby("pool", sort=False))
        if claim["over"] != "pools":
            pools = [(pool, f) for pool, f in pools if pool == claim["over"]]
            if not pools:
                raise NotTestable(f"not run: the pool of the {claim['over']} (the parameter pools)")
        return [Member(str(pool), OF_POOL[contrast](with_factor(f, K))) for pool, f in pools]
    return _of_records(claim, study)


def evaluate(
    frames: Study | None = None, answers: pd.DataFrame | None = None, policies: Iterable[str] = (),
    book: Mapping[str, Any] | None = None, *, model: str, profile: str,
) -> pd.DataFrame:  # fmt: skip
    """Verdict of every claim of a book (None: of the chapter's, `judge.verdicts`). General claims are also tested on
    the reader's own among `policies`. frames: of `study.triples_of`; answers: rows of `quality.answers`."""
    stated = (book or claims.load_claims("dropkv_bound"))["claims"]
    general = [c for c in stated if c["contrast"] in GENERAL and "prompt_tokens" not in c.get("needs", {})]
    of_own = claims.claims_on_own([{**claim, "over": {"policy": "any"}} for claim in general], policies)
    frame = history.verdicts(
        stated, lambda claim, _: members(claim, frames, answers), own=of_own, model=model, profile=profile
    )
    timed = [claim for claim in stated if claim["contrast"] in timings.CONTRASTS]
    return claims.timed(frame, {claim["id"]: timings.CONTRASTS[claim["contrast"]][2] for claim in timed})


def verdicts(book: Mapping, tables: Mapping[str, Any], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """`evaluate` of a book's claims on the tables of one run, `frames` and `answers`."""
    frames, answers = tables.get("frames"), tables.get("answers")
    policies = [*(frames.records.rule if frames else ()), *(answers.method if answers is not None else ())]
    return evaluate(frames, answers, dict.fromkeys(policies), book, model=loaded.name, profile=settings.profile)
