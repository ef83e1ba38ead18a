"""How often the rule of each claim errs, tried on data where the answer is known. Writes data/error_rates.csv.

`python -m studies.error_rates`, after `make book`. The data are those of `studies.known_truth`, in the
shape of what the claim was tested on in the last run: its members and their parts, items, clusters, bounds, the spread
and the zeros and ones that were seen. The claim's own rule judges five kinds of them. A rule that is never reproduced
on the kind *far* cannot hold, one that is never refuted there cannot fail. With so few items the judge lets it decide
nothing; column `enough` says with how many it can do both.

Wanted: at most 5% "reproduced" where the claim is false or just not true, and at most 5% "not reproduced" where it is
true or just true. With 150 repeats a rate of 5% has a standard error of 1.8 points, with the 60 of rules that
resample (120 times each) or have many parts one of 2.8; a rule is listed where its rate is above 5% by two of these.
Column `repeats` says how many a row had.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import pandas as pd
import typer

from kvrepro.experiment import judge, stats
from kvrepro.experiment.judge import Member, NotTestable, Sample
from kvrepro.experiment.stats import MIN_ITEMS, Estimate
from kvrepro.paths import DATA
from studies import chapters
from studies.known_truth import KINDS, Picks, Source, parts_of, sampled
from studies.table import replace_rows

SHORT = {"reproduced": "reproduced", "not reproduced": "not_reproduced", "inconclusive": "inconclusive"}
COLUMNS = """chapter claim reading rule members parts n repeats wrongly_reproduced wrongly_not_reproduced decided
    can_hold can_fail enough wrongly_reproduced_above wrongly_not_reproduced_above""".split()
COLUMNS += [*(f"{kind}_{name}" for kind in KINDS[:4] for name in SHORT.values()), "note"]
FAR = {"far_true": "reproduced", "far_false": "not_reproduced"}  # kind -> the verdict that a rule must reach there
WRONG = 0.05  # of either false verdict, at most
REPEATS, SLOW_REPEATS, FAR_REPEATS = 150, 60, 20
SLOW_DRAWS, MANY = 120, 25  # resamples; parts from which on a claim counts as slow
TestedClaim = tuple[Mapping[str, Any], str, list[Member]]  # claim, reading, members


# ---- one claim


def simulated(
    claim: Mapping[str, Any], members: Sequence[Member], parts: Sequence[Mapping[str, Source]], kind: str, repeats: int
) -> dict[str, float]:
    """Shares of the repeats in which a claim on data of that kind is reproduced, not reproduced, and inconclusive.
    Empty where some part cannot take the value that the kind asks for."""
    names = [(i, name) for i, parts_of_member in enumerate(parts) for name in parts_of_member]
    hard = kind == "one"
    needed = ["true", "threshold"] if hard else [kind]
    nowhere = any(math.isnan(parts[i][name].where[k]) for i, name in names for k in needed)
    if nowhere or (hard and len(names) == 1):
        return {}
    rng, verdicts = np.random.default_rng([0, KINDS.index(kind)]), []
    for repeat in range(repeats):
        i, chosen = names[repeat % len(names)]
        picks, drawn = Picks(), []
        for j, (member, parts_of_member) in enumerate(zip(members, parts, strict=True)):
            kinds = dict.fromkeys(parts_of_member, "true" if hard else kind)
            if hard and i == j:  # a member of which some part must hold has all its parts at the bound
                kinds |= dict.fromkeys(parts_of_member if member.some else [chosen], "threshold")
            new = {name: part.drawn(part.where[kinds[name]], rng, picks) for name, part in parts_of_member.items()}
            drawn.append(replace(member, what=new if isinstance(member.what, Mapping) else new[""]))
        verdicts.append(judge.verdict(claim, judge.judge(claim, drawn)))
    return {short: verdicts.count(name) / repeats for name, short in SHORT.items()}


def of_facts(claim: Mapping[str, Any], members: Sequence[Member]) -> dict[str, dict[str, float]]:
    """Shares of an exact claim's verdicts, by kind of data: all cases as the rule wants them, or all but one."""
    a, b, ends = judge.region(claim["rule"])[0]
    good = next(x for x in (a, b) if math.isfinite(x))
    step = 0.01 * max(1.0, abs(good))
    good += 0.0 if ends else step * (1 if good == a else -1)
    wrong = a - step if math.isfinite(a) else b + step

    def judged(refuted: int) -> dict[str, float]:
        """The verdict, where one case of the member of that number is wrong; -1 for none."""
        given = []
        for i, member in enumerate(members):
            cases = pd.Series(good, index=member.what.index)
            cases.iloc[: int(i == refuted)] = wrong
            given.append(replace(member, what=cases))
        verdict = judge.verdict(claim, judge.judge(claim, given))
        return {short: float(verdict == name) for name, short in SHORT.items()}

    whole, mean = judged(-1), pd.DataFrame([judged(i) for i in range(len(members))]).mean().to_dict()
    return {"true": whole, "false": mean, "far_true": whole, "far_false": mean}


def rates(claim: Mapping[str, Any], members: Sequence[Member], repeats: int | None = None) -> dict[str, Any]:
    """One row of the table, without the columns that name the claim."""
    tested = [what for member in members for what in parts_of(member).values()]
    row: dict[str, Any] = {"members": len(members), "parts": len(tested)}
    if all(isinstance(what, pd.Series) for what in tested):
        shares = of_facts(claim, members)
        row |= {"n": sum(map(len, tested)), "repeats": 1}
    elif any(isinstance(what, Estimate | pd.Series) for what in tested):
        return row | {"note": "ranges of timings, or cases beside samples: not tried"}
    else:
        parts = sampled(claim, members)
        counts = [p.n for parts_of_member in parts for p in parts_of_member.values()]
        if max(counts) < MIN_ITEMS:
            return row | {"note": f"{max(counts)} items: an interval needs at least {MIN_ITEMS}"}
        slow = any(isinstance(what, Sample) and callable(what.contrast) for what in tested)
        n_repeats = repeats or (SLOW_REPEATS if slow or len(tested) > MANY else REPEATS)
        with mock.patch.object(stats, "DRAWS", SLOW_DRAWS):
            repeats_of_kind = {k: min(n_repeats, FAR_REPEATS) if "far" in k else n_repeats for k in KINDS}
            shares = {k: simulated(claim, members, parts, k, count) for k, count in repeats_of_kind.items()}
            row |= {"n": min(counts), "repeats": n_repeats, "enough": _enough(claim, members, shares, min(counts))}
    for kind in KINDS[:4]:
        row |= {f"{kind}_{name}": shares.get(kind, {}).get(name, math.nan) for name in SHORT.values()}
    return row | summary(claim, shares, row["repeats"])


def _enough(
    claim: Mapping[str, Any], members: Sequence[Member], shares: Mapping[str, Mapping[str, float]], n: int
) -> float:
    """Of 2, 4 .. 64 times n items the fewest with which a rule can hold and fail that cannot do both with n, by its
    shares on the kinds *far*. nan: it can do both with n, or with none of these."""
    for factor in (1, 2, 4, 8, 16, 32, 64):
        if factor > 1:
            parts = sampled(claim, members, factor)
            shares = {kind: simulated(claim, members, parts, kind, FAR_REPEATS) for kind in FAR}
        if all(shares.get(kind, {}).get(name, 0.0) > 0 for kind, name in FAR.items()):
            return factor * n if factor > 1 else math.nan
    return math.nan


def summary(claim: Mapping[str, Any], shares: Mapping[str, Mapping[str, float]], repeats: int) -> dict[str, Any]:
    """Summary of the rates of the kinds: the largest rate of each wrong verdict, whether it is above 5% by more than
    chance, how often a medium effect is decided, and whether the rule can hold and fail. shares: of verdicts, by kind
    and by name of the verdict."""

    def most(name: str, kinds: Sequence[str]) -> float:
        return max((shares[k][name] for k in kinds if shares.get(k)), default=math.nan)

    at_bound = ["threshold"] if "no_difference" not in claim["rule"] else []  # a real difference, which may be found
    wrong = {"wrongly_reproduced": most("reproduced", ["false", "threshold", "one"])}
    wrong["wrongly_not_reproduced"] = most("not_reproduced", ["true", *at_bound])
    chance = 2 * math.sqrt(WRONG * (1 - WRONG) / repeats)
    above = {f"{name}_above": bool(share > WRONG + chance) for name, share in wrong.items()}
    sides = [shares[k][name] for k, name in (("true", "reproduced"), ("false", "not_reproduced")) if shares.get(k)]
    decided = {"decided": float(np.mean(sides)) if sides else math.nan}
    can = {"can_hold": "far_true", "can_fail": "far_false"}
    return wrong | above | decided | {c: shares.get(k, {}).get(FAR[k], 0.0) > 0 for c, k in can.items()}


# ---- all claims


@contextmanager
def recorded() -> Iterator[list[TestedClaim]]:
    """A list that fills with the claims that `judge.verdicts` judges inside the block, each with those of its members
    that can be tested."""
    tested_claims: list[TestedClaim] = []
    real = judge.verdicts

    def verdicts(claims: Any, members: Any, *rest: Any, **keywords: Any) -> pd.DataFrame:
        def listed(claim: Mapping[str, Any], reading: str) -> Any:
            tested_claims.append((claim, reading, []))
            members_of_claim = list(members(claim, reading))
            tested_claims[-1] = claim, reading, [m for m in members_of_claim if not isinstance(m, NotTestable)]
            return members_of_claim

        return real(claims, listed, *rest, **keywords)

    with mock.patch.object(judge, "verdicts", verdicts):
        yield tested_claims


def table(chapter: str, tested_claims: Sequence[TestedClaim], processes: int = 2) -> pd.DataFrame:
    """Error rates of each claim and reading, a row for each."""
    _TESTED_CLAIMS[:] = tested_claims
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        rows = pool.map(_row, range(len(tested_claims)), chunksize=1)
    return pd.DataFrame(rows).assign(chapter=chapter)


_TESTED_CLAIMS: list[TestedClaim] = []  # inherited by the processes: members hold functions, which cannot be pickled


def _row(i: int) -> dict[str, Any]:
    """The row of the claim at place i of `_TESTED_CLAIMS`."""
    claim, reading, members = _TESTED_CLAIMS[i]
    row = {"claim": claim["id"], "reading": reading, "rule": judge.rule_text(claim)}
    if not members:
        return row | {"note": "nothing to test in this run"}
    started = time.perf_counter()
    row |= rates(claim, members)
    return row | {"seconds": time.perf_counter() - started}


def main(
    results: Annotated[Path, typer.Option(help="stored rows of all chapters")] = DATA / "results",
    chapter: Annotated[list[str] | None, typer.Option(help="these alone; the rows of others stay")] = None,
    processes: int = 2,
) -> None:
    """Try every rule and write the table."""
    for name in chapter or chapters.JUDGED:
        with recorded() as tested_claims:
            chapters.run(name, {"results": str(results)})
        rows = table(name, tested_claims, processes)
        typer.echo(f"{name}: {len(rows)} rules, {rows.seconds.sum() / processes:.0f} s")
        replace_rows(DATA / "error_rates.csv", rows.reindex(columns=COLUMNS), ["chapter"], digits=3)


if __name__ == "__main__":
    typer.run(main)
