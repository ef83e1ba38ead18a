"""The same claims on a family of models: run the chapters for each, and put the verdicts side by side.

    python -m studies.family run --results /tmp/family                    # every embedded model, seed 0
    python -m studies.family run --results /tmp/family --models small-gqa --seeds 1,2 --chapters protection
    python -m studies.family run --results /tmp/full --models small-gqa -p profile=full
    python -m studies.family collect --results /tmp/family                # data/family*.csv, or full_profile.csv

A run goes into `<results>/<model>-<seed>/<chapter>`, apart from the book's own: its rows, `claims.csv`, and what the
claims about several models need of it. Run again, it goes on where it was ended, and passes over what is done.
"""

import itertools
import json
import time
from collections.abc import Sequence
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
import yaml

from kvrepro.chapters.leakage import members as leakage
from kvrepro.errors import InputError, ensure_known, error_line
from kvrepro.experiment import claims, models
from kvrepro.paths import DATA, write_table
from studies import chapters, error_rates, family_claims

COLUMNS = "model chapter claim reading verdict estimate low high n unit profile note date".split()
RATES = ["wrongly_reproduced", "wrongly_not_reproduced", "can_hold", "can_fail"]  # of `studies.error_rates`
DONE = "done.json"  # beside a chapter's claims.csv
app = typer.Typer(add_completion=False, help=(__doc__ or "").partition("\n")[0])


def run_chapter(chapter: str, folder: Path, parameters: dict[str, Any]) -> bool:
    """Run a chapter with results in `folder`; False if that was done before with the same parameters."""
    done = folder / chapter / DONE
    if done.is_file() and json.loads(done.read_text())["parameters"] == parameters:
        return False
    start = time.perf_counter()
    space = chapters.run(chapter, parameters | {"results": str(folder)})
    if chapter in PER_ITEM:
        PER_ITEM[chapter](space).to_parquet(folder / chapter / family_claims.ROWS)
    facts = {"parameters": parameters, "date": f"{date.today()}", "seconds": round(time.perf_counter() - start)}
    done.write_text(json.dumps(facts | {"items": Path(str(space.get("items", ""))).name}))  # a file without its folders
    return True


def _of_protection(space: dict[str, Any]) -> pd.DataFrame:
    """The rows of the main grid, without texts: `output` is a hash."""
    columns = ["item", "task", "policy", "capacity", "prefix", "suffix", "suffix_mode", "regime", "reading"]
    rows = space["rows"]
    rows = rows.assign(output=rows.prediction.map(lambda text: sha256(text.encode()).hexdigest(), na_action="ignore"))
    return rows[[*columns, "token_f1", "output", "policy_calls", "evicted", "n_generated"]]


def _of_leakage(space: dict[str, Any]) -> pd.DataFrame:
    """The answers of each reading to the default variant with the defense first, where following was measured."""
    rows = leakage.tidied(space["tables"], None, space["settings"])["following"]
    rows = rows[(rows.order == "normal") & (rows.variant == "default") & rows.followed.notna()]
    return rows[["system", "order", "variant", "policy", "ratio", "followed", "following", "reading", "asked"]]


PER_ITEM = {"protection": _of_protection, "leakage": _of_leakage}


@app.command()
def run(
    results: Annotated[Path, typer.Option(help="a folder for the runs, each in a folder of its own")],
    names: Annotated[str, typer.Option("--models", help="or folders, hub ids")] = ",".join(models.embedded()),
    seeds: Annotated[str, typer.Option(help="of the items, with commas")] = "0",
    chapter_names: Annotated[str, typer.Option("--chapters", help="with commas")] = ",".join(chapters.JUDGED),
    parameter: Annotated[list[str], typer.Option("-p", "--parameter", help="name=value, as YAML")] = [],  # noqa: B006
) -> None:
    """Run chapters for models and seeds, one after another; a line for each. What fails leaves the others; the exit
    status is 1 then."""
    failed, chosen = False, chapter_names.split(",")
    ensure_known("chapter", chosen, chapters.JUDGED)
    given = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in parameter)}
    for seed, name_or_path in itertools.product(map(int, seeds.split(",")), names.split(",")):
        folder = results.resolve() / f"{Path(name_or_path).name}-{seed}"
        parameters = {"model": name_or_path, "options": {"seed": seed, "progress": False}} | given
        for chapter in chosen:
            start = time.perf_counter()
            try:
                outcome = "done" if run_chapter(chapter, folder, parameters) else "was done"
            except Exception as error:  # whatever a cell raises, one model's refusal too
                outcome, failed = f"failed: {error_line(error)}", True
            typer.echo(f"{folder.name:<20}{chapter:<14}{time.perf_counter() - start:8.0f} s  {outcome}")
    if failed:
        raise typer.Exit(1)


def collected(results: Path, columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """A row per model, claim and reading of all runs with seed 0, with these columns. The estimate and its interval are
    those of the member that decides. Raises InputError where there is no such run."""
    parts = []
    for file in sorted(results.glob("*-0/*/claims.csv")):
        model, chapter = file.parent.parent.name.removesuffix("-0"), file.parent.name
        table = pd.read_csv(file)
        verdicts = table[table.model == model].rename(columns={"ours": "estimate"})
        done = json.loads(file.with_name(DONE).read_text()) if file.with_name(DONE).is_file() else {}
        note = verdicts.note.where(verdicts.verdict == claims.NOT_TESTABLE, "")
        facts = {"date": done.get("date", ""), "items": done.get("items", "")}
        parts.append(verdicts.assign(chapter=chapter, note=note, **facts))
    if not parts:
        raise InputError(f"no verdicts in {results}/<model>-0/<chapter>/claims.csv: first family run")
    return pd.concat(parts, ignore_index=True).reindex(columns=list(columns))


@app.command()
def collect(results: Annotated[Path, typer.Option(help="the folder of the runs")]) -> None:
    """Store the verdicts of runs with seed 0, all of one profile. Full: data/full_profile.csv. Quick: data/family.csv;
    then the claims about several models are judged, too: data/family_claims.csv, with how often their rules err."""
    table = collected(results)
    [profile] = table.profile.dropna().unique()
    write_table(DATA / ("full_profile.csv" if profile == "full" else "family.csv"), table)
    if profile != "full":
        with error_rates.recorded() as tested_claims:
            judged = family_claims.verdicts(*(family_claims.rows_of(results, name) for name in PER_ITEM))
        rates = error_rates.table("family", tested_claims, 1).reindex(columns=["claim", "reading", *RATES])
        write_table(DATA / "family_claims.csv", judged.merge(rates))


if __name__ == "__main__":
    app()
