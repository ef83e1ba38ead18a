"""Is anything lost when a run is killed? `python -m kvrepro.tools.faults kills --chapter leakage --kills 20 --seed 0`.

How is said in `kvrepro.tools.kills`. `python -m kvrepro.tools.faults table` makes other faults, each in a call of
`kvrepro`, and writes down what a reader would see.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import pandas as pd
import psutil
import pyarrow.parquet as pq
import torch
import typer
from safetensors.torch import load_file, save_file

from kvrepro.engine.allowed import ensure
from kvrepro.errors import ENDING, InputError, Stopped, program
from kvrepro.experiment import data
from kvrepro.experiment.sealed import write
from kvrepro.experiment.table import VERSION
from kvrepro.paths import DATA, ROOT
from kvrepro.tools import trial
from kvrepro.tools.kills import SECONDS, WHO, campaign, differences, end, last_words, stored_rows
from kvrepro.tools.rows import answers_of, replace_rows, stamp, words

OUT = DATA / "reliability"
SMALL: dict[str, dict[str, Any]] = {"protection": {"capacities": [128]}, "fragility": {"shares": [0.2]}}  # to be quick
app = typer.Typer(add_completion=False)
KEY = ["chapter", "engine", "who", "seed", "machine"]


@dataclass(frozen=True)
class Fault:
    """How a fault is made in a call of `kvrepro`, and what its output says about it."""

    how: str  # in words, for the table
    says: str  # part of the line that the reader sees
    body: str = "pass"  # of the policy's function
    above: str = ""  # code above that function
    options: Sequence[str] = ()
    broken: int = 0  # rows that the fault makes impossible
    command: str = "run"
    signal: str = ""  # is sent when rows arrive
    nan: bool = False  # in the weights
    harm: str = ""  # is done to the stored table: a name in `HARMS`
    away: bool = True  # move the harmed file away afterwards, as the line says
    around: str = ""  # a shell script with the right to mount, in which the call is "$@"
    calls: int = 1  # at the same time


WORDS = words("faults")
FAULTS, DAMAGES = ({name: Fault(**entry) for name, entry in WORDS[kind].items()} for kind in ("faults", "damages"))


# ---- faults, each by the command that a reader would type

ROWS = 33  # 11 items under the full cache, the policy of the fault and another


def _command(fault: Fault, base: Path) -> list[str]:
    """The command line of a fault; files that it needs are written to `base`."""
    results, start = base / "results", [sys.executable, "-m", "kvrepro", fault.command]
    if fault.command == "book":
        parameters = {"model": _two_layers(base), "results": results, "n_items": 1}
        return [*start, "--workers=2", *(f"--parameter={key}={value}" for key, value in parameters.items())]
    scorer, items = base / "fault.py", base / "items.jsonl"
    scorer.write_text(WORDS["policy"].format(above=fault.above, body=fault.body))
    lengths = [40 if i == 7 else 10 for i in range(11)]
    lines = [{"context": "The red door is open. " * n, "question": "Which?", "answer": "red"} for n in lengths]
    items.write_text("".join(json.dumps(item) + "\n" for item in lines))
    model = _with_nan(base) if fault.nan else "small-gqa"
    arguments = f"-p {scorer}:MINE -p k_norm -b 0.5 -m {model} -i {items} -n 11 -o results={results} -o progress=false"
    return [*start, *arguments.split(), "--max-new-tokens", "4", *fault.options]


def _started(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """A command in a session of its own, which signals end: jobs in the background inherit that some are ignored."""

    def usual_signals() -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)

    environment = os.environ | {"KVREPRO_WORKERS": ""}
    return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment, start_new_session=True,
                            preexec_fn=usual_signals)  # fmt: skip


def _with_nan(base: Path) -> Path:
    """The two-layer checkpoint with one broken weight."""
    folder = _two_layers(base)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def meet(name: str, base: Path) -> dict[str, Any]:
    """Make a fault. Its row: the line that was seen, the exit code, seconds from a signal to the end, processes left,
    and rows lost of those that were stored before a signal, or that the fault does not make impossible."""
    fault, results, log = FAULTS[name], base / "results", base / "log"
    with log.open("wb") as output:
        process = _started(_command(fault, base), output)
        until, before, family = time.monotonic() + SECONDS, ROWS - fault.broken, list[psutil.Process]()
        if fault.signal:
            while process.poll() is None and not (before := stored_rows(results)) and time.monotonic() < until:
                time.sleep(0.05)
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(getattr(signal, fault.signal))
        began = time.monotonic()
        code = process.wait(max(1.0, until - began))
    lines = [line for line in log.read_text(errors="replace").splitlines() if fault.says in line]
    after = stored_rows(results) if fault.signal else int(answers_of(results / "run").error.isna().sum())
    taken = round(time.monotonic() - began, 1) if fault.signal else None
    left = end(family) if fault.signal else 0
    return {"fault": name, "made": fault.how, "seen": lines[0].replace(str(base), "...") if lines else "",
            "exit_code": code, "lost": max(0, before - after), "seconds": taken, "processes_left": left}  # fmt: skip


# ---- faults of the disk, after a call that stored rows and in the midst of one that stores more

ALONE = ("-o", "batch_rows=1")  # so that no row depends on which others are missing
MORE = (*ALONE, "-b", "0.25")  # and what the call with the fault computes beyond what is stored


def _of_later_version(file: Path) -> None:
    table = pq.read_table(file)
    write(table.replace_schema_metadata({b"kvrepro": b"results %d" % (VERSION + 1)}), file)


def _changed_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 1
    file.write_bytes(data)


def _from_the_future(file: Path) -> None:
    os.utime(file, (time.time() + 365 * 86_400,) * 2)


HARMS: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2), "changed": _changed_byte,
    "later version": _of_later_version, "future": _from_the_future,
}  # fmt: skip


def stored_and_whole(base: Path) -> tuple[Path, Path]:
    """A folder of results with the rows of a first call, and one with those of a second call, with `MORE`, too."""
    whole, kept = base / "whole", base / "stored"
    for options, copy in ((ALONE, kept), (MORE, None)):
        command = [*_command(Fault("", "", options=options), base), "-o", f"results={whole}"]
        if code := _called([command], base / "log")[0]:
            raise RuntimeError(f"a call without a fault ended with exit code {code}: {last_words(base / 'log')}")
        if copy:
            shutil.copytree(whole, copy)
    return kept, whole


def _called(commands: list[list[str]], log: Path) -> tuple[int, int]:
    """The largest exit code of commands that run at once, and how many processes they left behind. These are ended."""
    with log.open("wb") as output:
        running = [_started(command, output) for command in commands]
        codes = [process.wait(SECONDS) for process in running]
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            left += [process] if os.getsid(process.pid) in [leader.pid for leader in running] else []
    return max(codes), end(left)


def damaged(name: str, base: Path, kept: Path, whole: Path) -> dict[str, Any]:
    """Call `kvrepro run` with a fault of the disk, do what its line says, call it again, and count the rows that are
    then lost, doubled or different from those without the fault."""
    damage, results, out = DAMAGES[name], base / "results", base / "out"
    if damage.around and subprocess.run("unshare -rm mount -t tmpfs none /mnt", shell=True).returncode:
        raise InputError(f"fault {name!r} needs `unshare -rm` and mounts, which fail here: choose others by --only")
    for folder in (results, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, results)
    file = results / "run" / "main.parquet"
    if damage.harm:
        HARMS[damage.harm](file)
    harmed = file.read_bytes()
    command = [*_command(Fault("", "", options=MORE), base)]
    script = damage.around.format(kept, results, out)
    call = ["unshare", "-rm", "sh", "-c", script, "sh", *command] if script else command
    began = time.monotonic()
    code, left = _called([call] * damage.calls, base / "log")
    seconds = round(time.monotonic() - began, 1)
    lines = [line for line in (base / "log").read_text(errors="replace").splitlines() if damage.says in line]
    touched = bool(damage.harm) and damage.away and file.read_bytes() != harmed
    if damage.harm and damage.away:
        file.rename(base / "away")
    elif out.is_dir():
        shutil.rmtree(results)
        out.rename(results)
    _called([command], base / "log")
    lost = int(differences(whole, results)[["lost", "doubled", "different"]].to_numpy().sum()) + touched * ROWS
    if not (damage.harm and damage.away):  # rows of the first call are still those, with their dates
        before, after = (answers_of(folder / "run").set_index("key").date for folder in (kept, results))
        lost += int((after.reindex(before.index) != before).sum())
    seen = re.sub(r"@\S+\.parquet", "@....parquet", "; ".join(lines[-damage.calls :]).replace(str(base), "..."))
    return {"fault": name, "made": damage.how, "seen": seen, "exit_code": code, "lost": lost, "seconds": seconds,
            "processes_left": left}  # fmt: skip


# ---- the commands


@app.callback()
def main() -> None:
    """Kill runs, and count what is lost."""


@app.command()
def kills(
    chapter: Annotated[str, typer.Option(help=f"one of {', '.join(trial.CHAPTERS)}")],
    count: Annotated[int, typer.Option("--kills", min=1)] = 20,
    who: Annotated[str, typer.Option(help=f"is killed: {', '.join(WHO)}")] = "driver",
    seed: int = 0,
    engine: Annotated[str, typer.Option(help="local or ray")] = "local",
    workers: Annotated[int | None, typer.Option(help="processes; otherwise 1, or 2 where workers are killed")] = None,
    model: Annotated[str, typer.Option(help="a checkpoint; otherwise one of two layers with random weights")] = "",
    n_items: Annotated[int, typer.Option(help="of each study")] = 2,
    out: Annotated[Path, typer.Option(help="the table")] = OUT / "kills.csv",
) -> None:
    """Kill a chapter's run again and again, resume it, and count rows that are lost, doubled or different."""
    ensure(trial.CHAPTERS, chapter=chapter)
    ensure(WHO, who=who)
    ensure(("local", "ray"), engine=engine)
    if who == "node" and engine == "local":
        raise InputError("who 'node': nodes are Ray's: add --engine ray")
    os.environ["KVREPRO_ENGINE"] = engine
    torch.set_num_threads(1)
    processes = workers or (1 if who == "driver" and engine == "local" else 2)
    options = {"progress": False, "workers": processes, "batch_rows": 16}
    with tempfile.TemporaryDirectory() as base:
        parameters = {"model": model or str(_two_layers(Path(base))), "n_items": n_items, "options": options}
        row = campaign(chapter, parameters | SMALL.get(chapter, {}), Path(base), who, count, seed)
    kill_count: int = row["kills"]
    if not kill_count:
        raise Stopped(f"no {who} could be killed: {chapter} computes too little here for processes of its own, or ends "
                      "too soon; give more --n-items. Nothing was written")  # fmt: skip
    row = {"chapter": chapter, "engine": engine, "who": who, "seed": seed} | row | stamp()
    print(pd.Series(row).to_string())
    if kill_count < count:
        print(f"{kill_count} of {count} kills were made: after that the run ended too soon {count} times in a row")
    replace_rows(out, pd.DataFrame([row]), KEY)
    if row["lost"] or row["doubled"] or row["different"]:
        raise typer.Exit(1)


@app.command("table")
def table_(
    out: Annotated[Path, typer.Option(help="the table")] = OUT / "faults.csv",
    only: Annotated[str, typer.Option(help="faults whose name holds this text")] = "",
) -> None:
    """Make each fault once, and write down what was seen; exit 1 where one was met in silence or lost a row."""
    chosen, rows = [name for name in (*FAULTS, *DAMAGES) if only in name], []
    if not chosen:
        raise InputError(f"only {only!r}: no fault's name holds that; there are: {'; '.join((*FAULTS, *DAMAGES))}")
    with tempfile.TemporaryDirectory() as folder:
        for row in _met(chosen, Path(folder)):
            rows.append(row | stamp())
            print(pd.Series(rows[-1]).to_string(), flush=True)
            replace_rows(out, pd.DataFrame(rows), ["fault"])
    if any(row["lost"] or not row["seen"] or row["processes_left"] for row in rows):
        raise typer.Exit(1)


def _met(names: list[str], base: Path) -> Iterator[dict[str, Any]]:
    """A row for each fault. Faults of the disk start from the same stored rows."""
    before: tuple[Any, ...] = ()
    for name in names:
        if name in FAULTS:
            with tempfile.TemporaryDirectory() as folder:
                yield meet(name, Path(folder))
        else:
            before = before or stored_and_whole(base)
            yield damaged(name, base, *before)


def _two_layers(folder: Path) -> Path:
    """A checkpoint with random weights."""
    return trial.checkpoint_for(data.load_items("tinyworld:domains", 8, tokens=300), folder, "two-layer")


if __name__ == "__main__":
    program(app)
