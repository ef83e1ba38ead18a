"""Are rows and verdicts the same whenever, however and wherever they are computed? The share that is not.

    python -m kvrepro.tools.repeat run --results /tmp/repeat                  # every variant that this machine can run
    python -m kvrepro.tools.repeat run --results /tmp/repeat --only "7 rows at a time" --chapters leakage -p n_items=2
    python -m kvrepro.tools.repeat folders "another machine" /tmp/here /tmp/there

`run` computes the chapters as `kvrepro.tools.family` does, once as they are usually run and once for each of
`VARIANTS`, several side by side, and compares each with the first. The shares go into data/reliability/determinism.csv,
in the place of those of the same variant.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from kvrepro.engine.allowed import ensure
from kvrepro.errors import InputError, program
from kvrepro.experiment import claims, models, provenance
from kvrepro.paths import DATA
from kvrepro.tools import book, family, stability, store
from kvrepro.tools.rows import replace_rows

TABLE = DATA / "reliability" / "determinism.csv"
COLUMNS = "varied must_be_equal chapter rows text kept score verdicts changed turned which machine torch date".split()
SAME = {"prediction": "text", "kept_hash": "kept", "token_f1": "score"}  # columns of rows -> of the table
USUAL = "as usual"
EVERY = "all"
app = typer.Typer(add_completion=False, help=(__doc__ or "").partition("\n")[0])


@dataclass(frozen=True)
class Variant:
    """What one run is given, beside or in the place of `ALWAYS`."""

    environment: dict[str, str] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    compared_with: str = USUAL
    expected_equal: bool = True
    cuda: bool = False


ALWAYS = {"OMP_NUM_THREADS": "1", "KVREPRO_WORKERS": "1", "KVREPRO_ENGINE": "local"}
VARIANTS = {
    USUAL: Variant(),
    "a second run": Variant(),
    "two workers": Variant({"KVREPRO_WORKERS": "2"}),
    "two threads": Variant({"OMP_NUM_THREADS": "2"}),
    "1 row at a time": Variant(parameters=("batch_rows=1",)),
    "7 rows at a time": Variant(parameters=("batch_rows=7",)),
    "engine ray": Variant({"KVREPRO_ENGINE": "ray", "KVREPRO_WORKERS": "2"}),
    "instructions AVX2": Variant({"ATEN_CPU_CAPABILITY": "avx2"}, expected_equal=False),
    "no vector instructions": Variant({"ATEN_CPU_CAPABILITY": "default"}, expected_equal=False),
    "bfloat16": Variant(parameters=("dtype=bfloat16",), expected_equal=False),
    "GPU, float32": Variant(parameters=("device=cuda", "dtype=float32"), expected_equal=False, cuda=True),
    "GPU, bfloat16": Variant(
        parameters=("device=cuda", "dtype=bfloat16"), compared_with="GPU, float32", expected_equal=False, cuda=True
    ),
}


def possible() -> list[str]:
    """The variants that this machine can run: a GPU, Ray and the wider instructions may be missing."""
    found = [name for name, one in VARIANTS.items() if torch.cuda.is_available() or not one.cuda]
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        found.remove("instructions AVX2")
    return [name for name in found if name != "engine ray" or find_spec("ray")]


def folder_of(results: Path, variant: str, model: str) -> Path:
    """Where `family run` puts a variant's chapters."""
    return results / variant.replace(" ", "-").replace(",", "") / f"{model}-0"


# ---------------------------------------------------------------- two folders


def rows_of(folder: Path, chapter: str) -> pd.DataFrame:
    """All stored rows of a chapter, those of a run that was cut off as well, by what was asked whatever device and
    number format answered."""
    tables = [rows.with_suffix(".parquet") for rows in sorted((folder / chapter).glob("*.rows"))]
    frames = {table.stem: store.said(table, ("device", "dtype"))[list(SAME)] for table in tables}
    return pd.concat(frames) if frames else pd.DataFrame(columns=list(SAME))


def shares(varied: str, first: Path, other: Path, chapters: Sequence[str]) -> pd.DataFrame:
    """`COLUMNS`: how many rows of both folders have another text, other kept tokens or another score, and how many
    verdicts, of those that either could give, are others; a row for each chapter of which both hold rows, and their
    sum. Empty where they share none."""
    found: list[dict[str, Any]] = []
    for chapter in chapters:
        one, two = (rows_of(folder, chapter) for folder in (first, other))
        if one.index.intersection(two.index).empty:
            continue
        rows = store.differing(one, two)
        said: dict[str, Any] = dict.fromkeys(("verdicts", "changed", "turned"), 0)
        files = [folder / chapter / "claims.csv" for folder in (first, other)]
        if all(file.is_file() for file in files):
            verdicts = stability.compared([claims.read(file) for file in files])
            verdicts = verdicts[(verdicts != claims.NOT_TESTABLE).any(axis=1)]  # in both runs: none that could differ
            said = stability.row_of(verdicts) if len(verdicts) else said
        others = {SAME[column]: int(count) for column, count in rows.sum().items()}
        found.append({"varied": varied, "chapter": chapter, "rows": len(rows), **others, **said})
    if found:
        which = "; ".join(f"{row['chapter']} {row['which']}" for row in found if row.get("which"))
        whole = {"varied": varied, "chapter": EVERY, "which": which}
        numbers = "rows text kept score verdicts changed turned".split()
        found.append(whole | {name: sum(row[name] for row in found) for name in numbers})
    table = pd.DataFrame(found).reindex(columns=COLUMNS)
    version = torch.__version__.partition("+")[0]
    known = VARIANTS.get(varied)
    table["must_be_equal"] = known is not None and known.expected_equal
    return table.assign(machine=provenance.machine(), torch=version, date=f"{date.today()}")


def stored(table: pd.DataFrame, out: Path) -> None:
    """Print the sums, and put the rows in the place of those of the same variant and chapter."""
    for row in table[table.chapter == EVERY].itertuples():
        typer.echo(f"{row.varied}: of {row.rows} rows {row.text} have another text, {row.kept} other kept tokens, "
                   f"{row.score} another score; {row.changed} of {row.verdicts} verdicts are others")  # fmt: skip
    if len(table):
        replace_rows(out, table, ["varied", "chapter"])


# ---------------------------------------------------------------- programs


@app.command()
def folders(
    varied: Annotated[str, typer.Argument(help="what the two runs differ in")],
    first: Annotated[Path, typer.Argument(help="a results folder: it holds a folder per chapter")],
    other: Annotated[Path, typer.Argument(help="another one")],
    out: Annotated[Path, typer.Option()] = TABLE,
) -> None:
    """Compare two results folders. Raises InputError where they have no row in common."""
    found = shares(varied, first, other, family.CHAPTERS)
    if found.empty:
        raise InputError(f"{first} and {other} have no row in common: give folders that hold a folder per chapter")
    stored(found, out)


@app.command()
def run(
    results: Annotated[Path, typer.Option(help="a folder for the runs; what is there is not computed again")],
    only: Annotated[list[str], typer.Option(help="a variant; may be repeated. Otherwise all possible ones")] = [],  # noqa: B006
    chapters: Annotated[str, typer.Option(help="names with commas; otherwise all that have claims")] = "",
    model: Annotated[str, typer.Option(help="an embedded model")] = models.DEFAULT,
    parameter: Annotated[list[str], typer.Option("-p", "--parameter", help=book.PARAMETER)] = [],  # noqa: B006
    together: Annotated[int, typer.Option(min=1, help="runs side by side")] = 1,
    out: Annotated[Path, typer.Option()] = TABLE,
) -> None:
    """Run chapters in each variant and compare; the exit status is 1 where a run failed, or where rows differ that
    should be equal."""
    for name in only:
        ensure(tuple(VARIANTS), variant=name)
    wanted = only or possible()
    wanted = [name for name in VARIANTS if name in {*wanted, USUAL, *(VARIANTS[one].compared_with for one in wanted)}]
    names = family.chosen_names(chapters, family.CHAPTERS, "chapter")
    given = [f"--parameter={text}" for text in parameter]
    command = [sys.executable, "-m", "kvrepro.tools.family", "run", "--models", model, "--chapters"]

    def started(task: tuple[str, str]) -> int:
        name, chapter = task
        one, into = VARIANTS[name], ["--results", str(folder_of(results, name, model).parent.resolve())]
        own = [f"--parameter={text}" for text in one.parameters]
        return subprocess.run([*command, chapter, *into, *given, *own], env={**os.environ, **ALWAYS, **one.environment}
                              ).returncode  # fmt: skip

    with ThreadPoolExecutor(together) as pool:
        failed = any(list(pool.map(started, ((name, chapter) for chapter in names for name in wanted))))
    for name in wanted[1:]:
        one = VARIANTS[name]
        table = shares(name, folder_of(results, one.compared_with, model), folder_of(results, name, model), names)
        stored(table, out)
        failed |= one.expected_equal and bool(table[["text", "kept", "score", "changed"]].to_numpy().any())
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    program(app)
