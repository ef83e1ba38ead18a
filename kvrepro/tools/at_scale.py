"""What a sweep of 10 models x 4,750 items x 200 conditions takes, on paper: `python -m kvrepro.tools.at_scale`.

The items are those of LongBench. Seconds of a GPU are those of `data/gpu/real.csv`. What the driver does with rows is
measured now, on this machine: rows of a real study are packed, unpacked, stored and opened again, in jobs of the size
that a GPU gets.
"""

import hashlib
import pickle
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import pyarrow.parquet as pq
import torch
import typer

from kvrepro.chapters.protection import grid
from kvrepro.engine.generate import MOST_ROWS
from kvrepro.experiment import data, models, progress, workers
from kvrepro.experiment.answers import GPU_BATCHES
from kvrepro.experiment.cluster import AHEAD
from kvrepro.experiment.run import Answers, Settings, run
from kvrepro.experiment.store import Store
from kvrepro.experiment.table import COLUMNS
from kvrepro.paths import DATA, GPU, write_table
from kvrepro.tools import command
from kvrepro.tools.rows import stamp

OUT = DATA / "reliability" / "at_scale.csv"
SWEEP = {"models": 10, "items": 4750, "conditions": 200}
GPUS = (8, 64)
RATE, CONDITIONS = "the same as a study: 16 items of LongBench, rows stored, an item", 122  # of real.csv
OF = "Qwen2.5-3B, H100, prompts of 1,920 tokens, 128 new ones"
JOB = GPU_BATCHES * MOST_ROWS  # rows
ADDED = 4  # jobs whose rows are stored to time it


def driver(folder: Path) -> dict[str, float]:
    """What one row costs the driver: bytes as a job, as a result and in the store; seconds to unpack and store it, to
    open it again, and to fold it in."""
    loaded = models.load()
    items = data.load_items("tinyworld:domains", 2, tokens=1900)
    study, settings = Answers("scale", "main", items, grid.protection()[:8], 4), Settings(folder, progress=False)
    with study.plan(study, loaded, settings) as plan:
        jobs = plan.jobs()
        packed = sum(len(part) for part in workers.packed(jobs) or []) / sum(job.size for job in jobs)
    run(study, loaded, settings)
    rows = pq.read_table(folder / "scale" / "main.parquet", columns=COLUMNS).to_pylist()
    rows_of_job = [
        row | {"key": f"{i:016x}", "item": f"item-{i}", "prediction": _text(i), "kept_hash": _text(i)[:16]}
        for i, row in enumerate((rows * -(-JOB // len(rows)))[:JOB])
    ]
    result = pickle.dumps(rows_of_job)
    times: dict[str, list[float]] = {"add": [], "open": [], "close": []}
    for number in range(ADDED):
        with Store(folder, "scale", f"added-{number}") as store:
            began = time.perf_counter()
            store.add(pickle.loads(result))
            times["add"].append(time.perf_counter() - began)
            began = time.perf_counter()
        times["close"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with Store(folder, "scale", f"added-{number}"):
            times["open"].append(time.perf_counter() - began)
    size = (folder / "scale" / "added-0.parquet").stat().st_size / JOB
    least = {name: min(seconds) / JOB for name, seconds in times.items()}
    return {"job": packed, "result": len(result) / JOB, "stored": size} | least


def _text(number: int) -> str:
    """512 characters that differ for each number."""
    return "".join(hashlib.sha256(f"{number}-{part}".encode()).hexdigest() for part in range(8))


def table(row: dict[str, float], seconds: float, efficiency: float) -> pd.DataFrame:
    """What the sweep takes and needs, with a column for each of `GPUS`. row: the result of `driver`; seconds: of one
    row on one GPU; efficiency: of several GPUs, at most 1."""
    count = SWEEP["models"] * SWEEP["items"] * SWEEP["conditions"]
    lines: list[tuple[str, str, Any, str]] = [
        ("rows", "", lambda gpus: count, "models x items x conditions"),
        ("GPU hours", "h", lambda gpus: count * seconds / 3600, f"{1000 * seconds:.1f} ms a row: {OF}"),
        ("the sweep", "h", lambda gpus: count * seconds / gpus / efficiency / 3600,
         f"at the efficiency measured on 2 GPUs, {efficiency:.2f}"),
        ("rows that arrive", "1/s", lambda gpus: gpus * efficiency / seconds, ""),
        ("rows that the driver can take", "1/s", lambda gpus: 1 / row["add"], "unpickled, written, flushed to disk"),
        ("share of the driver's time", "percent", lambda gpus: 100 * gpus * efficiency / seconds * row["add"], ""),
        ("GPUs that one driver can serve", "", lambda gpus: seconds / row["add"] / efficiency, "one thread"),
        ("object store, at most", "MB", lambda gpus: AHEAD * gpus * JOB * (row["job"] + row["result"]) / 1e6,
         f"{AHEAD} jobs of {JOB:,} rows a worker"),
        ("files that arrive", "", lambda gpus: count / JOB, "one a job, folded in when a study ends"),
        ("results on disk", "GB", lambda gpus: count * row["stored"] / 1e9, "answers of 512 characters, no two alike"),
        ("opening and folding all rows in, once", "min", lambda gpus: count * (row["open"] + row["close"]) / 60,
         "as if all were in one table; each chapter's studies have their own"),
    ]  # fmt: skip
    names = [f"{gpus} GPUs" for gpus in GPUS]
    rows = [[name, unit, *(float(f"{value(gpus):.3g}") for gpus in GPUS), how] for name, unit, value, how in lines]
    return pd.DataFrame(rows, columns=["what", "unit", *names, "how"])


def main(out: Annotated[Path, typer.Option(help="the table")] = OUT) -> None:
    """Measure the driver, and write the table."""
    torch.set_num_threads(1)
    real = pd.read_csv(GPU / "real.csv").set_index("what")
    measured = pd.read_csv(OUT.with_name("scaling.csv"))
    two = measured[(measured.device != "CPU") & (measured.workers == 2)]
    efficiency = min(1.0, float(two.sort_values("rows").efficiency.iloc[-1]))  # of the largest study
    with tempfile.TemporaryDirectory() as folder, progress.listening(lambda _: None):
        sweep = table(driver(Path(folder)), real.now[RATE] / CONDITIONS, efficiency)
    names = [name for name in sweep if name.endswith("GPUs")]
    sweep[names] = sweep[names].map(lambda x: f"{x:.0f}" if x >= 100 else f"{x:g}")
    write_table(out, sweep.assign(**stamp()), None)
    print(sweep.to_string(index=False))


if __name__ == "__main__":
    command.run(main)
