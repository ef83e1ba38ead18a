"""How studies are run, whatever they study."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le

from kvrepro.engine.condition import Size, ensure_fields
from kvrepro.errors import InputError, ensure_known
from kvrepro.experiment import pool
from kvrepro.experiment.models import Dtype
from kvrepro.paths import WORK

Seconds = Annotated[float, Gt(0), Le(10**9)]  # longer ones no clock of the system takes
Workers = Annotated[int, Ge(1), Le(10_000)]  # a typing error beyond, on any machine or cluster


def ensure_options(options: object) -> None:
    """Raise InputError unless the options are settings by name."""
    if not isinstance(options, Mapping | None):
        raise InputError(f"options {str(options)[:50]!r}: give settings by name, {{'seed': 1}} for instance")


def ensure_folder(results: object) -> None:
    """Raise InputError unless `results` is the name of a folder."""
    if not isinstance(results, str | Path) or results == "":
        raise InputError(f"results is {results!r}: give the name of a folder")
    if str(results).startswith("~"):
        raise InputError(f"results {str(results)!r}: write the home folder out, ~ is replaced by a shell alone")


@dataclass(frozen=True)
class Settings:
    """How studies are run; a chapter's `settings.Settings` adds its own fields. Raises InputError for other values."""

    results: str | Path = "data/results"  #: a folder; a relative one lies in the clone, or else in the working folder
    profile: Literal["quick", "full"] = "quick"  #: how many items, where their number is not given
    seed: int = 0  #: of the items
    device: str = "cpu"  #: or "cuda"
    dtype: Dtype = "auto"  #: of weights and caches; "auto": the checkpoint's own on a GPU, float32 on the CPU
    enable_thinking: bool | None = None  #: for the template of a model that thinks (Qwen3); None: as it is by itself
    backend: Literal["auto", "torch", "triton"] = "auto"  #: "auto": kernels where a GPU runs them
    workers: Workers | None = None  #: processes, one thread or GPU each; None: `$KVREPRO_WORKERS`, or all cores or GPUs
    engine: Literal["local", "ray"] | None = None  #: who runs workers; None: `$KVREPRO_ENGINE`, or local processes
    address: str | None = None  #: of a Ray cluster, host:port; None: `$KVREPRO_RAY_ADDRESS`, or this machine alone
    batch_rows: Size | None = None  #: rows that decode together; None: 64, on a GPU what its memory holds
    time_limit: Seconds | None = None  #: seconds for an item or a row; what takes longer fails, and the rest goes on
    progress: bool = True  #: show a progress bar
    dry_run: bool = False  #: print what a study would take, and compute nothing; also by `$KVREPRO_DRY_RUN`

    def __post_init__(self) -> None:
        ensure_folder(self.results)
        object.__setattr__(self, "dry_run", self.dry_run or bool(os.environ.get("KVREPRO_DRY_RUN")))
        if self.workers is None and (given := os.environ.get("KVREPRO_WORKERS")):
            object.__setattr__(self, "workers", int(given) if given.isdecimal() else given)
        if self.engine is None:
            object.__setattr__(self, "engine", os.environ.get("KVREPRO_ENGINE") or "local")
        ensure_fields(self)
        if self.address is not None and self.engine == "local":
            raise InputError(f"address {self.address!r} is of a Ray cluster, and the engine is local: set engine 'ray'")
        object.__setattr__(self, "address", self.address or os.environ.get("KVREPRO_RAY_ADDRESS") or None)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None = None, **given: Any) -> Self:
        """Settings from a notebook's `options` and from keyword arguments. Raises InputError for an unknown option."""
        ensure_options(options)
        ensure_known("option", options or {}, [f.name for f in fields(cls)])
        for name in options or {}:
            if name in given:
                raise InputError(f"{name} is a parameter of its own: set it there, not among the options")
        return cls(**given, **(options or {}))

    @property
    def folder(self) -> Path:
        """Where results lie."""
        return WORK / self.results

    def end_studies(self) -> None:
        """To be called after a notebook's studies: its workers end. A dry run ends the notebook here, since the cells
        below need rows: papermill stops at a SystemExit of 0, and does not count it as an error."""
        pool.end()
        if self.dry_run:
            print("dry run: nothing was computed, and the cells below were not run")
            raise SystemExit(0)
