"""Do verdicts change with what should not matter? The tables of several runs side by side: of other item seeds, other
models, or another processor's rounding.

`python -m studies.stability "item seed" results-0 results-1 results-2` takes results folders and stores, for each
chapter that all of them hold, the share of verdicts that change in data/stability.csv, and which. What was stored under
the same title is replaced. Such folders come from

    python -m studies.family run --results /tmp/runs --models small-gqa --seeds 0,1,2
    ATEN_CPU_CAPABILITY=default python -m studies.family run --results /tmp/plain --models small-gqa
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from kvrepro.errors import InputError
from kvrepro.experiment import claims
from kvrepro.paths import DATA
from kvrepro.tools import command
from kvrepro.tools.rows import replace_rows

TABLE = DATA / "stability.csv"
COLUMNS = ["varied", "runs", "chapter", "verdicts", "changed", "turned", "share", "pair", "which"]


def compared(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Verdicts of the claims and readings that every table has, with a column for each table. Of a table with several
    models the first counts. Verdicts that rest on stored timings cannot change and are left out."""
    parts = []
    for number, table in enumerate(tables):
        first_run = claims.verdicts_of_run(table)
        first_run = first_run[first_run.model != claims.STORED]
        parts.append(first_run.set_index(["claim", "reading"]).verdict.rename(number))
    return pd.concat(parts, axis=1, join="inner")


def row_of(verdicts: pd.DataFrame) -> dict[str, object]:
    """What changes among the columns of `compared`: counts, share, and which claims. A claim turns where it is
    reproduced in one run and not reproduced in another. pair: the share that differs between two runs, the mean over
    all pairs; unlike `share` it does not grow with the number of runs."""
    differ = verdicts[verdicts.ne(verdicts.iloc[:, 0], axis=0).any(axis=1)]
    turned = differ.isin(["reproduced"]).any(axis=1) & differ.isin(["not reproduced"]).any(axis=1)
    pairs = [verdicts[a].ne(verdicts[b]).mean() for a, b in itertools.combinations(verdicts, 2)]
    texts = [f"{' '.join(name for name in key if name != 'any')}: {', '.join(row)}"
            for key, row in zip(differ.index, differ.to_numpy(), strict=True)]  # fmt: skip
    return {
        "runs": verdicts.shape[1], "verdicts": len(verdicts), "changed": len(differ), "turned": int(turned.sum()),
        "share": len(differ) / len(verdicts), "pair": sum(pairs) / len(pairs), "which": "; ".join(texts),
    }  # fmt: skip


def table(varied: str, folders: Sequence[Path]) -> pd.DataFrame:
    """A row for each chapter with verdicts of a common claim and reading in all folders. Raises InputError for fewer
    than two folders, or nothing in common."""
    if len(folders) < 2:
        raise InputError(f"{len(folders)} results folder: give two or more to compare")
    held = [{file.parent.name for file in folder.glob("*/claims.csv")} for folder in folders]
    if not (shared := sorted(set.intersection(*held))):
        raise InputError(f"no chapter has verdicts in all of {', '.join(map(str, folders))}")
    rows = []
    for chapter in shared:
        verdicts = compared([claims.read(folder / chapter / "claims.csv") for folder in folders])
        if len(verdicts):
            rows.append({"varied": varied, "chapter": chapter} | row_of(verdicts))
    if not rows:
        raise InputError(f"no verdict of {', '.join(shared)} is of the same claim and reading in all folders")
    return pd.DataFrame(rows, columns=COLUMNS)


def main(
    varied: Annotated[str, typer.Argument(help="what the runs differ in")],
    folders: Annotated[list[Path], typer.Argument(help="results folders")],
    out: Annotated[Path, typer.Option()] = TABLE,
) -> None:
    """Compare, print, and store the rows in the place of those of the same title and chapter."""
    rows = table(varied, folders)
    for row in rows.itertuples():
        typer.echo(f"{varied}, {row.chapter}: {row.changed} of {row.verdicts} verdicts change ({row.share:.0%}), "
                   f"{row.turned} of them turn over")  # fmt: skip
        if row.which:
            typer.echo("  " + row.which.replace("; ", "\n  "))
    replace_rows(out, rows, ["varied", "chapter"], digits=4)


if __name__ == "__main__":
    command.run(main)
