"""The one exception for bad input, how a program ends with it, and the words of messages."""

import difflib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = "interrupted: what is computed is stored, the next call goes on from there"
ENDING = tuple(  # of Ctrl-C, a batch system, a terminal that is closed, where the system has these signals
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
TOO_SMALL = "memory is too small: free some, or raise the limit (ulimit -v); what was computed is stored"
LONGEST = 4096  # characters that an argument, or the name of a model, may have


class InputError(ValueError):
    """Bad input. The message is one line: what was wanted, what prevents it (both values), and the way out."""


class Stopped(RuntimeError):
    """Work that could not be finished. The message is one line; what was done is stored."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Context or decorator of a command: an InputError becomes one line on stderr and exit code 2; Stopped, and too
    little memory, become one line and code 1."""
    try:
        yield
    except (InputError, Stopped, MemoryError) as error:
        print(TOO_SMALL if isinstance(error, MemoryError) else str(error), file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


def ensure_documented() -> None:
    """Raise InputError where Python drops docstrings, which transformers and this package read."""
    if sys.flags.optimize > 1:
        raise InputError("python -OO drops texts that kvrepro and transformers need: start it without -OO")


def program(app: Callable[..., Any], name: str | None = None, arguments: list[str] | None = None) -> None:
    """Run a typer app and end the process. A wrong command line is one line on stderr and exit code 2; an interrupt, by
    Ctrl-C, a batch system or a closed terminal, is one line and 128 plus the signal's number."""
    arguments, heard = sys.argv[1:] if arguments is None else arguments, list[int]()

    def end(number: int, frame: object) -> None:
        heard.append(number)
        for ending in ENDING:  # the program is ending: one signal is enough
            signal.signal(ending, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in ENDING}
    for number in (number for number, handler in before.items() if handler != signal.SIG_IGN):
        signal.signal(number, end)
    try:
        with one_line_errors():
            ensure_documented()
            ended = app(arguments, prog_name=name, standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, or Python would fail to flush at the very end
        ended = 1
    except (KeyboardInterrupt, Exception) as error:
        usage = getattr(error, "format_message", None)  # only errors of the command-line library have it
        if not heard and usage is None:
            raise
        if not heard and usage and (message := " ".join(usage().split())):  # none where the help was printed
            print(f"{message} Given: {' '.join(arguments)[:200]!r}; --help says what there is", file=sys.stderr)
        ended = 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:  # typer, or a library that was being imported, may have made another error of it
        print(f"\n{INTERRUPTED}", file=sys.stderr, flush=True)
        ended = 128 + heard[-1]
    raise SystemExit(ended or 0)


def counted(n: int, noun: str) -> str:
    """`1 claim`, `2 claims`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def first_line(error: BaseException) -> str:
    """The first line (200 characters) of an error's message, without its full stop; its class if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def error_line(error: BaseException) -> str:
    """`ValueError: its message`, the first line, even of an exception whose own `__str__` fails."""
    try:
        message = str(error)
    except Exception:
        message = "what it says cannot be printed"
    return f"{type(error).__name__}: {message}".splitlines()[0]


def suggestion(name: object, choices: Iterable[str]) -> str:
    """`, did you mean 'seed'?` for a name that is nearly one of the choices, else an empty text."""
    close = difflib.get_close_matches(str(name), list(choices), 1)
    return f", did you mean {close[0]!r}?" if close else ""


def ensure_known(kind: str, names: Iterable[str], choices: Collection[str], also: Iterable[str] = ()) -> None:
    """Raise InputError for a name that is not among the choices. kind: of the names, for the message. also: further
    names that the message offers."""
    for name in names:
        if name not in choices:
            every = [*also, *choices]
            there_are = f"there are: {', '.join(every)}"
            raise InputError(f"unknown {kind} {str(name)[:200]!r}{suggestion(name, every)}; {there_are}")


def invalid(error: Any, fields: Collection[str]) -> str:
    """What pydantic says first of the values of some fields: which, what was given, what it may be."""
    first, *others = error.errors(include_url=False)
    place = ".".join(str(part) for part in first["loc"] if "int" not in str(part) and part != "str")
    if first["type"] == "extra_forbidden":
        return f"unknown field {place!r}{suggestion(place, fields)}"
    same = [one for one in (first, *others) if one["loc"][:1] == first["loc"][:1]]
    why = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input ") for one in same))
    return f"{place} {first['input']!r:.80}: {why}"
