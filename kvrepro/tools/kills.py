"""A chapter's run that is killed again and again at seeded moments and resumed each time, and what that lost.

It is compared, row by row, with what a run without a fault stores.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from kvrepro.experiment.table import steadily
from kvrepro.tools import store
from kvrepro.tools.book import cells

WHO = ("driver", "worker", "node")
POLL = 0.0005  # seconds between two looks at the results folder
SETTLE = 20.0  # seconds that a killed run's workers may take to notice
SECONDS = 300.0  # for one command
Curve = list[tuple[float, int]]  # seconds since the start, rows stored by then


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


def started(chapter: str, parameters: dict[str, Any], log: Path) -> BaseProcess:
    """A process that computes a chapter."""
    context = multiprocessing.get_context("fork")  # this process has imported what takes seconds
    process = context.Process(target=_child, args=(chapter, parameters, log))
    process.start()
    return process


def finish(process: BaseProcess, log: Path) -> None:
    """Wait for the end of a chapter's process. Raises RuntimeError with its last lines where the exit code is not 0."""
    process.join()
    if process.exitcode:
        last = log.read_text(encoding="utf-8").splitlines()[-12:]
        raise RuntimeError("\n".join([f"a chapter ended with exit code {process.exitcode}:", *last]))


def family(process: BaseProcess) -> list[psutil.Process]:
    """The processes that a process started, and those that these started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def last_words(log: Path) -> str:
    """The last line that says something, if any does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), "")


def _victims(process: BaseProcess, who: str) -> list[psutil.Process]:
    """The processes that a kill of that kind may hit: the one that runs the study, its workers, or Ray's node. The node
    may be hit as soon as one of its workers has a job; an earlier kill would only try Ray's start."""
    if who == "driver":
        return [psutil.Process(process.pid)]
    victims, has_job = [], False
    for relative in family(process):
        with contextlib.suppress(psutil.Error):
            has_job = has_job or " ".join(relative.cmdline()).startswith("ray::Worker.do")
            if relative.name() == "raylet" if who == "node" else _is_worker(relative):
                victims.append(relative)
    return victims if has_job or who != "node" else []


def _is_worker(process: psutil.Process) -> bool:
    """Is it a worker of Ray, or one forked from the server of `kvrepro.experiment.workers`, with its command line?"""
    command, command_of_parent = (" ".join(p.cmdline()) for p in (process, process.parent() or process))
    return command.startswith("ray::Worker") or (
        "multiprocessing.forkserver" in command and command == command_of_parent
    )


# ---- what is stored


def files_below(folder: Path) -> list[str]:
    """The files in a folder to which others write: what they rename or remove meanwhile may be missing."""
    return [f"{path}/{name}" for path, _, files in os.walk(folder) for name in files]


def stored_rows(folder: Path) -> int:
    """How many rows are stored so far."""
    count = 0
    for file in files_below(folder):
        if file.endswith(".parquet") and ".tmp" not in file:
            with contextlib.suppress(OSError, pa.ArrowException):  # folded in the meantime
                count += pq.read_metadata(file).num_rows
    return count


def being_written(folder: Path) -> bool:
    """Is a file, or the folder of an item's tables, being written?"""
    return any(".tmp" in file for file in files_below(folder))


def differences(quiet: Path, other: Path) -> pd.DataFrame:
    """A row for each table, each item's tables and each chapter's verdicts of a run without a fault: how many rows it
    has, and how many of them another run lost, doubled, or has with other values. Columns that `kvrepro store diff`
    does not compare, such as times, do not count."""
    compared: list[tuple[Any, ...]] = []
    for table in store.tables_of(quiet):
        a, b = (store.latest_rows(folder / table).astype(str) for folder in (quiet, other))
        stored = steadily(other / table, lambda files: sum(file.rows for file in files))
        differs = store.differing(a, b)
        compared.append((table, len(a), len(a) - len(differs), stored - len(differs), differs.any(axis=1).sum()))
    items_of_other = store.items_of(other)
    for item, tables in store.items_of(quiet).items():
        whole, there = tables.read(Path(item).name), item in items_of_other
        rows = sum(map(len, whole.values()))
        different = there and store.unlike(whole, items_of_other[item].read(Path(item).name))
        compared.append((item, rows, 0 if there else rows, 0, different))
    for file in quiet.glob("*/claims.csv"):
        name, rows = file.relative_to(quiet), len(pd.read_csv(file))
        there = (other / name).is_file()
        changed = len(store.verdicts_that_differ(file, other / name)) if there else 0
        compared.append((name, rows, 0 if there else rows, 0, changed))
    return pd.DataFrame(compared, columns=["table", "rows", "lost", "doubled", "different"])


# ---- moments


def quiet_run(chapter: str, parameters: dict[str, Any], folder: Path) -> tuple[float, Curve]:
    """Compute a chapter into `folder` without a fault. Returns its seconds, and when how much was stored."""
    began, log, curve = time.monotonic(), folder.with_suffix(".log"), [(0.0, 0)]
    process = started(chapter, parameters | {"results": str(folder)}, log)
    while process.is_alive():
        count = stored_rows(folder)
        if count > curve[-1][1]:
            curve.append((time.monotonic() - began, count))
        time.sleep(0.01)
    finish(process, log)
    return time.monotonic() - began, curve


def wait_for(process: BaseProcess, folder: Path, rows: int, delay: float, writing: bool) -> None:
    """Wait until so many rows are stored and then `delay` seconds; if `writing`, also until a file is being written.
    The end of the process ends the wait."""
    while process.is_alive() and stored_rows(folder) < rows:
        time.sleep(POLL)
    process.join(delay)
    while writing and process.is_alive() and not being_written(folder):
        time.sleep(POLL)


def end(processes: list[psutil.Process]) -> int:
    """Wait `SETTLE` seconds for processes to end by themselves, and kill the others; how many these were."""
    _, left = psutil.wait_procs(processes, SETTLE)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(left)


def ended(process: BaseProcess, relatives: list[psutil.Process], log: Path) -> int:
    """Wait for the end of a run that lost its driver or its node; how many of its processes had to be killed. Raises
    RuntimeError where it has not ended after `SECONDS`."""
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        raise RuntimeError(f"a chapter had not ended {SECONDS:.0f} s after the kill: {last_words(log)}")
    print(f"    exit code {process.exitcode}: {last_words(log)}", flush=True)
    return end(relatives)


def killed_run(
    chapter: str, parameters: dict[str, Any], folder: Path, seconds: float, curve: Curve, who: str, kills: int,
    seed: int,
) -> dict[str, int]:  # fmt: skip
    """Compute a chapter into `folder`, kill one of its processes at `kills` random moments, every third time while a
    file is being written, and resume after each. Returns the counts.

    A moment is one of the quiet run, which took `seconds`: the kill comes as long after the same rows were stored.
    """
    dice, log = random.Random(f"{chapter} {who} {seed}"), folder.with_suffix(".log")
    run_parameters = parameters | {"results": str(folder)}
    computing, total = curve[-1]
    lengths = [seconds if k % 5 == 0 else computing for k in range(kills)]  # most before the analysis
    moments = sorted(dice.uniform(0, length) for length in lengths)
    counts = dict.fromkeys(("kills", "while_computing", "while_writing", "processes_left"), 0)
    process, misses = started(chapter, run_parameters, log), 0
    while counts["kills"] < kills and misses < kills:
        number = counts["kills"]
        at, rows = max(point for point in curve if point[0] <= moments[number])
        wait_for(process, folder, rows, moments[number] - at, writing=number % 3 == 2 and misses == 0)
        victims: list[psutil.Process] = []
        while process.is_alive() and not (victims := _victims(process, who)):
            time.sleep(POLL)
        if not victims:  # it was quicker this time
            if who == "driver":
                finish(process, log)
            misses += 1
            moments[number] = dice.uniform(0, computing)
        else:
            relatives = family(process)
            counts["while_writing"] += being_written(folder)
            dice.choice(sorted(victims, key=lambda victim: victim.pid)).kill()
            count = stored_rows(folder)
            counts["kills"] += 1
            counts["while_computing"] += count < total
            misses = 0
            print(f"  kill {counts['kills']} with {count} of {total} rows stored", flush=True)
            if who != "worker":
                counts["processes_left"] += ended(process, relatives, log)
        if not process.is_alive():
            process = started(chapter, run_parameters, log)
    finish(process, log)
    return counts


def campaign(chapter: str, parameters: dict[str, Any], base: Path, who: str, count: int, seed: int) -> dict[str, Any]:
    """Run a chapter once without a fault and once with kills, in folders of `base`. Returns the counts."""
    began = time.monotonic()
    seconds, curve = quiet_run(chapter, parameters, base / "quiet")
    print(f"{chapter}: {curve[-1][1]} rows in {seconds:.0f} s without a fault", flush=True)
    counted = killed_run(chapter, parameters, base / "killed", seconds, curve, who, count, seed)
    tables = differences(base / "quiet", base / "killed")
    wrong = tables[tables[["lost", "doubled", "different"]].any(axis=1)]
    if len(wrong):
        print(wrong.to_string())
    left = sum(1 for _ in (base / "killed").rglob("*.tmp"))
    run_facts = {"files_left": left, "quiet_seconds": round(seconds), "seconds": round(time.monotonic() - began)}
    return counted | tables.drop(columns="table").sum().astype(int).to_dict() | run_facts
