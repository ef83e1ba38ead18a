"""The members of the reclamation chapter's claims: the rows of a study in which a claim's column is read."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.reclamation import quoted
from kvrepro.chapters.reclamation.settings import Settings
from kvrepro.chapters.reclamation.survivors import label
from kvrepro.engine.policy import is_own
from kvrepro.experiment import history
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample
from kvrepro.experiment.models import Loaded

NEEDS = {"quoted": f": {quoted.NEEDS}"}
CASES = ("item", "policy", "granularity", "shared", "pattern", "check", "tokens", "repeat", "draw")  # these name a row


def verdicts(book: Mapping, tables: Mapping[str, pd.DataFrame], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Verdict of every claim of a book (`judge.verdicts`), then the claims about policies in general, asked of each of
    a reader's own. tables: the studies, by the name that the claims use. Verdicts on a study that was not run say so.
    """
    own_labels = [label(name) for name in settings.policies if is_own(name)]
    without_own = {name: t[~t.policy.isin(own_labels)] if "policy" in t else t for name, t in tables.items()}
    return history.verdicts(
        book["claims"], lambda claim, _: members(claim, tables if "own" in claim else without_own),
        own=claims_on_own(book["claims"], own_labels), whose="guide", model=loaded.name, profile=settings.profile,
    )  # fmt: skip


def claims_on_own(book: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> list[dict[str, Any]]:
    """Claims about policies in general, asked of each of a reader's own policies, which have these titles.

    Claims are general if their members name policies, or if they hold for whatever policy evicts; not those that the
    guide quotes or that `where` restricts to the chapter's policies, nor a member with a study of its own. A new
    claim's id is the old one with the title: `R1f Mine`.
    """
    new_claims = []
    for title, claim in itertools.product(titles, book):
        wheres = [member.get("where", {}) for member in claim.get("members", []) if "study" not in member]
        holds_for_any = claim["study"] == "identity" and "column" in claim
        restricted = claim["study"] == "quoted" or claim.get("where", {}).get("source") == "chapter"
        if restricted or not (holds_for_any or any("policy" in where for where in wheres)):
            continue
        rest = [{name: value for name, value in where.items() if name != "policy"} for where in wheres]
        titled = {
            ", ".join([title, *(f"{name} {value}" for name, value in where.items())]): where | {"policy": title}
            for where in rest
        }
        asked = [{"label": text, "where": where} for text, where in titled.items()]
        new_claims.append({**claim, "id": f"{claim['id']} {title}", "own": title, "members": asked})
    return new_claims


def members(claim: Mapping, tables: Mapping[str, pd.DataFrame]) -> list[Member | NotTestable]:
    """What a claim is tested on. An exact claim: each row, named by the columns that tell rows apart. Others: the rows
    in question, those of a prompt as one cluster. Raises NotTestable for a study that was not run."""
    members_or_reasons: list[Member | NotTestable] = []
    for member in claim.get("members", [{"label": "all"}]):
        study = member.get("study", claim["study"])
        if study not in tables or tables[study].empty:
            raise NotTestable(f"the study {study!r} was not run" + NEEDS.get(study, ""))
        table = tables[study]
        where = {**claim.get("where", {}), **member.get("where", {})}
        rows = table[np.logical_and.reduce([table[c] == v for c, v in where.items()])] if where else table
        rows = rows.dropna(subset=[column := member.get("column", claim.get("column"))])
        if rows.empty:
            conditions = ", ".join(f"{c} {v}" for c, v in where.items())
            members_or_reasons.append(NotTestable(f"no row of {study!r} has {conditions}"))
            continue
        values = rows[column].astype(float)
        if claim.get("exact") or member.get("exact"):
            cases = rows[[name for name in CASES if name in rows]].to_dict("records")
            texts = [", ".join(f"{name} {value}" for name, value in case.items()) for case in cases]
            members_or_reasons.append(Member(member["label"], Facts(values.set_axis(texts))))
        else:
            bounds = tuple(claim["bounds"]) if "bounds" in claim else None
            sample = Sample(values.to_frame("a"), clusters=rows.get("item"), bounds=bounds)
            members_or_reasons.append(Member(member["label"], sample))
    return members_or_reasons
