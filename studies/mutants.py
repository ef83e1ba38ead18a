"""Do the tests notice wrong code? What became of the mutants, and which survived.

    mutmut run --max-children 8        # in a copy of the clone: change one operator, number or name at a time, and test
    python -m studies.mutants    # in the same folder: data/reliability/mutants.csv and survivors.csv

pyproject.toml lists the modules that are changed and the tests that run; `mutmut run "kvrepro.engine.cache*"` tries one
module: the rows of others stay as they were, and that of all counts this run. A mutant is killed when a test fails or
takes many times as long as usual. In survivors.csv the column `reason` is written by hand: why no test can tell this
change from the original. It stays with its mutant when the table is written again.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import typer

from kvrepro.errors import InputError
from kvrepro.experiment import provenance
from kvrepro.paths import DATA, write_table
from studies.table import replace_rows, versions

FOLDER = DATA / "reliability"
KILLED, SURVIVED, NOT_TRIED = "killed", "survived", "not checked"
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


def main() -> None:
    """Write both tables, keeping the reasons that were given."""
    table = outcomes(Path("mutants"))
    table = table[table.module.isin(table.module[table.outcome != NOT_TRIED])]
    survivors = pd.DataFrame(list(changes(table[table.outcome == SURVIVED])), columns=CHANGE)
    file = FOLDER / "survivors.csv"
    old = pd.read_csv(file)[[*CHANGE, "reason"]].astype(object).drop_duplicates(CHANGE).fillna("")
    survivors = survivors.merge(old, how="left", on=CHANGE).fillna("")
    survivors = pd.concat([old[~old.module.isin(table.module)], survivors]).sort_values("module", kind="stable")
    write_table(file, survivors)
    counts = pd.crosstab(table.module, table.outcome).rename(columns={"timeout": "timeouts"})
    counts["mutants"] = table.module.value_counts()
    counts["tried"] = table.module[table.outcome != NOT_TRIED].value_counts()
    counts["explained"] = survivors.module[survivors.reason != ""].value_counts()
    counts = counts.reindex(columns=COUNTS).fillna(0).astype(int).reset_index()
    total = pd.DataFrame([{"module": "all", **counts[COUNTS].sum()}])
    counts = pd.concat([counts, total]).assign(**versions(), machine=provenance.machine())
    counts.insert(7, "share", (counts[KILLED] + counts.timeouts) / counts.tried)
    replace_rows(FOLDER / "mutants.csv", counts, ["module"], digits=4)
    typer.echo(counts.to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
