"""Are rows and verdicts the same whenever, however and wherever they are computed? data/reliability/determinism.csv and
data/stability.csv.

    python -m studies.repeat run --results /tmp/repeat                  # every variant of data/words/variants.yml
    python -m studies.repeat run --results /tmp/repeat --only "7 rows at a time" --chapters leakage -p n_items=2
    python -m studies.repeat folders "another machine" /tmp/here /tmp/there
    python -m studies.repeat verdicts "item seed" /tmp/runs/small-gqa-0 /tmp/runs/small-gqa-1 /tmp/runs/small-gqa-2

`run` computes the chapters as `studies.family` does, as they are usually run and in each variant, and compares; the
other two compare folders of results. Rows that are stored replace those of the same title and chapter.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from kvrepro.errors import InputError, ensure_known
from kvrepro.experiment import claims, models
from kvrepro.paths import DATA
from studies import chapters, oracle
from studies.table import replace_rows, stamp, words

DETERMINISM, STABILITY = DATA / "reliability" / "determinism.csv", DATA / "stability.csv"
COLUMNS = "varied must_be_equal chapter rows text kept score verdicts changed turned which machine torch date".split()
SAME = {"prediction": "text", "kept_hash": "kept", "token_f1": "score"}  # columns of rows -> of the table
COUNTS = ["rows", *SAME.values(), "verdicts", "changed", "turned"]
USUAL, EVERY = "as usual", "all"
ALWAYS = {"OMP_NUM_THREADS": "1", "KVREPRO_WORKERS": "1", "KVREPRO_ENGINE": "local"}
VARIANTS: dict[str, dict[str, Any]] = words("variants")
app = typer.Typer(add_completion=False, help=(__doc__ or "").partition("\n")[0])


def compared(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Verdicts of the claims and readings that every table has, with a column for each table. Of a table with several
    models the first counts. Verdicts that rest on stored timings cannot change and are left out."""
    parts = []
    for number, table in enumerate(tables):
        first_run = claims.verdicts_of_run(table)
        first_run = first_run[first_run.model != claims.STORED]
        parts.append(first_run.set_index(["claim", "reading"]).verdict.rename(number))
    return pd.concat(parts, axis=1, join="inner")


def row_of(verdicts: pd.DataFrame) -> dict[str, Any]:
    """What changes among the columns of `compared`: counts, share, and which claims. A claim turns where it is
    reproduced in one run and not reproduced in another. pair: the share that differs between two runs, the mean over
    all pairs; unlike `share` it does not grow with the number of runs."""
    differ = verdicts[verdicts.ne(verdicts.iloc[:, 0], axis=0).any(axis=1)]
    turned = differ.isin(["reproduced"]).any(axis=1) & differ.isin(["not reproduced"]).any(axis=1)
    pairs = [verdicts[a].ne(verdicts[b]).mean() for a, b in itertools.combinations(verdicts, 2)]
    texts = [
        f"{' '.join(name for name in key if name != 'any')}: {', '.join(row)}"
        for key, row in zip(differ.index, differ.to_numpy(), strict=True)
    ]
    counts = {"verdicts": len(verdicts), "changed": len(differ), "turned": int(turned.sum())}
    return counts | {"share": len(differ) / len(verdicts), "pair": sum(pairs) / len(pairs), "which": "; ".join(texts)}


def shares(varied: str, first: Path, other: Path) -> pd.DataFrame:
    """A row for each chapter of which both folders hold rows or verdicts, and their sum, with `COLUMNS`: in how many of
    the rows that both have text, kept tokens or score differ, and how many verdicts differ, of those that rest on no
    seconds."""
    identity = oracle.IDENTITY
    both = oracle.rows(first).merge(oracle.rows(other), on=identity, suffixes=("", "_other"))
    rows: list[dict[str, Any]] = []
    for chapter in chapters.JUDGED:
        part, files = both[both.chapter == chapter], [folder / chapter / "claims.csv" for folder in (first, other)]
        row: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"varied": varied, "chapter": chapter, "rows": len(part)}
        for column, name in SAME.items():
            one, two = part[column], part[f"{column}_other"]
            row[name] = int((one.ne(two) & ~(one.isna() & two.isna())).sum())
        if all(file.is_file() for file in files):
            verdicts = compared([claims.read(file) for file in files])
            timed = claims.load_claims(chapter).get("timed", [])
            verdicts = verdicts[~verdicts.index.isin(timed, level="claim")]
            verdicts = verdicts[(verdicts != claims.NOT_TESTABLE).any(axis=1)]
            row |= row_of(verdicts) if len(verdicts) else {}
        if row["rows"] or row["verdicts"]:
            rows.append(row)
    if not rows:
        raise InputError(f"{first} and {other} have no row or verdict in common")
    total = {"varied": varied, "chapter": EVERY, **pd.DataFrame(rows)[COUNTS].sum()}
    equal = varied in VARIANTS and VARIANTS[varied].get("expected_equal", True)
    return pd.DataFrame([*rows, total]).reindex(columns=COLUMNS).assign(must_be_equal=equal, **stamp())


@app.command()
def folders(
    varied: Annotated[str, typer.Argument(help="what the two runs differ in")],
    first: Annotated[Path, typer.Argument(help="a results folder: it holds a folder per chapter")],
    other: Annotated[Path, typer.Argument(help="another one")],
    out: Annotated[Path, typer.Option()] = DETERMINISM,
) -> None:
    """Compare rows and verdicts of two results folders."""
    table = shares(varied, first, other)
    typer.echo(table[["chapter", *COUNTS]].to_string(index=False))
    replace_rows(out, table, ["varied", "chapter"])


@app.command()
def verdicts(
    varied: Annotated[str, typer.Argument(help="what the runs differ in")],
    results: Annotated[list[Path], typer.Argument(help="two results folders or more")],
    out: Annotated[Path, typer.Option()] = STABILITY,
) -> None:
    """Compare the verdicts of several results folders, chapter by chapter."""
    rows = []
    for chapter in chapters.JUDGED:
        files = [folder / chapter / "claims.csv" for folder in results]
        if all(file.is_file() for file in files):
            table = compared([claims.read(file) for file in files])
            rows.append({"varied": varied, "runs": len(files), "chapter": chapter} | row_of(table))
    if len(results) < 2 or not rows:
        raise InputError("give two results folders or more with verdicts of the same chapters")
    typer.echo(pd.DataFrame(rows).to_string(index=False))
    replace_rows(out, pd.DataFrame(rows), ["varied", "chapter"], digits=4)


@app.command()
def run(
    results: Annotated[Path, typer.Option(help="a folder for the runs; what is there is not computed again")],
    only: Annotated[list[str], typer.Option(help="a variant; may be repeated. Otherwise all possible ones")] = [],  # noqa: B006
    chapter_names: Annotated[str, typer.Option("--chapters", help="with commas; otherwise all that have claims")] = "",
    model: Annotated[str, typer.Option(help="an embedded model")] = models.DEFAULT,
    parameter: Annotated[list[str], typer.Option("-p", "--parameter", help="name=value")] = [],  # noqa: B006
) -> None:
    """Run chapters in each variant and compare; the exit status is 1 where a run failed, or where rows differ that
    should be equal."""
    ensure_known("variant", only, VARIANTS)
    possible = [name for name, v in VARIANTS.items() if torch.cuda.is_available() or not v.get("cuda")]
    wanted = dict.fromkeys([USUAL, *(name for name in only or possible)])
    wanted = dict.fromkeys([*(VARIANTS[name].get("compared_with", USUAL) for name in wanted), *wanted])
    folder_of = {name: results.resolve() / name.replace(" ", "-").replace(",", "") for name in wanted}
    failed = False
    for name, folder in folder_of.items():
        texts = [*VARIANTS[name].get("parameters", []), *parameter]
        options = [word for text in texts for word in ("-p", text)]
        command = [sys.executable, "-m", "studies.family", "run", "--models", model, "--results", str(folder)]
        environment = os.environ | ALWAYS | VARIANTS[name].get("environment", {})
        failed |= bool(subprocess.run([*command, "--chapters", chapter_names, *options], env=environment).returncode)
    for name in [name for name in wanted if name != USUAL]:
        reference = folder_of[VARIANTS[name].get("compared_with", USUAL)]
        table = shares(name, *(folder / f"{model}-0" for folder in (reference, folder_of[name])))
        typer.echo(table[["varied", "chapter", *COUNTS]].to_string(index=False))
        replace_rows(DETERMINISM, table, ["varied", "chapter"])
        differ = table[["text", "kept", "score", "changed"]].to_numpy().any()
        failed |= bool(table.must_be_equal.all() and differ)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    app()
