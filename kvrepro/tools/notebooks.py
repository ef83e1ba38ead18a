"""Copies of the chapters' notebooks: `kvrepro notebooks`, for those who have the package without a clone."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kvrepro.errors import InputError, ensure_known
from kvrepro.experiment.sharing import make_folder
from kvrepro.paths import ROOT, replaced
from kvrepro.tools import command

INSTALL = "a first cell installs kvrepro from here, as pip names it: for Colab, which has no kvrepro"


def main(
    name: Annotated[list[str] | None, typer.Argument(help="of chapters; otherwise all")] = None,
    to: Annotated[Path, typer.Option(help="the folder, made where it is missing")] = Path("notebooks"),
    install: Annotated[str, typer.Option(help=INSTALL)] = "",
    force: Annotated[bool, typer.Option(help="replace notebooks that lie there, and what was changed in them")] = False,
) -> None:
    """Copy notebooks and print where they lie: open them in Jupyter, or run them with papermill."""
    sources = {file.stem: file for file in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    ensure_known("notebook", name or (), sources)
    wanted = {to / f"{notebook}.ipynb": sources[notebook] for notebook in name or sources}
    if lying := [str(file) for file in wanted if file.exists() and not force]:
        raise InputError(f"{lying[0]} is there already: give another folder (--to), or replace it (--force)")
    for file, source in wanted.items():
        make_folder(file.parent)
        with replaced(file) as aside:
            aside.write_text(_with_install(source, install), encoding="utf-8")
        print(file)


def _with_install(source: Path, install: str) -> str:
    """A notebook's text, with the first cell that installs the package, if one is asked for."""
    text = source.read_text(encoding="utf-8")
    if not install:
        return text
    cell = {"id": "install", "cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    notebook = json.loads(text)
    notebook["cells"].insert(0, cell | {"source": [f'%pip install --quiet "{install}"']})
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    command.run(main)
