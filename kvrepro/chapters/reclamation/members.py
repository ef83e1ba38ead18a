"""The members of the reclamation chapter's claims: the rows of a study in which a claim's column is read."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.reclamation import quoted
from kvrepro.chapters.reclamation.settings import SHAPES
from kvrepro.chapters.reclamation.survivors import label
from kvrepro.engine.policy import is_own
from kvrepro.experiment import claims, history
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample

NEEDS = {"quoted": f": {quoted.NEEDS}"}
CASES = ("item", "policy", "granularity", "shared", "pattern", "check", "tokens", "repeat", "draw")  # name a row


def verdicts(
    tables: Mapping[str, pd.DataFrame], model: str, profile: str, policies: Sequence[str] = ()
) -> pd.DataFrame:
    """Verdict of every claim of data/claims/reclamation.yml (`judge.verdicts`), then of those about policies in general
    for each of a reader's own among `policies`.

    tables: the studies by the name under which the claims ask for them. A study that was not run is said so.
    """
    book, own = claims.load_claims("reclamation")["claims"], [label(name) for name in policies if is_own(name)]
    tables = {name: DERIVED.get(name, lambda same: same)(table) for name, table in tables.items() if len(table)}
    others = {name: t[~t.policy.isin(own)] if "policy" in t else t for name, t in tables.items()}
    return history.verdicts(
        book, lambda claim, _: members(claim, tables if "own" in claim else others), own=of_own(book, own),
        whose="guide", model=model, profile=profile,
    )  # fmt: skip


def uncompacted(freed: pd.DataFrame) -> pd.DataFrame:
    """Of the shares of blocks freed (the chapter's figure "granularity") those that a policy frees by eviction alone,
    one set of tokens for all heads, at the least share kept."""
    return freed.query("granularity == 'one set' and compaction == 'no compaction' and kept == kept.min()")


# ---- columns that compare a study's rows with each other


def _identity(rows: pd.DataFrame) -> pd.DataFrame:
    """moved: copies were made, so that something could go wrong. pinned: without compaction the free list stays below
    what arithmetic says. noticed_*: the test fails, as it should in a control."""
    choice = [name for name in ("item", "source", "policy", "granularity") if name in rows]
    missed = 1.0 * (rows.as_predicted < 1)
    plain = rows.assign(pinned=missed.astype(bool))[(rows.layout == "none") & ~rows.shared]
    found = rows.assign(moved=rows.slot_copies > 0, noticed_blocks=missed, noticed_tokens=1 - rows.identical)
    return found.merge(plain[[*choice, "pinned"]], on=choice, how="left")


BATCH = 64


def _traffic(rows: pd.DataFrame) -> pd.DataFrame:
    """copies_ratio: of a repack's copies in the same rounds. of_step: bytes copied over all that a decoding step reads,
    cache and weights, of Qwen3-8B in bfloat16 at batch 64."""
    of = ["every", "draw"]
    repack = rows[rows.layout == "repack"].set_index(of).copies_per_pass
    layers, kv_heads, dim, weights = SHAPES["Qwen3-8B"]
    cache = BATCH * rows.budget * 4 * layers * kv_heads * dim
    ratio = rows.copies_per_pass / repack.reindex(pd.MultiIndex.from_frame(rows[of])).to_numpy()
    return rows.assign(copies_ratio=ratio, of_step=rows.share * cache / (cache + weights))


def _passes(rows: pd.DataFrame) -> pd.DataFrame:
    """slower, larger: time and memory over those of fused attention on the same draw."""
    of = ["tokens", "repeat"]
    fused = rows[rows.way == "fused attention"].set_index(of).reindex(pd.MultiIndex.from_frame(rows[of]))
    return rows.assign(slower=rows.seconds / fused.seconds.to_numpy(), larger=rows.held_mib / fused.held_mib.to_numpy())


def _published(rows: pd.DataFrame) -> pd.DataFrame:
    """times_smaller: blocks before over blocks after each head was packed; by slots, after a repack."""
    by = {"times_smaller": rows.freed_packed, "times_smaller_by_slots": rows.freed_repack}
    return rows.assign(**{name: rows.blocks / (rows.blocks - freed) for name, freed in by.items()})


DERIVED = {
    "identity": _identity, "traffic": _traffic, "oldest": _traffic, "passes": _passes, "published": _published,
}  # fmt: skip


# ---- members


def of_own(book: Sequence[Mapping[str, Any]], own: Sequence[str]) -> list[dict[str, Any]]:
    """Claims about policies in general, asked of each policy titled so: those whose members name policies, and those
    that hold for whatever policy evicts; not what the guide quotes. Its id is the claim's with the title: `R1f Mine`.
    """
    found = []
    for title in own:
        for claim in (one for one in book if one["study"] != "quoted"):
            parts = claim.get("members", [])
            of_policies = any("policy" in part.get("where", {}) for part in parts)
            if not of_policies and not (claim["study"] == "identity" and "column" in claim):
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
    found: list[Member | NotTestable] = []
    for member in claim.get("members", [{"label": "all"}]):
        study = member.get("study", claim["study"])
        if study not in tables:
            raise NotTestable(f"the study {study!r} was not run" + NEEDS.get(study, ""))
        table = tables[study]
        where = {**claim.get("where", {}), **member.get("where", {})}
        rows = table[np.logical_and.reduce([table[c] == v for c, v in where.items()])] if where else table
        rows = rows.dropna(subset=[column := member.get("column", claim.get("column"))])
        if rows.empty:
            said = ", ".join(f"{c} {v}" for c, v in where.items())
            found.append(NotTestable(f"no row of {study!r} has {said}"))
            continue
        values = rows[column].astype(float)
        if claim.get("exact") or member.get("exact"):
            named = rows[[name for name in CASES if name in rows]]
            texts = [", ".join(f"{name} {value}" for name, value in row.items()) for row in named.to_dict("records")]
            found.append(Member(member["label"], Facts(values.set_axis(texts))))
        else:
            bounds = tuple(claim["bounds"]) if "bounds" in claim else None
            sample = Sample(values.to_frame("a"), clusters=rows.get("item"), bounds=bounds)
            found.append(Member(member["label"], sample))
    return found
