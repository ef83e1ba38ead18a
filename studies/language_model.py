"""The chapters on a language model that others trained on real text: SmolLM2-135M-Instruct {cite}`smollm2`.

    python -m studies.family run --results /tmp/needles --models smollm2-135m-instruct --chapters protection \\
        -p items=ruler:niah_single_1,niah_single_2,niah_multikey_1,niah_multivalue -p n_items=80 -p device=cuda
    python -m studies.language_model /tmp/needles /tmp/texts      # data/language_model*.csv

`studies.gguf` makes the checkpoint. Each folder of results holds runs of chapters, each on its own items. From
their verdicts and rows come three tables: the verdicts, the runs, and mean scores by policy and by what is kept.
"""

import json
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from kvrepro.errors import InputError
from kvrepro.experiment import stats, store
from kvrepro.experiment.measure import scores
from kvrepro.paths import DATA, write_table
from studies import family
from studies.table import answers_of

VERDICTS, RUNS, SCORES = (DATA / f"language_model{part}.csv" for part in ("", "_runs", "_scores"))
NO_PASSAGE = "no_passage"  # in place of a policy's name: the model's answers to the questions alone
COLUMNS = ["model", "items", *family.COLUMNS[1:]]
MAIN = {"protection": "main", "fragility": "every", "dropkv_bound": "quality-1900", "synthesis": "grid"}
BY = ["chapter", "items", "policy", "reading", "guard", "kept"]  # of `scores_of`


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each item the rows of the form that was stored last."""
    forms = rows.data_hash.fillna("")
    last = forms.groupby([rows.model, rows["item"], rows.limit, rows.max_new_tokens], dropna=False).transform("last")
    return rows[forms == last]


def main_study(folder: Path) -> pd.DataFrame:
    """The rows of a chapter's main study with their `score`; none without one. Those of `NO_PASSAGE` are among them, of
    the same items: some chapters ask more items without their passages than the main study has."""
    main, controls = folder / str(MAIN.get(folder.name)), folder / "controls"
    if not main.is_dir():
        return pd.DataFrame(columns=["policy", "score"])
    rows = newest(store.read(main))
    if controls.is_dir():
        alone = newest(store.read(controls))
        alone = alone[alone.item.isin(rows.item)].assign(policy=NO_PASSAGE)
        rows = pd.concat([rows, alone], ignore_index=True)
    return rows.assign(score=scores(rows))


def run_of(folder: Path, main: pd.DataFrame) -> dict[str, object]:
    """What a chapter's run was: its items, answers, failed ones, seconds, and of the main study the full cache's score
    with its interval, the median prompt in tokens, and the share of prompts cut. A condition that an item cannot meet,
    a budget below what guards protect for instance, does not count."""
    done, rows = json.loads((folder / family.DONE).read_text()), answers_of(folder)
    rows = rows[~rows.error.astype(str).str.startswith("InputError")]
    row: dict[str, object] = {"chapter": folder.name, "items": done["items"], "seconds": done["seconds"]}
    row |= {"date": done["date"], "answers": len(rows), "failed": int(rows.error.notna().sum())}
    full = main.query("policy == 'full'")
    if len(full):
        mean = stats.interval(full.score, bounds=stats.UNIT)
        row |= {"score": mean.value, "low": mean.low, "high": mean.high, "n": mean.n}
        row |= {"tokens": full.prompt_tokens.median(), "cut": (full.cut > 0).mean()}
    return row


def scores_of(folder: Path, main: pd.DataFrame) -> pd.DataFrame:
    """Mean scores of a chapter's main study with their intervals: columns `BY`, value, low, high, n.

    Policies of a notebook or a grid's cells are left out; `NO_PASSAGE` is among the policies. guard: shares of the
    budget at the prompt's beginning and end. kept: tokens, or a share of the prompt; none for the full cache.
    """
    if main.empty:
        return pd.DataFrame()
    rows = main[main.error.isna() & ~main.policy.str.contains(":")]
    guard = [f"{start:.0%} + {end:.0%}" for start, end in rows[["prefix", "suffix"]].astype(float).fillna(0).to_numpy()]
    kept = rows.capacity.astype(float).fillna(rows.share.astype(float)).map("{:g}".format).replace("nan", "")
    items = json.loads((folder / family.DONE).read_text())["items"]
    return stats.means(rows.assign(guard=guard, kept=kept, chapter=folder.name, items=items), BY, "score", "item")


def main(results: Annotated[list[Path], typer.Argument(help="folders of runs by studies.family")]) -> None:
    """Store the verdicts, the runs and the scores of chapters that were run for one model on several kinds of items."""
    runs, means = [], []
    for chapter in (file.parent for folder in results for file in sorted(folder.glob(f"*/*/{family.DONE}"))):
        study = main_study(chapter)
        runs.append(run_of(chapter, study))
        means.append(scores_of(chapter, study))
    table = pd.DataFrame(runs)
    if len(twice := table[table.duplicated(["chapter", "items"])]):
        raise InputError(f"{twice.chapter.iloc[0]} was run twice on {twice['items'].iloc[0]}: give one of the two")
    verdicts = pd.concat([family.collected(folder, COLUMNS) for folder in results], ignore_index=True)
    write_table(VERDICTS, verdicts)
    write_table(RUNS, table)
    write_table(SCORES, pd.concat(means, ignore_index=True))
    print(verdicts.pivot_table(index=["items", "chapter"], columns="verdict", values="claim", aggfunc="count"))


if __name__ == "__main__":
    typer.run(main)
