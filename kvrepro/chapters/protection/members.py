"""What the protection claims are tested on: cells of the results table, and the members of each claim over them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.protection.settings import Settings
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import is_own
from kvrepro.errors import InputError, counted
from kvrepro.experiment import claims, history, judge, stats
from kvrepro.experiment.figure import look
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample
from kvrepro.experiment.models import Loaded

# Contrasts that hold of any weights; random ones write on, and attend to all alike.
NO_CEILING = {"same_output", "evicted"}
CONDITION = ["policy", "capacity", "prefix", "suffix", "suffix_mode"]  # columns of a row that tell conditions apart
MIN_CONDITIONS = 4  # of one cluster, for a correlation over its conditions
MIN_SINK = 0.10  # attention mass on position 0, in some layer, from which on a model is said to have a sink


# ---------------------------------------------------------------- cells


def per_item(rows: pd.DataFrame, cell: Mapping, column: str) -> pd.Series:
    """One column of one condition, indexed by item; failed items are nan. Raises NotTestable where the condition was
    not run or failed on every item, InputError where an item has several rows."""
    wanted_columns = rows.columns.intersection(["item", "error", column])
    if cell["policy"] == "full":
        selected = rows.loc[rows.policy == "full", wanted_columns].drop_duplicates("item")
    else:
        wanted = {"suffix_mode": "dynamic"} | {name: cell[name] for name in ("policy", "capacity")}
        wanted |= {name: cell[name] for name in ("suffix_mode", "regime") if name in cell}
        same = [rows[name] == value for name, value in wanted.items()]
        same += [np.isclose(rows[side], cell[side]) for side in ("prefix", "suffix")]
        selected = rows.loc[np.logical_and.reduce(same), wanted_columns]
    if selected.empty:
        raise NotTestable(f"not run: {_described(cell)}")
    if selected["item"].duplicated().any():
        counts = f"{len(selected)} rows of {dict(cell)} for {selected['item'].nunique()} items"
        raise InputError(f"results hold {counts}: one per item is needed")
    if "error" in selected and selected.error.notna().all():
        raise NotTestable(f"all {len(selected)} items failed ({selected.error.iloc[0]}): {_described(cell)}")
    return selected.set_index("item")[column]


def _described(cell: Mapping) -> str:
    """A condition in words: `SLW with 128 tokens kept, 10% protected at each end`."""
    if cell["policy"] == "full":
        return "the full cache"
    prefix, suffix = (f"{100 * cell[side]:.3g}% protected" for side in ("prefix", "suffix"))
    guard = f"{prefix} at each end" if prefix == suffix else f"{prefix} at the beginning and {suffix} at the end"
    guard = guard if cell["prefix"] or cell["suffix"] else "unprotected"
    pinned = "pinned to the prompt" if cell.get("suffix_mode") == "static" else ""
    regimes = {"decode cap": "capped layer by layer while decoding", "at the prompt's end": "evicted once"}
    regime = regimes.get(cell.get("regime", ""), cell.get("regime", ""))
    kept = f"{look(cell['policy']).name} with {cell['capacity']:g} tokens kept"
    return ", ".join(filter(None, [kept, guard, pinned, regime]))


def capacities(rows: pd.DataFrame, prefix: float) -> dict[str, Any]:
    """Smallest, middle, largest and all capacities of the main grid: those at which the most policies were run with
    `prefix` protected on both sides. Raises NotTestable where nothing is protected on both sides."""
    guarded = np.isclose(rows.prefix, prefix) & np.isclose(rows.suffix, prefix) & rows.capacity.notna()
    main = rows.loc[guarded, ["policy", "capacity"]]
    main = main[~main.policy.str.endswith("_faithful")]
    policies = main.groupby("capacity").policy.nunique()
    sizes = sorted(policies.index[policies == policies.max()])
    if not sizes:
        raise NotTestable("not run: no condition is protected on both sides")
    return {"smallest": sizes[0], "middle": sizes[len(sizes) // 2], "largest": sizes[-1], "all": sizes}


def cells_of(claim: Mapping, rows: pd.DataFrame, sets: Mapping, protect_frac: float) -> list[dict]:
    """Every member of a claim as `{"label", "a", "b", "rows"}`: cells with numbers for capacity and protection, and the
    rows that hold them. Raises NotTestable where the run lacks the capacities or domains that the claim needs."""
    over = claim.get("over", {})
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
        [(policy or "", {"policy": policy} if policy else {}) for policy in named_sets],
        [(member["label"], member) for member in claim.get("members", [{"label": ""}])],
        [(f"C={size:.0f}" if size and wanted == "all" else "", {"capacity": size} if size else {}) for size in sized],
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
    cells = []
    for (policy, policy_cell), (label, sides), (size, size_cell), (group, group_rows) in itertools.product(
        *axes, groups
    ):
        member: dict = {"label": ", ".join(filter(None, [policy, label, group, size])) or "all", "rows": group_rows}
        for side, side_cell in claim.get("cells", {}).items():
            cell = {**policy_cell, **size_cell, **side_cell, **sides.get(side, {})}
            if isinstance(cell.get("capacity"), str):
                cell["capacity"] = sizes[cell["capacity"]]
            if "length" in over:
                cell["capacity"] = capacities(group_rows, protect_frac)["middle"]
            cell["prefix"], cell["suffix"] = cell["prefix"] * protect_frac, cell["suffix"] * protect_frac
            member[side] = cell
        cells.append(member)
    return cells


# ---------------------------------------------------------------- members


def _correlation(values: np.ndarray) -> float:
    """Correlation of the means of the first half of the columns with those of the second half; nan where one half is
    constant. values: [items, columns]."""
    return stats.correlation(*np.split(values.mean(0), 2))


def _two_measures(claim: Mapping, rows: pd.DataFrame) -> Sample:
    """Two measures of the evicting conditions, those of a reader's own policies left out. The full cache stays out:
    conditions that score far above the others would bring any correlation near 1."""
    both = [claim["measure"], claim["against"]]
    if rows[both].dropna().empty:
        raise NotTestable(f"no row has {both[0]} and {both[1]}")
    evicting = rows[(rows.policy != "full") & ~rows.policy.map(is_own)]
    wide = evicting.pivot_table(index="item", columns=CONDITION, values=both)
    shared = wide[both[0]].columns.intersection(wide[both[1]].columns)
    if len(shared) < MIN_CONDITIONS:
        few = counted(len(shared), "condition")
        raise NotTestable(f"{few}: a correlation over conditions needs {MIN_CONDITIONS}")
    values = pd.concat([wide[measure][shared] for measure in both], axis=1).dropna()
    return Sample(values, _correlation, limits=(-1.0, 1.0))


def _same_output(claim: Mapping, cell: Mapping) -> Sample:
    """Whether two conditions write the same text, for items on which either evicts a second time: at the first time
    both rank tokens alike."""
    rows = cell["rows"]
    column = "prediction" if "prediction" in rows and rows.prediction.notna().any() else "output"
    text = pd.DataFrame({side: per_item(rows, cell[side], column) for side in "ab"}).dropna()
    calls = pd.DataFrame({side: per_item(rows, cell[side], "policy_calls") for side in "ab"})
    again = (calls.reindex(text.index) >= 2).any(axis=1)
    return Sample((text.a == text.b)[again].astype(float).to_frame("a"))


def _lift_when_sampled(claim: Mapping, rows: pd.DataFrame) -> Sample:
    """LRU's lift by protection, per item: sampled at the claim's temperature (mean over seeds) and greedy."""
    if "temperature" not in rows or not {0.0, claim["temperature"]} <= set(rows.temperature.dropna()):
        raise NotTestable(f"not run: greedy and temperature {claim['temperature']}")
    lru = rows[rows.policy == "lru"].assign(warm=lambda t: t.temperature > 0, guarded=lambda t: t.prefix > 0)
    means = lru.pivot_table(index="item", columns=["warm", "guarded"], values="token_f1", dropna=False)
    if means.shape[1] < 4:
        raise NotTestable("not run: LRU with and without protection, greedy and sampled")
    lift = {side: means[warm, True] - means[warm, False] for side, warm in (("a", True), ("b", False))}
    return Sample(pd.DataFrame(lift).dropna(), "difference", bounds=(-1.0, 1.0))


def _spread(claim: Mapping, cell: Mapping, sets: Mapping, label: str) -> Member:
    """Differences between every two of the policies in `across`; where the claim compares them with LRU's lift, the
    lift minus each difference."""
    measured = claim.get("measure", "token_f1")
    columns, missing = {}, []
    for policy in sets.get(claim["across"], claim["across"]):
        try:
            columns[policy] = per_item(cell["rows"], {"policy": policy, **cell["a"]}, measured)
        except NotTestable:
            missing.append(policy)
    if len(columns) < 2:
        count = "one" if columns else "none"
        raise NotTestable(f"{count} of the policies of a spread was run: it needs two")
    label = ", ".join([label, *(f"without {policy}" for policy in missing)])
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
    frame = pd.DataFrame({side: per_item(rows, wanted_cell, measured) for side, wanted_cell in wanted.items()}).dropna()
    if only := claim.get("only"):
        frame = frame[_satisfies(per_item(rows, cell[only["of"]], only["column"]).reindex(frame.index), only["rule"])]
    return frame.apply(_satisfies, rule=claim["counts"]).astype(float) if "counts" in claim else frame


def _satisfies(values: pd.Series, rule: Mapping) -> pd.Series:
    """Which values satisfy a rule of the judge; missing values do not."""
    return values.map(lambda value: judge.state_of(rule, value, value) == "holds").astype(bool)


def _check_ceiling(rows: pd.DataFrame) -> None:
    """Raise NotTestable where the model cannot answer with its full cache, or with protected LRU where the full cache
    was never run, as in several published files."""
    ceiling = rows.policy == "full"
    if not ceiling.any():
        ceiling = (rows.policy == "lru") & (rows.prefix > 0) & (rows.suffix > 0)
    full = rows.loc[ceiling, rows.columns.isin(["item", "token_f1", "error"])].drop_duplicates("item")
    judge.answers_enough(full.token_f1, full.get("error"))


def _of_attention(claim: Mapping, attention: pd.DataFrame) -> list[Member]:
    """Members of a claim about attention: means over layers and heads, per item. attention: rows (item, layer, head,
    region, mass, uniform)."""
    mass = attention.pivot_table(index="item", columns="region", values="mass", aggfunc="mean")
    if claim["contrast"] == "sink_share":
        of_layers = attention[attention.region == "sink"].groupby("layer").mass.mean()  # over heads and items
        if not of_layers.max() >= MIN_SINK:
            raise NotTestable("position 0 gets less than a tenth of the attention in every layer")
        frame = pd.DataFrame({"a": mass.sink, "full": mass.sink + mass.prefix})
        return [Member("all", Sample(frame, "share_of_ceiling", bounds=None))]
    share = attention.pivot_table(index="item", columns="region", values="uniform", aggfunc="mean")
    return [
        Member(
            region, Sample(pd.DataFrame({"a": mass[region], "full": share[region]}), "share_of_ceiling", bounds=None)
        )
        for region in claim["over"]["region"]
    ]


def members(
    claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, *, protect_frac: float = 0.10,
    max_new_tokens: int = 128, kv_heads: int | None = None, profile: str = "quick",
) -> list[Member | NotTestable]:  # fmt: skip
    """What a claim is tested on, in rows of one reading (or of `study.attention`); for what cannot be tested, why."""
    _check_heads(claim, kv_heads)
    if rows is None:
        raise NotTestable(f"not run: it needs {_needed(claim, profile)}")
    if claim.get("study") == "attention":
        return list(_of_attention(claim, rows))
    members_or_reasons: list[Member | NotTestable] = []
    for cell in cells_of(claim, rows, sets, protect_frac):
        try:
            members_or_reasons.append(_member(claim, cell, sets, max_new_tokens))
        except NotTestable as error:
            reason = NotTestable(f"{error}; it needs {claim['needs']}") if "needs" in claim else error
            members_or_reasons.append(reason)
    return members_or_reasons


def _needed(claim: Mapping, profile: str) -> str:
    """What must be run before a claim can be asked. The studies of claims with `needs` belong to the full profile."""
    if "needs" not in claim:
        return f"the study of {claim.get('study', 'main')}"
    return claim["needs"] if profile == "full" else f"the full profile (profile=full) with {claim['needs']}"


def _check_heads(claim: Mapping, kv_heads: int | None) -> None:
    """Raise NotTestable where a claim is about models with another number of KV heads (`kv_heads`, `kv_heads_not`)."""
    wanted, excluded = claim.get("kv_heads"), claim.get("kv_heads_not")
    if wanted is not None and kv_heads not in wanted:
        numbers = " or ".join(map(str, wanted))
        raise NotTestable(f"said of models with {numbers} KV heads; this one has {kv_heads or 'an unknown number'}")
    if excluded is not None and kv_heads == excluded:
        raise NotTestable(f"said of models without {excluded} KV heads")


def evaluate(
    results: pd.DataFrame, book: Mapping | str = "protection", *, scaling: pd.DataFrame | None = None,
    attention: pd.DataFrame | None = None, more: Mapping[str, pd.DataFrame] | None = None, protect_frac: float = 0.10,
    max_new_tokens: int = 128, kv_heads: int | None = None, measure: str = "token_f1", profile: str = "quick",
) -> pd.DataFrame:  # fmt: skip
    """Verdict of every claim in every reading that was run (`judge.verdicts`), then those on a reader's own policies.

    results, scaling: rows of the runner (`scaling` with a column `length`, tokens); attention: rows of
    `study.attention`; more: rows of the studies of `scope`, by name.
    kv_heads: of the model, for claims about their number. measure: the column of scores for claims that name none.
    """
    book = claims.load_claims(book) if isinstance(book, str) else book
    sets = book.get("sets", {})
    evicting = results[results.policy != "full"]
    readings = [reading for reading in claims.READINGS if (evicting.reading == reading).any()]
    if not readings:
        raise InputError("results hold no condition but the full cache: nothing to evaluate")
    tables = {"main": results, "scaling": scaling, "attention": attention, **(more or {})}
    own_policies = [policy for policy in dict.fromkeys(evicting.policy) if is_own(policy)]

    def readings_of(claim: Mapping) -> list[str]:
        if claim.get("study", "main") not in ("main", "scaling"):
            return ["any"]
        policies = claim.get("over", {}).get("policy")
        if policies not in [[policy] for policy in own_policies]:
            return readings
        run = set(evicting.reading[evicting.policy == policies[0]])
        return [reading for reading in readings if reading in run]

    @functools.cache
    def rows_of(study: str, reading: str) -> pd.DataFrame | None:
        rows = tables.get(study)
        return rows if rows is None or reading == "any" else rows[(rows.reading == reading) | (rows.policy == "full")]

    def members_of(claim: Mapping, reading: str) -> list[Member | NotTestable]:
        study = claim.get("study", "main")
        if study == "attention" and attention is not None:
            _check_ceiling(results)
        rows, claim = rows_of(study, reading), {"measure": measure} | dict(claim)
        return members(
            claim, sets, rows, protect_frac=protect_frac, max_new_tokens=max_new_tokens, kv_heads=kv_heads,
            profile=profile,
        )  # fmt: skip

    own_claims = claims.claims_on_own(book["claims"], own_policies)
    model = results["model"].iloc[0]
    return history.verdicts(book["claims"], members_of, readings_of, own=own_claims, model=model, profile=profile)


def verdicts(book: Mapping, tables: Mapping[str, Any], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """`evaluate` of a book's claims on the tables of one run, by their studies' names."""
    main, scaling, attention = (tables.get(name) for name in ("main", "scaling", "attention"))
    heads = max(ModelFacts.of(loaded.model).kv_heads.values())
    return evaluate(
        main, book, scaling=scaling, attention=attention, more=tables, protect_frac=settings.protect_frac,
        max_new_tokens=settings.max_new_tokens, kv_heads=heads, profile=settings.profile,
    )  # fmt: skip
