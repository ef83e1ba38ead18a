"""The page *Reliability*: what was tried, how often, what came out, and the command that tries it again.

From the tables in data/reliability.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvrepro.experiment import claims, figure
from kvrepro.paths import DATA, ROOT
from kvrepro.tools.filterable import table
from kvrepro.tools.rows import words

FOLDER = DATA / "reliability"
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
    result = f"{row.share:.1%} killed, {row.survived} survived, {row.explained} of them explained"
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
            line = f"{total.changed:.0f} of {total.verdicts:.0f} verdicts differ"
            if total.rows:  # a chapter that generates no answers has verdicts only
                text, kept = total.text / total.rows, total.kept / total.rows
                line = f"{text:.2%} of the answers, {kept:.2%} of the kept sets and {line}"
            above = ", more than the aim of 1%" if total.changed > 0.01 * total.verdicts else ""
            parts.append(f"{kind} {line}{above}")
    return f"{len(sums)} variants, {sums.rows.sum():,.0f} rows", "; ".join(parts)


def _store(frame: pd.DataFrame) -> tuple[str, str]:
    row = frame.sort_values("rows").iloc[-1]
    result = f"{row.study_seconds:.1f} s for the rows of one study, {row.open_seconds:.1f} s to open"
    return f"{row.rows:,.0f} rows", result


def _scaling(frame: pd.DataFrame) -> tuple[str, str]:
    measured = frame.dropna(subset="efficiency")
    result = f"efficiency {measured.efficiency.min():.2f} to {measured.efficiency.max():.2f}"
    several = frame[frame.workers > 1]
    for on_cpu, runs in several.groupby(several.device == "CPU"):
        equal = f"{_percents(runs['equal'])} of the rows and {_percents(runs.same_text)} of the texts"
        result += f"; on {'CPUs' if on_cpu else 'GPUs'} {equal} equal those of one worker"
    return f"{len(frame)} runs", result


def _percents(shares: pd.Series) -> str:
    """The least and the largest share: `0.21% to 33%`."""
    return " to ".join(dict.fromkeys(f"{100 * share:.3g}%" for share in (shares.min(), shares.max())))


PARTS: dict[str, dict[str, str]] = words("reliability")
SUMMARIES: dict[str, Callable[[pd.DataFrame], tuple[str, str]]] = {  # how much was tried, and what came out
    "kills": _kills, "faults": _faults, "bad_values": _bad_values, "properties": _properties, "mutants": _mutants,
    "determinism": _determinism, "store": _store, "scaling": _scaling,
}  # fmt: skip


def tables() -> dict[str, pd.DataFrame]:
    """The tables by name, in the order of `PARTS`."""
    return {name: pd.read_csv(FOLDER / f"{name}.csv", keep_default_na=False, na_values="") for name in PARTS}


def summary(tables_of: dict[str, pd.DataFrame]) -> list[dict[str, str]]:
    """A row per part: what was tried, how often, what came out, and the command."""
    rows = []
    for name, frame in tables_of.items():
        part, (count, result) = PARTS[name], SUMMARIES[name](frame)
        rows.append({"what": part["title"], "how many": count, "result": result, "command": f"`{part['command']}`"})
    return rows


def sections(tables_of: dict[str, pd.DataFrame]) -> str:
    """A section per part: what its columns mean, when and where it was measured, and its table, folded."""
    parts = []
    for name, frame in tables_of.items():
        shown = frame.drop(columns=["machine", "torch", "date"], errors="ignore")
        where = "; ".join(dict.fromkeys(f"{row.machine}, {row.date}" for row in frame.itertuples()))
        title, command, means = (PARTS[name][key] for key in ("title", "command", "means"))
        parts += [f"## {title}", means, f"Measured on {where}: `{command}`."]
        shown = shown.replace({"which": claims.LABELS}, regex=True) if "which" in shown else shown
        parts.append(_folded("The table", table(_texts(shown))))
        if name == "mutants":
            survivors = pd.read_csv(FOLDER / "survivors.csv")
            if changed := _changed(survivors):
                parts.append(f"Of the {len(survivors)} lines with survivors, {changed} have changed since.")
            parts.append(_folded("The survivors", "\n\n".join(map(_survivor, survivors.itertuples()))))
    return "\n\n".join(parts)


def _changed(survivors: pd.DataFrame, root: Path = ROOT) -> int:
    """How many of the survivors' lines are no longer in their modules."""
    code = {module: "".join((root / module).read_text().split()) for module in survivors.module.unique()}
    lines = ["".join(line.partition("  #")[0].split()) for line in survivors.before]
    return sum(line not in code[module] for module, line in zip(survivors.module, lines, strict=True))


def _survivor(row: Any) -> str:
    """A mutant that no test notices: where it is, why, and the changed line below the original."""
    where = f"`{row.module}`, `{row.function}`"
    return f"{where}: {row.reason}\n\n```diff\n- {row.before}\n+ {row.after}\n```"


def _folded(title: str, text: str) -> str:
    return f":::{{dropdown}} {title}\n{text}\n:::"


def _texts(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Rows with their values as text."""

    def text(value: object) -> str:
        if pd.isna(value):
            return ""
        return f"{value:.3g}" if isinstance(value, float) and value % 1 else str(value)

    return frame.astype(object).map(text).to_dict("records")


def drawn(tables_of: dict[str, pd.DataFrame]) -> Figure:
    """The figure: the share of rows and verdicts that differ, by variant."""
    whole = tables_of["determinism"].query("chapter == 'all'")
    rows = whole[["text", "kept", "score"]].div(whole.rows, axis=0)
    rows = rows.set_axis(["answers", "kept tokens", "scores"], axis=1)
    shares = rows.assign(verdicts=whole.changed / whole.verdicts, varied=whole.varied).melt("varied").dropna()
    labels = {"value": "share that differs from the usual run", "varied": ""}
    return figure.estimates(shares.assign(low=np.nan, high=np.nan), "value", "varied", colour="variable", percent=True,
                            labels=labels, height=0.4 * len(whole) + 0.8)  # fmt: skip
