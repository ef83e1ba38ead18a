"""What the protection claims are tested on: cells of the results table, and the members of each claim over them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.engine.policy import is_own
from kvrepro.errors import InputError
from kvrepro.experiment import claims, history, judge
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample
from kvrepro.experiment.stats import CONTRASTS

# Contrasts that hold of any weights; random ones write on, and attend to all alike.
NO_CEILING = {"same_output", "evicted"}
MIN_CONDITIONS = 4  # of one cluster, for a correlation over its conditions
MIN_SINK = 0.10  # attention mass on position 0, in some layer, from which on a model is said to have a sink


# ---------------------------------------------------------------- cells


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


def per_item(rows: pd.DataFrame, cell: Mapping, column: str) -> pd.Series:
    """One column of one condition, indexed by item; failed items are nan. Not run, or failed on every item:
    NotTestable."""
    said = ", ".join(f"{name} {value}" for name, value in cell.items())
    columns = [one for one in dict.fromkeys(["item", "error", "regime", column]) if one in rows or one == column]
    if cell["policy"] == "full":
        here = rows.loc[rows.policy == "full", columns].drop_duplicates("item")
    else:
        wanted = (cell["policy"], cell["capacity"], cell["prefix"], cell["suffix"], cell.get("suffix_mode", "dynamic"))
        rows = named(rows)
        here = rows.loc[rows.cell == _name(*wanted), columns]  # of dozens
        if "regime" in cell:
            here = here[here.regime == cell["regime"]]
    if here.empty:
        raise NotTestable(f"not run: {said}")
    if here["item"].duplicated().any():
        held = f"{len(here)} rows of {dict(cell)} for {here['item'].nunique()} items"
        raise InputError(f"results hold {held}: one per item is needed")
    if "error" in here and here.error.notna().all():
        raise NotTestable(f"all {len(here)} items failed ({here.error.iloc[0]}): {said}")
    return here.set_index("item")[column]


def capacities(rows: pd.DataFrame, prefix: float) -> dict[str, Any]:
    """Smallest, middle and largest capacity of the main grid: `prefix` protected on both sides, for most policies."""
    main = rows[np.isclose(rows.prefix, prefix) & np.isclose(rows.suffix, prefix) & rows.capacity.notna()]
    main = main[~main.policy.str.endswith("_faithful")]
    found = sorted(main.groupby("capacity").policy.nunique().pipe(lambda n: n[n == n.max()]).index)
    if not found:
        raise NotTestable("not run: no condition is protected on both sides")
    return {"smallest": found[0], "middle": found[len(found) // 2], "largest": found[-1], "all": found}


def cells_of(claim: Mapping, rows: pd.DataFrame, sets: Mapping, protect_frac: float) -> list[dict]:
    """Every member of a claim as `{"label", "a", "b", "rows"}`: cells with real numbers, and their rows."""
    rows, over = named(rows), claim.get("over", {})
    sizes = capacities(rows, protect_frac)
    given_cells = list(claim.get("cells", {}).values())
    given_cells += [m.get(side, {}) for m in claim.get("members", []) for side in "ab"]
    wanted_sizes = {cell.get("capacity") for cell in given_cells}
    if len(sizes["all"]) == 1 and {"smallest", "largest"} <= wanted_sizes:
        raise NotTestable(f"two capacities are needed, {sizes['middle']:.0f} alone was run")
    policies = over.get("policy", [None])
    named_sets = sets.get(policies, policies) if isinstance(policies, str) else policies
    wanted = over.get("capacity")
    sized = sizes["all"] if wanted == "all" else [sizes[wanted]] if wanted else [None]
    axes: list[list[tuple[str, dict]]] = [
        [(one or "", {"policy": one} if one else {}) for one in named_sets],
        [(one["label"], one) for one in claim.get("members", [{"label": ""}])],
        [(f"C={one:.0f}" if one and wanted == "all" else "", {"capacity": one} if one else {}) for one in sized],
    ]
    groups: list[tuple[str, pd.DataFrame]] = [("", rows)]
    for column in ("task", "length"):
        if column in over:
            groups = [(str(name), group) for name, group in rows.groupby(column, sort=True)]
            if column == "task" and len(groups) < 2:
                raise NotTestable(f"items of one domain alone ({groups[0][0]}): it needs several")
    if "protection" in over:
        full, guarded = rows.policy == "full", (rows.prefix > 0) | (rows.suffix > 0)
        groups = [("unprotected", rows[full | ~guarded]), ("protected", rows[full | guarded])]
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


# ---------------------------------------------------------------- members


def _correlation(values: np.ndarray) -> float:
    """Of the means of the first half of the columns with those of the second half."""
    x, y = np.split(values.mean(0), 2)
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else np.nan


def _two_measures(claim: Mapping, rows: pd.DataFrame) -> Sample:
    """The means of two measures over conditions of one kind: two kinds far apart make any correlation near 1."""
    both = [claim["measure"], claim["against"]]
    if rows[both].dropna().empty:
        raise NotTestable(f"no row has {both[0]} and {both[1]}")
    evicting = rows[rows.policy != "full"]
    wide = evicting.pivot_table(index="item", columns="cell", values=both, dropna=True)
    shared = wide[both[0]].columns.intersection(wide[both[1]].columns)
    if len(shared) < MIN_CONDITIONS:
        raise NotTestable(f"{len(shared)} conditions: a correlation over conditions needs {MIN_CONDITIONS}")
    return Sample(pd.concat([wide[one][shared] for one in both], axis=1).dropna(), _correlation, limits=(-1.0, 1.0))


def _same_output(claim: Mapping, cell: Mapping) -> Sample:
    """Do two conditions write the same? On items that either reduced again: before, ranks cannot differ."""
    rows = cell["rows"]
    column = "prediction" if "prediction" in rows and rows.prediction.notna().any() else "output"
    text = pd.DataFrame({side: per_item(rows, cell[side], column) for side in "ab"}).dropna()
    calls = pd.DataFrame({side: per_item(rows, cell[side], "policy_calls") for side in "ab"})
    again = (calls.reindex(text.index) >= 2).any(axis=1)
    return Sample((text.a == text.b)[again].astype(float).to_frame("a"))


def _lift_when_sampled(claim: Mapping, rows: pd.DataFrame) -> Sample:
    """LRU's lift at a temperature (mean over seeds) and the greedy one, per item."""
    if "temperature" not in rows or not {0.0, claim["temperature"]} <= set(rows.temperature.dropna()):
        raise NotTestable(f"not run: greedy and temperature {claim['temperature']}")
    lru = rows[rows.policy == "lru"].assign(warm=lambda t: t.temperature > 0, guarded=lambda t: t.prefix > 0)
    means = lru.pivot_table(index="item", columns=["warm", "guarded"], values="token_f1", dropna=False)
    if means.shape[1] < 4:
        raise NotTestable("not run: LRU with and without protection, greedy and sampled")
    lift = {side: means[warm, True] - means[warm, False] for side, warm in (("a", True), ("b", False))}
    return Sample(pd.DataFrame(lift).dropna(), "difference", bounds=(-1.0, 1.0))


def _spread(claim: Mapping, cell: Mapping, sets: Mapping, label: str) -> Member:
    """Of the policies in `across`, in every pair; beside LRU's lift where the claim compares them with it."""
    measured = claim.get("measure", "token_f1")
    columns, lost = {}, []
    for one in sets.get(claim["across"], claim["across"]):
        try:
            columns[one] = per_item(cell["rows"], {"policy": one, **cell["a"]}, measured)
        except NotTestable:
            lost.append(one)
    if len(columns) < 2:
        raise NotTestable(f"{len(columns)} of the policies of a spread were run: it needs two")
    label = ", ".join([label, *(f"without {one}" for one in lost)])
    if "b" not in cell:
        return judge.pairs(pd.DataFrame(columns), label)
    lift = {side: per_item(cell["rows"], {"policy": "lru", **cell[side]}, measured) for side in "ab"}
    parts = {}
    for x, y in itertools.permutations(columns, 2):
        frame = pd.DataFrame(lift | {"x": columns[x], "y": columns[y]})
        parts[f"LRU's lift against {x} minus {y}"] = Sample(frame, "lift_minus_difference")
    return Member(label, parts)


def _member(claim: Mapping, cell: Mapping, sets: Mapping, limit: int) -> Member:
    rows, kind, label = cell["rows"], claim["contrast"], cell["label"]
    if kind not in NO_CEILING:
        _check_ceiling(rows)
    if kind == "correlation":
        return Member(label, _two_measures(claim, rows))
    if kind == "lift_when_sampled":
        return Member(label, _lift_when_sampled(claim, rows))
    if "across" in claim:
        return _spread(claim, cell, sets, label)
    if kind == "same_output":
        return Member(label, _same_output(claim, cell))
    if kind == "evicted":
        return Member(label, Facts(per_item(rows, cell["a"], "evicted")))
    if kind == "share_of_limit":
        return Member(label, Sample((per_item(rows, cell["a"], "n_generated") / limit).to_frame("a")))
    return Member(label, Sample(_columns(claim, cell), kind))


def _columns(claim: Mapping, cell: Mapping) -> pd.DataFrame:
    """The columns that a contrast of `stats.CONTRASTS` names, one row per item."""
    rows, kind = cell["rows"], claim["contrast"]
    wanted = {side: cell[side] for side in "abxy" if side in cell}
    if kind in ("share_of_ceiling", "loss_ratio"):
        wanted["full"] = {"policy": "full"}
    measured = claim.get("measure", "token_f1")
    frame = pd.DataFrame({name: per_item(rows, one, measured) for name, one in wanted.items()}).dropna()
    if only := claim.get("only"):
        frame = frame[_met(per_item(rows, cell[only["of"]], only["column"]).reindex(frame.index), only["rule"])]
    return frame.apply(_met, rule=claim["counts"]).astype(float) if "counts" in claim else frame


def _met(values: pd.Series, rule: Mapping) -> pd.Series:
    """Which values satisfy a rule of the judge; none that is missing."""
    return values.map(lambda value: judge.state_of(rule, value, value) == "holds").astype(bool)


def _check_ceiling(rows: pd.DataFrame) -> None:
    """Can the model answer? Where its full cache was never run, as in several published files: with protected LRU."""
    who = rows.policy == "full"
    if not who.any():
        who = (rows.policy == "lru") & (rows.prefix > 0) & (rows.suffix > 0)
    full = rows.loc[who, rows.columns.isin(["item", "token_f1", "error"])].drop_duplicates("item")
    judge.answers_enough(full.token_f1, full.get("error"))


def _of_attention(claim: Mapping, attention: pd.DataFrame) -> list[Member]:
    """From rows (item, layer, head, region, mass, uniform): means over layers and heads, per item."""
    mass = attention.pivot_table(index="item", columns="region", values="mass", aggfunc="mean")
    if claim["contrast"] == "sink_share":
        of_layers = attention[attention.region == "sink"].groupby("layer").mass.mean()  # over heads and items
        if not of_layers.max() >= MIN_SINK:
            raise NotTestable(
                "the last prompt token gives position 0 less than a tenth of its attention in every layer"
            )
        frame = pd.DataFrame({"a": mass.sink, "full": mass.sink + mass.prefix})
        return [Member("all", Sample(frame, "share_of_ceiling", bounds=None))]
    share = attention.pivot_table(index="item", columns="region", values="uniform", aggfunc="first")
    return [
        Member(one, Sample(pd.DataFrame({"a": mass[one], "full": share[one]}), "share_of_ceiling", bounds=None))
        for one in claim["over"]["region"]
    ]


def members(
    claim: Mapping,
    sets: Mapping,
    rows: pd.DataFrame | None,
    *,
    protect_frac: float = 0.10,
    max_new_tokens: int = 128,
    kv_heads: int | None = None,
) -> list[Member | NotTestable]:
    """What a claim is tested on, in rows of one reading (or of `study.attention`)."""
    _check_heads(claim, kv_heads)
    if rows is None:
        raise NotTestable(f"not run: it needs {claim.get('needs', 'the study of ' + claim.get('study', 'main'))}")
    if claim.get("study") == "attention":
        return list(_of_attention(claim, rows))
    found: list[Member | NotTestable] = []
    for cell in cells_of(claim, rows, sets, protect_frac):
        try:
            found.append(_member(claim, cell, sets, max_new_tokens))
        except NotTestable as reason:
            found.append(NotTestable(f"{reason}; it needs {claim['needs']}") if "needs" in claim else reason)
    return found


def _check_heads(claim: Mapping, kv_heads: int | None) -> None:
    """Some statements are about models with so many key and value heads (`kv_heads`), or about all others."""
    asked, other = claim.get("kv_heads"), claim.get("kv_heads_not")
    if asked is not None and kv_heads not in asked:
        said = " or ".join(map(str, asked))
        raise NotTestable(f"said of models with {said} KV heads; this one has {kv_heads or 'an unknown number'}")
    if other is not None and kv_heads == other:
        raise NotTestable(f"said of models without {other} KV heads")


def evaluate(
    results: pd.DataFrame,
    book: Mapping | str = "protection",
    *,
    scaling: pd.DataFrame | None = None,
    attention: pd.DataFrame | None = None,
    more: Mapping[str, pd.DataFrame] | None = None,
    protect_frac: float = 0.10,
    max_new_tokens: int = 128,
    kv_heads: int | None = None,
    measure: str = "token_f1",
    profile: str = "quick",
) -> pd.DataFrame:
    """Verdict of every claim in every reading that was run (`judge.verdicts`), a reader's own policies' after them.

    results, scaling: rows of the runner (`scaling` with a column `length`, tokens); attention: rows of
    `study.attention`; more: rows of the studies of `scope`, by name.
    kv_heads: of the model, for statements about their number. measure: a column of scores, for claims that name none.
    """
    known = claims.load_claims(book) if isinstance(book, str) else book
    compressed = results[results.policy != "full"]
    run_in = [one for one in claims.READINGS if (compressed.reading == one).any()]
    if not run_in:
        raise InputError("results hold no condition but the full cache: nothing to evaluate")
    tables = {"main": results, "scaling": scaling, **(more or {})}
    tables = {name: None if rows is None else named(rows) for name, rows in tables.items()} | {"attention": attention}
    own = [one for one in dict.fromkeys(compressed.policy) if is_own(one)]

    def asked(claim: Mapping) -> list[str]:
        if claim.get("study", "main") not in ("main", "scaling"):
            return ["any"]
        mine = [one for one in own if dict(claim.get("over", {})).get("policy") == [one]]
        return [one for one in run_in if not mine or (compressed.policy.isin(mine) & (compressed.reading == one)).any()]

    @functools.cache
    def of(study: str, reading: str) -> pd.DataFrame | None:
        rows = tables.get(study)
        return rows if rows is None or reading == "any" else rows[(rows.reading == reading) | (rows.policy == "full")]

    in_these = functools.partial(members, protect_frac=protect_frac, max_new_tokens=max_new_tokens, kv_heads=kv_heads)

    def found(claim: Mapping, reading: str) -> list[Member | NotTestable]:
        study = claim.get("study", "main")
        if tables.get(study) is not None and study == "attention":
            _check_ceiling(results)
        return in_these({"measure": measure} | dict(claim), known.get("sets", {}), of(study, reading))

    told = {"own": claims.of_own(known["claims"], own), "model": results["model"].iloc[0], "profile": profile}
    return history.verdicts(known["claims"], found, asked, **told)


def scored(book: Mapping) -> dict[str, Any]:
    """The part of a claims file that depends on the measure of quality: what is asked of scores, and names none."""
    kinds = {*CONTRASTS, "spread", "lift_minus_spread", "lift_when_sampled"}
    return {**book, "claims": [c for c in book["claims"] if c["contrast"] in kinds and "measure" not in c]}


def turned(verdicts: pd.DataFrame, others: pd.DataFrame) -> list[str]:
    """Verdicts that differ between two tables, as text: `P4 (authors' code): reproduced, here partly`."""
    both = others.merge(verdicts[["claim", "reading", "verdict"]], on=["claim", "reading"], suffixes=("", "_first"))
    return [
        f"{row.claim} ({claims.LABELS.get(row.reading, 'either')}): {row.verdict_first}, here {row.verdict}"
        for row in both[both.verdict != both.verdict_first].itertuples()
    ]
