"""The book's first page: what each chapter found, in a sentence with its number, and all verdicts at a glance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml
from matplotlib.figure import Figure

from kvrepro.chapters.reanalysis import printed
from kvrepro.chapters.synthesis import grid, stored, variance
from kvrepro.errors import InputError
from kvrepro.experiment import artifact, claims, figure
from kvrepro.paths import ROOT
from kvrepro.tools.edition import results_of
from kvrepro.tools.family_page import COLOURS, SIGNS


class Answer(NamedTuple):
    """A chapter's question, the claim that answers it, and what that claim is about: the beginning of a sentence."""

    question: str
    claim: str = ""
    subject: str = ""


ANSWERS = {
    "protection": Answer(
        "Does it matter how tokens are scored, or only which are never evicted?", "P6",
        "The recovery of most of the full cache's score by guarding both ends of the prompt, whatever the policy,",
    ),
    "reanalysis": Answer("What do that paper's own rows say, analysed again?"),
    "fragility": Answer(
        "Does what mattered so far go on to matter?", "C1",
        "The gain that DefensiveKV promises for the worst step of a long answer",
    ),
    "dropkv_bound": Answer(
        "Is a small bound on the error a good choice of tokens?", "D3",
        "The promise that DropKV's choice is near the best one",
    ),
    "leakage": Answer(
        "Which instruction is forgotten first, and which secret is told?", "L2",
        "The finding that it depends on the policy how many instructions are lost",
    ),
    "reclamation": Answer(
        "When does an evicted token give memory back?", "R1f",
        "The warning that eviction alone frees almost no blocks of memory",
    ),
    "synthesis": Answer("Which part of a method matters, and what should one use?"),
}  # fmt: skip


def parts(root: Path = ROOT) -> dict[str, str]:
    """The page's computed parts by name: `answers` and `citation`, as markdown."""
    return {"answers": answers(root), "citation": citation()}


def answers(root: Path = ROOT) -> str:
    """A list: each chapter's question, its answer in a sentence, and a link."""
    own = {"reanalysis": _reanalysis, "synthesis": _synthesis}
    lines = []
    for chapter, answer in ANSWERS.items():
        told = own[chapter](root) if chapter in own else _judged(chapter, answer, root)
        lines.append(f"- **{answer.question}** {told} {{doc}}`The chapter <executed/{chapter}>`.")
    return "\n".join(lines)


def _judged(chapter: str, answer: Answer, root: Path) -> str:
    frame = verdicts([chapter], root).get(chapter)
    if frame is None or answer.claim not in set(frame.claim):
        return "This run has no verdict on that yet."
    row = frame[frame.claim == answer.claim].iloc[0]
    told = claims.sentence(frame, answer.claim, answer.subject).replace('"../claims.html', '"claims.html')
    in_print = claims.printed(row)
    return told + (f" In print: {in_print}." if any(sign.isdigit() for sign in in_print) else "")


def _reanalysis(root: Path) -> str:
    beside = printed.beside(artifact.scores())
    public = beside[beside.same.notna()]
    return (
        f"Of {len(beside)} printed numbers {len(public)} have public rows; {int(public.same.sum())} of these come out "
        "in every digit, the others differ only by rounding."
    )


def _synthesis(root: Path) -> str:
    try:
        rows = stored.rows(results_of("synthesis", root))
    except InputError:
        return "This chapter has no results yet."
    cells = rows[(rows.kind == "grid") & (rows.model == rows.groupby("model").size().idxmax())]
    factors = list(grid.factors(()))
    share = variance.by_model(cells, factors, "score", draws=2)[0].set_index("term").value.loc[factors]
    most, other = share.idxmax(), "guard" if share.idxmax() != "guard" else "scorer"
    return (
        f"The {most} explains most of what differs between scores, {share[most]:.0%} of their variance; the {other} "
        f"explains {max(share[other], 0):.0%}. {{doc}}`decide` has the table."
    )


def verdicts(chapters: Sequence[str], root: Path = ROOT) -> dict[str, pd.DataFrame]:
    """The verdicts of the run, by chapter; chapters without any are left out."""
    files = {name: results_of(name, root) / name / "claims.csv" for name in chapters}
    return {name: claims.of_run(claims.read(file)) for name, file in files.items() if file.is_file()}


def drawn(found: Mapping[str, pd.DataFrame]) -> Figure:
    """A bar for each chapter, parted by verdict, with the number of each."""
    drawing, [axes] = figure.panels(1, height=0.5 + 0.42 * max(len(found), 1))
    counts = pd.DataFrame({name: frame.verdict.value_counts() for name, frame in found.items()})
    counts = counts.reindex(claims.VERDICTS).fillna(0).T[::-1]
    left = pd.Series(0.0, counts.index)
    for verdict, colour in zip(claims.VERDICTS, COLOURS, strict=True):
        label = f"{SIGNS[verdict]} {claims.label(verdict)}"
        axes.barh(
            [name.replace("_", " ") for name in counts.index],
            counts[verdict],
            0.7,
            left,
            color=colour,
            ec="grey",
            lw=0.5,
            label=label,
        )
        for at, (start, width) in enumerate(zip(left, counts[verdict], strict=True)):
            if width >= 3:
                axes.text(
                    start + width / 2,
                    at,
                    f"{SIGNS[verdict]} {width:.0f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="black",
                )
        left += counts[verdict]
    axes.set(xlabel="verdicts: a claim in one reading", xlim=(0, max(left.max() if len(left) else 1, 1)))
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    axes.grid(visible=False)
    return drawing


def citation(root: Path = ROOT) -> str:
    """How to cite the book, as CITATION.cff says it: a sentence, and BibTeX."""
    known = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    names = [person.get("name") or f"{person['given-names']} {person['family-names']}" for person in known["authors"]]
    fields = {
        "author": " and ".join(f"{{{name}}}" for name in names),
        "title": f"{{{known['title']}}}",
        "version": known["version"],
    }
    fields |= {"url": known["repository-code"]} if "repository-code" in known else {}
    fields |= {"year": str(known["date-released"])[:4]} if "date-released" in known else {}
    body = "\n".join(f"  {name} = {{{value}}}," for name, value in fields.items())
    return f"{known['message']}\n\n```bibtex\n@software{{kvrepro,\n{body}\n}}\n```"
