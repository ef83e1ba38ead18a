"""A chapter's run that is killed again and again at seeded moments and resumed each time, and what that lost.

It is compared, row by row, with what two runs without a fault store.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from kvrepro.tools.book import cells

WHO = ("driver", "worker", "node")
POLL = 0.0005  # seconds between two looks at the results folder
SETTLE = 20.0  # seconds that a killed run's workers may take to notice
SECONDS = 300.0  # for one command


# ---- a run in a process of its own


def _child(chapter: str, parameters: dict[str, Any], log: Path) -> None:
    """Run all cells of the notebook; what they print goes to `log`."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("a", buffering=1, encoding="utf-8") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            for _ in cells(chapter, parameters):
                pass
        except Exception:
            traceback.print_exc()
            sys.stdout.flush()
            raise SystemExit(1) from None


@dataclass
class Run:
    """A chapter that is being computed into a folder."""

    chapter: str
    parameters: dict[str, Any]
    log: Path
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("fork")  # this process has imported what takes seconds
        self.process = context.Process(target=_child, args=(self.chapter, self.parameters, self.log))
        self.process.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def family(self) -> list[psutil.Process]:
        """Its processes: workers and what they started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def finish(self) -> None:
        """Wait for its end. Raises RuntimeError with its last lines where the exit code is not 0."""
        self.process.join()
        if self.process.exitcode:
            last = self.log.read_text(encoding="utf-8").splitlines()[-12:]
            raise RuntimeError("\n".join([f"{self.chapter} ended with exit code {self.process.exitcode}:", *last]))


def last_words(log: Path) -> str:
    """The last line that says something, if any does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def _victims(run: Run, who: str) -> list[psutil.Process]:
    """The processes that a kill of that kind may hit: the one that runs the study, its workers, or Ray's node. The node
    may be hit as soon as one of its workers has a job; an earlier kill would only try Ray's start."""
    if who == "driver":
        return [psutil.Process(run.process.pid)]
    victims, has_job = [], False
    for process in run.family():
        with contextlib.suppress(psutil.Error):
            has_job = has_job or " ".join(process.cmdline()).startswith("ray::Worker.do")
            node = process.name() == "raylet"
            victims += [process] if (node if who == "node" else _is_worker(process)) else []
    return victims if has_job or who != "node" else []


def _is_worker(process: psutil.Process) -> bool:
    """Is it a worker of Ray, or one forked from the server of `kvrepro.experiment.workers`, with its command line?"""
    command, command_of_parent = (" ".join(p.cmdline()) for p in (process, process.parent() or process))
    return command.startswith("ray::Worker") or (
        "multiprocessing.forkserver" in command and command == command_of_parent
    )


# ---- what is stored


def stored_rows(folder: Path, rows_of_file: dict[str, int] | None = None) -> tuple[int, bool]:
    """(rows stored so far, whether a file is being written). rows_of_file: the rows of files counted before, to which
    those of new files are added."""
    rows_of_file = {} if rows_of_file is None else rows_of_file
    count, writing = 0, False
    for path, _, files in os.walk(folder):
        for name in files:
            file = f"{path}/{name}"
            if ".tmp" in file:
                writing = True
            elif name.endswith(".parquet"):
                with contextlib.suppress(OSError, pa.ArrowException):  # folded in the meantime
                    if file not in rows_of_file or not file.endswith("0.parquet"):
                        rows_of_file[file] = pq.read_metadata(file).num_rows
                    count += rows_of_file[file]
    return count, writing


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """All tables that a finished run stored, their values as text: rows of answers by study, indexed by their keys;
    tables of items and verdicts by their path in the folder, indexed by number."""
    parts_of_table: dict[str, list[pd.DataFrame]] = {}
    for file in sorted(folder.rglob("*.parquet")) + sorted(folder.rglob("*.csv")):
        if ".tmp" in str(file):
            continue
        frame = pd.read_csv(file) if file.suffix == ".csv" else pq.read_table(file).to_pandas()
        name = f"{file.relative_to(folder)}"
        if {"key", "chapter", "name"} <= set(frame):
            frame = frame.set_index("key", drop=False)
            name = "/".join(frame.iloc[0][["chapter", "name"]]) if len(frame) else name
        parts_of_table.setdefault(name, []).append(frame.astype(str).fillna(""))
    return {name: pd.concat(frames) for name, frames in parts_of_table.items()}


def differences(quiet: Mapping[str, pd.DataFrame], other: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Where two runs differ, with columns `table, column, lost, doubled, different`: a row for each table of which the
    other run lacks rows or has some more than once, and a row for each column in which values differ."""
    rows = []
    for name in sorted({*quiet, *other}):
        a, b = (side.get(name, pd.DataFrame()) for side in (quiet, other))
        more = b.index.value_counts().sub(a.index.value_counts(), fill_value=0)
        lost, doubled = int(-more[more < 0].sum()), int(more[more > 0].sum())
        if lost or doubled:
            rows.append((name, "", lost, doubled, 0))
        a, b = (side[~side.index.duplicated()] for side in (a, b))
        both = a.index.intersection(b.index)
        for column in sorted({*a, *b} if len(both) else ()):
            sides = [side[column].loc[both] if column in side else pd.Series("", both) for side in (a, b)]
            if count := int((sides[0] != sides[1]).sum()):
                rows.append((name, column, 0, 0, count))
    return pd.DataFrame(rows, columns=["table", "column", "lost", "doubled", "different"])


# ---- moments


@dataclass
class Quiet:
    """A run without a fault: how long it took, and when how much was stored."""

    seconds: float
    curve: list[tuple[float, int]]  # seconds since the start, rows

    def stored_at(self, moment: float) -> tuple[int, float]:
        """(rows that were stored by then, seconds since the last of them)."""
        rows, since = max((count, -at) for at, count in self.curve if at <= moment or at == self.curve[0][0])
        return rows, max(0.0, moment + since)


def quiet_run(chapter: str, parameters: dict[str, Any], folder: Path) -> Quiet:
    """Compute a chapter into `folder`, and watch how many rows are stored when."""
    run = Run(chapter, parameters | {"results": str(folder)}, folder.with_suffix(".log"))
    curve = [(0.0, 0)]
    rows_of_file: dict[str, int] = {}
    while run.process.is_alive():
        count, _ = stored_rows(folder, rows_of_file)
        if count > curve[-1][1]:
            curve.append((run.seconds, count))
        time.sleep(0.01)
    run.finish()
    return Quiet(run.seconds, curve)


def wait_for(run: Run, folder: Path, rows: int, delay: float, writing: bool) -> bool:
    """Wait until so many rows are stored and then `delay` seconds; if `writing`, also until a file is being written.
    True if the run is still alive then."""
    rows_of_file: dict[str, int] = {}
    while run.process.is_alive() and stored_rows(folder, rows_of_file)[0] < rows:
        time.sleep(POLL)
    until = time.monotonic() + delay
    while run.process.is_alive() and time.monotonic() < until:
        time.sleep(POLL)
    while writing and run.process.is_alive() and not stored_rows(folder, rows_of_file)[1]:
        time.sleep(POLL)
    return run.process.is_alive()


def end(processes: list[psutil.Process]) -> int:
    """Wait `SETTLE` seconds for processes to end by themselves, and kill the others; how many these were."""
    _, left = psutil.wait_procs(processes, SETTLE)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(left)


def ended(run: Run, family: list[psutil.Process]) -> int:
    """Wait for the end of a run that lost its driver or its node; how many of its processes had to be killed. Raises
    RuntimeError where it has not ended after `SECONDS`."""
    run.process.join(SECONDS)
    if run.process.is_alive():
        run.process.kill()
        raise RuntimeError(f"{run.chapter} had not ended {SECONDS:.0f} s after the kill: {last_words(run.log)}")
    print(f"    exit code {run.process.exitcode}: {last_words(run.log)}", flush=True)
    return end(family)


def killed_run(
    chapter: str, parameters: dict[str, Any], folder: Path, quiet: Quiet, who: str, kills: int, seed: int
) -> dict[str, int]:
    """Compute a chapter into `folder`, kill one of its processes at `kills` random moments, every third time while a
    file is being written, and resume after each. The moments lie within the quiet run's length. Returns the counts."""
    dice, run_parameters = random.Random(f"{chapter} {who} {seed}"), parameters | {"results": str(folder)}
    lengths = [quiet.seconds if k % 5 == 0 else quiet.curve[-1][0] for k in range(kills)]  # most before the analysis
    moments = sorted(dice.uniform(0, length) for length in lengths)
    total, log = quiet.curve[-1][1], folder.with_suffix(".log")
    counts = dict.fromkeys(("kills", "while_computing", "while_writing", "processes_left"), 0)
    run, misses = Run(chapter, run_parameters, log), 0
    while counts["kills"] < kills and misses < kills:
        rows, delay = quiet.stored_at(moments[counts["kills"]])
        alive = wait_for(run, folder, rows, delay, writing=counts["kills"] % 3 == 2 and misses == 0)
        while alive and not (victims := _victims(run, who)):
            time.sleep(POLL)
            alive = run.process.is_alive()
        if not alive:  # it was quicker this time
            if who == "driver":
                run.finish()
            misses += 1
            moments[counts["kills"]] = dice.uniform(0, min(run.seconds, quiet.seconds))
        else:
            count, writing = stored_rows(folder)
            family = run.family()
            dice.choice(sorted(victims, key=lambda process: process.pid)).kill()
            counts["kills"] += 1
            counts["while_computing"] += count < total
            counts["while_writing"] += writing
            misses = 0
            print(f"  kill {counts['kills']} after {run.seconds:.1f} s, {count} of {total} rows", flush=True)
            if who != "worker":
                counts["processes_left"] += ended(run, family)
        if not run.process.is_alive():
            run = Run(chapter, run_parameters, log)
    run.finish()
    return counts


def campaign(chapter: str, parameters: dict[str, Any], base: Path, who: str, count: int, seed: int) -> dict[str, Any]:
    """Run a chapter twice without a fault and once with kills, in folders of `base`. Returns the counts.

    Columns in which the two quiet runs differ are measured times, and are not compared with the third.
    """
    began = time.monotonic()
    quiet = quiet_run(chapter, parameters, base / "quiet")
    print(f"{chapter}: {quiet.curve[-1][1]} rows in {quiet.seconds:.0f} s without a fault", flush=True)
    quiet_run(chapter, parameters, base / "again")
    counted = killed_run(chapter, parameters, base / "killed", quiet, who, count, seed)
    first, again, last = (tables(base / name) for name in ("quiet", "again", "killed"))
    times = differences(first, again)
    if times.lost.any() or times.doubled.any():
        raise RuntimeError(f"two quiet runs of {chapter} differ:\n{times.to_string()}")
    differing = differences(first, last)
    measured_times = pd.MultiIndex.from_frame(times[["table", "column"]])
    differing = differing[~pd.MultiIndex.from_frame(differing[["table", "column"]]).isin(measured_times)]
    if len(differing):
        print(differing.to_string())
    rows = {"rows": sum(map(len, first.values()))}
    rows |= differing[["lost", "doubled", "different"]].sum().to_dict()
    left = sum(1 for _ in (base / "killed").rglob("*.tmp"))
    run_facts = {"files_left": left, "quiet_seconds": round(quiet.seconds), "seconds": round(time.monotonic() - began)}
    return counted | rows | run_facts | {"times": " ".join(sorted(set(times.column)))}
