"""The command line of the programs in this folder: a bad value ends them with one line, before anything is computed."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from annotated_types import Ge, Gt, Le

from kvrepro.engine.allowed import ensure
from kvrepro.errors import LONGEST, InputError, program
from kvrepro.paths import WORK

MOST = 10**9  # the largest number that a program takes
FROM_ZERO = ("seed", "sinks", "recent", "weight")  # options that may be 0
NAMES = ("model", "items", "device")  # options that `check_values` checks


def with_checked_values(main: Callable[..., Any]) -> Callable[..., Any]:
    """`main` with its values checked first. It raises InputError for numbers that are no size, texts that nobody types,
    an unknown model or device, unknown items, and a file to write that has no folder or is one."""
    usual = {name: parameter.default for name, parameter in inspect.signature(main).parameters.items()}

    @functools.wraps(main)
    def behind(**given: Any) -> Any:
        for name, value in given.items():
            if value != getattr(usual[name], "default", usual[name]):
                for element in value if isinstance(value, list | tuple) else [value]:
                    _check(name, element)
        if named := {name: given[name] for name in NAMES if isinstance(given.get(name), str)}:
            from kvrepro.experiment.parameters import check_values  # imports torch, which most programs need, not all

            check_values(named)
        return main(**given)

    return behind


def _check(name: str, value: Any) -> None:
    """Raise InputError for a number, a text or a path that a program does not take."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        least = Ge(0) if name in FROM_ZERO else Gt(0)
        ensure(Annotated[type(value), least, Le(MOST)], "", **{name: value})
    if isinstance(value, str | Path):
        if not (str(value).isprintable() and 0 < len(str(value)) <= LONGEST):
            raise InputError(f"{name} {str(value)[:50]!r}: give a text of printed signs")
        if name == "out":  # a text starts from the project's folder, as its help says; a Path where the user stands
            file = WORK / value if isinstance(value, str) else value
            if file.is_dir() or not file.parent.is_dir():
                raise InputError(f"out {str(value)!r}: give a file in a folder that is there")


def app_of(main: Callable[..., Any]) -> typer.Typer:
    """A command line for one function."""
    app = typer.Typer(add_completion=False)
    app.command()(with_checked_values(main))
    return app


def run(main: Callable[..., Any], name: str | None = None, arguments: list[str] | None = None) -> None:
    """Run a function on the command line."""
    program(app_of(main), name, arguments)
