"""Claims that take several models (`data/claims/family.yml`), judged over the runs of `studies.family`.

The models are those that ship with the project.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from kvrepro.chapters.leakage import members as leakage
from kvrepro.chapters.protection import members as protection
from kvrepro.chapters.protection.study import Settings
from kvrepro.engine.policy import READINGS
from kvrepro.experiment import claims, judge, models
from kvrepro.experiment.judge import Member, NotTestable, Sample
from kvrepro.experiment.members import Language, Table

ROWS = "family.parquet"  # what a run keeps of its rows for these claims, beside its verdicts
Members = list["Member | NotTestable"]
CONFIGURATIONS = {name: folder / "config.json" for name, folder in models.embedded().items()}
KV_HEADS = {name: json.loads(file.read_text())["num_key_value_heads"] for name, file in CONFIGURATIONS.items()}
HEADS = 4  # query heads of the small models
ALIKE = {"small-mqa", "small-gqa", "small-mha"}  # kinds that differ in their KV heads alone


def kind(name: str) -> str:
    """The name of the first model of its kind: models of one kind differ in their seed."""
    return name.partition("-seed-")[0]


def pairs(names: Iterable[str], what: str) -> list[tuple[str, str]]:
    """Pairs of models. heads: alike but for the number of their KV heads, with no model's number between theirs, the
    one with fewer first; seeds: of one kind; kinds: of different kinds, with the first model of each kind."""
    names = list(names)
    every = list(itertools.combinations(sorted(names, key=KV_HEADS.__getitem__), 2))
    if what == "kinds":
        first = {kind(name): name for name in reversed(names)}.values()
        return [(a, b) for a, b in every if a in first and b in first]
    if what == "seeds":
        return [(a, b) for a, b in every if kind(a) == kind(b)]
    fewer = [(a, b) for a, b in every if {kind(a), kind(b)} <= ALIKE and KV_HEADS[a] < KV_HEADS[b]]
    return [(a, b) for a, b in fewer if KV_HEADS[b] == min(KV_HEADS[y] for x, y in fewer if x == a)]


def _language(rows: pd.DataFrame) -> Language:
    """The language of the chapter's claims on one model's rows."""
    tidied = protection.tidied({"main": rows}, None, Settings())
    return Language(claims.load_claims("protection"), {"main": Table(tidied["main"])}, protection)


def paired(fewer: Sample, more: Sample) -> Sample:
    """The value of the model with fewer heads minus the other's, on the items of both."""
    a, b = fewer.data.align(more.data, join="inner")
    if list(a) == ["a"]:
        return Sample(pd.DataFrame({"a": a.a, "b": b.a}), "difference", bounds=fewer.bounds, each=fewer.each)
    columns = {"a": a.a, "b": a.b, "x": b.a, "y": b.b}
    return Sample(pd.DataFrame(columns), "lift_minus_difference", bounds=fewer.bounds, each=fewer.each)


def _of_protection(claim: Mapping, models: Mapping[str, Language], reading: str) -> Members:
    """A claim's members by model, or by pair of models: as many for each as the claim has cells."""
    comparison = claim["models"]
    chosen = [name for name in models if comparison != "full_heads" or KV_HEADS[name] == HEADS]
    members_of = {name: models[name].members(claim, reading) for name in chosen}
    if comparison != "heads":
        return [_named(name, member) for name in chosen for member in members_of[name]]
    members: Members = []
    for fewer, more in pairs(models, comparison):
        heads = f"{KV_HEADS[fewer]} against {KV_HEADS[more]} KV heads ({fewer}, {more})"
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


def _of_leakage(claim: Mapping, rows: Mapping[str, pd.DataFrame]) -> Members:
    """By pair of models and policy: the share of following that the first model loses, minus the other's."""
    column = claim.get("column", "following")
    able = {
        name: answers for name, answers in rows.items() if answers[column][answers.ratio == 0].mean() >= leakage.ABLE
    }
    members: Members = []
    for a, b in pairs(able, claim["models"]):
        parts = leakage.spread(able[a], able[b], column)
        members.append(Member(f"{a} against {b}", parts, some=bool(claim.get("some"))))
    if not members:
        raise NotTestable(f"{len(able)} models follow half of their instructions: no two of them to compare")
    return members


def rows_of(results: Path, chapter: str) -> dict[str, pd.DataFrame]:
    """The rows that runs with seed 0 kept of a chapter, by model, of the models that ship with the project."""
    files = {name: results / f"{name}-0" / chapter / ROWS for name in models.embedded()}
    return {name: pd.read_parquet(file) for name, file in files.items() if file.is_file()}


def verdicts(protection_rows: Mapping[str, pd.DataFrame], leakage_rows: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The family's claims in both readings, `claims.COLUMNS`, from each model's rows."""
    of_protection = {name: _language(rows) for name, rows in protection_rows.items()}

    def members(claim: Mapping, reading: str) -> Sequence[Member | NotTestable]:
        if claim["contrast"] == "model_spread":
            rows_of = {name: r[(r.reading == reading) | (r.policy == "full")] for name, r in leakage_rows.items()}
            members_of_claim = _of_leakage(claim, rows_of)
        else:
            members_of_claim = _of_protection(claim, of_protection, reading)
        if not members_of_claim:
            raise NotTestable("the runs lack the models that it compares")
        return members_of_claim

    book = claims.load_claims("family")["claims"]
    return judge.verdicts(book, members, lambda claim: READINGS, model="the family", profile="quick")
