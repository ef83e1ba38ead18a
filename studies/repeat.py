"""Are rows and verdicts the same whenever, however and wherever they are computed? data/reliability/determinism.csv and
data/stability.csv.

    python -m studies.family run --results /tmp/usual --models small-gqa
    python -m studies.family run --results /tmp/sevens --models small-gqa -p batch_rows=7
    python -m studies.repeat folders /tmp/usual/small-gqa-0 /tmp/sevens/small-gqa-0 --store "7 rows at a time" --equal
    python -m studies.repeat folders data/oracle data/results     # what changed since the oracle: nothing is stored
    python -m studies.repeat verdicts "item seed" /tmp/runs/small-gqa-0 /tmp/runs/small-gqa-1 /tmp/runs/small-gqa-2

Runs differ in a parameter or in the environment: OMP_NUM_THREADS, ATEN_CPU_CAPABILITY, KVREPRO_WORKERS, KVREPRO_ENGINE.
Rows that are stored replace those of the same title and chapter. data/oracle holds rows and verdicts of the quick
profile as the third design began, by one worker.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from kvrepro.errors import InputError
from kvrepro.experiment import claims, provenance
from kvrepro.paths import DATA
from studies import chapters
from studies.table import replace_rows, versions

DETERMINISM, STABILITY = DATA / "reliability" / "determinism.csv", DATA / "stability.csv"
COLUMNS = "varied must_be_equal chapter rows text kept score verdicts changed turned which machine torch date".split()
IDENTITY = """chapter name item model limit max_new_tokens policy capacity prefix suffix suffix_mode interval reading
    switches regime share until whitelist spans fair chunk chunk_mode bits""".split()
SAME = {"prediction": "text", "kept_hash": "kept", "token_f1": "score"}  # columns of rows -> of the table
COUNTS = ["rows", *SAME.values(), "verdicts", "changed", "turned"]
NUMBERS = ["ours", "low", "high"]
app = typer.Typer(add_completion=False, help=(__doc__ or "").partition("\n")[0])


def answers(results: Path) -> pd.DataFrame:
    """All answers in a folder of results, the latest of each identity."""
    frames = [pd.read_parquet(file) for file in sorted(results.rglob("*.parquet"))]
    frames = [frame for frame in frames if {"policy", "prediction", "kept_hash"} <= set(frame)]
    table = pd.concat([frame.reindex(columns=[*IDENTITY, *SAME, "date", "error"]) for frame in frames])
    table = table[table.error.isna() | (table.error == "")].sort_values("date", kind="stable")
    return table.drop_duplicates(IDENTITY, keep="last")


def compared(chapter: str, folders: Sequence[Path], column: str = "verdict") -> pd.DataFrame:
    """Verdicts (or another column) of a chapter's claims and readings that every folder has, with a column for each
    folder; none where one has no verdicts. Of a table with several models the first counts. Verdicts that rest on
    stored timings cannot change and are left out."""
    parts, files = [], [folder / chapter / "claims.csv" for folder in folders]
    for number, file in enumerate(files if all(file.is_file() for file in files) else []):
        table = pd.read_csv(file)
        first_run = table[table.model != claims.STORED]
        first_run = first_run[(first_run[["model", "profile"]] == first_run[["model", "profile"]].iloc[0]).all(axis=1)]
        parts.append(first_run.set_index(["claim", "reading"])[column].rename(number))
    return pd.concat(parts, axis=1, join="inner") if parts else pd.DataFrame()


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


def shares(varied: str, first: Path, other: Path, equal: bool) -> pd.DataFrame:
    """A row for each chapter of which both folders hold rows or verdicts, and their sum, with `COLUMNS`: in how many of
    the rows that both have text, kept tokens or score differ, and how many verdicts differ, of those that rest on no
    seconds."""
    both = answers(first).merge(answers(other), on=IDENTITY, suffixes=("", "_other"))
    rows: list[dict[str, Any]] = []
    for chapter in chapters.JUDGED:
        part, verdicts = both[both.chapter == chapter], compared(chapter, [first, other])
        row: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {"varied": varied, "chapter": chapter, "rows": len(part)}
        for column, name in SAME.items():
            one, two = part[column], part[f"{column}_other"]
            row[name] = int((one.ne(two) & ~(one.isna() & two.isna())).sum())
        if len(verdicts):
            timed = claims.load_claims(chapter).get("timed", [])
            verdicts = verdicts[~verdicts.index.isin(timed, level="claim")]
            verdicts = verdicts[(verdicts != claims.NOT_TESTABLE).any(axis=1)]
            row |= row_of(verdicts) if len(verdicts) else {}
        if row["rows"] or row["verdicts"]:
            rows.append(row)
    if not rows:
        raise InputError(f"{first} and {other} have no row or verdict in common")
    total = {"varied": varied, "chapter": "all", **pd.DataFrame(rows)[COUNTS].sum()}
    facts = {"must_be_equal": equal, "machine": provenance.machine()} | versions("torch")
    return pd.DataFrame([*rows, total]).reindex(columns=COLUMNS).assign(**facts)


@app.command()
def folders(
    first: Annotated[Path, typer.Argument(help="a results folder: it holds a folder per chapter")],
    other: Annotated[Path, typer.Argument(help="another one")],
    store: Annotated[str, typer.Option(help="what the two differ in: the title of the rows to store")] = "",
    equal: Annotated[bool, typer.Option("--equal", help="the rows of both must be equal")] = False,
) -> None:
    """Compare rows and verdicts of two results folders, and say how many estimates and ends of intervals differ."""
    table = shares(store, first, other, equal)
    typer.echo(table[["chapter", *COUNTS, "which"]].to_string(index=False))
    for chapter, column in itertools.product(chapters.JUDGED, NUMBERS):
        numbers = compared(chapter, [first, other], column)
        if len(numbers):
            differ = ~np.isclose(numbers[0], numbers[1], rtol=1e-6, atol=1e-6, equal_nan=True)
            typer.echo(f"{chapter}, {column}: {differ.sum()} of {len(numbers)} differ")
    if store:
        replace_rows(DETERMINISM, table, ["varied", "chapter"])


@app.command()
def verdicts(
    varied: Annotated[str, typer.Argument(help="what the runs differ in")],
    results: Annotated[list[Path], typer.Argument(help="two results folders or more")],
) -> None:
    """Compare the verdicts of several results folders, chapter by chapter."""
    rows = []
    for chapter in chapters.JUDGED:
        table = compared(chapter, results)
        if len(table):
            rows.append({"varied": varied, "runs": len(results), "chapter": chapter} | row_of(table))
    if len(results) < 2 or not rows:
        raise InputError("give two results folders or more with verdicts of the same chapters")
    typer.echo(pd.DataFrame(rows).to_string(index=False))
    replace_rows(STABILITY, pd.DataFrame(rows), ["varied", "chapter"], digits=4)


if __name__ == "__main__":
    app()
