"""Parameters that papermill injects into a notebook, checked before anything is computed."""

import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import yaml
from IPython import get_ipython

from kvrepro.engine.condition import Count, Positive, PositiveShare, ProperShare, Size, ensure
from kvrepro.engine.policy import ensure_titles
from kvrepro.errors import LONGEST, InputError, first_line, suggestion
from kvrepro.experiment import data, models
from kvrepro.experiment.settings import ensure_folder, ensure_options
from kvrepro.paths import WORK

INJECTED = "# Parameters"  # the first line of the cell that papermill adds
KINDS: dict[str, Any] = {  # name of a parameter, which means the same in every notebook -> what it may be
    "reading": Literal["both", "as_run", "as_described"], "n_items": Size | None, "seed": Count, "block_size": Size,
    "share": PositiveShare, "margin": Positive, "capacities": list[Size | PositiveShare], "kept": list[ProperShare],
    "shares": list[ProperShare], "ratios": list[ProperShare] | None, "pools": list[Size | ProperShare],
    "policies": list[str], "rivals": list[str], "family": list[str] | None, "tables": list[str],
    "profile": Literal["quick", "full"], "dry_run": bool, "model": str, "items": str, "device": str, "compare": str,
    "quoted": str,
}  # fmt: skip


def check_parameters(**choices: Sequence[str]) -> None:
    """Raise InputError for parameters given to papermill that no earlier cell sets (papermill only logs that), for
    lists given as text, and for values that `check_values` refuses. Does nothing outside a notebook.

    choices: name of a parameter of this notebook only -> its possible values.
    """
    shell = get_ipython()
    if shell is None:
        return
    cells = list(shell.user_ns.get("In", []))
    names = [_names_set(source) for source in cells]
    for i, source in enumerate(cells):
        if source.startswith(INJECTED):
            known = set().union(*names[:i])
            for name in sorted(names[i] - known):
                way_out = "see its cell tagged parameters"
                raise InputError(f"this notebook has no parameter {name!r}{suggestion(name, known)}: {way_out}")
    for name, value in injected().items():
        if isinstance(value, str) and value.startswith(("[", "{")):
            way_out = f'papermill passes text with -p, use -y "{name}: {value}"'
            raise InputError(f"{name} is the text {value!r}: {way_out}")
    check_values(shell.user_ns, **choices)


def injected() -> dict[str, Any]:
    """The parameters that papermill got for this notebook."""
    shell = get_ipython()
    cells = shell.user_ns.get("In", []) if shell is not None else []
    lines = [line for cell in cells if cell.startswith(INJECTED) for line in ast.parse(cell).body]
    assignments = [line for line in lines if isinstance(line, ast.Assign)]
    return {ast.unparse(line.targets[0]): ast.literal_eval(line.value) for line in assignments}


def check_values(given: Mapping[str, Any], **choices: Sequence[str]) -> None:
    """Raise InputError for parameters (and `options` among them) that no study can take, before anything is loaded:
    values of a wrong kind, empty lists, lists with a value twice, unprintable texts, unknown names, and a folder that
    cannot be written. given: parameters by name; other names, and modules, are ignored."""
    options = given.get("options")
    values = {name: given[name] for name in (*KINDS, *choices) if not isinstance(given.get(name, sys), ModuleType)}
    ensure_options(options)
    values |= options or {}
    for name, value in values.items():
        _check_texts(str(name), value)
        if name in KINDS:
            ensure(KINDS[name], **{name: value})
        if isinstance(value, list | tuple):
            _check_list(str(name), value)
        if name in ("policies", "rivals"):
            ensure_titles(value)
    for name, words in choices.items():
        chosen = given.get(name, [])
        for value in chosen if isinstance(chosen, list) else [chosen]:
            ensure(tuple(words), **{name: value})
    if "items" in given:
        own = "ratios" in given or given["items"] == "ifeval"  # the leakage chapter has items of its own
        (data.check_count if own else data.check_items)(given["items"], given.get("n_items"))
    for name in ("model", "compare"):
        if values.get(name) or name in given:
            models.look(values[name])
    for name in values.get("family") or ():
        models.look(name)
    if values.get("quoted") and not os.path.isfile(WORK / values["quoted"]):
        raise InputError(f"quoted {values['quoted']!r}: no such file, give a .jsonl")
    if "device" in given:
        models.device_of(given["device"])
    if "results" in given:
        check_folder(given["results"])


# What the library raises for a text that is no YAML, for `!!bool x`, and for a 13th month.
NO_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class Yaml(yaml.SafeLoader):
    """YAML as people write it: 1e-5 is a number, which PyYAML takes for a text."""


EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
Yaml.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, "-+.0123456789")


def read(text: str) -> Any:
    """The value of a YAML text. Raises InputError for other texts, and for long ones."""
    if not text.isprintable() or len(text) > LONGEST:
        raise InputError(f"value {text[:50]!r}: give at most {LONGEST} printed signs")
    try:
        return yaml.load(text, Loader=Yaml)
    except NO_YAML as error:
        why = getattr(error, "problem", first_line(error))
        raise InputError(f"{text[:50]!r} is no YAML value ({why}): lists look like [1, 2]") from None


def _check_texts(name: str, value: Any) -> None:
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, dict | list | tuple):
            raise InputError(f"{name} holds a {type(text).__name__}: give numbers or texts, alone or in a list")
        if isinstance(text, str | Path) and not (str(text).isprintable() and len(str(text)) <= LONGEST):
            raise InputError(f"{name} {str(text)[:50]!r}: give at most {LONGEST} printed signs")


def _check_list(name: str, value: list[Any] | tuple[Any, ...]) -> None:
    if not value and name != "family":
        raise InputError(f"{name} {value!r}: give a list of at least one")
    if twice := next((element for at, element in enumerate(value) if element in value[:at]), None):
        raise InputError(f"{name} has {twice!r} twice: give each once")


def check_folder(results: str | Path) -> None:
    """Raise InputError for a folder of results that cannot be written. Makes no folder."""
    ensure_folder(results)
    _check_texts("results", results)
    folder = (WORK / results).absolute()
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists() or place.is_symlink())
    except OSError as error:  # a name that no file system takes
        raise InputError(f"results {str(results)[:50]!r}: {error.strerror}, give the name of a folder") from None
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"results {str(results)!r}: {existing} is no folder that you may write to, give another")


def ensure_name(name: str) -> None:
    """Raise InputError for a study's name that cannot be a file's name in the folder of results."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise InputError(f"name {name[:50]!r}: give at most 100 letters, digits, '-', '_' and '.', no folder")
    if (count := len(os.fsencode(name))) > 150:  # parts of a file's 255
        raise InputError(f"name {name[:50]!r}: {len(name)} signs of {count} bytes in all, give at most 150 bytes")


def _names_set(source: str) -> set[str]:
    """The names that a cell sets."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # magics
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
