"""Values that no parameter may take unless a test says why, and what the notebooks and programs have for parameters."""

import functools
import importlib
import inspect
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import papermill
import typer
from typer.main import get_command

from kvrepro import cli
from kvrepro.tools import book, command

BAD: dict[str, Any] = {
    "a word": "nosuch", "a negative number": -1, "zero": 0, "a fraction": 0.5, "above one": 1.5, "NaN": math.nan,
    "infinity": math.inf, "huge": 10**30, "an empty text": "", "an empty list": [], "nothing": None, "True": True,
    "a mapping": {"a": 1}, "a list": [1, 2], "one twice": [3, 3], "a list in a list": [[1]], "a long text": "x" * 10**5,
    "a NUL": "a\0b", "two lines": "a\nb", "a folder": "/tmp", "no such path": "/no/such/path",
    "a path that leaves": "../../../../x/y", "markup": "<img src=x onerror=alert(1)>", "twins": "ｓｎapkv",
    "a template": "{{ 7 * 7 }}",
}  # fmt: skip
TEXTS = {  # of a command line; more for those that read YAML
    "a word": "nosuch", "a negative number": "-1", "zero": "0", "NaN": "nan", "infinity": "inf", "huge": "1" + "0" * 30,
    "an empty text": "", "a long text": "x" * 10**5, "a NUL": "a\0b", "two lines": "a\nb", "a folder": "/tmp",
    "no such path": "/no/such/path", "markup": "<b onclick=x>", "twins": "ｓｎapkv",
}  # fmt: skip
BOMB = "[&a [1,1,1,1,1,1,1,1], &b [*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b,*b], &d [*c,*c,*c,*c]]"
YAMLS = {"a bomb": BOMB, "a tag": "!!python/object/apply:os.getpid []", "half a list": "[1", "deep": "[" * 3000}
PROGRAMS = """book coverage notebooks pdf shortcuts studies.calibrate studies.duo studies.error_rates studies.family
studies.parity studies.speed studies.stability studies.trial studies.training.card studies.training.evaluate
studies.training.sinks studies.training.train""".split()


NEEDED = {("kvrepro items", "name"): "tinyworld:needle"}  # beside what a command asks for


class Pair(NamedTuple):
    """A parameter of a notebook or program, and what it is given."""

    where: str
    parameter: str
    label: str
    value: Any
    option: bool = False  # among a notebook's `options`


def of_notebooks() -> Iterator[Pair]:
    """Every parameter and every setting of the eight notebooks with each of `BAD`."""
    for name in book.chapters():
        parameters = papermill.inspect_notebook(book._source(name, book.ROOT))
        options = sorted(book.settings_of(name) - set(parameters)) if "options" in parameters else []
        for parameter in [*parameters, *options]:
            for label, value in BAD.items():
                yield Pair(name, parameter, label, value, parameter in options)


def commands() -> dict[str, tuple[typer.Typer, list[str], Any]]:
    """Every command of `kvrepro` as it is; every command of the tools, behind the look at its values that it has, with
    a main that does nothing: its app, what calls it there, the command itself."""
    by_name: dict[str, tuple[typer.Typer, list[str], Any]] = {}
    for name, click_command in get_command(cli.app).commands.items():
        if name not in cli.PROGRAMS:
            by_name[f"kvrepro {name}"] = cli.app, [name], click_command
    for name in PROGRAMS:
        module = importlib.import_module(name if name.startswith("studies.") else f"kvrepro.tools.{name}")
        subcommands = get_command(module.app).commands if hasattr(module, "app") else {"": module.main}
        for sub, entry in subcommands.items():
            main = entry.callback.__wrapped__ if sub else entry
            app = command.app_of(functools.wraps(main)(lambda **_: None))
            by_name[f"{name} {sub}".strip()] = app, [], get_command(app)
    return by_name


def of_programs() -> Iterator[Pair]:
    """Every option of `kvrepro` with each of `TEXTS`, its settings with `YAMLS` too; of the tools those that are
    numbers or name a model, items, a device or a file to write: other texts are looked up by the tool itself."""
    for name, (_, _, click_command) in commands().items():
        usual = inspect.signature(click_command.callback).parameters
        for parameter in click_command.params:
            kind = str(usual[parameter.name].annotation) if parameter.name in usual else ""
            shared = parameter.name in (*command.NAMES, "out") or "int" in kind or "float" in kind
            if parameter.name == "help" or kind == "<class 'bool'>" or "bool" in kind:
                continue
            if name.startswith("kvrepro") or (shared and not getattr(parameter, "multiple", False)):
                texts = TEXTS | (YAMLS if parameter.name in ("option", "setting") else {})
                for label, text in texts.items():
                    yield Pair(name, parameter.name, label, text)


def arguments(pair: Pair) -> list[str]:
    """The command line that gives a program that value, and what else it needs."""
    _, path, click_command = commands()[pair.where]
    words, last = list(path), list[str]()
    for parameter in click_command.params:
        value = pair.value if parameter.name == pair.parameter else NEEDED.get((pair.where, parameter.name))
        value = "snapkv" if value is None and parameter.required else value
        if value is not None and parameter.name == "option":
            value = f"seed={value}"
        if value is not None and parameter.name == "setting":
            value = f"until={value}"
        if value is not None and parameter.param_type_name == "argument":
            last += [value]
        elif value is not None:
            words += [f"{parameter.opts[-1]}={value}"]
    return [*words, "--", *last]
