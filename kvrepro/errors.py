"""The one exception for bad input, and how a program ends with it."""

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = "interrupted: what is computed is stored, the next call goes on from there"
LONGEST = 4096  # characters of a text that somebody types


class InputError(ValueError):
    """Bad input, told in one line: what was asked, what stands in its way (both values), and the way out."""


class Stopped(RuntimeError):
    """Work that could not be ended, told in one line; what was done of it is stored."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around or above a command: an InputError becomes one line on stderr and the exit code 2, Stopped the code 1, an
    interrupt 130."""
    try:
        yield
    except (InputError, Stopped) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt:
        print(f"\n{INTERRUPTED}", file=sys.stderr)
        raise SystemExit(130) from None


def program(app: Callable[..., Any], name: str | None = None, arguments: list[str] | None = None) -> None:
    """Run a typer app and end the process. Whatever is wrong with the command line is one line on stderr, and the exit
    status 2, as for an InputError."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with one_line_errors():
            for word in arguments:
                if not word.isprintable() or len(word) > LONGEST:
                    raise InputError(f"argument {word[:50]!r}: give at most {LONGEST} printed signs")
            ended = app(arguments, prog_name=name, standalone_mode=False)
    except Exception as error:
        if type(error).__name__ == "Abort":  # Ctrl-C
            print(f"\n{INTERRUPTED}", file=sys.stderr)
            raise SystemExit(130) from None
        if not hasattr(error, "format_message"):  # of the library that reads command lines
            raise
        given, said = " ".join(arguments), error.format_message()
        print(f"{' '.join(said.split())} Given: {given[:200]!r}; --help says what there is", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(ended or 0)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, without its full stop; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def meant(name: object, known: Iterable[str]) -> str:
    """`, did you mean 'seed'?` for a name that is nearly one of the known, else nothing."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f", did you mean {close[0]!r}?" if close else ""
