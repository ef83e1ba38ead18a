"""Claims that take several models (`data/claims/family.yml`), judged over the runs of `studies.family`.

Which models are compared is read off their configurations: those of one kind have equal ones, and differ in their seed.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from kvrepro.chapters.leakage import members as leakage
from kvrepro.chapters.leakage.members import Study
from kvrepro.chapters.protection import members as protection
from kvrepro.experiment import claims, history, models
from kvrepro.experiment.judge import Member, NotTestable, Sample
from kvrepro.paths import DATA

TABLE, JUDGED = DATA / "family.csv", DATA / "family_claims.csv"  # verdicts by model; of the claims judged here
FULL = DATA / "full_profile.csv"  # verdicts of the default model's full profile
RATES = ["wrongly_reproduced", "wrongly_not_reproduced", "can_hold", "can_fail"]  # of `studies.error_rates`
ROWS = "family.parquet"  # what a run keeps of its rows for these claims, beside its verdicts
FOLLOWS = 0.5  # share of instructions that a model must follow uncompressed, as in the leakage chapter
Members = list["Member | NotTestable"]


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
    folders = models.embedded()
    return {name: Kind.of(folders[name]) for name in (folders if names is None else names)}


def pairs(names: Iterable[str], what: str) -> list[tuple[str, str]]:
    """Pairs of models. heads: alike but for the number of their KV heads, with no model's number between theirs, the
    one with fewer first; seeds: of one kind; kinds: of different kinds, with the first model of each kind."""
    kind_of = kinds(names)
    every = list(itertools.combinations(sorted(kind_of, key=lambda name: kind_of[name].kv_heads), 2))
    if what == "kinds":
        first = {kind: name for name, kind in reversed(kind_of.items())}.values()
        return [(a, b) for a, b in every if a in first and b in first]
    wanted = "seed" if what == "seeds" else "KV heads"
    chosen = [(a, b) for a, b in every if kind_of[a].differs_in(kind_of[b]) == wanted]
    if what == "seeds":
        return chosen
    between = {name: {kind_of[b].kv_heads for a, b in chosen if a == name} for name in kind_of}
    return [(a, b) for a, b in chosen if kind_of[b].kv_heads == min(between[a])]


# ---------------------------------------------------------------- the protection paper's


def _members_of_model(claim: Mapping, sets: Mapping, rows: pd.DataFrame) -> Members:
    """A claim's members of one model. Where its full cache answers too little, the reason is the only one."""
    try:
        return protection.members(claim, sets, protection.Table(rows))
    except NotTestable as reason:
        return [reason]


def paired(fewer: Sample, more: Sample) -> Sample:
    """The value of the model with fewer heads minus the other's, on the items of both."""
    a, b = fewer.data.align(more.data, join="inner")
    if list(a) == ["a"]:
        return Sample(pd.DataFrame({"a": a.a, "b": b.a}), "difference", bounds=fewer.bounds, each=fewer.each)
    columns = {"a": a.a, "b": a.b, "x": b.a, "y": b.b}
    return Sample(pd.DataFrame(columns), "lift_minus_difference", bounds=fewer.bounds, each=fewer.each)


def _of_protection(claim: Mapping, sets: Mapping, rows: Mapping[str, pd.DataFrame]) -> Members:
    """A claim's members by model, or by pair of models: as many for each as the claim has cells."""
    kind_of, comparison = kinds(rows), claim["models"]
    if comparison != "heads":
        chosen = [name for name, k in kind_of.items() if comparison == "each" or k.kv_heads == k.heads]
        return [_named(name, member) for name in chosen for member in _members_of_model(claim, sets, rows[name])]
    members_of = {name: _members_of_model(claim, sets, rows[name]) for name in rows}
    members: Members = []
    for fewer, more in pairs(rows, comparison):
        heads = f"{kind_of[fewer].kv_heads} against {kind_of[more].kv_heads} KV heads ({fewer}, {more})"
        reasons = [member for name in (fewer, more) for member in members_of[name] if isinstance(member, NotTestable)]
        members += [NotTestable(f"{heads}: {reasons[0]}")] if reasons else []
        left, right = (_samples(members_of[name], bool(claim.get("together"))) for name in (fewer, more))
        labels = {name: ", ".join(filter(None, [heads, name])) for name in left if name in right}
        members += [Member(label, paired(left[name], right[name])) for name, label in labels.items()]
    parts = _samples(members)
    return [Member("", parts, some=True)] if claim.get("some") and parts else members


def _samples(members: Members, together: bool = False) -> dict[str, Sample]:
    """The members' samples by label. together: one sample instead, the mean of all on each item, labelled ""."""
    testable = [member for member in members if isinstance(member, Member)]
    samples = {member.label: member.what for member in testable if isinstance(member.what, Sample)}
    if not together or not samples:
        return samples
    mean = pd.concat([sample.data for sample in samples.values()]).groupby(level=0).mean()
    return {"": replace(next(iter(samples.values())), data=mean, each=len(samples))}


def _named(model: str, member: Member | NotTestable) -> Member | NotTestable:
    """The member with its model's name in its label, or in its reason."""
    if isinstance(member, NotTestable):
        return NotTestable(f"{model}: {member}")
    return Member(model if member.label == "all" else f"{model}, {member.label}", member.what)


# ---------------------------------------------------------------- the leakage paper's


def _of_leakage(claim: Mapping, rows: Mapping[str, pd.DataFrame]) -> Members:
    """By pair of models and policy: the share of following that the first model loses, minus the other's."""
    studies = {name: Study("", frame, instructions=frame.asked.iloc[0]) for name, frame in rows.items() if len(frame)}
    if claim.get("mean") == "prompts":
        studies = {name: leakage.by_prompt(s) for name, s in studies.items()}
    able = {name: s for name, s in studies.items() if s.follow.uncompressed() >= FOLLOWS}
    members: Members = []
    for a, b in pairs(able, claim["models"]):
        parts = leakage.CONTRASTS[claim["contrast"]](replace(able[a], other=able[b]))
        members.append(Member(f"{a} against {b}", parts, some=bool(claim.get("some"))))
    if not members:
        raise NotTestable(f"{len(able)} models follow half of their instructions: no two of them to compare")
    return members


# ---------------------------------------------------------------- verdicts


def rows_of(results: Path, chapter: str) -> dict[str, pd.DataFrame]:
    """The rows that runs with seed 0 kept of a chapter, by model, of the models that ship with the project."""
    files = {name: results / f"{name}-0" / chapter / ROWS for name in models.embedded()}
    return {name: pd.read_parquet(file) for name, file in files.items() if file.is_file()}


def verdicts(protection_rows: Mapping[str, pd.DataFrame], leakage_rows: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The family's claims in both readings, `claims.COLUMNS`."""
    sets = claims.load_claims("protection")["sets"]

    def members(claim: Mapping, reading: str) -> Sequence[Member | NotTestable]:
        of_leakage = claim["contrast"] == "model_spread"
        rows_of = {
            name: rows[(rows.reading == reading) | (rows.policy == "full")]
            for name, rows in (leakage_rows if of_leakage else protection_rows).items()
        }
        members_of_claim = _of_leakage(claim, rows_of) if of_leakage else _of_protection(claim, sets, rows_of)
        if not members_of_claim:
            raise NotTestable("the runs lack the models that it compares")
        return members_of_claim

    every: Callable[[Mapping], Sequence[str]] = lambda claim: claims.READINGS  # noqa: E731
    book = claims.load_claims("family")["claims"]
    return history.verdicts(book, members, every, model="the family", profile="quick")
