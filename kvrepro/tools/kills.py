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
    """The notebook's cells, all of them; what they print goes to `log`."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("a", buffering=1, encoding="utf-8") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
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
        """Wait for its end. Raises RuntimeError with its last words where that is no good one."""
        self.process.join()
        if self.process.exitcode:
            last = self.log.read_text(encoding="utf-8").splitlines()[-12:]
            raise RuntimeError("\n".join([f"{self.chapter} ended with exit code {self.process.exitcode}:", *last]))


def last_words(log: Path) -> str:
    """The last line that says something, if any does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def _victims(run: Run, who: str) -> list[psutil.Process]:
    """Whom a kill of that kind may hit: the process that runs the study, a worker of it, or Ray's node, as soon as a
    worker of its has a job: before, it is Ray's start that is tried."""
    if who == "driver":
        return [psutil.Process(run.process.pid)]
    found, busy = [], False
    for process in run.family():
        with contextlib.suppress(psutil.Error):
            busy = busy or " ".join(process.cmdline()).startswith("ray::Worker.do")
            node = process.name() == "raylet"
            found += [process] if (node if who == "node" else _is_worker(process)) else []
    return found if busy or who != "node" else []


def _is_worker(process: psutil.Process) -> bool:
    """Of Ray, or forked from the server of `kvrepro.experiment.workers`, whose command line it has."""
    mine, parents = (" ".join(one.cmdline()) for one in (process, process.parent() or process))
    return mine.startswith("ray::Worker") or ("multiprocessing.forkserver" in mine and mine == parents)


# ---- what is stored


def stored(folder: Path, known: dict[str, int] | None = None) -> tuple[int, bool]:
    """(rows stored so far, whether a file is being written). known: rows of files that were counted before."""
    known = {} if known is None else known
    count, writing = 0, False
    for path, _, files in os.walk(folder):
        for name in files:
            file = f"{path}/{name}"
            if ".tmp" in file:
                writing = True
            elif name.endswith(".parquet"):
                with contextlib.suppress(OSError, pa.ArrowException):  # folded in the meantime
                    if file not in known or not file.endswith("0.parquet"):
                        known[file] = pq.read_metadata(file).num_rows
                    count += known[file]
    return count, writing


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Everything that a finished run stored, as text: rows of answers by study, with an index of their keys; tables of
    items and verdicts by their place in the folder, with one that counts."""
    found: dict[str, list[pd.DataFrame]] = {}
    for file in sorted(folder.rglob("*.parquet")) + sorted(folder.rglob("*.csv")):
        if ".tmp" in str(file):
            continue
        frame = pd.read_csv(file) if file.suffix == ".csv" else pq.read_table(file).to_pandas()
        of = f"{file.relative_to(folder)}"
        if {"key", "chapter", "name"} <= set(frame):
            frame = frame.set_index("key", drop=False)
            of = "/".join(frame.iloc[0][["chapter", "name"]]) if len(frame) else of
        found.setdefault(of, []).append(frame.astype(str).fillna(""))
    return {of: pd.concat(frames) for of, frames in found.items()}


def differences(quiet: Mapping[str, pd.DataFrame], other: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """A row for each table and column in which two runs differ, `table, column, lost, doubled, different`: rows that
    the other run lacks, that it has more often, and, with the column's name, those whose value is another."""
    found = []
    for of in sorted({*quiet, *other}):
        a, b = (side.get(of, pd.DataFrame()) for side in (quiet, other))
        more = b.index.value_counts().sub(a.index.value_counts(), fill_value=0)
        lost, doubled = int(-more[more < 0].sum()), int(more[more > 0].sum())
        if lost or doubled:
            found.append((of, "", lost, doubled, 0))
        a, b = (side[~side.index.duplicated()] for side in (a, b))
        both = a.index.intersection(b.index)
        for column in sorted({*a, *b} if len(both) else ()):
            sides = [side[column].loc[both] if column in side else pd.Series("", both) for side in (a, b)]
            if count := int((sides[0] != sides[1]).sum()):
                found.append((of, column, 0, 0, count))
    return pd.DataFrame(found, columns=["table", "column", "lost", "doubled", "different"])


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
    """Compute a chapter into `folder` and watch."""
    run, curve, known = Run(chapter, parameters | {"results": str(folder)}, folder.with_suffix(".log")), [(0.0, 0)], {}
    while run.process.is_alive():
        count, _ = stored(folder, known)
        if count > curve[-1][1]:
            curve.append((run.seconds, count))
        time.sleep(0.01)
    run.finish()
    return Quiet(run.seconds, curve)


def wait_for(run: Run, folder: Path, rows: int, more: float, writing: bool) -> bool:
    """Wait until so many rows are stored and so many seconds have passed since; then, if asked, until a file is being
    written. Whether the run was still alive then."""
    known: dict[str, int] = {}
    while run.process.is_alive() and stored(folder, known)[0] < rows:
        time.sleep(POLL)
    until = time.monotonic() + more
    while run.process.is_alive() and time.monotonic() < until:
        time.sleep(POLL)
    while writing and run.process.is_alive() and not stored(folder, known)[1]:
        time.sleep(POLL)
    return run.process.is_alive()


def end(processes: list[psutil.Process]) -> int:
    """Wait until they have ended by themselves; how many had to be ended."""
    _, left = psutil.wait_procs(processes, SETTLE)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(left)


def ended(run: Run, family: list[psutil.Process]) -> int:
    """Wait for the end of a run that lost its driver or its node; how many of its processes had to be ended. Raises
    RuntimeError where it goes on and on."""
    run.process.join(SECONDS)
    if run.process.is_alive():
        run.process.kill()
        raise RuntimeError(f"{run.chapter} had not ended {SECONDS:.0f} s after the kill: {last_words(run.log)}")
    print(f"    exit code {run.process.exitcode}: {last_words(run.log)}", flush=True)
    return end(family)


def killed_run(
    chapter: str, parameters: dict[str, Any], folder: Path, quiet: Quiet, who: str, kills: int, seed: int
) -> dict[str, int]:
    """Compute a chapter into `folder` while one of its processes is killed at that many moments of the quiet run's
    length, every third time as the next file is written; resume after each. What was counted."""
    dice, given = random.Random(f"{chapter} {who} {seed}"), parameters | {"results": str(folder)}
    lengths = [quiet.seconds if k % 5 == 0 else quiet.curve[-1][0] for k in range(kills)]  # most before the analysis
    moments = sorted(dice.uniform(0, length) for length in lengths)
    total, log = quiet.curve[-1][1], folder.with_suffix(".log")
    counted = dict.fromkeys(("kills", "while_computing", "while_writing", "processes_left"), 0)
    run, misses = Run(chapter, given, log), 0
    while counted["kills"] < kills and misses < kills:
        rows, more = quiet.stored_at(moments[counted["kills"]])
        alive = wait_for(run, folder, rows, more, writing=counted["kills"] % 3 == 2 and misses == 0)
        while alive and not (victims := _victims(run, who)):
            time.sleep(POLL)
            alive = run.process.is_alive()
        if not alive:  # it was quicker this time
            if who == "driver":
                run.finish()
            misses += 1
            moments[counted["kills"]] = dice.uniform(0, min(run.seconds, quiet.seconds))
        else:
            count, writing = stored(folder)
            family = run.family()
            dice.choice(sorted(victims, key=lambda process: process.pid)).kill()
            counted["kills"] += 1
            counted["while_computing"] += count < total
            counted["while_writing"] += writing
            misses = 0
            print(f"  kill {counted['kills']} after {run.seconds:.1f} s, {count} of {total} rows", flush=True)
            if who != "worker":
                counted["processes_left"] += ended(run, family)
        if not run.process.is_alive():
            run = Run(chapter, given, log)
    run.finish()
    return counted


def campaign(chapter: str, parameters: dict[str, Any], base: Path, who: str, count: int, seed: int) -> dict[str, Any]:
    """Run a chapter twice without a fault and once with kills, in folders of `base`: what was counted.

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
    found = differences(first, last)
    known = pd.MultiIndex.from_frame(times[["table", "column"]])
    found = found[~pd.MultiIndex.from_frame(found[["table", "column"]]).isin(known)]
    if len(found):
        print(found.to_string())
    rows = {"rows": sum(len(frame) for frame in first.values())} | found[
        ["lost", "doubled", "different"]
    ].sum().to_dict()
    left = sum(1 for _ in (base / "killed").rglob("*.tmp"))
    taken = {"files_left": left, "quiet_seconds": round(quiet.seconds), "seconds": round(time.monotonic() - began)}
    return counted | rows | taken | {"times": " ".join(sorted(set(times.column)))}
