"""Are rows and verdicts the same whenever, however and wherever they are computed? The share that is not.

    python -m studies.repeat run --results /tmp/repeat                  # every variant that this machine can run
    python -m studies.repeat run --results /tmp/repeat --only "7 rows at a time" --chapters leakage -p n_items=2
    python -m studies.repeat folders "another machine" /tmp/here /tmp/there

`run` computes the chapters as `studies.family` does, once as they are usually run and once for each of
`VARIANTS`, several side by side, and compares each with the first. The shares go into data/reliability/determinism.csv,
in the place of those of the same variant.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from kvrepro.engine.allowed import ensure
from kvrepro.errors import InputError, program
from kvrepro.experiment import claims, models
from kvrepro.paths import DATA
from kvrepro.tools import book, store
from kvrepro.tools.rows import replace_rows, stamp, words
from studies import family, stability

TABLE = DATA / "reliability" / "determinism.csv"
COLUMNS = "varied must_be_equal chapter rows text kept score verdicts changed turned which machine torch date".split()
SAME = {"prediction": "text", "kept_hash": "kept", "token_f1": "score"}  # columns of rows -> of the table
USUAL = "as usual"
EVERY = "all"
app = typer.Typer(add_completion=False, help=(__doc__ or "").partition("\n")[0])


@dataclass(frozen=True)
class Variant:
    """What distinguishes one run from the usual one. environment: added to `ALWAYS`, or replacing it."""

    environment: dict[str, str] = field(default_factory=dict)
    parameters: Sequence[str] = ()
    compared_with: str = USUAL
    expected_equal: bool = True
    cuda: bool = False


ALWAYS = {"OMP_NUM_THREADS": "1", "KVREPRO_WORKERS": "1", "KVREPRO_ENGINE": "local"}
VARIANTS = {name: Variant(**entry) for name, entry in words("variants").items()}


def possible() -> list[str]:
    """The variants that this machine can run: a GPU, Ray and the wider instructions may be missing."""
    names = [name for name, variant in VARIANTS.items() if torch.cuda.is_available() or not variant.cuda]
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        names.remove("instructions AVX2")
    return [name for name in names if name != "engine ray" or find_spec("ray")]


def folder_of(results: Path, variant: str, model: str) -> Path:
    """Where `family run` puts a variant's chapters."""
    return results / variant.replace(" ", "-").replace(",", "") / f"{model}-0"


# ---------------------------------------------------------------- two folders


def rows_of(folder: Path, chapter: str) -> pd.DataFrame:
    """All stored rows of a chapter, also those of a run that was cut off. They are indexed by table and by what was
    asked, without device and number format."""
    tables = [rows.with_suffix(".parquet") for rows in sorted((folder / chapter).glob("*.rows"))]
    frames = {table.stem: store.latest_rows(table, ("device", "dtype"))[list(SAME)] for table in tables}
    return pd.concat(frames) if frames else pd.DataFrame(columns=list(SAME))


def shares(varied: str, first: Path, other: Path, chapters: Sequence[str]) -> pd.DataFrame:
    """A row for each chapter of which both folders hold the same answers, or verdicts without any answers, and their
    sum, with `COLUMNS`: in how many of the rows that both have text, kept tokens or score differ, and how many verdicts
    differ, of those that at least one folder could give and that rest on no seconds. Empty where the folders share
    nothing."""
    rows: list[dict[str, Any]] = []
    for chapter in chapters:
        rows_a, rows_b = (rows_of(folder, chapter) for folder in (first, other))
        files = [folder / chapter / "claims.csv" for folder in (first, other)]
        judged = all(file.is_file() for file in files)
        no_answers = judged and rows_a.empty and rows_b.empty  # of a chapter that generates none, as reclamation
        if rows_a.index.intersection(rows_b.index).empty and not no_answers:
            continue
        differs = store.differing(rows_a, rows_b)
        verdict_counts: dict[str, Any] = dict.fromkeys(("verdicts", "changed", "turned"), 0)
        if judged:
            verdicts = stability.compared([claims.read(file) for file in files])
            timed = claims.load_claims(chapter).get("timed", [])
            verdicts = verdicts[~verdicts.index.isin(timed, level="claim")]
            verdicts = verdicts[(verdicts != claims.NOT_TESTABLE).any(axis=1)]
            verdict_counts = stability.row_of(verdicts) if len(verdicts) else verdict_counts
        row_counts = {SAME[column]: int(count) for column, count in differs.sum().items()}
        rows.append({"varied": varied, "chapter": chapter, "rows": len(differs), **row_counts, **verdict_counts})
    table = pd.DataFrame(rows).reindex(columns=COLUMNS)
    variant = VARIANTS.get(varied)
    table["must_be_equal"] = variant is not None and variant.expected_equal
    return with_sum(table.assign(**stamp() | {"torch": torch.__version__.partition("+")[0]}))


def with_sum(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a variant's chapters, and their sum, dated as the last of them."""
    if table.empty:
        return table
    counts = {name: table[name].sum() for name in "rows text kept score verdicts changed turned".split()}
    which = "; ".join(f"{row.chapter} {row.which}" for row in table.fillna({"which": ""}).itertuples() if row.which)
    return pd.concat([table, table.tail(1).assign(chapter=EVERY, which=which, **counts)], ignore_index=True)


def print_and_store(table: pd.DataFrame, out: Path) -> None:
    """Print the sums, and store the rows in the place of those of the same variant and chapter. The stored sum counts
    the variant's chapters that were measured before, too."""
    for row in table[table.chapter == EVERY].itertuples():
        typer.echo(f"{row.varied}: of {row.rows} rows {row.text} have another text, {row.kept} other kept tokens, "
                   f"{row.score} another score; {row.changed} of {row.verdicts} verdicts are others")  # fmt: skip
    if len(table):
        stored = replace_rows(out, table, ["varied", "chapter"])
        chapters = stored[stored.varied.isin(table.varied) & (stored.chapter != EVERY)]
        replace_rows(out, with_sum(chapters), ["varied", "chapter"])


# ---------------------------------------------------------------- programs


@app.command()
def folders(
    varied: Annotated[str, typer.Argument(help="what the two runs differ in")],
    first: Annotated[Path, typer.Argument(help="a results folder: it holds a folder per chapter")],
    other: Annotated[Path, typer.Argument(help="another one")],
    out: Annotated[Path, typer.Option()] = TABLE,
) -> None:
    """Compare two results folders. Raises InputError where they have no row in common."""
    table = shares(varied, first, other, family.CHAPTERS)
    if table.empty:
        raise InputError(f"{first} and {other} have no row in common: give folders that hold a folder per chapter")
    print_and_store(table, out)


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
    chosen = only or possible()
    references = {VARIANTS[name].compared_with for name in chosen}
    wanted = [name for name in VARIANTS if name in {USUAL, *chosen, *references}]
    names = family.chosen_names(chapters, family.CHAPTERS, "chapter")
    given = [f"--parameter={text}" for text in parameter]
    command = [sys.executable, "-m", "studies.family", "run", "--models", model, "--chapters"]

    def started(task: tuple[str, str]) -> int:
        name, chapter = task
        variant, into = VARIANTS[name], ["--results", str(folder_of(results, name, model).parent.resolve())]
        options = [f"--parameter={text}" for text in variant.parameters]
        environment = os.environ | ALWAYS | variant.environment
        return subprocess.run([*command, chapter, *into, *given, *options], env=environment).returncode

    with ThreadPoolExecutor(together) as pool:
        failed = any(list(pool.map(started, ((name, chapter) for chapter in names for name in wanted))))
    for name in wanted[1:]:
        variant = VARIANTS[name]
        table = shares(name, folder_of(results, variant.compared_with, model), folder_of(results, name, model), names)
        print_and_store(table, out)
        failed |= variant.expected_equal and bool(table[["text", "kept", "score", "changed"]].to_numpy().any())
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    program(app)
