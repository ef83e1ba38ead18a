"""Claims that take several models (`data/claims/family.yml`), judged over the runs of `kvrepro.tools.family`.

Which models are compared is read off their configurations: those of one kind have equal ones, and differ in their seed.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from kvrepro.chapters.leakage import members as leakage
from kvrepro.chapters.leakage.study import Study
from kvrepro.chapters.protection import members as protection
from kvrepro.experiment import claims, history, models
from kvrepro.experiment.judge import Member, NotTestable, Sample
from kvrepro.paths import DATA

TABLE, JUDGED = DATA / "family.csv", DATA / "family_claims.csv"  # verdicts by model; of the claims judged here
FULL = DATA / "full_profile.csv"  # verdicts of the default model's full profile
RATES = ["wrongly_reproduced", "wrongly_not_reproduced", "can_hold", "can_fail"]  # of `kvrepro.tools.error_rates`
ROWS = "family.parquet"  # what a run keeps of its rows for these claims, beside its verdicts
FOLLOWS = 0.5  # share of instructions that a model must follow uncompressed, as in the leakage chapter
Found = list["Member | NotTestable"]


@dataclass(frozen=True)
class Kind:
    """What a model's configuration says of its kind; models of equal kinds differ in their seed."""

    kv_heads: int
    heads: int
    layers: int
    width: int
    window: int  # tokens that a sliding layer sees; 0 where none slides

    @classmethod
    def of(cls, folder: Path) -> "Kind":
        config = json.loads((folder / "config.json").read_text())
        slides = "sliding_attention" in config.get("layer_types", [])
        return cls(
            config["num_key_value_heads"], config["num_attention_heads"], config["num_hidden_layers"],
            config["hidden_size"], config["sliding_window"] if slides else 0,
        )  # fmt: skip

    def differs_in(self, other: "Kind") -> str:
        """seed, KV heads, sliding layers or size; what differs in several counts as the last of these."""
        if (self.layers, self.heads, self.width) != (other.layers, other.heads, other.width):
            return "size"
        if self.window != other.window:
            return "sliding layers"
        return "KV heads" if self.kv_heads != other.kv_heads else "seed"


def kinds(names: Iterable[str] | None = None) -> dict[str, Kind]:
    """The kind of every embedded model, or of those named."""
    own = models.embedded()
    return {name: Kind.of(own[name]) for name in (own if names is None else names)}


def pairs(names: Iterable[str], what: str) -> list[tuple[str, str]]:
    """Pairs of models: `heads`, alike but for their KV heads, of which no number lies between, the one with fewer
    first; `seeds`, of one kind; `kinds`, of different kinds, each kind by its first model."""
    known = kinds(names)
    every = list(itertools.combinations(sorted(known, key=lambda name: known[name].kv_heads), 2))
    if what == "kinds":
        first = {kind: name for name, kind in reversed(known.items())}.values()
        return [(a, b) for a, b in every if a in first and b in first]
    wanted = "seed" if what == "seeds" else "KV heads"
    found = [(a, b) for a, b in every if known[a].differs_in(known[b]) == wanted]
    if what == "seeds":
        return found
    between = {name: {known[b].kv_heads for a, b in found if a == name} for name in known}
    return [(a, b) for a, b in found if known[b].kv_heads == min(between[a])]


# ---------------------------------------------------------------- the protection paper's


def _one(claim: Mapping, sets: Mapping, rows: pd.DataFrame) -> Found:
    """A claim's members of one model; a model whose full cache answers too little has none."""
    try:
        return protection.members({"measure": "token_f1"} | dict(claim), sets, rows)
    except NotTestable as reason:
        return [reason]


def paired(fewer: Sample, more: Sample) -> Sample:
    """One model's value minus the other's, on the items of both."""
    a, b = fewer.data.align(more.data, join="inner")
    if list(a) == ["a"]:
        return Sample(pd.DataFrame({"a": a.a, "b": b.a}), "difference", bounds=fewer.bounds, each=fewer.each)
    columns = {"a": a.a, "b": a.b, "x": b.a, "y": b.b}
    return Sample(pd.DataFrame(columns), "lift_minus_difference", bounds=fewer.bounds, each=fewer.each)


def _of_protection(claim: Mapping, sets: Mapping, rows: Mapping[str, pd.DataFrame]) -> Found:
    """By model, or by pair of models, each as many members as the claim's cells."""
    known, asked = kinds(rows), claim["models"]
    if asked != "heads":
        chosen = [name for name, k in known.items() if asked == "each" or k.kv_heads == k.heads]
        return [_named(name, one) for name in chosen for one in _one(claim, sets, rows[name])]
    by = {name: _one(claim, sets, rows[name]) for name in rows}
    found: Found = []
    for fewer, more in pairs(rows, asked):
        said = f"{known[fewer].kv_heads} against {known[more].kv_heads} KV heads ({fewer}, {more})"
        lost = [one for name in (fewer, more) for one in by[name] if isinstance(one, NotTestable)]
        found += [NotTestable(f"{said}: {lost[0]}")] if lost else []
        left, right = (_samples(by[name], bool(claim.get("together"))) for name in (fewer, more))
        labels = {name: ", ".join(filter(None, [said, name])) for name in left if name in right}
        found += [Member(label, paired(left[name], right[name])) for name, label in labels.items()]
    parts = _samples(found)
    return [Member("", parts, some=True)] if claim.get("some") and parts else found


def _samples(found: Found, together: bool = False) -> dict[str, Sample]:
    """By label; together: one sample, the mean of all on each item."""
    every = {one.label: one.what for one in found if isinstance(one, Member) and isinstance(one.what, Sample)}
    if not together or not every:
        return every
    mean = pd.concat([what.data for what in every.values()]).groupby(level=0).mean()
    return {"": replace(next(iter(every.values())), data=mean, each=len(every))}


def _named(model: str, found: Member | NotTestable) -> Member | NotTestable:
    if isinstance(found, NotTestable):
        return NotTestable(f"{model}: {found}")
    return Member(model if found.label == "all" else f"{model}, {found.label}", found.what)


# ---------------------------------------------------------------- the leakage paper's


def _of_leakage(claim: Mapping, rows: Mapping[str, pd.DataFrame]) -> Found:
    """What is lost of following, one model minus the other, by pair of models and policy."""
    studies = {name: Study("", frame, asked=frame.asked.iloc[0]) for name, frame in rows.items() if len(frame)}
    able = {name: s for name, s in studies.items() if s.follow.uncompressed().value >= FOLLOWS}
    found: Found = []
    for a, b in pairs(able, claim["models"]):
        parts = leakage.CONTRASTS[claim["contrast"]](replace(able[a], other=able[b]))
        found.append(Member(f"{a} against {b}", parts, some=bool(claim.get("some"))))
    if not found:
        raise NotTestable(f"{len(able)} models follow half of their instructions: no two of them to compare")
    return found


# ---------------------------------------------------------------- verdicts


def rows_of(results: Path, chapter: str, seed: int = 0) -> dict[str, pd.DataFrame]:
    """What the runs with a seed keep of a chapter's rows, by model: those that ship with the project."""
    files = {name: results / f"{name}-{seed}" / chapter / ROWS for name in models.embedded()}
    return {name: pd.read_parquet(file) for name, file in files.items() if file.is_file()}


def verdicts(protection_rows: Mapping[str, pd.DataFrame], leakage_rows: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The family's claims in both readings, `claims.COLUMNS`."""
    sets = claims.load_claims("protection")["sets"]

    def members(claim: Mapping, reading: str) -> Sequence[Member | NotTestable]:
        of_leakage = claim["contrast"] == "model_spread"
        tables = leakage_rows if of_leakage else protection_rows
        here = {name: t[(t.reading == reading) | (t.policy == "full")] for name, t in tables.items()}
        found = _of_leakage(claim, here) if of_leakage else _of_protection(claim, sets, here)
        if not found:
            raise NotTestable("the runs lack the models that it compares")
        return found

    every: Callable[[Mapping], Sequence[str]] = lambda claim: claims.READINGS  # noqa: E731
    book = claims.load_claims("family")["claims"]
    return history.verdicts(book, members, every, model="the family", profile="quick")
