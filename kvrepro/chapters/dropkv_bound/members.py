"""What the claims about DropKV's bound are tested on: triples and records by prompt, answers by item, timings.

Whole prompts are resampled, since the triples of one prompt are not independent.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from kvrepro.chapters.dropkv_bound import bound, study, timings
from kvrepro.chapters.dropkv_bound.bound import ORIGIN
from kvrepro.chapters.dropkv_bound.settings import Settings
from kvrepro.chapters.dropkv_bound.study import WHERE
from kvrepro.chapters.dropkv_bound.triples import RULES, STRATA, scored_alone
from kvrepro.engine.policy import find
from kvrepro.errors import InputError
from kvrepro.experiment import claims, history, judge, longbench
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample, Unpaired
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.stats import ANY, MIN_ITEMS, UNIT
from kvrepro.world import ruler

K = 200  # in the claims about theorem 1's factor, whatever `Settings.k` is
HARD_K = 10  # in the claims about records
NEAR = 0.5  # ||a - v|| / ||a|| of values near the output: removing one costs less than half of what a value of 0 would
ITEMS: dict[str, Iterable[str]] = {"longbench": longbench.SETS, "ruler": ruler.TASKS}
Tables = Mapping[str, pd.DataFrame]
GENERAL = ("peer_minus_dropkv", "quality_lead")  # contrasts of claims about other policies in general
TIMES = (1.0, math.inf)
LIMITS = {  # of columns and so of their quantiles; also of a high quantile of `factor` over its median
    "ratio": TIMES, "factor": TIMES, "slack": (0.0, math.inf), "even": (0.0, math.inf), "c_low": (-1.0, 1.0),
}  # fmt: skip


# ---------------------------------------------------------------- frames and statistics


def with_factor(assumptions: pd.DataFrame, k: int) -> pd.DataFrame:
    """The triples with a column `factor`, theorem 1's constant for sets of k keys; infinite if an assumption fails."""
    c, eps = (torch.tensor(assumptions[name].to_list(), dtype=torch.float64) for name in ("c_low", "eps"))
    return assumptions.assign(k=k, factor=bound.factor(c, eps, k).numpy())


def selected(records: pd.DataFrame, queries: int = 1, objective: str = "query") -> pd.DataFrame:
    """Records of DropKV's rule on the paper's four strata."""
    ours = records.query("rule == 'dropkv' and queries == @queries and objective == @objective")
    return ours[ours.stratum.isin(STRATA)]


def disagreement(alignment: pd.DataFrame) -> pd.DataFrame:
    """A row per triple and stratum, about the 20 keys of its pool whose values are nearest to the output, or most
    aligned with it. kept: share of the ten keys that DropKV evicts and AnDPro keeps; distance: the largest
    ||a - v_j|| / ||a||."""

    def of_triple(f: pd.DataFrame) -> pd.Series:
        gone, stays = f.dropkv.rank(method="first") <= len(f) / 2, f.andpro.rank(method="first") > len(f) / 2
        return pd.Series({"kept": stays[gone].mean(), "distance": f.distance.max()})

    return alignment.groupby(["item", *WHERE, "stratum"]).apply(of_triple, include_groups=False).reset_index()


def _median(values: np.ndarray) -> float:
    return float(np.median(values[:, 0]))


def _p95(values: np.ndarray) -> float:
    return float(np.quantile(values[:, 0], 0.95))


def _median_difference(values: np.ndarray) -> float:
    return float(np.median(values[:, 0]) - np.median(values[:, 1]))


def _median_gap(values: np.ndarray) -> float:
    """Median of the first column where the second is true, minus that where it is false; nan if one side is empty."""
    held = values[:, 1] > 0
    return float(np.median(values[held, 0]) - np.median(values[~held, 0])) if 0 < held.mean() < 1 else np.nan


def _statistic(frame: pd.DataFrame, of: Callable[[np.ndarray], float], *columns: str) -> Sample:
    """A statistic of all rows. Of two columns it is a difference, which has no limits."""
    limits = LIMITS.get(columns[0], ANY) if len(columns) == 1 else ANY
    return Sample(frame[list(columns)], of, frame["item"], limits=limits)


def _mean(values: pd.Series, items: pd.Series, bounds: tuple[float, float] | None = UNIT) -> Sample:
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
    return _mean(np.isfinite(f.factor), f["item"])


OF_POOL: dict[str, Callable[[pd.DataFrame], Sample]] = {
    "cone_share": lambda f: _mean(f.c_low > ORIGIN, f["item"]),
    "cone_median": lambda f: _statistic(f, _median, "c_low"),
    "cone_first_layer": _first_layer,
    "eps_median": lambda f: _statistic(f.assign(even=f.eps * f.tokens), _median, "even"),
    "factor_finite": lambda f: _mean(np.isfinite(f.factor), f["item"]),
    "factor_given_cone": _given_cone,
    "factor_median": lambda f: _statistic(f[np.isfinite(f.factor)], _median, "factor"),
    "factor_tail": lambda f: _statistic(f[np.isfinite(f.factor)], lambda v: _p95(v) / _median(v), "factor"),
}


def _of_pools(claim: Mapping, tables: Tables) -> list[Member]:
    pools = dict(iter(tables["assumptions"].groupby("pool", sort=False)))
    if claim["over"] != "pools":
        if claim["over"] not in pools:
            raise NotTestable(f"not run: the pool of the {claim['over']} (the parameter pools)")
        pools = {claim["over"]: pools[claim["over"]]}
    return [Member(str(pool), OF_POOL[claim["contrast"]](with_factor(f, K))) for pool, f in pools.items()]


# ---------------------------------------------------------------- records


def _cells(records: pd.DataFrame, of: Callable[[np.ndarray], float], *columns: str) -> list[Member]:
    """A statistic of each stratum and number of evicted keys."""
    cells = records.groupby(["k", "stratum"], sort=False)
    return [Member(f"{stratum}, k={k}", _statistic(f, of, *columns)) for (k, stratum), f in cells]


def _with_other_rule(tables: Tables, rule: str, queries: int, ours: pd.DataFrame) -> pd.DataFrame:
    """Our records with `ratio_other`, the triple's ratio by another rule, and `log`, its log minus that of ours."""
    keys = ["item", *WHERE, "stratum", "k", "objective"]
    other = tables["records"].query("rule == @rule and queries == @queries")
    pairs = ours.merge(other[[*keys, "ratio"]], on=keys, suffixes=("", "_other"))
    return pairs.assign(log=np.log(pairs.ratio_other) - np.log(pairs.ratio))


def _facts(f: pd.DataFrame, values: pd.Series) -> list[Member]:
    """A value per record, named for its triple."""
    names = f[["item", *WHERE, "stratum", "k"]].itertuples(index=False)
    named = [f"{i}, layer {la}, head {h}, position {p}, {s}, k={k}" for i, la, h, p, s, k in names]
    return [Member("all", Facts(values.set_axis(named)))]


def _hardest_stratum(ours: pd.DataFrame) -> list[Member]:
    """Median ratio of the threshold stratum minus that of each other stratum."""
    r, parts = ours[ours.k == HARD_K].assign(near=ours.stratum == "threshold"), {}
    for name in STRATA:
        if name != "threshold":
            two = r[r.stratum.isin(["threshold", name])]
            parts[f"against {name}"] = _statistic(two, _median_gap, "ratio", "near")
    return [Member("all", parts)]


def _peers(claim: Mapping, tables: Tables) -> list[Member]:
    """Log ratio of each rule minus DropKV's, both observing the window. Without PyramidKV: its score is SnapKV's."""
    rules = _own(claim) or [rule for rule in RULES if rule not in ("dropkv", "pyramid_kv")]
    peers, window = [], int(tables["records"].queries.max())
    for rule in rules:
        if rule not in RULES and not scored_alone(find(rule)):
            raise NotTestable(f"the choice of {find(rule).title} among twenty keys has no score to go by")
    for objective in claim.get("objectives", ("query", "window")):
        ours = selected(tables["records"], window, objective)
        for rule in rules:
            f = _with_other_rule(tables, rule, window, ours[ours.k == HARD_K])
            peers.append(Member(f"{rule}, shift of the {objective}", _mean(f.log, f["item"], bounds=None)))
    return peers


def _pool_slack(tables: Tables, ours: pd.DataFrame) -> list[Member]:
    """Theorem 1's factor of the triple's pool, where it is finite, over the realised ratio on twenty of its keys."""
    pools = []
    for pool, f in tables["assumptions"].groupby("pool", sort=False):
        merged = ours.merge(with_factor(f, K)[["item", *WHERE, "factor"]], on=["item", *WHERE])
        merged = merged[np.isfinite(merged.factor)].eval("slack = factor / ratio")
        pools.append(Member(str(pool), _statistic(merged, _median, "slack")))
    return pools


def _way_gap(claim: Mapping, tables: Tables) -> list[Member]:
    """Two ways to weigh a key: log of the shift that one way's sets cause over the other's, ten of twenty evicted."""
    first, second, shift = claim["weights"]
    f = tables["weights"][tables["weights"].k == HARD_K]
    wide = f.pivot_table(index=["item", *WHERE, "stratum"], columns="way", values=shift).reset_index()
    log = np.log(wide[first].clip(lower=1e-300)) - np.log(wide[second].clip(lower=1e-300))
    return [Member("all", _mean(log, wide["item"], bounds=None))]


def _near(claim: Mapping, tables: Tables) -> pd.DataFrame:
    """A row per triple that `disagreement` gives for the claim's stratum. The nearest keys count where all twenty lie
    within `NEAR`; raises NotTestable, with what was measured, where too few prompts have such keys."""
    f = disagreement(tables["alignment"][tables["alignment"].stratum == claim["over"]])
    if claim["over"] != "near":
        return f
    near = f[f.distance <= NEAR]
    if (prompts := near["item"].nunique()) < MIN_ITEMS:
        found = f"{len(near)} of {len(f)} triples, of {prompts} prompts, have twenty keys with |a - v| <= {NEAR:g} |a|"
        middle = f"the median distance of the twentieth is {f.distance.median():.2f} |a|"
        raise NotTestable(f"{found} ({middle}): at least {MIN_ITEMS} prompts are needed")
    return near


def _own(claim: Mapping) -> list[str]:
    """The reader's own policies that a general claim is tested on."""
    return claim["over"]["policy"] if isinstance(claim["over"], Mapping) else []


def _of_records(claim: Mapping, tables: Tables) -> list[Member]:
    contrast, ours = claim["contrast"], selected(tables["records"])
    finite = ours[np.isfinite(ours.bound)]
    match contrast:
        case "ratio_median":
            return _cells(ours, _median, "ratio")
        case "ratio_p95":
            return _cells(ours, _p95, "ratio")
        case "attention_minus_dropkv" | "random_minus_dropkv":
            rule, strata = contrast.removesuffix("_minus_dropkv"), STRATA if claim["over"] == "cells" else claim["over"]
            some = ours[ours.k.isin(claim.get("ks", ours.k)) & ours.stratum.isin(strata)]
            return _cells(_with_other_rule(tables, rule, 1, some), _median_difference, "ratio_other", "ratio")
        case "peer_minus_dropkv":
            return _peers(claim, tables)
        case "hardest_stratum":
            return _hardest_stratum(ours)
        case "ratio_worst":
            return _facts(ours, ours.ratio)
        case "violations":
            return _facts(finite, finite.ratio / finite.bound)
        case "pool_slack":
            return _pool_slack(tables, ours)
        case "slack_median":
            return [Member("all", _statistic(finite.eval("slack = bound / ratio"), _median, "slack"))]
        case "andpro_keeps":
            f = _near(claim, tables)
            return [Member("all", _mean(f.kept, f["item"]))]
        case "aligned_andpro_minus_dropkv":
            of_rule = tables["records"].query("rule == 'dropkv' and queries == 1 and k == @HARD_K")
            near = of_rule.merge(_near(claim, tables)[["item", *WHERE, "stratum"]])
            f = _with_other_rule(tables, "andpro", 1, near)
            return [Member("all", _mean(f.log, f["item"], bounds=None))]
        case "same_alone":
            linear = tables["weights"][tables["weights"].way == "linear"]
            return _facts(linear, linear.same_alone.astype(float))
        case "way_gap":
            return _way_gap(claim, tables)
    raise InputError(f"claim {claim['id']}: unknown contrast {contrast!r}")


# ---------------------------------------------------------------- answers and timings


def _from_answers(claim: Mapping, answers: pd.DataFrame) -> list[Member | NotTestable]:
    """Scores of each item in points: DropKV's paired with each method's that the claim names, or with each peer's."""
    main = study.main(answers)
    needs = claim.get("needs", {})
    if "items" in needs and not set(main.task) <= set(ITEMS[needs["items"]]):
        raise NotTestable(f"{claim['why']} Give -p items {needs['items']} with a model of the hub.")
    if main.prompt_tokens.mean() < needs.get("prompt_tokens", 0):
        lengths = f"{needs['prompt_tokens']} tokens wanted, {main.prompt_tokens.mean():.0f} run"
        raise NotTestable(f"{claim['why']} Prompts of {lengths}: give such a file with -p items, and -p tokens.")
    full = main[main.method == "full"]
    judge.answers_enough(full["score"], full.get("error"))

    def lead(name: str) -> Sample:
        return Sample(100 * pair(main, name, claim["share"]), "difference", bounds=(0.0, 100.0))

    if claim["contrast"] == "quality_lead":
        others = _own(claim) or [name for name in study.PEERS if name in set(main.method)]
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
    wide = of_share.pivot_table(index=["length", "item"], columns="method", values="score")
    lead = 100 * (wide["dropkv"] - wide[claim["against"]]).dropna()
    ends = [lead[length] for length in (max(answers.length), min(answers.length))]
    return [Member("all", Unpaired(*ends, bounds=(-100.0, 100.0)))]


def pair(rows: pd.DataFrame, against: str, share: float) -> pd.DataFrame:
    """Score of DropKV (a) and of another method, or "full" (b), at a share, by item that has both."""
    sides, rows = {}, study.main(rows)
    for name, method, side_share in (("a", "dropkv", share), ("b", against, 1.0 if against == "full" else share)):
        of_side = rows[(rows.method == method) & (rows["share"] == side_share)]
        if of_side.empty:
            raise NotTestable(f"not run: {method} at {side_share:.0%}")
        sides[name] = of_side.set_index("item")["score"]
    return pd.DataFrame(sides).dropna()


def members(claim: Mapping, tables: Tables) -> Sequence[Member | NotTestable]:
    """What a claim is tested on. Raises NotTestable where triples, answers or timings are needed and missing."""
    contrast, answers = claim["contrast"], tables.get("answers")
    if contrast in timings.CONTRASTS:
        given = {name: claim[name] for name in ("tokens", "kernel") if name in claim}
        measured = timings.CONTRASTS[contrast][0](**given)
        if claim.get("exact"):
            return [Member(name, Facts(pd.Series({timings.KERNELS.name: m.value}))) for name, m in measured.items()]
        return [Member(name, m) for name, m in measured.items()]
    if contrast == "quality_growth":
        return _lead_growth(claim, answers)
    if contrast in ("quality_difference", "quality_lead"):
        if answers is None:
            raise NotTestable("no answers were generated: run study.answers")
        return _from_answers(claim, answers)
    if "records" not in tables:
        raise NotTestable("no triples were computed: run study.triples_of")
    return _of_pools(claim, tables) if contrast in OF_POOL else _of_records(claim, tables)


def verdicts(book: Mapping, tables: Tables, loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Verdict of every claim of a book on the tables of `study.triples_of` and `answers`, then of the general ones on
    a reader's own policies."""
    columns = {"records": "rule", "answers": "method"}
    policies = [name for table, column in columns.items() if table in tables for name in tables[table][column]]
    stated = book["claims"]
    general = [c for c in stated if c["contrast"] in GENERAL and "prompt_tokens" not in c.get("needs", {})]
    own = claims.claims_on_own([{**claim, "over": {"policy": "any"}} for claim in general], policies)
    frame = history.verdicts(
        stated, lambda claim, _: members(claim, tables), own=own, model=loaded.name, profile=settings.profile
    )
    timed = [claim for claim in stated if claim["contrast"] in timings.CONTRASTS]
    return claims.timed(frame, {claim["id"]: timings.CONTRASTS[claim["contrast"]][1] for claim in timed})
