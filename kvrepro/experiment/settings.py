"""How studies are run, whatever they study, and what a notebook may set: checked before anything is loaded."""

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from IPython import get_ipython

from kvrepro.engine.condition import Condition, Count, Prefill, Size, ensure, ensure_fields
from kvrepro.engine.policy import Rule, ensure_titles, find
from kvrepro.errors import InputError, ensure_known, first_line
from kvrepro.experiment import data, models
from kvrepro.experiment.models import Dtype
from kvrepro.paths import WORK

INJECTED = "# Parameters"  # the first line of the cell that papermill adds


@dataclass(frozen=True)
class Settings:
    """How studies are run; a chapter's `settings.Settings` adds its own fields. Raises one InputError for all values
    that are not of their kind, and for lists with a value twice."""

    results: str | Path = "data/results"  #: a folder; a relative one lies in the clone, or else in the working folder
    profile: Literal["quick", "full"] = "quick"  #: how many items, where their number is not given
    model: str = models.DEFAULT  #: or a checkpoint's folder, or a hub id
    items: str = "tinyworld"  #: a name of `data.load_items`, or a .jsonl file
    n_items: Size | None = None  #: None: as many as the profile says
    policies: tuple[str, ...] = ()  #: of the catalogue, or a reader's own
    seed: Count = 0  #: of the items
    device: str = "cpu"  #: or "cuda"
    dtype: Dtype = "auto"  #: of weights and caches; "auto": the checkpoint's own on a GPU, float32 on the CPU
    enable_thinking: bool | None = None  #: for the template of a model that thinks (Qwen3); None: as it is by itself
    backend: Literal["auto", "torch", "triton"] = "auto"  #: "auto": kernels where a GPU runs them
    workers: Size | None = None  #: processes, one thread or GPU each; None: `$KVREPRO_WORKERS`, or all cores or GPUs
    engine: Literal["local", "ray"] | None = None  #: who runs workers; None: `$KVREPRO_ENGINE`, or local processes
    address: str | None = None  #: of a Ray cluster, host:port; None: `$RAY_ADDRESS`, or this machine alone
    batch_rows: Size | None = None  #: rows that decode together; None: 64, on a GPU what its memory holds
    progress: bool = True  #: show a progress bar

    def __post_init__(self) -> None:
        if self.workers is None and (given := os.environ.get("KVREPRO_WORKERS")):
            object.__setattr__(self, "workers", int(given) if given.isdecimal() else given)
        if self.engine is None:
            object.__setattr__(self, "engine", os.environ.get("KVREPRO_ENGINE") or ("ray" if self.address else "local"))
        ensure_fields(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, tuple) and (value or f.default) and not 0 < len(set(value)) == len(value):
                raise InputError(f"{f.name} {value!r}: give a list of at least one, each once")

    @classmethod
    def of(cls, options: Mapping[str, Any] | None = None, **given: Any) -> Self:
        """Settings from a notebook's parameters, or a command's, and its `options`, which win. Raises InputError for
        unknown names (`check_parameters`), and for a model, items, policies, a device or a folder that nothing can be
        run with; loads nothing."""
        check_parameters()
        ensure(dict[str, Any] | None, options=options)
        ensure_known("option", options or {}, [f.name for f in fields(cls)])
        settings = cls(**given | dict(options or {}))
        ensure_titles(settings.policies)
        for name in settings.policies:
            settings.ensure_runs(name)
        models.device_of(settings.device)
        beside = getattr(settings, "compare", ""), *(getattr(settings, "family", None) or ())
        for name in (settings.model, *filter(None, beside)):
            models.located(name)
        if settings.items != "ifeval":  # the leakage chapter's own
            data.check_items(settings.items, settings.n_items)
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise InputError(f"results {str(settings.results)!r} is no folder ({first_line(error)})") from None
        return settings

    def ensure_runs(self, policy: str) -> None:
        """Raise InputError for one of `policies` that is unknown, or that nothing here can be run with."""
        find(policy)
        Rule.of(Condition(policy, 0.5, Prefill()))

    @property
    def folder(self) -> Path:
        """Where results lie."""
        return WORK / Path(self.results).expanduser()


def injected() -> dict[str, Any]:
    """The parameters that papermill got for this notebook."""
    given: dict[str, Any] = {}
    for cell in _cells():
        if cell.startswith(INJECTED):
            exec(cell, {}, given)
    return given


def check_parameters() -> None:
    """Raise InputError for a parameter given to papermill that no earlier cell sets; papermill only logs that."""
    before = itertools.takewhile(lambda cell: not cell.startswith(INJECTED), _cells())
    ensure_known("parameter", injected(), re.findall(r"^(\w+) *=", "\n".join(before), re.MULTILINE))


def _cells() -> list[str]:
    """This notebook's cells in the order in which they ran; none outside of one."""
    shell = get_ipython()
    return [] if shell is None else list(shell.user_ns["In"])
