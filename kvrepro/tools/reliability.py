"""The page *Reliability*: what was tried, how often, what came out, and the command that tries it again.

From the tables in data/reliability; a part whose table is not there is left out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvrepro.experiment import claims, figure
from kvrepro.paths import DATA
from kvrepro.tools.cost import ITEMS
from kvrepro.tools.filterable import table

FOLDER = DATA / "reliability"
PROGRAM = "python -m kvrepro.tools."


class Section(NamedTuple):
    """One table: its title on the page, the command that makes it, and a function from its rows to two texts: how much
    was tried, and what came out."""

    title: str
    command: str
    summarize: Callable[[pd.DataFrame], tuple[str, str]]
    means: str  # what a reader must know to read the table


LEFT = {"processes_left": "processes of killed runs", "files_left": "unfinished files"}


def _kills(frame: pd.DataFrame) -> tuple[str, str]:
    result = f"{frame.lost.sum():,} rows lost, {frame.doubled.sum():,} doubled, {frame.different.sum():,} different"
    left = [f"{frame[name].sum():,} {what_left}" for name, what_left in LEFT.items() if frame[name].sum()]
    result += f"; {' and '.join(left)} left behind" if left else ""
    return f"{frame.kills.sum():,} kills, {frame.rows.sum():,} rows", result


def _faults(frame: pd.DataFrame) -> tuple[str, str]:
    lines = (frame.seen.fillna("") != "").sum()
    return f"{len(frame)} faults", f"{lines} of {len(frame)} are told in a line, {int(frame.lost.sum()):,} rows lost"


def _bad_values(frame: pd.DataFrame) -> tuple[str, str]:
    counts = frame.groupby("outcome")["count"].sum().sort_values(ascending=False)
    words = {"one line": "refused in one line"}
    return f"{counts.sum():,} values", ", ".join(f"{words.get(name, name)}: {n:,}" for name, n in counts.items())


def _properties(frame: pd.DataFrame) -> tuple[str, str]:
    return (
        f"{frame.passing.sum() + frame.failing.sum():,} cases",
        f"{len(frame)} properties, {(frame.failing > 0).sum()} refuted",
    )


def _mutants(frame: pd.DataFrame) -> tuple[str, str]:
    row = frame[frame.module == "all"].iloc[0]
    result = f"{row.share:.1%} killed, {row.survived} survived"
    result += f", {row.explained} of them explained" if "explained" in frame else ""
    return f"{row.tried:,} of {row.mutants:,} mutants tried", result


def _determinism(frame: pd.DataFrame) -> tuple[str, str]:
    sums = frame[frame.chapter == "all"]
    half = sums.varied.str.contains("bfloat16")
    rows_of_kind = {
        "on one machine": sums.must_be_equal,
        "elsewhere in float32": ~sums.must_be_equal & ~half,
        "in bfloat16": half,
    }
    parts = []
    for kind, chosen in rows_of_kind.items():
        if chosen.any():
            total = sums.loc[chosen, ["rows", "text", "kept", "changed", "verdicts"]].sum()
            parts.append(
                f"{kind} {total.text / total.rows:.2%} of the answers, {total.kept / total.rows:.2%} of the kept sets "
                f"and {total.changed:.0f} of {total.verdicts:.0f} verdicts differ"
                f"{', more than the aim of 1%' if total.changed > 0.01 * total.verdicts else ''}"
            )
    return f"{len(sums)} variants, {sums.rows.sum():,.0f} rows", "; ".join(parts)


def _store(frame: pd.DataFrame) -> tuple[str, str]:
    row = frame.sort_values("rows").iloc[-1]
    result = f"{row.study_seconds:.1f} s for the rows of one study, {row.open_seconds:.1f} s to open"
    return f"{row.rows:,.0f} rows", result


def _scaling(frame: pd.DataFrame) -> tuple[str, str]:
    measured = frame.dropna(subset="efficiency")
    result = f"efficiency {measured.efficiency.min():.2f} to {measured.efficiency.max():.2f}"
    for kind, runs in frame.groupby(frame.device == "CPU"):
        result += f"; on {'CPUs' if kind else 'GPUs'} {'' if runs['equal'].min() == 1 else 'at least '}"
        result += f"{runs['equal'].min():.0%} of the rows and "
        result += f"{runs.same_text.min():.0%} of the texts equal"
    return f"{len(frame)} runs", result


PARTS = {
    "kills": Section(
        "Kills at random moments",
        f"for c in {' '.join(ITEMS)}; do {PROGRAM}faults kills --chapter $c --kills 20 --seed 0; done", _kills,
        "A chapter is killed at random moments and started again until it is done. What it stored is then compared "
        "with what an undisturbed run stores. The model has two layers of random weights, and each study two items: "
        "only the moment of the kill matters. `while_computing` counts kills before the last row was stored, "
        "`while_writing` those during a write; `quiet_seconds` is the time of an undisturbed run. `--who worker` kills "
        "workers instead, `--engine ray` those of Ray. A process is left if it still runs after 20 s; two agents of "
        "Ray itself end a minute after a killed driver.",
    ),
    "faults": Section(
        "Faults", PROGRAM + "faults table", _faults,
        "Each fault is produced for real. `seen` is the line that the reader gets, `lost` the rows that were stored "
        "before and are gone.",
    ),
    "bad_values": Section(
        "Bad values", "pytest tests/hostile -m slow --table", _bad_values,
        "Values of the wrong kind are given to every parameter of the notebooks and to every command. Each one should "
        "be refused in one line before anything is computed, unless the parameter allows it (*accepted*).",
    ),
    "properties": Section(
        "Properties", "make test ARGS='--nightly --table'", _properties,
        "A property is a statement about all inputs of a kind: the kept set has the size of the budget, whatever the "
        "scores. Each is tried on hundreds of times as many random cases as in `make test`, fewer where no more "
        "exist. A case that is drawn but does not meet the statement's conditions is *invalid* and does not count.",
    ),
    "mutants": Section(
        "Mutants", "mutmut run, then " + PROGRAM + "mutants", _mutants,
        "A mutant is the code with one operator, number or name changed. It is killed when a test fails or takes many "
        "times as long. What survives is either the same computation written differently, or a gap in the tests. "
        "Each module was tried with its tests alone (`tests/engine/test_select.py` for `kvrepro/engine/select.py`); "
        "the others may notice more. Every survivor was read: `reason` says why no test tells it from the original.",
    ),
    "determinism": Section(
        "The same again", PROGRAM + "repeat run --results /tmp/repeat", _determinism,
        "Each variant is compared with the usual run, row by row and verdict by verdict. `text`, `kept` and `score` "
        "count rows whose answer, kept tokens or score differ; `changed` counts verdicts that differ, `turned` those "
        "that go from reproduced to not reproduced or back.",
    ),
    "store": Section(
        "The store at twenty million rows", "kvrepro store bench", _store,
        "Rows that the benchmark made are written, opened and read: the rows of one study (`study`: how many), "
        "those of one item, two columns of all; `add` stores 64 rows more, `fold` merges them into the table. Seconds "
        "are wall clock, from a cold start.",
    ),
    "scaling": Section(
        "Several workers and GPUs",
        PROGRAM + "scaling --workers 1,2,4,8,16 --engines local --n-items 48 --cells 16", _scaling,
        "The synthesis' grid. Efficiency is the time with one worker divided by n times the time with n workers, on "
        "the same items; 1 is ideal, 0.95 the aim. `efficiency_whole` includes the start of the workers. `equal` is "
        "the share of rows that equal those of one worker, `same_text` the share of texts. GPUs: `--shape qwen2.5-3b "
        "--device cuda --workers 1,2 --n-items 960 --cells 16`. One GPU decodes larger batches than each of two, in "
        "which bfloat16 rounds differently: random weights, which prefer no word, then often generate another one.",
    ),
}  # fmt: skip


def tables(folder: Path = FOLDER) -> dict[str, pd.DataFrame]:
    """The tables that are in the folder, by name, in the order of `PARTS`."""
    return {
        name: pd.read_csv(folder / f"{name}.csv", keep_default_na=False, na_values="")
        for name in PARTS
        if (folder / f"{name}.csv").is_file()
    }


def summary(tables_of: dict[str, pd.DataFrame]) -> list[dict[str, str]]:
    """A row per part: what was tried, how often, what came out, and the command."""
    rows = []
    for name, frame in tables_of.items():
        part, (count, result) = PARTS[name], PARTS[name].summarize(frame)
        rows.append({"what": part.title, "how many": count, "result": result, "command": f"`{part.command}`"})
    return rows


def sections(tables_of: dict[str, pd.DataFrame]) -> str:
    """A section per part: what its columns mean, when and where it was measured, and its table, folded."""
    parts = []
    for name, frame in tables_of.items():
        shown = frame.drop(columns=["machine", "torch", "date", "times"], errors="ignore")
        where = "; ".join(dict.fromkeys(f"{row.machine}, {row.date}" for row in frame.itertuples()))
        parts += [f"## {PARTS[name].title}", PARTS[name].means, f"Measured on {where}: `{PARTS[name].command}`."]
        shown = shown.replace({"which": claims.LABELS}, regex=True) if "which" in shown else shown
        parts.append(_folded("The table", table(_texts(shown))))
        if name == "mutants" and (file := FOLDER / "survivors.csv").is_file():
            parts.append(_folded("The survivors", table(_texts(pd.read_csv(file), code=("before", "after")))))
    return "\n\n".join(parts)


def _folded(title: str, text: str) -> str:
    return f":::{{dropdown}} {title}\n{text}\n:::"


def _texts(frame: pd.DataFrame, code: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """Rows with their values as text. code: columns whose values are code."""

    def text(name: str, value: object) -> str:
        if pd.isna(value):
            return ""
        if name in code:
            return f"`{str(value).replace('`', '')}`" if value else ""
        return f"{value:.3g}" if isinstance(value, float) and value % 1 else str(value)

    return [{str(name): text(str(name), value) for name, value in row.items()} for row in frame.to_dict("records")]


def drawn(tables_of: dict[str, pd.DataFrame]) -> Figure | None:
    """The figure: the share of rows and verdicts that differ, by variant; None without differences."""
    if "determinism" not in tables_of:
        return None
    whole = tables_of["determinism"].query("chapter == 'all'")
    rows = whole[["text", "kept", "score"]].div(whole.rows, axis=0)
    rows = rows.set_axis(["answers", "kept tokens", "scores"], axis=1)
    shares = rows.assign(verdicts=whole.changed / whole.verdicts, varied=whole.varied).melt(
        "varied", value_name="share"
    )
    shares["share"] *= 100
    if not shares.share.max() > 0:
        return None
    with figure.style():
        picture = Figure(figsize=(7, 0.45 * len(whole) + 1.2), layout="constrained")
        axes = picture.subplots()
        sns.stripplot(shares, x="share", y="varied", hue="variable", dodge=True, jitter=False, size=6, ax=axes)
        axes.set(xlabel="% that differ from the usual run", ylabel="", xlim=(-0.02 * max(1, shares.share.max()), None))
        axes.legend(title="", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return picture
