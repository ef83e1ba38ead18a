"""Claims that were written, or changed, when results were known: the table of verdicts says so.

A claim of `data/claims/` says `exploratory:` (written with results in sight) or `changed:` (its rule or members were),
each with the reason. `first:` holds the entries as they were first written; the same rows are judged by them too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from kvrepro.experiment import judge
from kvrepro.experiment.claims import LABELS, label

FIRST = ", as first written"  # after the id of a claim in its first form


def verdicts(
    book: Sequence[Mapping[str, Any]], members: Callable[[Mapping[str, Any], str], judge.Members],
    readings: Callable[[Mapping[str, Any]], Sequence[str]] = lambda claim: ("any",), *,
    own: Sequence[Mapping[str, Any]] = (), whose: str = "", model: str, profile: str,
) -> pd.DataFrame:  # fmt: skip
    """`judge.verdicts` of a book's claims, which say what they were at first, and of `own`, those that are asked of a
    reader's own policies. whose: the source's, whose words the claims that say `ours` are not, `paper` for instance."""
    said = f" (Not in the {whose}'s words.)" if whose else ""
    told = [claim | {"statement": claim["statement"] + said} if "ours" in claim else claim for claim in map(dict, book)]
    every = [*_with_first(told), *own]
    return _marked(judge.verdicts(every, members, readings, model=model, profile=profile), book)


def _with_first(book: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The claims, each followed by its first form where it has one."""
    found = []
    for claim in book:
        found.append(dict(claim))
        if "first" in claim:
            found.append({**claim, **claim["first"], "id": claim["id"] + FIRST})
    return found


def _marked(frame: pd.DataFrame, book: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The table of `_with_first(book)` without the first forms: statements tell what came of them, and that a claim was
    written or changed late."""
    is_first = frame.claim.str.endswith(FIRST)
    notes = {claim["id"]: _note(claim, frame[frame.claim == claim["id"] + FIRST]) for claim in book}
    rest = frame[~is_first].reset_index(drop=True)
    return rest.assign(statement=(rest.statement + " " + rest.claim.map(notes).fillna("")).str.rstrip())


def _note(claim: Mapping[str, Any], first: pd.DataFrame) -> str:
    kind = {"exploratory": "Exploratory: written when results were known", "changed": "Changed when results were known"}
    said = [text for name, text in kind.items() if name in claim][:1]
    if len(first):
        by = [(LABELS.get(row.reading, ""), row.verdict) for row in first.itertuples()]
        alike = len({verdict for _, verdict in by}) == 1
        verdicts = label(by[0][1]) if alike else ", ".join(f"{label(verdict)} with the {name}" for name, verdict in by)
        said.append(f"as first written ({first.rule.iloc[0]}): *{verdicts}*")
    return f"({'; '.join(said)}.)" if said else ""
