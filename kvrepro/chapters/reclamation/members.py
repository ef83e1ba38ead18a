"""The members of the reclamation chapter's claims: the rows of a study in which a claim's column is read."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.reclamation import quoted
from kvrepro.chapters.reclamation.survivors import label
from kvrepro.engine.policy import is_own
from kvrepro.experiment import claims, history
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample

NEEDS = {"quoted": f": {quoted.NEEDS}"}
CASES = ("item", "policy", "granularity", "shared", "pattern", "check", "tokens", "repeat", "draw")  # these name a row


def verdicts(
    tables: Mapping[str, pd.DataFrame], model: str, profile: str, policies: Sequence[str] = ()
) -> pd.DataFrame:
    """Verdict of every claim of data/claims/reclamation.yml (`judge.verdicts`), then the claims about policies in
    general, asked of each of a reader's own among `policies`.

    tables: the studies, by the name that the claims use. Verdicts on a study that was not run say so.
    """
    book, own_labels = claims.load_claims("reclamation")["claims"], [label(name) for name in policies if is_own(name)]
    tables = {name: DERIVED[name](table) if name in DERIVED else table for name, table in tables.items() if len(table)}
    without_own = {name: t[~t.policy.isin(own_labels)] if "policy" in t else t for name, t in tables.items()}
    return history.verdicts(
        book, lambda claim, _: members(claim, tables if "own" in claim else without_own),
        own=claims_on_own(book, own_labels), whose="guide", model=model, profile=profile,
    )  # fmt: skip


# ---- columns that compare the rows of a study


def _identity(rows: pd.DataFrame) -> pd.DataFrame:
    """moved: copies were made, so that something could go wrong. pinned: without compaction fewer blocks are free than
    arithmetic says. noticed_*: the test fails, as it should in a control. copies_ratio: copies while decoding, over
    those of a repack of the same choice."""
    choice = [name for name in ("item", "source", "policy", "granularity") if name in rows]
    missed = rows.as_predicted < 1
    plain = rows.assign(pinned=missed)[(rows.layout == "none") & ~rows.shared]
    rows = rows.assign(moved=rows.slot_copies > 0, noticed_blocks=1.0 * missed, noticed_tokens=1 - rows.identical)
    rows = rows.merge(plain[[*choice, "pinned"]], on=choice, how="left")
    return rows.assign(copies_ratio=_over_repack(rows, "decode_copies", [*choice, "shared"]))


def _traffic(rows: pd.DataFrame) -> pd.DataFrame:
    """copies_ratio: copies over those of a repack in the same rounds."""
    return rows.assign(copies_ratio=_over_repack(rows, "copies_per_pass", ["every", "draw"]))


def _over_repack(rows: pd.DataFrame, column: str, keys: list[str]) -> pd.Series:
    """A column over its value in the repack's row with the same `keys`; missing where that is 0."""
    repack = rows[rows.layout == "repack"].set_index(keys)[column].replace(0, np.nan)
    return rows[column] / repack.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()


def _passes(rows: pd.DataFrame) -> pd.DataFrame:
    """slower, larger: time and memory over those of fused attention on the same draw."""
    keys = ["tokens", "repeat"]
    fused = rows[rows.way == "fused attention"].set_index(keys).reindex(pd.MultiIndex.from_frame(rows[keys]))
    return rows.assign(slower=rows.seconds / fused.seconds.to_numpy(), larger=rows.held_mib / fused.held_mib.to_numpy())


def _published(rows: pd.DataFrame) -> pd.DataFrame:
    """times_smaller: blocks before eviction over blocks after a repack of slots, which all heads share."""
    return rows.assign(times_smaller=rows.blocks / (rows.blocks - rows.freed_repack))


DERIVED = {"identity": _identity, "traffic": _traffic, "passes": _passes, "published": _published}


# ---- members


def claims_on_own(book: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> list[dict[str, Any]]:
    """Claims about policies in general, asked of each of a reader's own policies, which have these titles.

    Claims are general if their members name policies, or if they hold for whatever policy evicts; not those that the
    guide quotes or that `where` restricts to the chapter's policies, nor a member with a study of its own. A new
    claim's id is the old one with the title: `R1f Mine`.
    """
    general = []
    for claim in book:
        in_study = [member for member in claim.get("members", []) if "study" not in member]
        names_policies = any("policy" in member.get("where", {}) for member in in_study)
        holds_for_any = claim["study"] == "identity" and "column" in claim
        restricted = claim["study"] == "quoted" or claim.get("where", {}).get("source") == "chapter"
        if not restricted and (names_policies or holds_for_any):
            general.append({**claim, "members": in_study})
    new_claims = []
    for title, claim in itertools.product(titles, general):
        wheres: list[dict[str, Any]] = []
        for member in claim["members"]:
            where = {name: value for name, value in member["where"].items() if name != "policy"}
            if where not in wheres:
                wheres.append(where)
        titled = [{"label": _label(title, where), "where": where | {"policy": title}} for where in wheres]
        new_claims.append({**claim, "id": f"{claim['id']} {title}", "own": title, "members": titled})
    return new_claims


def _label(title: str, where: Mapping[str, Any]) -> str:
    """A member's name: `Mine, one set, 10% kept`."""
    texts = [
        f"{value:.0%} kept" if name == "kept" else "shared prefix" if value is True else str(value)
        for name, value in where.items()
    ]
    return ", ".join([title, *texts])


def members(claim: Mapping, tables: Mapping[str, pd.DataFrame]) -> list[Member | NotTestable]:
    """What a claim is tested on. An exact claim: each row, named by the columns that tell rows apart. Others: the rows
    in question, those of a prompt as one cluster. Raises NotTestable for a study that was not run."""
    members_or_reasons: list[Member | NotTestable] = []
    for member in claim.get("members", [{"label": "all"}]):
        study = member.get("study", claim["study"])
        if study not in tables:
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
