"""Runs the benchmarks: `python -m kvrepro_kernels.bench`."""

import datetime
from pathlib import Path

import torch

from kvrepro_kernels.bench.checks import checks
from kvrepro_kernels.bench.harness import Bench
from kvrepro_kernels.bench.scores import bench_ceilings, bench_prefill, bench_window_scores
from kvrepro_kernels.bench.storage import bench_compaction, bench_ragged_decode
from kvrepro_kernels.bench.tables import COLUMNS, FOLDER, page, targets, write


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("the kernels are timed on a GPU, and torch sees none")
    b, folder = Bench(str(datetime.date.today())), FOLDER if FOLDER.is_dir() else Path()
    names = "kernel variant dtype tokens error kept differ not_ties date".split()
    write(folder / "checks.csv", list(checks(b.common["date"])), names)
    for measure in (bench_ceilings, bench_window_scores, bench_prefill, bench_ragged_decode, bench_compaction):
        measure(b)
        torch.cuda.empty_cache()
        write(folder / "kernels.csv", b.rows, COLUMNS)
    reached = list(targets(b))
    write(folder / "targets.csv", reached, "target wanted outcome met".split())
    (folder / "kernels.md").write_text(page(folder))
    for row in reached:
        print(f"{row['met']:4}{row['outcome']:>10} {row['wanted']:8} {row['target']}")


if __name__ == "__main__":
    main()
