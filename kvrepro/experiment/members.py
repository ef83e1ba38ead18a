"""What a claim is tested on, in one language: entries of `data/claims/*.yml` in, members for the judge out.

A chapter's module `members` has `tidied(tables, loaded, settings)`, the tables by the names that claims use, with a
column for whatever they choose by. A claim says which rows it takes, and what is computed of them:

- `rows`: the table. The file's own `rows` hold entries that all claims on a table share.
- `readings: both`: judged in every reading in which the rows were run; else once, whatever their reading.
- `filter`: a value by column, a list of values, one of the file's `sets`, or a rule of the judge. **A row that has no
  value in a column fits every value**: so the full cache, which has no capacity, stands beside every capacity.
- `over`: a member for each value of a column: a list, one of `sets`, or `all` that occur; several multiply. `members`:
  a list of what each member has in its own way, any of these entries (`label` names it).
- `parts`: as `over`, but within a member: all parts must hold, with `some` one. `pairs`: every two values of a column,
  as sides a and b, or x and y where the contrast has these; `both_ways`: in either order.
- `sides`: what a, b, x, y, full choose besides; `full` is the policy of that name if the contrast needs it. Each unit
  (`per`, an item) has one value on each side. An axis or `where` may name sides: `ab.task` is the task of a and b.
- `column`: what is read, `score` by default; several for a statistic of columns. `counts`: 1 where a value satisfies
  this rule, else 0. `where: {a.evicted: {at_least: 1}}`: only units of which that side's column does.
- `mean_over`: a column over whose values each unit is averaged, with equal weights: over those that all sides have
  (`whole`: for every unit), and a unit that lacks one is missing. A side that chooses its own value stands apart.
- Without `sides` each row counts, and those of a unit are a cluster. `exact`: each row is a case, named by `cases`.
- `contrast`: of `stats.CONTRASTS`, of `CONTRASTS` below, or of the chapter's, functions of a `Case` that give evidence,
  or several parts by their names.
- `requires`: names of the chapter's `REQUIRES`, functions of a `Case` that raise NotTestable. `needs`: what runs lack.
- `bounds`, `limits`, `each`: of `judge.Sample`, numbers, or columns of which the mean is taken. `stored`: what the
  interval is of timings that are stored with the project, on which the verdict then rests.

Claims about policies in general, those that choose policies by one of `sets`, are also put to each of a reader's own.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvrepro.engine.policy import READINGS, find, is_own
from kvrepro.errors import InputError
from kvrepro.experiment import judge
from kvrepro.experiment.judge import Member, NotTestable, Sample
from kvrepro.experiment.stats import MIN_ITEMS, Estimate

Claim: TypeAlias = Mapping[str, Any]
OF_CEILING = ("share_of_ceiling", "loss", "loss_ratio", "difference_of_ceiling")  # contrasts with the side `full`
OF_TWO_PAIRS = ("lift_minus_difference", "difference_of_ceiling")  # contrasts with the sides x and y


def merged(claim: Claim, entries: Claim) -> dict[str, Any]:
    """The claim with other entries; `filter`, `over` and each of `sides` keep what these do not name."""
    both = {**claim, **entries}
    for name in ("filter", "over", "sides"):
        both[name] = {**claim.get(name, {}), **entries.get(name, {})}
    for side in both["sides"]:
        both["sides"][side] = {**claim.get("sides", {}).get(side, {}), **both["sides"][side]}
    return both


def chosen(claim: Claim, cell: Claim) -> dict[str, Any]:
    """The claim with a cell in its filter; `ab.task` goes to the sides a and b."""
    new: dict[str, Any] = {"filter": {}, "sides": {}}
    for name, value in cell.items():
        sides, _, column = name.rpartition(".")
        for side in sides:
            new["sides"].setdefault(side, {})[column] = value
        if not sides:
            new["filter"][column] = value
    return merged(claim, new)


def satisfies(values: pd.Series, rule: Claim) -> pd.Series:
    """Which values satisfy a rule of the judge; missing values do not."""
    return values.map(lambda value: judge.state_of(rule, value, value) == "holds").astype(bool)


class Table:
    """Rows of a study; which of them fit is looked up once."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self.rows = rows.reset_index(drop=True)
        self._fits: dict[str, np.ndarray] = {}  # by column and value
        self._fitting: dict[str, pd.DataFrame] = {}  # by cell

    def fitting(self, cell: Claim) -> pd.DataFrame:
        """The rows that fit a value, a list of values or a rule in each column; None fits all."""
        if repr(cell) not in self._fitting:
            fits = [self._fit(column, wanted) for column, wanted in cell.items() if wanted is not None]
            self._fitting[repr(cell)] = self.rows[np.logical_and.reduce(fits)] if fits else self.rows
        return self._fitting[repr(cell)]

    def _fit(self, column: str, wanted: Any) -> np.ndarray:
        if (key := f"{column} {wanted!r}") not in self._fits:
            values = self.rows[column]
            found = satisfies(values, wanted) if isinstance(wanted, Mapping) else values.isin(_listed(wanted))
            self._fits[key] = (found | values.isna()).to_numpy()
        return self._fits[key]


@dataclass(frozen=True)
class Case:
    """One member of a claim, or a part of it: the claim's entries, all that was chosen among them, and the tables."""

    claim: Claim
    tables: Mapping[str, Table]

    @property
    def table(self) -> Table:
        """The rows of the claim's study. Raises NotTestable where it was not run."""
        name = self.claim["rows"]
        if name not in self.tables or self.tables[name].rows.empty:
            raise NotTestable(f"not run: it needs {self.claim.get('needs', f'the study {name}')}")
        return self.tables[name]

    @property
    def sides(self) -> dict[str, Claim]:
        """What each side chooses; empty where the claim has no sides."""
        full = {"full": {"policy": "full"}} if self.claim["contrast"] in OF_CEILING else {}
        return full | self.claim["sides"] if self.claim["sides"] else {}

    def rows(self, **cell: Any) -> pd.DataFrame:
        """The rows of the case, or of a cell in it. Raises NotTestable where there are none, or where all failed."""
        cell = {**self.claim["filter"], **cell}
        rows, text = self.table.fitting(cell), _described(cell)
        if rows.empty:
            raise NotTestable(f"not run: {text}")
        if "error" in rows and rows.error.notna().all():
            raise NotTestable(f"all {len(rows)} items failed ({rows.error.iloc[0]}): {text}")
        return rows

    def values(self, side: str, column: str | None = None) -> pd.Series:
        """One column on one side, by unit. Raises InputError where a unit has several rows."""
        rows, per = self.rows(**self.sides[side]), self.claim["per"]
        if rows[per].duplicated().any():
            raise InputError(f"several rows of an {per}: {_described({**self.claim['filter'], **self.sides[side]})}")
        return pd.Series(rows[column or self.claim["column"]].to_numpy(), rows[per])

    def frame(self) -> pd.DataFrame:
        """A row per unit, a column per side."""
        if "mean_over" in self.claim:
            frame = pd.DataFrame({side: wide.mean(axis=1, skipna=False) for side, wide in self.averaged()[0].items()})
        else:
            frame = pd.DataFrame({side: self.values(side) for side in self.sides})
        for name, rule in self.claim.get("where", {}).items():
            side, _, column = name.partition(".")
            frame = frame[satisfies(self.values(side, column).reindex(frame.index), rule)]
        return frame

    def averaged(self) -> tuple[dict[str, pd.DataFrame], int]:
        """By side, a row per unit and a column per value of `mean_over` that enters, and how many values those sides
        share that do not choose their own (1 where all do). Raises NotTestable where they share none."""
        mean, per, column = (self.claim[name] for name in ("mean_over", "per", "column"))
        wide = {s: self.rows(**c).pivot_table(index=per, columns=mean, values=column) for s, c in self.sides.items()}
        free = [side for side, cell in self.sides.items() if mean not in cell]
        if self.claim.get("whole"):
            units = self.table.rows.dropna(subset=column)[per].unique()
            wide |= {side: wide[side].reindex(units).dropna(axis=1) for side in free}
        shared = sorted(set.intersection(*(set(wide[side]) for side in free))) if free else []
        if free and not shared:
            raise NotTestable(f"no {mean} was run on all sides")
        return wide | {side: wide[side][shared] for side in free}, len(shared) or 1

    def sample(self, contrast: str | Callable[[np.ndarray], float] = "", frame: pd.DataFrame | None = None) -> Sample:
        """The case as a sample: of its sides or rows, or of a frame [units, columns]; by its contrast, or another."""
        clusters, claim = None, self.claim
        if frame is None and self.sides:
            frame = self.frame()
        elif frame is None:
            rows, names, per = self.rows(), _listed(claim["column"]), claim["per"]
            frame = rows[names].astype(float).set_axis(["a"] if len(names) == 1 else names, axis=1)
            clusters = rows[per] if per in rows and rows[per].duplicated().any() else None
        if "counts" in claim:
            frame = frame.dropna().apply(satisfies, rule=claim["counts"]).astype(float)
        ends = {name: claim[name] for name in ("bounds", "limits") if name in claim}
        ends = {name: given and tuple(map(self.number, given)) for name, given in ends.items()}
        each = self.number(claim.get("each", 1)) * (self.averaged()[1] if "mean_over" in claim else 1)
        return Sample(frame, contrast or claim["contrast"], clusters, each=each, **ends)

    def number(self, given: float | str) -> float:
        """A number, or the mean of a column over the rows of the case."""
        return float(self.rows()[given].mean()) if isinstance(given, str) else given

    def evidence(self) -> Sample | pd.Series:
        """The case as a sample, or, of an exact claim, the value of every row."""
        if not self.claim.get("exact"):
            return self.sample()
        rows = self.rows().dropna(subset=self.claim["column"])
        names = [name for name in self.claim.get("cases", ["item"]) if name in rows]
        texts = [_described(dict(zip(names, row, strict=True))) for row in rows[names].to_numpy()]
        return rows[self.claim["column"]].astype(float).set_axis(texts)


def measured(case: Case) -> Estimate:
    """The one timing of a table with value, low and high. Of six independent `runs` or more the range covers the median
    at 97%, of fewer it is no interval. Without a number of runs it is one already, or the value was counted."""
    [row] = case.rows().itertuples()
    if pd.isna(row.runs):
        return Estimate(row.value, row.low, row.high, 1)
    low, high = (row.low, row.high) if row.runs >= MIN_ITEMS else (math.nan, math.nan)
    return Estimate(row.value, low, high, int(row.runs))


def unpaired(case: Case) -> Sample:
    """a, or a - b, minus x, or x - y, of other units."""
    means = [case.values(top) - (case.values(bottom) if bottom in case.sides else 0) for top, bottom in ("ab", "xy")]
    case = Case({"bounds": (-1, 1), **case.claim}, case.tables)
    return case.sample("unpaired", pd.DataFrame({"a": means[0], "b": means[1]}))


CONTRASTS: dict[str, Callable[[Case], Any]] = {"measured": measured, "unpaired": unpaired}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return find(value).title if is_own(value) else value
    return " or ".join(map(_text, value)) if isinstance(value, list) else f"{value:g}"


def _described(cell: Claim) -> str:
    """A cell in words: values that are names stand alone, and so do the columns that are true."""
    texts = []
    for column, value in cell.items():
        if value is True or isinstance(value, Mapping):
            texts.append(column)
        elif value is not None and column != "reading":
            texts.append(_text(value) if isinstance(value, str) else f"{column} {_text(value)}")
    return ", ".join(texts)


@dataclass(frozen=True)
class Language:
    """A file of claims, the tidied tables of a run, and the chapter's own contrasts and requirements."""

    book: Claim
    tables: Mapping[str, Table]
    chapter: Any

    def entries(self, claim: Claim, reading: str = "any") -> dict[str, Any]:
        """A claim with what its table's claims share, in one reading, and the file's sets in place of their names."""
        rows, sets = claim.get("rows", "main"), self.book.get("sets", {})
        shared = {"rows": rows, "column": "score", "per": "item", **self.book.get("rows", {}).get(rows, {})}
        entries = merged(merged(shared, claim), {"filter": {"reading": reading}} if reading != "any" else {})
        for name in {"filter", "over", "parts", "pairs"} & set(entries):
            entries[name] = {c: sets.get(v, v) if isinstance(v, str) else v for c, v in entries[name].items()}
        return entries

    def values(self, case: Case, name: str, given: Any) -> list[Any]:
        """The values of an axis."""
        if given != "all":
            return _listed(given)
        values = case.table.fitting({**case.claim["filter"], name: None})[name].dropna().unique()
        if not len(values):
            raise NotTestable(f"not run: {_described(case.claim['filter'])}")
        return list(values)

    def cells(self, case: Case, axes: Claim) -> Iterator[tuple[str, Case]]:
        """(label, case) for each combination of the axes' values."""
        for values in itertools.product(*(self.values(case, *axis) for axis in axes.items())):
            cell = dict(zip(axes, values, strict=True))
            yield _described(cell), Case(chosen(case.claim, cell), self.tables)

    def cases(self, claim: Claim, reading: str) -> Iterator[tuple[str, Case]]:
        """(label, case) of each member."""
        for own in claim.get("members", [{}]):
            case = Case(self.entries(merged(claim, own), reading), self.tables)
            for label, cell in self.cells(case, case.claim["over"]):
                yield ", ".join(filter(None, [label, own.get("label")])) or "all", cell

    def parts(self, case: Case) -> Iterator[tuple[str, Case]]:
        """(label, case) of each part of a member; of one without parts, ("", the case)."""
        claim = case.claim
        if not {"parts", "pairs"} & set(claim):
            yield "", case
        if "parts" in claim:
            yield from self.cells(case, claim["parts"])
        for name, given in claim.get("pairs", {}).items():
            sides = "xy" if claim["contrast"] in OF_TWO_PAIRS else "ab"
            every = itertools.permutations if claim.get("both_ways") else itertools.combinations
            for two in every(self.values(case, name, given), 2):
                pair = {side: {name: value} for side, value in zip(sides, two, strict=True)}
                yield " against ".join(map(_text, two)), Case(merged(claim, {"sides": pair}), self.tables)

    def member(self, label: str, case: Case) -> Member:
        """A member. Raises NotTestable where it, or each of its parts, cannot be tested."""
        for name in case.claim.get("requires", ()):
            self.chapter.REQUIRES[name](case)
        evidence = {**CONTRASTS, **self.chapter.CONTRASTS}.get(case.claim["contrast"], Case.evidence)
        parts, reason = {}, NotTestable("its parts were not run")
        for name, part in self.parts(case):
            try:
                parts[name] = evidence(part)
            except NotTestable as why:
                reason = why
        if not parts:
            raise reason
        return Member(label, parts.get("", parts), bool(case.claim.get("some")))

    def members(self, claim: Claim, reading: str = "any") -> list[Member | NotTestable]:
        """What a claim is tested on in one reading; for what cannot be tested, why."""
        tested: list[Member | NotTestable] = []
        for label, case in self.cases(claim, reading):
            try:
                tested.append(self.member(label, case))
            except NotTestable as reason:
                needs = f"; it needs {claim['needs']}" if "needs" in claim and claim["needs"] not in str(reason) else ""
                tested.append(NotTestable(f"{reason}{needs}"))
        return tested

    def readings(self, claim: Claim) -> Sequence[str]:
        """The readings in which a claim is judged: those of its rows, or of the first table where they were not run."""
        entries = self.entries(claim)
        table = self.tables.get(entries["rows"], next(iter(self.tables.values()), Table(pd.DataFrame())))
        if entries.get("readings") != "both" or "reading" not in table.rows:
            return ["any"]
        rows = table.rows[table.rows.policy == claim["own"]] if claim.get("own") else table.rows
        return [reading for reading in READINGS if (rows.reading == reading).any()] or ["any"]

    def general(self) -> Iterator[dict[str, Any]]:
        """The claims about policies in general, put to each of a reader's own: `P4 Mine`."""
        policies = [p for table in self.tables.values() if "policy" in table.rows for p in table.rows.policy.unique()]
        for policy, claim in itertools.product(filter(is_own, dict.fromkeys(policies)), self.book["claims"]):
            axes = {name: claim[name] for name in ("over", "parts", "filter") if name in claim}
            named = [name for name, axis in axes.items() if isinstance(axis.get("policy"), str)]
            if named and claim.get("own") is not False:
                title = find(policy).title
                new = {"id": f"{claim['id']} {title}", "statement": f"Asked of {title}: {claim['statement']}"}
                new |= {"own": policy} | {name: {**claim[name], "policy": [policy]} for name in named}
                late = ("first", "changed", "exploratory")  # how the claim of the book came to be
                yield {name: value for name, value in claim.items() if name not in late} | new


def verdicts(
    book: Claim, tables: Mapping[str, pd.DataFrame], chapter: Any, *, model: str, profile: str
) -> pd.DataFrame:
    """Verdict of every claim of a book on tidied tables (`judge.verdicts`), then those on a reader's own policies."""
    language = Language(book, {name: Table(rows) for name, rows in tables.items()}, chapter)
    asked = [{"stored": language.entries(c).get("stored"), **c} for c in [*book["claims"], *language.general()]]
    return judge.verdicts(asked, language.members, language.readings, model=model, profile=profile)
