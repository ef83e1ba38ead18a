"""The book's first page: what each chapter found, and all verdicts at a glance."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from kvrepro.experiment import claims, figure
from kvrepro.paths import ROOT
from kvrepro.tools import claims_page, language_model_page
from kvrepro.tools.edition import findings
from kvrepro.tools.family_page import COLOURS, SIGNS
from kvrepro.tools.rows import words

QUESTIONS: dict[str, str] = words("questions")  # by chapter
MOST = 2  # findings of each chapter


def answers(root: Path = ROOT) -> str:
    """A list: each chapter's question, the first findings in its box, and a link; then how many verdicts are the same
    on a language model."""
    lines = []
    for chapter, question in QUESTIONS.items():
        text = " ".join(findings(chapter, root)[:MOST]) or "This chapter has no results yet."
        lines.append(f"- **{question}** {text} {{doc}}`The chapter <executed/{chapter}>`.".replace('"../', '"'))
    compared = language_model_page.page()["found"].splitlines()[0].removeprefix("- ")
    other = f"{compared} {{doc}}`The page <language-model>`."
    return "\n".join([*lines, f"- **Does this hold on a language model?** {other}"])


def drawn(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """The figure: a bar for each chapter, divided by the verdicts of its first run, with the number of each."""
    drawing, [axes] = figure.panels(1, height=0.5 + 0.42 * max(len(frames), 1))
    verdicts = {name: claims.verdicts_of_run(frame).verdict for name, frame in frames.items()}
    counts = pd.DataFrame({name: column.value_counts() for name, column in verdicts.items()})
    counts = counts.reindex(claims.VERDICTS).fillna(0).T[::-1]
    left = pd.Series(0.0, counts.index)
    for verdict, colour in zip(claims.VERDICTS, COLOURS, strict=True):
        label = f"{SIGNS[verdict]} {claims.label(verdict)}"
        names = [claims_page.title(name) for name in counts.index]
        bars = axes.barh(names, counts[verdict], 0.7, left, color=colour, ec="grey", lw=0.5, label=label)
        wide = [f"{SIGNS[verdict]} {n:.0f}" if n >= 3 else "" for n in counts[verdict]]
        axes.bar_label(bars, wide, label_type="center", fontsize=8, color="black")
        left += counts[verdict]
    axes.set(xlabel="verdicts: a claim in one reading", xlim=(0, max(left.max() if len(left) else 1, 1)))
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.35, 1.0))
    axes.grid(visible=False)
    return drawing
