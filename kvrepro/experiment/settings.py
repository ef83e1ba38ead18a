"""How studies are run, whatever they study, and what a notebook may set: checked before anything is loaded."""

import ast
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le
from IPython import get_ipython

from kvrepro.engine.condition import Count, Size, ensure, ensure_fields, ensure_once_each
from kvrepro.engine.policy import ensure_titles
from kvrepro.errors import LONGEST, InputError, ensure_known, suggestion
from kvrepro.experiment import data, models, pool
from kvrepro.experiment.models import Dtype
from kvrepro.paths import WORK

INJECTED = "# Parameters"  # the first line of the cell that papermill adds
Seconds = Annotated[float, Gt(0), Le(10**9)]  # longer ones no clock of the system takes
Workers = Annotated[int, Ge(1), Le(10_000)]  # a typing error beyond, on any machine or cluster


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
    workers: Workers | None = None  #: processes, one thread or GPU each; None: `$KVREPRO_WORKERS`, or all cores or GPUs
    engine: Literal["local", "ray"] | None = None  #: who runs workers; None: `$KVREPRO_ENGINE`, or local processes
    address: str | None = None  #: of a Ray cluster, host:port; None: `$KVREPRO_RAY_ADDRESS`, or this machine alone
    batch_rows: Size | None = None  #: rows that decode together; None: 64, on a GPU what its memory holds
    time_limit: Seconds | None = None  #: seconds for an item or a row; what takes longer fails, and the rest goes on
    progress: bool = True  #: show a progress bar

    def __post_init__(self) -> None:
        if not isinstance(self.results, str | Path) or str(self.results)[:1] in ("", "~"):
            raise InputError(f"results is {self.results!r}: give the name of a folder, its home folder written out")
        if self.workers is None and (given := os.environ.get("KVREPRO_WORKERS")):
            object.__setattr__(self, "workers", int(given) if given.isdecimal() else given)
        if self.engine is None:
            object.__setattr__(self, "engine", os.environ.get("KVREPRO_ENGINE") or "local")
        ensure_fields(self)
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, list | tuple) and (value or f.default):
                ensure_once_each(**{f.name: value})
        if self.address is not None and self.engine == "local":
            raise InputError(f"address {self.address!r} is of a Ray cluster, and the engine is local: set engine 'ray'")
        object.__setattr__(self, "address", self.address or os.environ.get("KVREPRO_RAY_ADDRESS") or None)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None = None, **given: Any) -> Self:
        """Settings from a notebook's parameters and its `options`, or from those of a command. Raises InputError for
        unknown names (`check_parameters`), and for a model, items, policies, a device or a folder that nothing can be
        run with; loads nothing."""
        check_parameters()
        if not isinstance(options, Mapping | None):
            raise InputError(f"options {str(options)[:50]!r}: give settings by name, {{'seed': 1}} for instance")
        options = options or {}
        ensure_known("option", options, [f.name for f in fields(cls)])
        if twice := [name for name in options if name in given]:
            raise InputError(f"{twice[0]} is a parameter of its own: set it there, not among the options")
        given |= options
        for name, value in given.items():
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str | Path) and not (str(text).isprintable() and len(str(text)) <= LONGEST):
                    raise InputError(f"{name} {str(text)[:50]!r}: give at most {LONGEST} printed signs")
        settings = cls(**given)
        ensure_titles(settings.policies)
        models.device_of(settings.device)
        beside = getattr(settings, "compare", ""), *(getattr(settings, "family", None) or ())
        for name in (settings.model, *filter(None, beside)):
            models.located(name)
        if settings.items != "ifeval":  # the leakage chapter's own
            data.check_items(settings.items, settings.n_items)
        _check_folder(settings.folder)
        return settings

    @property
    def folder(self) -> Path:
        """Where results lie."""
        return WORK / self.results

    def end_studies(self) -> None:
        """To be called after a notebook's studies: its workers end."""
        pool.end()


def injected() -> dict[str, Any]:
    """The parameters that papermill got for this notebook."""
    lines = [line for cell in _notebook().get("In", []) if cell.startswith(INJECTED) for line in ast.parse(cell).body]
    return {
        ast.unparse(line.targets[0]): ast.literal_eval(line.value) for line in lines if isinstance(line, ast.Assign)
    }


def check_parameters(**kinds: Any) -> None:
    """Raise InputError for parameters given to papermill that no earlier cell sets (papermill only logs that), for
    lists given as text, and for values that are not of their kind. Does nothing outside a notebook.

    kinds: name of a parameter that is in no `Settings` -> a type hint, or a tuple of words.
    """
    cells, given = list(_notebook().get("In", [])), injected()
    first = next((i for i, source in enumerate(cells) if source.startswith(INJECTED)), 0)
    known = set().union(*map(_names_set, cells[:first]))
    if unknown := [f"{name!r}{suggestion(name, known)}" for name in given if name not in known]:
        raise InputError(f"this notebook has no parameter {'; '.join(unknown)}: see its cell tagged parameters")
    for name, value in given.items():
        if isinstance(value, str) and value.startswith(("[", "{")):
            way_out = f'papermill passes text with -p, use -y "{name}: {value}"'
            raise InputError(f"{name} is the text {value!r}: {way_out}")
    for name, kind in kinds.items():
        value = _notebook().get(name, [])
        for one in value if isinstance(value, list) else [value]:
            ensure(kind, **{name: one})


def ensure_name(name: str) -> None:
    """Raise InputError for a study's name that cannot be a file's name in the folder of results."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name) or len(os.fsencode(name)) > 150:
        raise InputError(f"name {name[:50]!r}: give at most 100 letters, digits, '-', '_' and '.', and 150 bytes")


def _notebook() -> dict[str, Any]:
    """This notebook's variables, of which `In` lists the cells in the order in which they ran; none outside of one."""
    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def _names_set(source: str) -> set[str]:
    """The names that a cell sets."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # magics
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _check_folder(folder: Path) -> None:
    """Raise InputError for a folder that cannot be written. Makes no folder."""
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"results {str(folder)!r}: {existing} is no folder that you may write to, give another")
