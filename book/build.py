"""Build the book: papermill executes the notebooks whose inputs changed, jupyter-book makes the HTML.

    python book/build.py                                   # or make book
    python book/build.py -p profile full -p device cuda    # parameters of papermill, for the notebooks that have them

_toc.yml lists the notebooks under book/executed, where their executed copies lie; the HTML is in _build/html.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parents[1]
EXECUTED = ROOT / "book" / "executed"
SHARED = ["kvrepro/**/*.py", "kernels/**/*.py", "constraints.txt", "data/*.*"]  # what every notebook depends on
SHARED += [f"data/{name}/**/*.*" for name in "artifact claims gpu models published reliability words".split()]
ALONE = {"leakage", "reclamation"}  # they measure time
PAGES = {"claims", "decide", "family", "language_model", "methods", "reliability_cost"}  # they run no model
# One thread for each process, this environment's kernel, and large blocks of memory kept for reuse.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "JUPYTER_PREFER_ENV_PATH": "1", "MALLOC_MMAP_THRESHOLD_": str(2**30)}


def names() -> list[str]:
    """The notebooks that _toc.yml lists, in its order."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [Path(entry["file"]) for part in toc["parts"] for entry in part["chapters"]]
    return [file.stem for file in files if file.parent == Path("book/executed")]


def parameters_of(name: str) -> set[str]:
    """Names of a notebook's parameters: what its tagged cell assigns."""
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    tagged = "\n".join(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))
    return set(re.findall(r"^(\w+) = ", tagged, re.M))


def stamp(name: str, given: Sequence[Sequence[str]]) -> str:
    """Hash of what an executed notebook depends on: itself, its parameters, code, data, and the run's verdicts."""
    results = ROOT / dict(given).get("results", "data/results")
    verdicts = results.glob("*/claims.csv" if name in PAGES else f"{name}/claims.csv")
    own = hashed([ROOT / "notebooks" / f"{name}.ipynb", *verdicts])
    return hashlib.sha256(repr((sys.version, given, own, shared())).encode()).hexdigest()


@cache
def shared() -> str:
    """Hash of what all notebooks depend on."""
    return hashed(file for pattern in SHARED for file in ROOT.glob(pattern) if file.is_file())


def hashed(files: Iterable[Path]) -> str:
    """Hash of files with their names."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def execute(name: str, given: Sequence[Sequence[str]], force: bool = False) -> bool:
    """Execute one notebook unless its copy belongs to these inputs; prints how it went. Returns whether it came to its
    end; where it did not, the copy shows the error, and the next build tries again."""
    given = [pair for pair in given if pair[0] in parameters_of(name)]
    out, mark, start = EXECUTED / f"{name}.ipynb", EXECUTED / f"{name}.stamp", time.perf_counter()
    if not force and out.is_file() and mark.is_file() and mark.read_text() == stamp(name, given):
        print(f"{name:<18} unchanged", flush=True)
        return True
    print(f"{name:<18} begins", flush=True)
    mark.unlink(missing_ok=True)
    options = [word for key, value in given for word in ("-p", key, value)]
    command = ["papermill", f"notebooks/{name}.ipynb", str(out), "--cwd", ".", "-k", "python3", "--no-progress-bar"]
    command = [sys.executable, "-m", *command, *options]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | os.environ, capture_output=True, text=True)
    if done.returncode == 0:
        mark.write_text(stamp(name, given))
    else:
        print(f"{name}: {' '.join(done.stderr.strip().splitlines()[-1:])}", file=sys.stderr)
    how = "failed: its page shows the error" if done.returncode else "executed"
    print(f"{name:<18}{time.perf_counter() - start:8.1f} s  {how}", flush=True)
    return done.returncode == 0


def in_order(every: Sequence[str], given: Sequence[Sequence[str]]) -> Iterator[tuple[list[str], int]]:
    """(Notebooks, how many at a time): two side by side, so that one computes while the other draws; alone those that
    measure time, and all where they would share a GPU; the pages last."""
    side_by_side = 2 if dict(given).get("device", "cpu") == "cpu" else 1
    yield [name for name in every if name not in ALONE | PAGES], side_by_side
    yield [name for name in every if name in ALONE], 1
    yield [name for name in every if name in PAGES], 2


def main() -> int:
    """Execute what changed, build the HTML; the exit status is 1 where a notebook or the build failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("--force", action="store_true", help="execute notebooks even if nothing changed")
    chosen = parser.parse_args()
    every, given = names(), chosen.parameter
    if unknown := {key for key, _ in given}.difference(*map(parameters_of, every)):
        parser.error(f"no notebook has a parameter {', '.join(sorted(unknown))}")
    EXECUTED.mkdir(parents=True, exist_ok=True)
    good = True
    for group, at_once in in_order(every, given):
        pool = ThreadPoolExecutor(at_once)
        try:
            good &= all(list(pool.map(lambda name: execute(name, given, chosen.force), group)))
        finally:
            pool.shutdown(cancel_futures=True)
    start, tool = time.perf_counter(), Path(sys.executable).with_name("jupyter-book")
    done = subprocess.run([tool, "build", ".", "-W", "--keep-going"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        log = (done.stdout + done.stderr).splitlines()
        print("\n".join([line for line in log if "WARNING" in line or "ERROR" in line] or log[-30:]), file=sys.stderr)
    print(f"{'build':<18}{time.perf_counter() - start:8.1f} s\nthe book: {ROOT / '_build' / 'html' / 'index.html'}")
    return 0 if good and done.returncode == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
