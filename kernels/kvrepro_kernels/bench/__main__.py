"""Runs the benchmarks: `python -m kvrepro_kernels.bench`."""

import argparse
import datetime
import sys
from pathlib import Path

import torch

from kvrepro_kernels import bench
from kvrepro_kernels.bench.checks import checks
from kvrepro_kernels.bench.harness import Bench
from kvrepro_kernels.bench.scores import bench_ceilings, bench_prefill, bench_window_scores
from kvrepro_kernels.bench.storage import bench_compaction, bench_ragged_decode
from kvrepro_kernels.bench.tables import COLUMNS, FOLDER, page, read, targets, write

PARTS = {  # what measures each kernel's rows
    "ceiling": bench_ceilings,
    "window_scores window_attention": bench_window_scores,
    "prefill_attention column_mass": bench_prefill,
    "ragged_decode": bench_ragged_decode,
    "compaction": bench_compaction,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvrepro_kernels.bench", description=bench.__doc__)
    parser.add_argument(
        "--out", type=Path, default=FOLDER if FOLDER.is_dir() else Path(), help="folder for the three tables"
    )
    parser.add_argument("--only", choices=" ".join(PARTS).split(), help="measure its rows anew; the others stay")
    parser.add_argument("--date", default=str(datetime.date.today()), help="written into the tables")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("the kernels are timed on a GPU, and torch sees none", file=sys.stderr)
        return 2
    if not options.only:
        checked = list(checks(options.date))
        names = "kernel variant dtype tokens error kept differ not_ties date".split()
        write(options.out / "checks.csv", checked, names)
    b, table = Bench(options.date), options.out / "kernels.csv"
    chosen = [kernels for kernels in PARTS if options.only in (None, *kernels.split())]
    if options.only:
        b.rows = [row for row in read(table) if row["kernel"] not in chosen[0].split()]
    for kernels in chosen:
        PARTS[kernels](b)
        torch.cuda.empty_cache()
        write(table, b.rows, COLUMNS)
    reached = list(targets(b))
    write(options.out / "targets.csv", reached, "target wanted outcome met".split())
    (options.out / "kernels.md").write_text(page(options.out))
    for row in reached:
        print(f"{row['met']:4}{row['outcome']:>10} {row['wanted']:8} {row['target']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
