"""What the protection claims are tested on: cells of the results table, and the members of each claim over them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
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

CONDITION = ["policy", "capacity", "prefix", "suffix", "suffix_mode"]  # columns of a row that tell conditions apart
QUICK = Settings()
MIN_CONDITIONS = 4  # of one cluster, for a correlation over its conditions
MIN_SINK = 0.10  # attention mass on position 0, in some layer, from which on a model is said to have a sink


# ---------------------------------------------------------------- cells


class Table:
    """Rows of one study in one reading, grouped by condition once for all claims; shares are rounded in the groups."""

    def __init__(self, rows: pd.DataFrame, protect_frac: float = 0.10):
        self.rows, self.protect_frac = rows, protect_frac

    @functools.cached_property
    def conditions(self) -> dict[tuple, pd.DataFrame]:
        """The rows of each condition; of the full cache one per item, under the key of its name."""
        rounded = self.rows.assign(prefix=self.rows.prefix.round(6), suffix=self.rows.suffix.round(6))
        full = self.rows[self.rows.policy == "full"].drop_duplicates("item")
        return {("full",): full, **dict(iter(rounded.groupby(CONDITION)))}

    def column(self, cell: Mapping, name: str) -> pd.Series:
        """One column of one condition, indexed by item; failed items are nan. Raises NotTestable where the condition
        was not run or failed on every item, InputError where an item has several rows."""
        key: tuple = ("full",)
        if cell["policy"] != "full":
            sides = round(cell["prefix"], 6), round(cell["suffix"], 6)
            key = cell["policy"], cell["capacity"], *sides, cell.get("suffix_mode", "dynamic")
        rows = self.conditions.get(key, self.rows[:0])
        if "regime" in cell:
            rows = rows[rows.regime == cell["regime"]]
        if rows.empty:
            raise NotTestable(f"not run: {_described(cell)}")
        if rows["item"].duplicated().any():
            counts = f"{len(rows)} rows of {dict(cell)} for {rows['item'].nunique()} items"
            raise InputError(f"results hold {counts}: one per item is needed")
        if "error" in rows and rows.error.notna().all():
            raise NotTestable(f"all {len(rows)} items failed ({rows.error.iloc[0]}): {_described(cell)}")
        return pd.Series(rows[name].to_numpy(), rows["item"])

    @functools.cached_property
    def capacities(self) -> dict[str, Any]:
        """Smallest, middle, largest and all capacities of the main grid: those at which the most policies were run with
        both sides protected. Raises NotTestable where nothing is protected on both sides."""
        sides = [np.isclose(self.rows[side], self.protect_frac) for side in ("prefix", "suffix")]
        main = self.rows[sides[0] & sides[1] & self.rows.capacity.notna()]
        policies = main[~main.policy.str.endswith("_faithful")].groupby("capacity").policy.nunique()
        sizes = sorted(policies.index[policies == policies.max()])
        if not sizes:
            raise NotTestable("not run: no condition is protected on both sides")
        return {"smallest": sizes[0], "middle": sizes[len(sizes) // 2], "largest": sizes[-1], "all": sizes}

    def parts(self, over: Mapping) -> dict[str, Table]:
        """The tables that a claim asks for apart: of each task, of each length, unprotected and protected; or all."""
        if "protection" in over:
            full, guarded = self.rows.policy == "full", (self.rows.prefix > 0) | (self.rows.suffix > 0)
            parts = {"unprotected": self.rows[full | ~guarded], "protected": self.rows[full | guarded]}
        elif column := next((name for name in ("task", "length") if name in over), ""):
            parts = {str(name): part for name, part in self.rows.groupby(column)}
            if column == "task" and len(parts) < 2:
                raise NotTestable(f"items of one domain alone ({next(iter(parts))}): it needs several")
        else:
            return {"": self}
        return {name: Table(part, self.protect_frac) for name, part in parts.items()}

    def check_ceiling(self) -> None:
        """Raise NotTestable where the model cannot answer with its full cache, or with protected LRU where the full
        cache was never run, as in several published files."""
        full = self.conditions["full",]
        if full.empty:
            guarded = (self.rows.policy == "lru") & (self.rows.prefix > 0) & (self.rows.suffix > 0)
            full = self.rows[guarded].drop_duplicates("item")
        judge.answers_enough(full.token_f1, full.get("error"))


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


def _cells(claim: Mapping, table: Table, sets: Mapping) -> Iterator[tuple[str, Table, dict[str, dict]]]:
    """Every member of a claim: its label, its rows, and its cells by side, with numbers for capacity and protection.
    Raises NotTestable where the run lacks the capacities or domains that the claim needs."""
    over, sizes, frac = claim.get("over", {}), table.capacities, table.protect_frac
    shared, members = claim.get("cells", {}), claim.get("members", [{}])
    asked = {cell.get("capacity") for cell in [*shared.values(), *(m.get(side, {}) for m in members for side in "ab")]}
    if len(sizes["all"]) == 1 and {"smallest", "largest"} <= asked:
        raise NotTestable(f"two capacities are needed, {sizes['middle']:.0f} alone was run")
    policies = over.get("policy", [""])
    policies = sets.get(policies, policies) if isinstance(policies, str) else policies
    wanted = over.get("capacity", "")
    chosen = sizes["all"] if wanted == "all" else [sizes.get(wanted)]
    for policy, member, size, (name, part) in itertools.product(policies, members, chosen, table.parts(over).items()):
        at = f"C={size:.0f}" if wanted == "all" else ""
        cells = {}
        for side, given in shared.items():
            cell = {"policy": policy, "capacity": size, **given, **member.get(side, {})}
            capacity = part.capacities["middle"] if "length" in over else cell["capacity"]
            cell["capacity"] = sizes.get(capacity, capacity)
            cells[side] = cell | {"prefix": cell["prefix"] * frac, "suffix": cell["suffix"] * frac}
        yield ", ".join(filter(None, [policy, member.get("label"), name, at])) or "all", part, cells


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


def _same_output(table: Table, cells: Mapping) -> Sample:
    """Whether two conditions write the same text, for items on which either evicts a second time: at the first time
    both rank tokens alike."""
    texts = table.rows.get("prediction")
    column = "output" if texts is None or texts.isna().all() else "prediction"
    text = pd.DataFrame({side: table.column(cells[side], column) for side in "ab"}).dropna()
    calls = pd.DataFrame({side: table.column(cells[side], "policy_calls") for side in "ab"})
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


def _spread(claim: Mapping, label: str, table: Table, cells: Mapping, sets: Mapping) -> Member:
    """Differences between every two of the policies in `across`; where the claim compares them with LRU's lift, the
    lift minus each difference."""
    columns, missing = {}, ""
    for policy in sets[claim["across"]]:
        try:
            columns[policy] = table.column(cells["a"] | {"policy": policy}, claim["measure"])
        except NotTestable:
            missing += f", without {policy}"
    if len(columns) < 2:
        count = "one" if columns else "none"
        raise NotTestable(f"{count} of the policies of a spread was run: it needs two")
    if "b" not in cells:
        return judge.pairs(pd.DataFrame(columns), label + missing)
    lift = {side: table.column(cells[side] | {"policy": "lru"}, claim["measure"]) for side in "ab"}
    parts = {}
    for x, y in itertools.permutations(columns, 2):
        frame = pd.DataFrame(lift | {"x": columns[x], "y": columns[y]})
        parts[f"LRU's lift against {x} minus {y}"] = Sample(frame, "lift_minus_difference")
    return Member(label + missing, parts)


def _columns(claim: Mapping, table: Table, cells: Mapping) -> pd.DataFrame:
    """The columns that a contrast of `stats.CONTRASTS` names, one row per item."""
    if claim["contrast"] in ("share_of_ceiling", "loss_ratio"):
        cells = {**cells, "full": {"policy": "full"}}
    frame = pd.DataFrame({side: table.column(cell, claim["measure"]) for side, cell in cells.items()}).dropna()
    if only := claim.get("only"):
        frame = frame[_satisfies(table.column(cells[only["of"]], only["column"]).reindex(frame.index), only["rule"])]
    return frame.apply(_satisfies, rule=claim["counts"]).astype(float) if "counts" in claim else frame


def _satisfies(values: pd.Series, rule: Mapping) -> pd.Series:
    """Which values satisfy a rule of the judge; missing values do not."""
    return values.map(lambda value: judge.state_of(rule, value, value) == "holds").astype(bool)


def _member(claim: Mapping, label: str, table: Table, cells: Mapping, sets: Mapping, settings: Settings) -> Member:
    kind = claim["contrast"]
    if kind not in ("same_output", "evicted"):  # which hold of random weights too: they write on, and attend alike
        table.check_ceiling()
    if kind == "correlation":
        return Member(label, _two_measures(claim, table.rows))
    if kind == "lift_when_sampled":
        return Member(label, _lift_when_sampled(claim, table.rows))
    if "across" in claim:
        return _spread(claim, label, table, cells, sets)
    if kind == "same_output":
        return Member(label, _same_output(table, cells))
    if kind == "evicted":
        return Member(label, Facts(table.column(cells["a"], "evicted")))
    if kind == "share_of_limit":
        return Member(label, Sample((table.column(cells["a"], "n_generated") / settings.max_new_tokens).to_frame("a")))
    return Member(label, Sample(_columns(claim, table, cells), kind))


def _of_attention(claim: Mapping, attention: pd.DataFrame) -> list[Member]:
    """Members of a claim about attention: means over layers and heads, per item. attention: rows (item, layer, head,
    region, mass, uniform)."""
    means = attention.pivot_table(index="item", columns="region", values=["mass", "uniform"], aggfunc="mean")
    mass, even = means["mass"], means["uniform"]
    if claim["contrast"] == "sink_share":
        of_layers = attention[attention.region == "sink"].groupby("layer").mass.mean()  # over heads and items
        if not of_layers.max() >= MIN_SINK:
            raise NotTestable("position 0 gets less than a tenth of the attention in every layer")
        shares = {"all": {"a": mass.sink, "full": mass.sink + mass.prefix}}
    else:
        shares = {region: {"a": mass[region], "full": even[region]} for region in claim["over"]["region"]}
    return [Member(name, Sample(pd.DataFrame(f), "share_of_ceiling", bounds=None)) for name, f in shares.items()]


def members(
    claim: Mapping, sets: Mapping, table: Table | None, settings: Settings = QUICK, kv_heads: int | None = None
) -> list[Member | NotTestable]:
    """What a claim is tested on, in the rows of its study in one reading; for what cannot be tested, why."""
    if "kv_heads" in claim and kv_heads not in claim["kv_heads"]:
        numbers = " or ".join(map(str, claim["kv_heads"]))
        raise NotTestable(f"said of models with {numbers} KV heads; this one has {kv_heads or 'an unknown number'}")
    if kv_heads is not None and kv_heads == claim.get("kv_heads_not"):
        raise NotTestable(f"said of models without {kv_heads} KV heads")
    if table is None:  # the studies of claims with `needs` belong to the full profile
        needs = claim.get("needs", f"the study of {claim.get('study', 'main')}")
        late = "needs" in claim and settings.profile != "full"
        raise NotTestable(f"not run: it needs {'the full profile (profile=full) with ' if late else ''}{needs}")
    if claim.get("study") == "attention":
        return [*_of_attention(claim, table.rows)]
    members_or_reasons: list[Member | NotTestable] = []
    for label, part, cells in _cells(claim, table, sets):
        try:
            members_or_reasons.append(_member({"measure": "token_f1", **claim}, label, part, cells, sets, settings))
        except NotTestable as error:
            reason = NotTestable(f"{error}; it needs {claim['needs']}") if "needs" in claim else error
            members_or_reasons.append(reason)
    return members_or_reasons


def evaluate(
    book: Mapping, tables: Mapping[str, pd.DataFrame], settings: Settings = QUICK, kv_heads: int | None = None
) -> pd.DataFrame:
    """Verdict of every claim in every reading that was run (`judge.verdicts`), then those on a reader's own policies.

    tables: rows by study: main, scaling (`study.context`), attention, real, once, and those of
    `study.of_full_profile`. kv_heads: of the model.
    """
    main, sets = tables["main"], book.get("sets", {})
    evicting = main[main.policy != "full"]
    readings = [reading for reading in claims.READINGS if (evicting.reading == reading).any()]
    if not readings:
        raise InputError("results hold no condition but the full cache: nothing to evaluate")
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
    def table_of(study: str, reading: str) -> Table | None:
        if (rows := tables.get(study)) is None:
            return None
        if reading != "any":
            rows = rows[(rows.reading == reading) | (rows.policy == "full")]
        return Table(rows, settings.protect_frac)

    def members_of(claim: Mapping, reading: str) -> list[Member | NotTestable]:
        study = claim.get("study", "main")
        if study == "attention" and study in tables:
            Table(main).check_ceiling()
        return members(claim, sets, table_of(study, reading), settings, kv_heads)

    own, model = claims.claims_on_own(book["claims"], own_policies), main["model"].iloc[0]
    return history.verdicts(book["claims"], members_of, readings_of, own=own, model=model, profile=settings.profile)


def verdicts(book: Mapping, tables: Mapping[str, Any], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """`evaluate` of a book's claims on the tables of one run, by their studies' names."""
    return evaluate(book, tables, settings, max(ModelFacts.of(loaded.model).kv_heads.values()))
