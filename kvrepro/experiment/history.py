"""Claims that were written, or changed, when results were known: the table of verdicts says so.

Such a claim of `data/claims/` has an entry `exploratory:` (it was written with results in sight) or `changed:` (its
rule or members were), each with the reason. `first:` holds the first form's entries, by which rows are judged too;
null takes an entry away. What a claim `presumes` is no part of its first form.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvrepro.experiment import judge
from kvrepro.experiment.claims import FIRST, LABELS, label


def verdicts(
    book: Sequence[Mapping[str, Any]], members: Callable[[Mapping[str, Any], str], judge.Members],
    readings: Callable[[Mapping[str, Any]], Sequence[str]] = lambda claim: ("any",), *,
    own: Sequence[Mapping[str, Any]] = (), whose: str = "", model: str, profile: str,
) -> pd.DataFrame:  # fmt: skip
    """`judge.verdicts` of a book's claims, with the verdicts of their first forms noted, and of `own`, the claims about
    a reader's own policies. whose: the source, such as `paper`, in whose words claims marked `ours` are not."""
    claims = []
    for claim in book:
        note = f" (Not in the {whose}'s words.)" if whose and "ours" in claim else ""
        claims.append({**claim, "statement": claim["statement"] + note})
        if "first" in claim:
            first = {**claims[-1], "presumes": None, **claim["first"], "id": claim["id"] + FIRST}
            claims.append({name: value for name, value in first.items() if value is not None})
    return _marked(judge.verdicts([*claims, *own], members, readings, model=model, profile=profile), book)


def _marked(frame: pd.DataFrame, book: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The table of verdicts without the rows of first forms. Statements give these verdicts instead, and say that a
    claim was written or changed late."""
    is_first = frame.claim.str.endswith(FIRST)
    notes = {claim["id"]: _note(claim, frame[frame.claim == claim["id"] + FIRST]) for claim in book}
    rest = frame[~is_first].reset_index(drop=True)
    return rest.assign(statement=(rest.statement + " " + rest.claim.map(notes).fillna("")).str.rstrip())


def _note(claim: Mapping[str, Any], first: pd.DataFrame) -> str:
    kind = {
        "exploratory": "Exploratory: written when results were known", "changed": "Changed when results were known",
        "presumes": "Its premise was added when results were known",
    }  # fmt: skip
    notes = [text for name, text in kind.items() if name in claim][:1]
    if len(first):
        texts = [f"{label(row.verdict)} with the {LABELS.get(row.reading, '')}" for row in first.itertuples()]
        verdicts = label(first.verdict.iloc[0]) if len(set(first.verdict)) == 1 else ", ".join(texts)
        notes.append(f"as first written ({first.rule.iloc[0]}): *{verdicts}*")
    return f"({'; '.join(notes)}.)" if notes else ""
