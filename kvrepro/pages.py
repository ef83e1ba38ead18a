"""Pages of the book that are computed: methods and switches from the code, claims from the results of the last run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import nbformat
import pandas as pd

from kvrepro import claims, policy

ROOT = Path(__file__).resolve().parents[1]


def write(chapters: Sequence[str], root: Path = ROOT) -> None:
    """The tables that the pages in book/ include, into book/generated."""
    folder = root / "book" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    pages = {name: table(rows) for name, rows in policy.tables().items()} | {"claims": verdicts(chapters, root)}
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")


def verdicts(chapters: Iterable[str], root: Path = ROOT) -> str:
    """Per chapter the summary and one row per claim, each reading with its interval and verdict."""
    parts = []
    for chapter in chapters:
        file = root / "data" / "results" / chapter / "claims.csv"
        parts.append(f"## {title(root / 'notebooks' / f'{chapter}.ipynb')}\n")
        if not file.is_file():
            parts.append("This chapter has stored no verdicts.\n")
            continue
        frame = pd.read_csv(file)
        texts = frame.columns.difference(["low", "high", "ours", "p", "n"])
        frame = frame.fillna(dict.fromkeys(texts, ""))
        model, profile = frame.model.iloc[0], frame.profile.iloc[0]
        parts += [
            f"Model {model}, profile {profile}.\n",
            claims.summary(frame) + "\n",
            table(claims.overview(frame).reset_index().to_dict("records")) + "\n",
        ]
    return "\n".join(parts) or "No chapter has been run."


def title(notebook: Path) -> str:
    """Its first heading; its name if there is no such file."""
    if not notebook.is_file():
        return notebook.stem
    return nbformat.read(notebook, as_version=4).cells[0].source.splitlines()[0].lstrip("# ")


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of equal keys as a markdown table."""
    cells = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([str(value).replace("|", "\\|") for value in row.values()] for row in rows),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)
