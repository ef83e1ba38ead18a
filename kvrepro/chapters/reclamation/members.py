"""The members of the reclamation chapter's claims: the rows of a study in which a claim's column is read."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.reclamation.survivors import label
from kvrepro.engine.policy import is_own
from kvrepro.experiment import claims, judge
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample

CASES = ("item", "policy", "granularity", "shared", "pattern", "check", "tokens", "repeat", "draw")  # name a row


def verdicts(
    tables: Mapping[str, pd.DataFrame], model: str, profile: str, policies: Sequence[str] = ()
) -> pd.DataFrame:
    """Verdict of every claim of data/claims/reclamation.yml (`judge.verdicts`), then of those about policies in general
    for each of a reader's own among `policies`.

    tables: the studies by the name under which the claims ask for them. A study that was not run is said so.
    """
    book, own = claims.load_claims("reclamation")["claims"], [label(name) for name in policies if is_own(name)]
    others = {name: t[~t.policy.isin(own)] if "policy" in t else t for name, t in tables.items()}
    asked = [*book, *of_own(book, own)]
    return judge.verdicts(
        asked, lambda claim, _: members(claim, tables if "own" in claim else others), model=model, profile=profile
    )


def of_own(book: Sequence[Mapping[str, Any]], own: Sequence[str]) -> list[dict[str, Any]]:
    """Claims about policies in general, asked of each policy titled so: those whose members name policies, and those
    that hold for whatever policy evicts. Its id is the claim's with the title: `R1f Mine`."""
    found = []
    for title in own:
        for claim in book:
            parts = claim.get("members", [])
            if not any("policy" in part.get("where", {}) for part in parts) and claim.get("study") != "identity":
                continue
            wheres = [{k: v for k, v in part["where"].items() if k != "policy"} for part in parts]
            named = [
                {"label": ", ".join([title, *map(_said, where.items())]), "where": where | {"policy": title}}
                for i, where in enumerate(wheres) if where not in wheres[:i]
            ]  # fmt: skip
            found.append({**claim, "id": f"{claim['id']} {title}", "own": title, "members": named})
    return found


def _said(where: tuple[str, Any]) -> str:
    name, value = where
    return f"{value:.0%} kept" if name == "kept" else "shared prefix" if value is True else str(value)


def members(claim: Mapping, tables: Mapping[str, pd.DataFrame]) -> list[Member | NotTestable]:
    """Of an exact claim every row, named by what tells rows apart; of others the rows of a prompt as one cluster."""
    if claim["study"] not in tables:
        raise NotTestable(f"the study {claim['study']!r} was not run")
    table = tables[claim["study"]]
    found: list[Member | NotTestable] = []
    for member in claim.get("members", [{"label": "all"}]):
        where = {**claim.get("where", {}), **member.get("where", {})}
        rows = table[np.logical_and.reduce([table[c] == v for c, v in where.items()])] if where else table
        rows = rows.dropna(subset=[column := member.get("column", claim.get("column"))])
        if rows.empty:
            said = ", ".join(f"{c} {v}" for c, v in where.items())
            found.append(NotTestable(f"no row of {claim['study']!r} has {said}"))
            continue
        values = rows[column].astype(float)
        if claim.get("exact") or member.get("exact"):
            named = rows[[name for name in CASES if name in rows]]
            texts = [", ".join(f"{name} {value}" for name, value in row.items()) for row in named.to_dict("records")]
            found.append(Member(member["label"], Facts(values.set_axis(texts))))
        else:
            clusters = rows.get("item")
            found.append(Member(member["label"], Sample(values.to_frame("a"), clusters=clusters, bounds=None)))
    return found
