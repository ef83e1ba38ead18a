"""The one exception for bad input, how a program ends with it, and the words of messages."""

import atexit
import difflib
import errno
import gc
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = "interrupted: what is computed is stored, the next call goes on from there"
ENDING = tuple(  # of Ctrl-C, a batch system, a terminal that is closed, where the system has these signals
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
TOO_SMALL = "memory is too small: free some, or raise the limit (ulimit -v); what was computed is stored"
NO_MEMORY = "failed to map segment|cannot allocate memory"  # what the system says where memory is too small
UNWRITTEN = (errno.ENOSPC, errno.EPIPE, errno.EBADF)  # a full disk, a reader that has gone, a stream without a file
LONGEST = 4096  # characters that an argument, or the name of a model, may have
LONG = 1500  # characters of an error's line; of a longer one the beginning and the end (the way out) are printed


class InputError(ValueError):
    """Bad input. The message is one line: what was wanted, what prevents it (both values), and the way out."""


class Stopped(RuntimeError):
    """Work that could not be finished. The message is one line; what was done is stored."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Context or decorator of a command: an InputError becomes one line on stderr and exit code 2, Stopped becomes one
    line and code 1, an interrupt the code of `interrupted` (130 for Ctrl-C)."""
    try:
        yield
    except (InputError, Stopped) as error:
        line = str(error)
        print(line if len(line) <= LONG else f"{line[:LONG]} ... {line[-200:]}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt as interrupt:
        raise SystemExit(interrupted(interrupt)) from None


@contextmanager
def signals_interrupt(heard: list[int], once: bool = False) -> Iterator[None]:
    """A context in which the signals of `ENDING` raise KeyboardInterrupt, unless they are ignored: a batch system and a
    closed terminal then end a program as Ctrl-C does. heard: gets the signals' numbers. Does nothing outside the main
    thread, which alone gets signals. once: after the first signal, while the program ends, others are ignored."""

    def end(number: int, frame: object) -> None:
        heard.append(number)
        for ending in before if once else ():
            signal.signal(ending, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in ENDING if main}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == end:
                signal.signal(number, handler)


def ensure_documented() -> None:
    """Raise InputError where Python drops docstrings, which transformers and this package read."""
    if sys.flags.optimize > 1:
        raise InputError("python -OO drops texts that kvrepro and transformers need: start it without -OO")


def interrupted(interrupt: KeyboardInterrupt) -> int:
    """Print that the program was interrupted; returns its exit code, 128 plus the signal's number. Further signals are
    ignored from here on, since the program is ending."""
    for number in ENDING if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, signal.SIG_IGN)
    try:
        print(f"\n{INTERRUPTED}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    except OSError:  # the terminal is gone; Python would fail to flush its streams at the very end, and change the code
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, closed with the process
    return 128 + int(next((number for number in interrupt.args if number in ENDING), signal.SIGINT))


def program(app: Callable[..., Any], name: str | None = None, arguments: list[str] | None = None) -> None:
    """Run a typer app and end the process. A wrong command line is one line on stderr and exit code 2; output that
    cannot be written, and too little memory, are one line and code 1. Where a stream was closed, nothing is printed;
    characters that its encoding does not have are spelled out."""
    arguments, heard = sys.argv[1:] if arguments is None else arguments, list[int]()
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115, closed with the process
        elif isinstance(getattr(sys, stream), io.TextIOWrapper):
            getattr(sys, stream).reconfigure(errors="backslashreplace")
    atexit.register(gc.freeze)  # Python would look through all objects of all libraries as it ends: seconds when busy
    try:
        with signals_interrupt(heard), one_line_errors():
            ensure_documented()
            for word in arguments:
                if not (word.isprintable() and 0 < len(word) <= LONGEST):
                    raise InputError(f"argument {word[:50]!r}: give 1 to {LONGEST} printed signs")
            ended = app(arguments, prog_name=name, standalone_mode=False)
            if ended == 130 and heard:  # typer ended silently on an interrupt
                raise KeyboardInterrupt(heard[-1])
            sys.stdout.flush()
    except Exception as error:
        if heard:  # typer, or a library that was being imported, turned an interrupt into another error
            raise SystemExit(interrupted(KeyboardInterrupt(heard[-1]))) from None
        if isinstance(error, OSError) and error.errno in UNWRITTEN and error.filename is None:  # from a stream
            print(f"the output cannot be written ({error.strerror}): what was computed is stored", file=sys.stderr)
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, or Python would fail to flush at the very end
            raise SystemExit(1) from None
        if _of_memory(error):
            print(TOO_SMALL, file=sys.stderr)
            raise SystemExit(1) from None
        if not hasattr(error, "format_message"):  # only the errors of the command-line library have it
            raise
        if message := " ".join(error.format_message().split()):  # none where the help was printed
            print(f"{message} Given: {' '.join(arguments)[:200]!r}; --help says what there is", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(ended or 0)


def _of_memory(error: Exception) -> bool:
    """Whether memory did not suffice, also for a library that was being loaded."""
    refused = isinstance(error, OSError | ImportError) and re.search(NO_MEMORY, str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or bool(refused)


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
