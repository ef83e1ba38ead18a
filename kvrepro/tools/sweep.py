"""Several models x chapters in one command: `kvrepro run sweep.yml`, on this machine or on a Ray cluster.

    models: [small-gqa, Qwen/Qwen2.5-3B-Instruct]
    chapters: [protection, leakage]
    profile: quick
    parameters: {items: longbench, device: cuda, leakage.ratios: [0.5]}

`parameters` are those of `make book -p`. The file is checked and priced before anything is computed. Then the studies
of the notebooks run, without their analysis: `make book` reads the same rows and computes none of them again. Models
come one after the other, each on all workers: a worker holds one model, and to load another takes minutes.
"""

import contextlib
import gc
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pandas as pd
import torch
import typer
import yaml

from kvrepro.engine.allowed import ensure_fields, ensure_once_each
from kvrepro.errors import InputError, ensure_known, error_line
from kvrepro.experiment import cluster, models, progress
from kvrepro.experiment.parameters import NO_YAML, Yaml
from kvrepro.experiment.run import Settings
from kvrepro.experiment.sharing import make_folder, writing
from kvrepro.paths import WORK
from kvrepro.tools import book, edition

LOG = "sweep.log"  # in the folder of results: what the chapters printed
SET_ELSEWHERE = {"model": "the key models", "profile": "the key profile", "dry_run": "--dry-run"}  # no `parameters`


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file. Raises InputError for values that no model or chapter can have."""

    models: list[str]
    chapters: list[str]
    profile: Literal["quick", "full"] = "quick"
    parameters: dict[str, Any] = field(default_factory=dict)  # name or chapter.name: value

    def __post_init__(self) -> None:
        ensure_fields(self, Sweep)
        if not isinstance(self.parameters, dict) or not all(isinstance(name, str) for name in self.parameters):
            raise InputError(f"parameters {self.parameters!r}: give names with values, such as n_items: 8")
        ensure_once_each(models=self.models, chapters=self.chapters)
        ensure_known("chapter with studies", self.chapters, book.studied())
        for name in self.parameters:
            if (key := SET_ELSEWHERE.get(name.rpartition(".")[2])) is not None:
                raise InputError(f"{name} stands among the parameters: set it by {key}")
            if name.endswith(".results"):
                raise InputError(f"{name}: all chapters of a sweep write into one folder, set it by results")

    @property
    def results(self) -> Path:
        """The folder of the rows."""
        return WORK / self.parameters.get("results", edition.RESULTS)

    def given(self, model: str) -> dict[str, dict[str, Any]]:
        """Each chapter's parameters for a model. Raises InputError for a name that no chapter has."""
        return book.by_chapter(self.parameters | {"model": model, "profile": self.profile}, self.chapters)


def read(file: Path) -> Sweep:
    """Read and check a sweep file: keys, models, chapters, and every parameter as far as that is possible before a
    model is loaded. Raises InputError."""
    if file.exists() and not file.is_file():  # a pipe that nobody writes into would keep the command waiting
        raise InputError(f"sweep file {file} is no regular file: give the path of a YAML file")
    try:
        with file.open(encoding="utf-8") as text:
            content = yaml.load(text, Loader=Yaml)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"sweep file {file} cannot be read ({error}): give the path of a YAML file") from None
    except NO_YAML as error:
        reason = " ".join(str(error).split())[:500]
        raise InputError(f"sweep file {file} is no YAML ({reason}): book/cluster.md shows one") from None
    keys = [f.name for f in fields(Sweep)]
    if not isinstance(content, dict):
        raise InputError(f"sweep file {file} holds {content!r}: give the keys {', '.join(keys)}")
    ensure_known(f"key in sweep file {file}:", content, keys)
    if missing := [key for key in ("models", "chapters") if key not in content]:
        raise InputError(f"sweep file {file}: no {missing[0]}; name at least one of them")
    sweep = Sweep(**content)
    resolved = [models.resolve(model) for model in sweep.models]
    if len({name for name, _ in resolved}) < len(resolved):
        names = ", ".join(name for name, _ in resolved)
        raise InputError(f"models are told apart by their folders' names, here {names}: rename one")
    for name, parameters in sweep.given(sweep.models[0]).items():
        book.check(name, parameters)
    return sweep


# ---- what it takes


def price(sweep: Sweep) -> pd.DataFrame:
    """An estimate of what is still to be computed, from a few tokens of each study: columns model, chapter, results,
    hours (of all workers together), MB, and note. Raises InputError for what a model or its items refuse."""
    rows = []
    for model, name, parameters in _parts(sweep):
        messages: list[dict[str, Any]] = []
        note = ""
        dry_run = mock.patch.dict(os.environ, KVREPRO_DRY_RUN="1")
        with progress.listening(messages.append), dry_run, contextlib.redirect_stdout(io.StringIO()):
            try:
                _studies(name, parameters)
            except InputError as error:
                raise InputError(f"{model}, {name}: {error}") from None
            except Exception as error:  # cells between studies, which read rows that are not there yet
                note = f"at least: what follows needs rows ({type(error).__name__})"
        studies = [study for study in messages if "bytes" in study]
        rows.append({
            "model": model, "chapter": name, "results": sum(study["results"] for study in studies),
            "hours": sum(study["seconds"] / study["processes"] for study in studies) / 3600,
            "MB": sum(study["bytes"] for study in studies) / 1e6, "note": note,
        })  # fmt: skip
    return pd.DataFrame(rows)


def _parts(sweep: Sweep) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(model, chapter, its parameters), in the order in which they run."""
    for model in sweep.models:
        for name, parameters in sweep.given(model).items():
            yield model, name, parameters


def _studies(name: str, parameters: Mapping[str, Any]) -> None:
    """Run a notebook's cells up to the end of its studies."""
    for _ in book.cells(name, dict(parameters), until=book.STUDIES_END):
        pass
    gc.collect()  # frees the model before the next one is loaded
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- the run


class Line:
    """One live line for a model on a terminal; elsewhere a plain line when a study begins."""

    def __init__(self, model: str):
        self.model, self.study, self.began = model, "", time.monotonic()

    def __call__(self, message: Mapping[str, Any]) -> None:
        """Print how far a study is. message: as of `progress.listening`."""
        if "done" not in message:
            return
        left = "" if message["left"] is None else f", {progress.clock(message['left'])} left of it"
        since = progress.clock(time.monotonic() - self.began)
        text = f"{self.model}  {since}  {message['study']}: {message['done']:,} of {message['total']:,}{left}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif message["study"] != self.study:
            print(text, file=sys.stderr, flush=True)
        self.study = message["study"]

    def end(self, text: str) -> None:
        """Replace the live line by one that stays."""
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(clear, end="", file=sys.stderr, flush=True)
        print(f"{self.model}  {text}", flush=True)


def run(sweep: Sweep) -> list[str]:
    """Compute what is missing, and return the chapters that failed, as `model: chapter`. What the chapters print goes
    to `<results>/sweep.log`."""
    failed, lines, log_file = [], {model: Line(model) for model in sweep.models}, sweep.results / LOG
    make_folder(sweep.results)
    with writing(log_file):
        log = log_file.open("a", buffering=1, encoding="utf-8")
    try:
        for model, name, parameters in _parts(sweep):
            began, line = time.monotonic(), lines[model]
            try:
                with progress.listening(line), contextlib.redirect_stdout(log):
                    _studies(name, parameters)
                outcome = "done"
            except Exception as error:  # whatever a cell raises costs its chapter
                outcome = f"failed: {error_line(error)}"
                failed.append(f"{model}: {name}")
            line.end(f"{name:<14}{progress.clock(time.monotonic() - began):>10}  {outcome}")
    finally:
        with contextlib.suppress(OSError):  # where the disk is full, the log's last lines are lost
            log.close()
    return failed


def main(file: Path, dry_run: bool = False, **chosen: Any) -> None:
    """Check, price, and run a sweep. chosen: engine, address, workers, as in `Settings`. Raises InputError; exits with
    1 where a chapter failed."""
    settings = Settings(**chosen)
    names = {"engine": "KVREPRO_ENGINE", "address": "KVREPRO_RAY_ADDRESS", "workers": "KVREPRO_WORKERS"}
    os.environ.update({variable: str(chosen[name]) for name, variable in names.items() if chosen.get(name) is not None})
    sweep = read(file)
    if settings.engine == "ray":
        cluster.connect(settings.address, settings.workers or 1)
    table = price(sweep)
    print(table.round({"hours": 3, "MB": 1}).to_string(index=False))
    total = f"{table.results.sum():,} results, about {progress.clock(table.hours.sum() * 3600)}"
    print(f"{total}, {table.MB.sum():,.1f} MB, to {sweep.results}", flush=True)
    if dry_run or settings.dry_run:
        return
    if failed := run(sweep):
        print(f"failed: {'; '.join(failed)}; the same command tries them again", file=sys.stderr)
        raise typer.Exit(1)
