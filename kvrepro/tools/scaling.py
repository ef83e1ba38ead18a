"""How much faster is a study on more workers? `python -m kvrepro.tools.scaling --shape qwen2.5-3b --device cuda`.

The synthesis' grid: on random weights of a real shape by 1 and 2 GPUs, or on the embedded model by 1 to 16 processes
of one core each (`python -m kvrepro.tools.scaling --workers 1,2,4,8,16`). Each measurement is a process of its own,
which first runs the study on a few other items: that loads the model into the workers and compiles the kernels. Rows
are compared with those of one worker. One worker is the process itself, whatever the engine. A measurement
sees as many GPUs as it has workers; a single GPU decodes larger batches, in which bfloat16 rounds differently.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from kvrepro.chapters.synthesis import study
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.engine.allowed import ensure
from kvrepro.errors import InputError
from kvrepro.experiment import data, models, progress, store
from kvrepro.paths import DATA
from kvrepro.tools import command, trial
from kvrepro.tools.rows import replace_rows, stamp

OUT = DATA / "reliability" / "scaling.csv"
KEY = ["model", "device", "engine", "workers", "items"]
TIMES = ["date", "prefill_seconds", "decode_seconds", "peak_bytes"]  # columns that no two runs share


def measure(model: str, device: str, engine: str, count: int, n_items: int, cells: int, folder: str) -> dict[str, Any]:
    """One measurement: `start`, seconds of a first study on other items; `seconds`, from the moment the jobs of the
    study are handed out until the last is stored; `wall`, with checks, estimate and reading of the rows."""
    torch.set_num_threads(1)
    if device == "cuda":  # as many GPUs as workers, before anything asks how many there are
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
    batch = None if device == "cuda" else 16  # on the CPU a job for each item or two, for many workers to share
    given: dict[str, Any] = dict(device=device, engine=engine, workers=count, batch_rows=batch, cells=cells)
    warm, timed = (Settings(results=f"{folder}/{name}/{engine}-{count}", **given) for name in ("warm", "timed"))
    loaded = models.load(model, device, warm.dtype)
    others = study.questions(loaded, study.ITEMS, 4 * count, replace(warm, seed=1))
    items = study.questions(loaded, study.ITEMS, n_items, timed)
    began = time.perf_counter()
    with progress.listening(lambda message: None):
        study.answers(loaded, others, cells, (), warm)
    start, moments = time.perf_counter() - began, list[float]()
    began = time.perf_counter()
    with progress.listening(lambda message: moments.append(time.perf_counter()) if "done" in message else None):
        rows = study.answers(loaded, items, cells, (), timed)
    wall = time.perf_counter() - began
    return {"rows": len(rows), "start": start, "seconds": moments[-1] - moments[0], "wall": wall}


def measured_apart(*given: Any) -> dict[str, Any]:
    """`measure` in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(measure, *given).result()
        except BrokenProcessPool:
            raise InputError("the measurement's process ended, see above: fewer items or workers may do") from None


def table(folder: str, engine: str, count: int) -> pd.DataFrame:
    """The rows that a measurement stored, without times, by key."""
    rows = store.read(Path(folder, "timed", f"{engine}-{count}", "synthesis", "grid.parquet"))
    return rows.drop(columns=TIMES).set_index("key").sort_index().map(str)


def measured(
    model: str, device: str, engines: Sequence[str], counts: Sequence[int], n_items: int, cells: int, folder: str
) -> pd.DataFrame:
    """A row per engine and number of workers. `equal`: the share of rows that equal those of one worker in every column
    but times; `same_text`: the share with the same prediction. `efficiency`: the seconds of one worker over the sum of
    the workers' seconds, once they are warm; `efficiency_whole`: the same with start, checks and estimate."""
    rows: list[dict[str, Any]] = []
    for count in counts:
        for engine in engines if count > 1 else engines[:1]:
            row = measured_apart(model, device, engine, count, n_items, cells, folder)
            first = table(folder, rows[0]["engine"] if rows else engine, counts[0])
            rows_of_workers = table(folder, engine, count).reindex_like(first)  # a row that is missing equals none
            row["equal"] = float((first == rows_of_workers).all(axis=1).mean())
            row["same_text"] = float((first.prediction == rows_of_workers.prediction).mean())
            rows.append({"engine": engine, "workers": count, "items": n_items} | row)
            print(pd.Series(rows[-1]).to_frame().T.to_string(index=False), flush=True)
    frame = pd.DataFrame(rows)
    single, work = frame.iloc[0], frame.workers / frame.workers[0]
    whole = (single.start + single.wall) / (frame.start + frame.wall)
    return frame.assign(efficiency=single.seconds / frame.seconds / work, efficiency_whole=whole / work)


def main(
    shape: Annotated[str, typer.Option(help="random weights of this shape; otherwise the embedded model")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    workers: Annotated[str, typer.Option(help="numbers of workers, with commas, the first one 1")] = "1,2",
    engines: Annotated[str, typer.Option(help="with commas")] = "local,ray",
    n_items: Annotated[int, typer.Option(min=1)] = 64,
    cells: Annotated[int, typer.Option(min=8, help="of the grid")] = 24,
    out: Annotated[Path, typer.Option(help="the table")] = OUT,
) -> None:
    """Measure, print, and write the table."""
    ensure(("", *trial.SHAPES), shape=shape)
    counts = [int(text) if text.isdecimal() else 0 for text in workers.split(",")]
    if counts[0] != 1 or min(counts) < 1:
        raise InputError(f"workers {workers!r}: whole numbers with commas, the first one 1, such as 1,2,4")
    kinds = engines.split(",")
    for kind in kinds:
        ensure(("local", "ray"), engines=kind)
    with tempfile.TemporaryDirectory() as folder:
        model = models.DEFAULT
        if shape:
            dtype = "bfloat16" if device == "cuda" else "float32"
            model = str(trial.checkpoint_for(data.load_items(study.ITEMS, 12), Path(folder), shape, dtype))
        frame = measured(model, device, kinds, counts, n_items, cells, folder)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    conditions = {"model": Path(model).name, "device": where, "cells": cells}
    frame = frame.assign(**conditions, **stamp())
    replace_rows(out, frame, KEY, digits=4)
    print(frame[["engine", "workers", "seconds", "efficiency", "efficiency_whole", "equal"]].to_string(index=False))
    print(f"the table: {out}")


if __name__ == "__main__":
    command.run(main)
