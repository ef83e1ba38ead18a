"""Claims of a paper as data, and their verdicts computed from results.

A claims file (`data/claims/<chapter>.yml`) holds, per claim, the printed value as a reference to a cell of
`data/published/`, the contrast that computes ours, the test and the tolerance. This module evaluates every member (a
policy, capacity, domain or length) of every claim and counts: a verdict is arithmetic. The file's header has the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from kvrepro.errors import InputError
from kvrepro.experiment import measure, stats
from kvrepro.paths import DATA

READINGS = ("as_run", "as_described")
VERDICTS = ("reproduced", "partly", "not reproduced", "not testable here")
COLUMNS = ["claim", "statement", "paper", "ours", "low", "high", "test", "p", "verdict", "reading", "model", "profile"]
EXTRA = ["depends_on_reading", "unit", "members", "closest", "n", "topic", "source", "note"]
NEEDS_CEILING = {
    "mean",
    "difference",
    "share_of_ceiling",
    "spread",
    "lift_minus_spread",
    "share_of_limit",
    "correlation",
}
MIN_CEILING = 0.10  # lower bound of the full cache's F1 below which a quality claim says nothing
MIN_SINK = 0.10  # attention mass on position 0, in some layer, from which on a model is said to have a sink
MIN_ITEMS = 6  # below that no two-sided sign or rank test of pairs can reach 5%, and an interval says less still
DRAWS = 10_000


class Missing(Exception):
    """The results hold no row for a cell that a claim needs."""


# ---------------------------------------------------------------- the paper's side


def load_claims(chapter: str = "protection", folder: Path = DATA / "claims") -> dict:
    """Claims of a chapter: `{"sets": {name: [policy, ...]}, "claims": [claim, ...]}`, ids checked to be unique."""
    path = Path(folder) / f"{chapter}.yml"
    if not path.is_file():
        raise InputError(f"no claims for chapter {chapter!r}: {path} does not exist")
    book = yaml.safe_load(path.read_text(encoding="utf-8"))
    ids = [claim["id"] for claim in book["claims"]]
    if len(ids) != len(set(ids)):
        raise InputError(f"{path}: claim ids repeat: {sorted({i for i in ids if ids.count(i) > 1})}")
    return book


@lru_cache(maxsize=64)
def published(file: str, folder: Path = DATA / "published") -> pd.DataFrame:
    """One table of printed numbers, every cell as text."""
    return pd.read_csv(Path(folder) / file, dtype=str, keep_default_na=False)


def _same(cell: str, want: object) -> bool:
    if isinstance(want, list):
        return any(_same(cell, one) for one in want)
    if isinstance(want, bool):
        return cell == str(want)
    if isinstance(want, int | float):
        try:
            return float(cell) == float(want)
        except ValueError:
            return False
    return cell == want


def cells(file: str, where: Mapping[str, object]) -> pd.DataFrame:
    """The printed rows that match: equality per column, `<column>_starts` for a beginning. None found raises."""
    table = published(file)
    keep = pd.Series(True, index=table.index)
    for column, want in where.items():
        if column.endswith("_starts"):
            keep &= table[column.removesuffix("_starts")].str.startswith(str(want))
        else:
            keep &= table[column].map(lambda cell, want=want: _same(cell, want))
    if not keep.any():
        raise InputError(f"no printed number in {file} matches {dict(where)}")
    return table[keep]


def paper_values(spec: Mapping) -> list[float]:
    """Numbers behind one `paper` entry: the cells, their differences (`minus`), spread or count (`show`)."""
    rows = cells(spec["file"], spec["where"])
    column, by, show = spec.get("column", "value"), spec.get("by"), spec.get("show")
    if show == "count":
        return [float(len(rows))]
    if "minus" in spec:
        other = cells(spec["file"], spec["minus"])
        pairs = (
            rows.merge(other, on=by, suffixes=("_a", "_b"))
            if by
            else rows.merge(other, how="cross", suffixes=("_a", "_b"))
        )
        values = (pairs[f"{column}_a"].astype(float) - pairs[f"{column}_b"].astype(float)).tolist()
    elif show == "spread":
        groups = [group for _, group in rows.groupby(by)] if by else [rows]
        values = [np.ptp(group[column].astype(float)).item() for group in groups]
    else:
        values = rows[column].astype(float).tolist()
    return [value * spec.get("scale", 1.0) for value in values]


def paper_text(spec: Mapping | Sequence[Mapping], unit: str = "") -> str:
    """The printed value as it is shown: one number, or the least and the greatest."""
    digits = 1 if unit == "%" else 3
    if isinstance(spec, Mapping) and "text" in spec:
        return spec["text"].format(
            **{
                name: f"{paper_values(cell)[0]:.{0 if cell.get('show') == 'count' else cell.get('digits', 3)}f}"
                for name, cell in spec.get("cells", {}).items()
            }
        )
    values = list(itertools.chain(*map(paper_values, [spec] if isinstance(spec, Mapping) else spec)))
    counted = unit not in ("F1", "%") and all(float(value).is_integer() for value in values)
    low, high = (f"{value:g}" if counted else f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# ---------------------------------------------------------------- our side: cells, members, contrasts


def _name(policy: str, capacity: float, prefix: float, suffix: float, mode: str) -> str:
    if policy == "full":
        return "full"
    return f"{policy}|{capacity:.0f}|{prefix:.4f}|{suffix:.4f}|{mode}"


def named(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `cell` that names each one's condition, so that a condition is found by one comparison."""
    if "cell" in rows:
        return rows
    parts = zip(rows.policy, rows.capacity.astype(float), rows.prefix, rows.suffix, rows.suffix_mode, strict=True)
    return rows.assign(cell=[_name(*part) for part in parts])


def _select(rows: pd.DataFrame, cell: Mapping) -> pd.DataFrame:
    if cell["policy"] == "full":
        return rows[rows.policy == "full"].drop_duplicates("item")
    wanted = (cell["policy"], cell["capacity"], cell["prefix"], cell["suffix"], cell.get("suffix_mode", "dynamic"))
    rows = named(rows)
    return rows[rows.cell == _name(*wanted)]


def per_item(rows: pd.DataFrame, cell: Mapping, column: str) -> pd.Series:
    """One column of one condition, indexed by item. A condition that was not run raises `Missing`."""
    here = _select(rows, cell)
    if here.empty:
        raise Missing("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
    if here["item"].duplicated().any():
        raise InputError(
            f"results hold {len(here)} rows of {dict(cell)} for {here['item'].nunique()} items: one per item is needed"
        )
    return here.set_index("item")[column]


def capacities(rows: pd.DataFrame, prefix: float) -> dict[str, Any]:
    """Smallest, middle and largest capacity of the main grid: `prefix` protected on both sides, for most policies."""
    main = rows[np.isclose(rows.prefix, prefix) & np.isclose(rows.suffix, prefix) & rows.capacity.notna()]
    main = main[~main.policy.str.endswith("_faithful")]
    found = sorted(main.groupby("capacity").policy.nunique().pipe(lambda n: n[n == n.max()]).index)
    if not found:
        raise Missing("not run: no condition is protected on both sides")
    return {"smallest": found[0], "middle": found[len(found) // 2], "largest": found[-1], "all": found}


def members(claim: Mapping, rows: pd.DataFrame, sets: Mapping, protect_frac: float) -> list[dict]:
    """Every member of a claim as `{"label", "a", "b", "rows"}`: cells with real numbers, and their rows."""
    rows = named(rows)
    sizes = capacities(rows, protect_frac)
    over = claim.get("over", {})
    axes: list[list[tuple[str, dict]]] = []
    policies = over.get("policy", [None])
    axes.append(
        [
            (one or "", {"policy": one} if one else {})
            for one in (sets.get(policies, policies) if isinstance(policies, str) else policies)
        ]
    )
    axes.append([(one["label"], one) for one in claim.get("members", [{"label": ""}])])
    wanted = over.get("capacity", None)
    sized = sizes["all"] if wanted == "all" else [sizes[wanted]] if wanted else [None]
    axes.append(
        [(f"C={one:.0f}" if one and wanted == "all" else "", {"capacity": one} if one else {}) for one in sized]
    )
    groups: list[tuple[str, pd.DataFrame]] = [("", rows)]
    for column in ("task", "length"):
        if column in over:
            groups = [(str(name), group) for name, group in rows.groupby(column, sort=True)]
    found = []
    for (policy, by_policy), (label, by_member), (size, by_size), (group, group_rows) in itertools.product(
        *axes, groups
    ):
        member: dict = {"label": ", ".join(filter(None, [policy, label, group, size])) or "all", "rows": group_rows}
        for side, given in claim.get("cells", {}).items():
            cell = {**by_policy, **by_size, **given, **by_member.get(side, {})}
            if isinstance(cell.get("capacity"), str):
                cell["capacity"] = sizes[cell["capacity"]]
            if "length" in over:
                cell["capacity"] = capacities(group_rows, protect_frac)["middle"]
            cell["prefix"], cell["suffix"] = cell["prefix"] * protect_frac, cell["suffix"] * protect_frac
            member[side] = cell
        found.append(member)
    return found


def _columns(claim: Mapping, member: Mapping, sets: Mapping, limit: int) -> pd.DataFrame:
    """Items by named columns: all whose means the contrast needs. An item with a failed row drops out as a pair."""
    rows, kind = member["rows"], claim["contrast"]
    full = {"policy": "full"}
    if kind == "same_kept":
        hashes = pd.DataFrame(
            {
                side: per_item(
                    rows, member[side], "kept_positions_hash" if "kept_positions_hash" in rows else "kept_hash"
                )
                for side in "ab"
            }
        )
        return (hashes.dropna()["a"] == hashes.dropna()["b"]).astype(float).to_frame("a")
    if kind == "reinvoked":
        return (per_item(rows, member["a"], "policy_calls").dropna() >= 2).astype(float).to_frame("a")
    if kind == "share_of_limit":
        return (per_item(rows, member["a"], "n_generated").dropna() / limit).to_frame("a")
    if kind == "correlation":
        keys = ["policy", "capacity", "prefix", "suffix", "suffix_mode"]
        if rows[[claim["measure"], claim["against"]]].dropna().empty:
            raise Missing(f"no row has {claim['measure']} and {claim['against']}")
        wide = rows.pivot_table(index="item", columns=keys, values=[claim["measure"], claim["against"]], dropna=True)
        wide.columns = [
            f"{'x' if name[0] == claim['measure'] else 'y'}:{'/'.join(map(str, name[1:]))}" for name in wide.columns
        ]
        return wide.dropna()
    measure = claim.get("measure", "token_f1")
    named = {side: member[side] for side in "ab" if side in member}
    if kind == "share_of_ceiling":
        named["full"] = full
    if "across" in claim:
        names = sets.get(claim["across"], claim["across"])
        named = {f"a:{one}": {"policy": one, **member["a"]} for one in names}
        if "b" in member:
            named |= {"a": {"policy": "lru", **member["a"]}, "b": {"policy": "lru", **member["b"]}}
    frame = pd.DataFrame({name: per_item(rows, cell, measure) for name, cell in named.items()}).dropna()
    if "below" in claim:
        frame = (frame < claim["below"]).astype(float)
    if "from" in claim:
        frame = (frame >= claim["from"]).astype(float)
    return frame


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _spread(means: Mapping[str, np.ndarray]) -> np.ndarray:
    across = np.stack([value for name, value in means.items() if name.startswith("a:")])
    return across.max(0) - across.min(0)


def _correlation(means: Mapping[str, np.ndarray]) -> np.ndarray:
    x, y = (
        np.stack([value for name, value in sorted(means.items()) if name.startswith(axis)]) for axis in ("x:", "y:")
    )
    x, y = x - x.mean(0), y - y.mean(0)
    return _ratio((x * y).sum(0), np.sqrt((x**2).sum(0) * (y**2).sum(0)))


# Every contrast is a function of column means, so that one matrix of resampled means gives its interval.
CONTRASTS = {
    "mean": lambda m: m["a"],
    "difference": lambda m: m["a"] - m["b"],
    "share_of_ceiling": lambda m: _ratio(m["a"] - m.get("b", 0.0), m["full"]),
    "spread": _spread,
    "lift_minus_spread": lambda m: m["a"] - m["b"] - _spread(m),
    "share_of_limit": lambda m: m["a"],
    "same_kept": lambda m: m["a"],
    "reinvoked": lambda m: m["a"],
    "correlation": _correlation,
    "sink_share": lambda m: _ratio(m["sink"], m["sink"] + m["prefix"]),
    "boundary_density": lambda m: _ratio(m["mass"], m["share"]),
}


@lru_cache(maxsize=16)
def _weights(n: int, seed: int) -> np.ndarray:
    """Bootstrap weights [DRAWS, n]: how often each item was drawn, over n."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS) / n


def estimate(frame: pd.DataFrame, contrast: str, *, level: float = 0.95, seed: int = 42) -> tuple[float, float, float]:
    """Value and percentile interval of a contrast over items (rows are items, resampled together)."""
    compute, values = CONTRASTS[contrast], frame.to_numpy(float)
    means = [values.mean(0, keepdims=True), _weights(len(frame), seed) @ values]
    point, draws = (compute(dict(zip(frame.columns, part.T, strict=True))) for part in means)
    decided = len(frame) >= MIN_ITEMS and np.isfinite(draws).any()
    low, high = np.nanpercentile(draws, [50 - 50 * level, 50 + 50 * level]) if decided else (np.nan, np.nan)
    return float(point[0]), float(low), float(high)


# ---------------------------------------------------------------- verdicts


def judge(rule: Mapping, value: float, low: float, high: float, p: float | None) -> str:
    """`holds`, `fails` or `undecided` for one member, by its interval [low, high] and, where there is one, its p."""
    (kind, bound), significant = next(iter(rule.items())), p is None or p < 0.05
    if np.isnan(low) or np.isnan(high):
        return "undecided"
    if kind == "at_least":
        return (
            "holds" if low > bound and significant else "fails" if high < bound or low == high == bound else "undecided"
        )
    if kind == "at_most":
        return "holds" if high < bound and significant else "fails" if low > bound else "undecided"
    if kind == "between":
        return (
            "holds"
            if bound[0] <= low and high <= bound[1]
            else "fails"
            if high < bound[0] or low > bound[1]
            else "undecided"
        )
    if kind == "no_difference":
        return "fails" if significant else "holds" if -bound < low and high < bound else "undecided"
    if kind == "equivalent":
        return "holds" if significant else "fails" if high < -bound or low > bound else "undecided"
    raise InputError(f"unknown rule {kind!r}: known are at_least, at_most, between, no_difference, equivalent")


def verdict(states: Sequence[str]) -> str:
    """Verdict of a claim from its members: it is reproduced where all hold, and not where none does or most fail."""
    holds, fails = states.count("holds"), states.count("fails")
    if not holds + fails:
        return "not testable here"
    if holds == len(states):
        return "reproduced"
    return "not reproduced" if not holds or fails > len(states) / 2 else "partly"


def _against(rule: Mapping, value: float, low: float, high: float) -> float:
    """How far a member speaks against its claim, for choosing the one to show."""
    kind, bound = next(iter(rule.items()))
    if kind == "at_least":
        return -low
    if kind == "at_most":
        return high
    if kind == "between":
        return max(bound[0] - low, high - bound[1])
    return max(abs(low), abs(high))


def _ceiling(rows: pd.DataFrame) -> float:
    """Lower bound of the full cache's token F1."""
    return estimate(per_item(rows, {"policy": "full"}, "token_f1").dropna().to_frame("a"), "mean")[1]


def _attention_members(claim: Mapping, attention: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Items by column, from rows (item, layer, head, region, mass, uniform): means over layers and heads."""
    mass = attention.pivot_table(index="item", columns="region", values="mass", aggfunc="mean")
    if claim["contrast"] == "sink_share":
        return [("all", mass[["sink", "prefix"]])]
    share = attention.pivot_table(index="item", columns="region", values="uniform", aggfunc="first")
    return [
        (region, pd.DataFrame({"mass": mass[region], "share": share[region]})) for region in claim["over"]["region"]
    ]


def has_sink(attention: pd.DataFrame) -> bool:
    """Whether position 0 takes at least a tenth of the attention mass in some layer (mean over heads and items)."""
    return bool(attention[attention.region == "sink"].groupby("layer").mass.mean().max() >= MIN_SINK)


def evaluate_members(
    claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, *, protect_frac: float, max_new_tokens: int
) -> pd.DataFrame:
    """One row per member of a claim in one reading: member, value, low, high, n, p, state. No data raise `Missing`."""
    if rows is None or claim["contrast"] == "none":
        raise Missing(claim.get("why", "not run") if claim["contrast"] == "none" else "not run")
    rule, margin = claim["rule"], next(iter(claim["rule"].values()))
    if claim.get("study") == "attention":
        if not has_sink(rows) and claim["contrast"] == "sink_share":
            raise Missing("the last prompt token gives position 0 less than a tenth of its attention in every layer")
        frames = _attention_members(claim, rows)
    else:
        frames, reasons = [], []
        for member in members(claim, rows, sets, protect_frac):
            try:
                items = member["rows"]["item"].nunique()
                if items < MIN_ITEMS:
                    raise Missing(f"{items} items: an interval needs at least {MIN_ITEMS}")
                if claim["contrast"] in NEEDS_CEILING and not _ceiling(member["rows"]) >= MIN_CEILING:
                    raise Missing("the full cache itself answers too few items")
                frame = _columns(claim, member, sets, max_new_tokens)
                if frame.empty:
                    raise Missing(f"no item has a value in every condition of {member['label']}")
                frames.append((member["label"], frame))
            except Missing as missing:
                reasons.append(str(missing))
        if not frames:
            raise Missing(reasons[0])
    found = pd.DataFrame(
        [(label, *estimate(frame, claim["contrast"]), len(frame)) for label, frame in frames],
        columns=["member", "value", "low", "high", "n"],
    )
    test, found["p"] = claim.get("test"), np.nan
    if test == "wilcoxon_holm":
        found["p"] = stats.holm([stats.wilcoxon(frame["a"].to_numpy(), frame["b"].to_numpy()).p for _, frame in frames])
    elif test == "tost":
        found["p"] = [stats.tost(frame["a"].to_numpy(), frame["b"].to_numpy(), margin=margin).p for _, frame in frames]
    elif test == "sign":
        found["p"] = stats.sign_test(found["value"].to_numpy(), np.zeros(len(found))).p
    by_p = test in ("wilcoxon_holm", "tost")
    found["state"] = [judge(rule, m.value, m.low, m.high, m.p if by_p else None) for m in found.itertuples()]
    return found


TESTS = {
    "wilcoxon_holm": "Wilcoxon, Holm",
    "tost": "paired TOST",
    "sign": "sign test over domains",
    None: "bootstrap interval",
}


def claim_row(claim: Mapping, found: pd.DataFrame | str) -> dict:
    """One row of the claims table, from the members or from the reason why there are none."""
    unit = claim.get("unit", "F1")
    row = {
        "claim": claim["id"],
        "statement": claim["statement"],
        "paper": paper_text(claim["paper"], unit),
        "test": TESTS[claim.get("test")],
        "unit": unit,
        "topic": claim["topic"],
        "source": claim["source"],
        "note": claim.get("why", ""),
    }
    if isinstance(found, str):
        return row | {"verdict": "not testable here", "note": found, "test": "none", "members": "", "closest": ""}
    order = found.assign(
        rank=found.state.map({"fails": 0, "undecided": 1, "holds": 2}),
        against=[-_against(claim["rule"], m.value, m.low, m.high) for m in found.itertuples()],
    ).sort_values(["rank", "against"])
    worst, scale = order.iloc[0], 100.0 if unit == "%" else 1.0
    counts = found.state.value_counts()
    if counts.get("undecided", 0) == len(found):
        row["note"] = f"the interval straddles the tolerance with {int(worst.n)} items"
    return row | {
        "ours": worst.value * scale,
        "low": worst.low * scale,
        "high": worst.high * scale,
        "p": worst.p,
        "n": int(worst.n),
        "verdict": verdict(found.state.tolist()),
        "members": ", ".join(
            f"{counts[state]} {state}" for state in ("holds", "undecided", "fails") if state in counts
        ),
        "closest": worst.member if len(found) > 1 else "",
    }


def evaluate(
    results: pd.DataFrame,
    claims: Mapping | str = "protection",
    *,
    scaling: pd.DataFrame | None = None,
    attention: pd.DataFrame | None = None,
    protect_frac: float = 0.10,
    max_new_tokens: int = 128,
    profile: str = "quick",
) -> pd.DataFrame:
    """Verdict of every claim in every reading that was run.

    results, scaling: rows of `kvrepro.experiment.run.run` (`scaling` with a column `length`, tokens); attention: rows
    of
    `study.attention` (item, layer, head, region, mass, uniform). Claims that no reading touches appear once, with
    reading "any". Returns `COLUMNS` and `EXTRA`; ours, low, high are those of the member closest to refuting the claim.
    """
    book = load_claims(claims) if isinstance(claims, str) else claims
    results, scaling = named(results), None if scaling is None else named(scaling)
    readings = [one for one in READINGS if (results[results.policy != "full"].reading == one).any()]
    if not readings:
        raise InputError("results hold no condition but the full cache: nothing to evaluate")
    table: list[dict] = []
    states: dict[str, list[dict[str, str]]] = {}
    for claim in book["claims"]:
        study = claim.get("study", "main")
        free = study == "attention" or claim["contrast"] == "none"
        for reading in ["any"] if free else readings:
            rows = {"main": results, "scaling": scaling, "attention": attention}[study]
            if rows is not None and not free:
                rows = rows[(rows.reading == reading) | (rows.policy == "full")]
            try:
                found = evaluate_members(
                    claim, book.get("sets", {}), rows, protect_frac=protect_frac, max_new_tokens=max_new_tokens
                )
            except Missing as missing:
                found = str(missing)
            known = {} if isinstance(found, str) else dict(zip(found.member, found.state, strict=True))
            states.setdefault(claim["id"], []).append(known)
            table.append(claim_row(claim, found) | {"reading": reading})
    frame = pd.DataFrame(table).reindex(columns=COLUMNS + EXTRA)
    frame["model"] = results["model"].iloc[0]
    frame["profile"] = profile
    frame["depends_on_reading"] = frame.claim.map({claim: _depends(states[claim]) for claim in states})
    return frame


def _depends(states: Sequence[Mapping[str, str]]) -> str:
    """Does the reading decide? yes: a member holds in one and fails in the other; unclear: it is open in one."""
    if len(states) < 2 or not all(states):
        return ""
    pairs = [{one[member] for one in states if member in one} for member in states[0]]
    return "yes" if {"holds", "fails"} in pairs else "unclear" if any(len(pair) > 1 for pair in pairs) else "no"


def write(frame: pd.DataFrame, path: Path | str) -> Path:
    """The claims table as CSV, at `<results>/<chapter>/claims.csv`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, float_format="%.6g")
    return path


# ---------------------------------------------------------------- sentences and numbers for the notebook


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(ids) if ids else "none"


def summary(frame: pd.DataFrame) -> str:
    """What the verdicts add up to, as Markdown: the ids of each verdict per reading, then what hangs on the reading.

    The reading decides where a member holds in one and fails in the other. A verdict can differ without that, where a
    member is decided in one reading only.
    """
    lines = []
    for reading, group in frame.groupby("reading", sort=False):
        name = {"as_run": "As run", "as_described": "As described", "any": "Without regard to the reading"}[
            str(reading)
        ]
        parts = [
            f"*{one}*: {_listed(group[group.verdict == one].claim.tolist())}"
            for one in VERDICTS
            if (group.verdict == one).any()
        ]
        lines.append(f"- **{name}** ({len(group)} claims). " + "; ".join(parts) + ".")
    compared = frame[frame.claim.isin(frame[frame.claim.duplicated()].claim)]
    decides = compared.depends_on_reading == "yes"
    differs = compared.groupby("claim").verdict.transform("nunique") > 1
    for split, what in (
        (compared[decides], "**The reading decides** {} of them"),
        (compared[differs & ~decides], "**The verdict differs** for {} more, where no member turns over"),
    ):
        if len(split):
            lines.append(f"- {what.format(split.claim.nunique())}:")
            lines += [f"    - {_both(group)}." for _, group in split.groupby("claim", sort=False)]
    if len(compared) and not (decides | differs).any():
        lines.append("- No verdict depends on the reading.")
    return "\n".join(lines)


def _both(group: pd.DataFrame) -> str:
    """One claim, and what each reading says of it."""
    by = {row.reading: row.verdict for row in group.itertuples()}
    said = f"*{by['as_run']}* as run, *{by['as_described']}* as described"
    if by["as_run"] == by["as_described"]:
        said = f"*{by['as_run']}* in both, but for other members"
    return f"{group.claim.iloc[0]}, {_lower(group.statement.iloc[0])}: {said}"


def _lower(statement: str) -> str:
    text = statement.rstrip(".")
    return text if text[:2].isupper() or text.split()[0] in ("H2O", "ROUGE-L", "Ada-KV") else text[0].lower() + text[1:]


def table(frame: pd.DataFrame, topics: Sequence[str] = ()) -> pd.DataFrame:
    """The claims as the reader sees them: paper beside ours, with interval, test, verdict and reading."""
    rows = frame[frame.topic.isin(list(topics))] if topics else frame
    ours = [shown(row) for row in rows.itertuples()]
    return pd.DataFrame(
        {
            "claim": rows.claim,
            "statement": rows.statement,
            "paper": rows.paper,
            "ours [95%]": ours,
            "unit": rows.unit,
            "members": rows.members,
            "closest to refuting": rows.closest,
            "test": [
                row.test if pd.isna(row.p) else f"{row.test}, p {'< 0.001' if row.p < 0.001 else f'= {row.p:.3f}'}"
                for row in rows.itertuples()
            ],
            "reading": rows.reading.str.replace("_", " "),
            "verdict": rows.verdict,
        }
    ).reset_index(drop=True)


def _text(values: tuple[float, ...], unit: str) -> str:
    """A value with its interval, in a unit."""
    value, low, high = values
    if np.isnan(value):
        return "no value"
    if value == low == high and float(value).is_integer():  # counted, not estimated
        return f"{value:g}" + ("" if unit == "F1" else f" {unit}")
    if unit not in ("F1", "%") and 0 < np.nanmax(np.abs(values)) < 5e-4:  # errors of rounding: zeros would hide them
        said = [f"{one:.1g}" for one in values]
        return (said[0] if value == low == high else f"{said[0]} [{said[1]}, {said[2]}]") + f" {unit}"
    digits = 1 if unit == "%" else 3
    interval = "too few items" if np.isnan(low) else f"{low:.{digits}f}, {high:.{digits}f}"
    return f"{value:.{digits}f} [{interval}]" + ("" if unit == "F1" else f" {unit}")


def shown(row, with_unit: bool = False) -> str:
    """Ours with its interval; empty where there is none."""
    if pd.isna(row.ours):
        return ""
    text = _text((row.ours, row.low, row.high), row.unit)
    return text if with_unit else text.removesuffix(f" {row.unit}")


def beside(frame: pd.DataFrame, *topics: str) -> str:
    """The claims of some topics as a Markdown list: what the paper printed, what came out here, in each reading."""
    lines = []
    for claim, group in frame[frame.topic.isin(topics)].groupby("claim", sort=False):
        first = group.iloc[0]
        unit = f" {first.unit}" if first.unit != "F1" and str(first.paper)[-1:].isdigit() else ""
        lines.append(f"- **{claim}** {first.statement} Paper: {first.paper}{unit}.")
        for row in group.itertuples():
            tested = row.test if pd.isna(row.p) else f"{row.test}, p {'< 0.001' if row.p < 0.001 else f'= {row.p:.3f}'}"
            why = [shown(row, with_unit=True), row.closest, row.members, tested] if shown(row) else [row.note]
            name = {"any": "here"}.get(row.reading, str(row.reading).replace("_", " "))
            lines.append(f"    - {name}: *{row.verdict}*. " + "; ".join(filter(None, why)))
    return "\n".join(lines)


def overview(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per claim: statement, the paper's value, verdict and value per reading, does the reading decide."""
    rows = []
    for claim, group in frame.groupby("claim", sort=False):
        first = group.iloc[0]
        by = {row.reading: f"{row.verdict} {shown(row)}".strip() for row in group.itertuples()}
        row = {"claim": claim, "statement": first.statement, "paper": first.paper, "unit": first.unit}
        row |= {name.replace("_", " "): by.get(name, by.get("any", "not run")) for name in READINGS}
        rows.append(row | {"reading decides": first.depends_on_reading})
    return pd.DataFrame(rows).set_index("claim")


def numbers(frame: pd.DataFrame, results: pd.DataFrame, protect_frac: float = 0.10) -> dict[str, str]:
    """What the prose may quote, as text: of each claim `<claim>-<reading>` (value, interval) and `...-verdict`; of the
    run its sizes, the full cache's F1 and what LRU keeps of it at the middle capacity."""
    sizes = capacities(results, protect_frac)
    ceiling = estimate(per_item(results, {"policy": "full"}, "token_f1").dropna().to_frame("a"), "mean")
    found = {
        "claims": str(frame.claim.nunique()),
        "decided-by-reading": str(frame[frame.depends_on_reading == "yes"].claim.nunique()),
        "items": str(results["item"].nunique()),
        "prompt-tokens": f"{results.prompt_tokens.mean():.0f}",
        "middle": f"{sizes['middle']:.0f}",
        "ceiling": _text(ceiling, "F1"),
        "paper-lru-bare": paper_text({"file": PAPER_SEVEN, "where": PAPER_LRU | {"protected": False}}, "%") + "%",
        "paper-lru-kept": paper_text({"file": PAPER_SEVEN, "where": PAPER_LRU | {"protected": True}}, "%") + "%",
    }
    full = {"policy": "full"}
    lru = {"policy": "lru", "capacity": sizes["middle"]}
    cells = {
        "bare": lru | {"prefix": 0.0, "suffix": 0.0},
        "kept": lru | dict.fromkeys(("prefix", "suffix"), protect_frac),
    }
    for reading in READINGS:
        rows = rest_of(results[(results.reading == reading) | (results.policy == "full")])
        for name, cell in cells.items():
            try:
                pair = {"a": per_item(rows, cell, "token_f1"), "full": per_item(rows, full, "token_f1")}
                share = estimate(pd.DataFrame(pair).dropna(), "share_of_ceiling")
                rest = estimate(per_item(rows, cell, "rest_f1").dropna().to_frame("a"), "mean")
            except Missing:
                share = rest = (np.nan,) * 3
            found[f"lru-{name}-{reading}"] = _text(tuple(100 * part for part in share), "%")
            found[f"rest-{name}-{reading}"] = _text(rest, "F1")
        for claim in frame.claim.unique():
            row = next(frame[(frame.claim == claim) & frame.reading.isin([reading, "any"])].itertuples(), None)
            found[f"{claim}-{reading}-verdict"] = "not run" if row is None else row.verdict
            found[f"{claim}-{reading}"] = "no value" if row is None else shown(row, with_unit=True) or "no value"
    return found


def rest_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `first_right` (is the first word the answer's? 0 or 1) and `rest_f1`, token F1 of the words after.

    Under every policy the first output token comes from the full cache, the rest does not. One-word answers: null.
    """
    rest, first = [], []
    for prediction, answer in zip(rows.prediction, rows.answer, strict=True):
        ours, gold = (str(text or "").split() for text in (prediction, answer))
        one_word = len(gold) < 2 or pd.isna(prediction)
        first.append(np.nan if one_word else float(ours[:1] == gold[:1]))
        rest.append(np.nan if one_word else measure.token_f1(" ".join(ours[1:]), " ".join(gold[1:])))
    return rows.assign(first_right=first, rest_f1=rest)


PAPER_SEVEN = "protection_t03_policies_qwen25_3b.csv"
PAPER_LRU = {"metric": "pct_of_ceiling", "policy": "LRU", "capacity": 256}


def glue(numbers: Mapping[str, object]) -> None:
    """Hand numbers to the prose (MyST's `{glue:text}`), each under its name."""
    from myst_nb import glue as myst_glue

    for name, value in numbers.items():
        myst_glue(name, value, display=False)
