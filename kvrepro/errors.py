"""The one exception for bad input, how a program ends with it, and the words of messages."""

import difflib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

INTERRUPTED = "interrupted: what is computed is stored, the next call goes on from there"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # of Ctrl-C, a batch system, a terminal that is closed
TOO_SMALL = "memory is too small: free some, or raise the limit (ulimit -v); what was computed is stored"


class InputError(ValueError):
    """Bad input. The message is one line: what was wanted, what prevents it (both values), and the way out."""


class PolicyError(InputError):
    """What a policy caused while it ran: its row has failed and is tried again, whatever the prompt was."""


class Stopped(RuntimeError):
    """Work that could not be finished. The message is one line; what was done is stored."""

    results: Any = None  # of a study of which too much failed: what `run` gives otherwise


def program(app: Callable[..., Any], name: str | None = None, arguments: list[str] | None = None) -> None:
    """Run a typer app and end the process: bad input is one line on stderr and exit code 2, whatever else prevents the
    work one line and 1, an interrupt one line and 128 plus the signal's number."""
    arguments, heard, ended = sys.argv[1:] if arguments is None else arguments, list[int](), 1

    def end(number: int, frame: object) -> None:
        heard.append(number)
        for ending in ENDING:  # the program is ending: one signal is enough
            signal.signal(ending, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        ended = app(arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, or Python would fail to flush at the very end
    except (InputError, Stopped, MemoryError, OSError) as error:
        print(TOO_SMALL if isinstance(error, MemoryError) else error, file=sys.stderr)
        ended = 2 if isinstance(error, InputError) else 1
    except (KeyboardInterrupt, Exception) as error:
        usage = getattr(error, "format_message", None)  # only errors of the command-line library have it
        if not heard and usage is None:
            raise
        if not heard and usage and (message := " ".join(usage().split())):  # none where the help was printed
            print(f"{message} Given: {' '.join(arguments)[:200]!r}; --help says what there is", file=sys.stderr)
        ended = 2
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
    """`ValueError: its message`, the first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def suggestion(name: object, choices: Iterable[str]) -> str:
    """`, did you mean 'seed'?` for a name that is nearly one of the choices, else an empty text."""
    close = difflib.get_close_matches(str(name), list(choices), 1)
    return f", did you mean {close[0]!r}?" if close else ""


def ensure_known(kind: str, names: Iterable[str], choices: Collection[str], also: Iterable[str] = ()) -> None:
    """Raise InputError for a name that is not among the choices. kind: of the names; also: further ones to offer."""
    every = [*also, *choices]
    for name in names:
        if name not in choices:
            raise InputError(f"unknown {kind} {name!r:.200}{suggestion(name, every)}; there are: {', '.join(every)}")


def invalid(error: Any, fields: Collection[str]) -> str:
    """What pydantic says first of the values of some fields: which, what was given, what it may be."""
    first, *others = error.errors(include_url=False)
    place = ".".join(str(part) for part in first["loc"] if "int" not in str(part) and part != "str")
    if first["type"] == "extra_forbidden":
        return f"unknown field {place!r}{suggestion(place, fields)}"
    same = [one for one in (first, *others) if one["loc"][:1] == first["loc"][:1]]
    why = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input ") for one in same))
    return f"{place} {first['input']!r:.80}: {why}"
