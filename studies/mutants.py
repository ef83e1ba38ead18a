"""Do the tests notice wrong code? What became of the mutants, and which survived.

    mutmut run --max-children 8        # in a copy of the clone: change one operator, number or name at a time, and test
    python -m studies.mutants    # in the same folder: data/reliability/mutants.csv and survivors.csv

pyproject.toml lists the modules that are changed and the tests that run; `mutmut run "kvrepro.engine.quota*"` tries one
module, and the rows of the others stay as they were. A mutant is killed when a test fails or takes
many times as long as usual. In survivors.csv the column `reason` is written by hand: why no test can tell this change
from the original. It stays with its mutant when the table is written again.
"""

import contextlib
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from kvrepro.errors import InputError, one_line_errors
from kvrepro.experiment import provenance
from kvrepro.paths import DATA, write_table

FOLDER = DATA / "reliability"
KILLED, SURVIVED, TIMEOUT, NOT_TRIED = "killed", "survived", "timeout", "not checked"
CHANGE = ["module", "function", "before", "after"]
COUNTS = ["mutants", "tried", KILLED, "timeouts", SURVIVED, "explained"]


def outcomes(mutants: Path) -> pd.DataFrame:
    """name, module and outcome of every mutant; the outcome is "not checked" for those that were not tried. Raises
    InputError where mutmut has not run."""
    from mutmut.stats import status_by_exit_code

    rows = []
    for file in sorted(mutants.rglob("*.py.meta")):
        module = str(file.relative_to(mutants)).removesuffix(".meta")
        for name, code in json.loads(file.read_text())["exit_code_by_key"].items():
            outcome = status_by_exit_code[code]
            rows.append((name, module, SURVIVED if outcome == "no tests" else outcome))
    table = pd.DataFrame(rows, columns=["name", "module", "outcome"])
    if (table.outcome == NOT_TRIED).all():
        raise InputError(f"no mutant was tested in {mutants}: first mutmut run")
    return table.replace({"outcome": {"segfault": KILLED, "suspicious": KILLED}})


def changes(table: pd.DataFrame) -> Iterator[tuple[str, ...]]:
    """`CHANGE` of each mutant: its module and function, and the lines before and after. Call it in the folder in which
    mutmut ran."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    for row in table.itertuples():
        lines = get_diff_for_mutant(row.name, path=row.module).splitlines()[3:]
        before, after = (" ".join(x[1:].strip() for x in lines if x[:1] == sign) for sign in "-+")
        function = row.name.rpartition("__mutmut_")[0].rpartition(".")[2]
        yield row.module, function.removeprefix("x_").replace("xǁ", "").replace("ǁ", "."), before, after


def counted(table: pd.DataFrame, explained: pd.DataFrame) -> pd.DataFrame:
    """A row per module: `COUNTS`, the day and the machine."""
    counts = pd.crosstab(table.module, table.outcome).rename(columns={TIMEOUT: "timeouts"})
    counts["mutants"] = table.module.value_counts()
    counts["tried"] = table.module[table.outcome != NOT_TRIED].value_counts()
    counts["explained"] = explained.module[explained.reason != ""].value_counts()
    counts = counts.reindex(columns=COUNTS).fillna(0).astype(int).reset_index()
    return counts.assign(date=f"{date.today()}", machine=provenance.machine())


def together(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Counts per module, the new ones in the place of the old, and a row for all of them, of the newest date; with the
    share of the tried mutants that were killed or timed out."""
    kept = old[~old.module.isin([*new.module, "all"])]
    counts = pd.concat([part for part in (kept, new) if len(part)]).sort_values("module")
    of_all = {"module": "all", **counts[COUNTS].sum(), "date": counts.date.max(), "machine": new.machine.iloc[0]}
    counts = pd.concat([counts, pd.DataFrame([of_all])], ignore_index=True)
    share = (counts[KILLED] + counts.timeouts) / counts.tried.clip(lower=1)
    return counts.assign(share=share)[["module", *COUNTS, "share", "date", "machine"]]


@one_line_errors()
def main(
    mutants: Annotated[Path, typer.Argument(help="the folder that mutmut wrote")] = Path("mutants"),
    out: Annotated[Path, typer.Option(help="the folder for both tables")] = FOLDER,
) -> None:
    """Write both tables, keeping the reasons that were given."""
    table, out = outcomes(mutants), out.resolve()
    table = table[table.module.isin(table.module[table.outcome != NOT_TRIED])]
    with contextlib.chdir(mutants.resolve().parent):  # mutmut reads what it wrote from there
        survivors = pd.DataFrame(list(changes(table[table.outcome == SURVIVED])), columns=CHANGE)
    files = {name: out / f"{name}.csv" for name in ("mutants", "survivors")}
    before = {name: pd.read_csv(file) for name, file in files.items() if file.is_file()}
    old = before.get("survivors", pd.DataFrame()).reindex(columns=[*CHANGE, "reason"]).astype(object)
    old = old.drop_duplicates(CHANGE).fillna("")
    survivors = survivors.merge(old, how="left", on=CHANGE).fillna("")
    counts = counted(table, survivors)
    counts = together(before.get("mutants", counts[:0]), counts)
    survivors = pd.concat([old[~old.module.isin(table.module)], survivors]).sort_values("module", kind="stable")
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("mutants", counts), ("survivors", survivors)):
        write_table(files[name], rows)
    typer.echo(counts[["module", *COUNTS, "share"]].to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
