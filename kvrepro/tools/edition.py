"""The book's edition of an executed notebook: findings first, code folded, figures numbered and captioned.

The notebook itself stays as it is, and runs from top to bottom; its text is plain Markdown, which every Jupyter shows.
What `figure.show` displayed becomes a file beside the page, its data another, and a `{figure}` directive with the label
`fig-<chapter>-<name>`.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from kvrepro.experiment.figure import WHITE
from kvrepro.experiment.wording import FOUND
from kvrepro.paths import ROOT

FOLDED = {"hide-input", "hide-cell", "remove-input", "remove-cell", "show-input"}
BOX = f":::{{admonition}} {FOUND.strip('*')}\n:class: tip\n"  # above the findings
LAST = "## How this page was computed"
RESULTS = "data/results"
REFERENCE = re.compile(r"\[(?:[Tt]he )?[Ff]igure\]\(#fig-([a-z0-9-]+)\)")  # in a notebook; in the book it has a number
LINK = re.compile(r"\[([^\]]+)\]\((https://[^)\s]+)\)")
SOURCE = re.compile(r"(?ms)^@\w+\{(\w+),(.*?)^\}")  # an entry of references.bib


def figure_data(chapter: str, name: str, root: Path = ROOT) -> pd.DataFrame | None:
    """The numbers behind a figure of the chapter's executed copy; None where the copy has no such figure."""
    file = _picture(root / "book" / "executed", chapter, name).with_suffix(".csv")
    return pd.read_csv(file) if file.is_file() else None


def findings(chapter: str, root: Path = ROOT) -> list[str]:
    """The sentences in the box of findings of a chapter's executed copy; none where it has no box."""
    file = root / "book" / "executed" / f"{chapter}.ipynb"
    if not file.is_file():
        return []
    outputs = [output for cell in nbformat.read(file, as_version=4).cells for output in cell.get("outputs", [])]
    boxes = [text for output in outputs if (text := text_of(output, "text/markdown")).startswith(BOX)]
    return [line.removeprefix("- ") for line in "\n".join(boxes).splitlines() if line.startswith("- ")]


def _picture(folder: Path, chapter: str, name: str) -> Path:
    """A figure's file, which gives its label on the page as well."""
    return folder / "figures" / f"{chapter}-{name}.svg"


def results_of(chapter: str, root: Path = ROOT) -> Path:
    """The results folder that a chapter's executed copy was told to use; the usual one where there is no copy."""
    executed = root / "book" / "executed" / f"{chapter}.ipynb"
    if not executed.is_file():
        return root / RESULTS
    metadata = json.loads(executed.read_text(encoding="utf-8"))["metadata"]
    return root / str(metadata.get("papermill", {}).get("parameters", {}).get("results", RESULTS))


def edit(notebook: Any, chapter: str, folder: Path) -> None:
    """Turn an executed notebook into the book's copy, in place; figures and their data go to `folder`/figures."""
    undrawn = _undrawn(notebook.cells)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if "caption_of" not in _figure_facts(output)]
            cell.outputs = [_placed(output, chapter, folder, undrawn) for output in shown]
            if not FOLDED & set(tags(cell)):
                tag(cell, "hide-input")
        else:
            cell.source = _in_book(_numbered(cell.source, chapter, undrawn))
    notebook.cells = _joined(_findings_first(notebook.cells))
    for cell in notebook.cells:
        if any("{figure}" in text_of(output, "text/markdown") for output in cell.get("outputs", [])):
            cell.outputs = list(map(_folded, cell.outputs))


def tags(cell: Any) -> list[str]:
    """A cell's tags."""
    return list(cell.metadata.get("tags", []))


def tag(cell: Any, *names: str) -> None:
    """Give a cell these tags in the place of those that fold."""
    cell.metadata["tags"] = [name for name in tags(cell) if name not in FOLDED] + list(names)


def text_of(output: Any, kind: str) -> str:
    """What an output shows as text of one kind; empty if it has none."""
    return "".join(output.get("data", {}).get(kind, ""))


def _figure_facts(output: Any) -> dict[str, Any]:
    """What `figure.show` wrote into an output's metadata; empty for other outputs."""
    return dict(output.get("metadata", {}).get("kvrepro", {}))


def _undrawn(cells: list[Any]) -> set[str]:
    """Strings in the code, names of figures among them, that no figure of this run is called: another run may draw
    these."""
    code = [cell for cell in cells if cell.cell_type == "code"]
    drawn = {_figure_facts(output).get("figure") for cell in code for output in cell.outputs}
    return {name for cell in code for name in re.findall(r'"([a-z0-9-]+)"', cell.source)} - drawn


def _numbered(text: str, chapter: str, undrawn: set[str]) -> str:
    """The text with references to figures as the book has them, so that they get their numbers. A figure that this run
    did not draw is named in words. A name that is nowhere in the code stays a reference, which fails the build."""

    def number(link: re.Match[str]) -> str:
        return "the figure (not drawn in this run)" if link[1] in undrawn else f"{{numref}}`fig-{chapter}-{link[1]}`"

    return REFERENCE.sub(number, text)


def _in_book(text: str) -> str:
    """Prose as the book has it: links to sources become citations, and links to pages of the book are relative to the
    folder of executed chapters."""
    keys = _sources()

    def cited(link: re.Match[str]) -> str:
        key = keys.get(link[2])
        return f"{link[1]} {{cite}}`{key}`" if key else link[0]

    return LINK.sub(cited, text).replace("](../book/", "](../")


@functools.cache
def _sources(file: Path = ROOT / "book" / "references.bib") -> dict[str, str]:
    """Address of a source -> its key in the references."""
    entries = SOURCE.findall(file.read_text(encoding="utf-8"))
    return {address: key for key, entry in entries for address in re.findall(r"\\url\{([^}]+)\}", entry)}


def _folded(output: Any) -> Any:
    """An output with its HTML table folded behind a line that says how many rows it has; any other output as it is."""
    table = text_of(output, "text/html")
    if "<table" not in table:
        return output
    rows = table.count("<tr") - 1
    summary = f"<summary>The numbers: {rows} row{'' if rows == 1 else 's'}</summary>"
    output.data["text/html"] = f'<details class="numbers">{summary}\n{table}\n</details>'
    return output


def _placed(output: Any, chapter: str, folder: Path, undrawn: set[str]) -> Any:
    """An output as the book shows it: a figure as a directive, anything else as it is."""
    facts = _figure_facts(output)
    if "figure" not in facts:
        if text := text_of(output, "text/markdown"):
            output.data["text/markdown"] = _numbered(text, chapter, undrawn)
        return output
    picture, caption = _picture(folder, chapter, facts["figure"]), _numbered(facts["caption"], chapter, undrawn)
    stem = picture.stem
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(output.data["image/svg+xml"].replace(WHITE, "", 1), encoding="utf-8")
    if "data" in facts:
        picture.with_suffix(".csv").write_text(facts["data"], encoding="utf-8")
        caption += f" {{download}}`Data (CSV) <figures/{stem}.csv>`"
    options = {
        "name": f"fig-{stem}",
        "alt": facts["alt"],
        "class": "dark-light kvrepro-figure",  # the theme leaves its brightness alone; book.css inverts it in the dark
        "target": f"../../_images/{stem}.svg",  # a click opens the picture itself, to zoom
    }
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()]
    text = "\n".join([f"::::{{figure}} figures/{stem}.svg", "---", *lines, "---", caption, "::::"])
    return nbformat.v4.new_output("display_data", data={"text/markdown": text})


def _findings_first(cells: list[Any]) -> list[Any]:
    """The cells, with the box of findings below the title, and the code before it as one folded cell at the end."""
    outputs_of = [cell.outputs if cell.cell_type == "code" else [] for cell in cells]
    texts = ["".join(text_of(output, "text/markdown") for output in outputs) for outputs in outputs_of]
    at = next((i for i, text in enumerate(texts) if FOUND in text), None)
    if at is None:
        return cells
    box = cells[at]
    moved = [i for i in range(at + 1) if cells[i].cell_type == "code" and "show-input" not in tags(cells[i])]
    source = "\n\n".join(cells[i].source for i in moved)
    outputs = [output for i in moved[:-1] for output in cells[i].outputs]
    setup = nbformat.v4.new_code_cell(source, outputs=outputs, metadata={"tags": ["hide-cell"]})
    tag(box, "remove-input")
    for output in box.outputs:
        if FOUND in (text := text_of(output, "text/markdown")):
            output["data"]["text/markdown"] = f"{text.replace(FOUND, BOX)}\n:::"
    rest = [cell for i, cell in enumerate(cells) if i not in moved]
    rest.insert(int(bool(rest) and rest[0].cell_type == "markdown"), box)
    end = next((i for i, cell in enumerate(rest) if cell.source.startswith(LAST)), None)
    if end is None:
        return [*rest, nbformat.v4.new_markdown_cell(LAST), setup]
    return [*rest[: end + 1], setup, *rest[end + 1 :]]


def _joined(cells: list[Any]) -> list[Any]:
    """The cells, with successive folded ones joined into one cell that has the sources and outputs of all."""
    joined: list[Any] = []
    for cell in cells:
        pair = [*joined[-1:], cell]
        if len(pair) == 2 and all(c.cell_type == "code" and tags(c) == ["hide-input"] for c in pair):
            before = joined.pop()
            cell.source = f"{before.source}\n\n{cell.source}"
            cell.outputs = [*before.outputs, *cell.outputs]
        joined.append(cell)
    return joined
