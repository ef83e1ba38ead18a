"""The one exception for bad input, and how a program ends with it."""

import difflib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = "interrupted: what is computed is stored, the next call goes on from there"
ENDING = tuple(  # Ctrl-C, a batch system, a terminal that is closed, where the system has them
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
LONGEST = 4096  # characters of a text that somebody types
LONG = 1500  # characters of a line; of a longer one its end, which says the way out, is printed too


class InputError(ValueError):
    """Bad input, told in one line: what was asked, what stands in its way (both values), and the way out."""


class Stopped(RuntimeError):
    """Work that could not be ended, told in one line; what was done of it is stored."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around or above a command: an InputError becomes one line on stderr and the exit code 2, Stopped the code 1, an
    interrupt 130, or as `interrupted` says."""
    try:
        yield
    except (InputError, Stopped) as error:
        said = str(error)
        print(said if len(said) <= LONG else f"{said[:LONG]} ... {said[-200:]}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt as interrupt:
        raise SystemExit(interrupted(interrupt)) from None


@contextmanager
def signals_interrupt(heard: list[int], once: bool = False) -> Iterator[None]:
    """A signal of `ENDING` that is not ignored raises KeyboardInterrupt with its number, which joins `heard`: a batch
    system and a closed terminal end a program as Ctrl-C does. Outside the main thread, which alone hears them, nothing
    changes. once: further signals, which would find the program ending, are ignored from the first on."""

    def end(number: int, frame: object) -> None:
        heard.append(number)
        for one in before if once else ():
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    main = threading.current_thread() is threading.main_thread()
    before = {one: signal.getsignal(one) for one in ENDING if main and signal.getsignal(one) != signal.SIG_IGN}
    for one in before:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, handler in before.items():
            if signal.getsignal(one) == end:
                signal.signal(one, handler)


def interrupted(interrupt: KeyboardInterrupt) -> int:
    """Say that a program was interrupted; its exit code, 128 and the signal's number. A second signal would find it
    ending, and is ignored from here on."""
    for one in ENDING if threading.current_thread() is threading.main_thread() else ():
        signal.signal(one, signal.SIG_IGN)
    try:
        print(f"\n{INTERRUPTED}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    except OSError:  # the terminal is gone: what is left to be said would fail at the very end, and change the code
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, closed with the process
    return 128 + int(next((one for one in interrupt.args if one in ENDING), signal.SIGINT))


def program(app: Callable[..., Any], name: str | None = None, arguments: list[str] | None = None) -> None:
    """Run a typer app and end the process. Whatever is wrong with the command line is one line on stderr, and the exit
    status 2, as for an InputError."""
    arguments, heard = sys.argv[1:] if arguments is None else arguments, list[int]()
    try:
        with signals_interrupt(heard), one_line_errors():
            for word in arguments:
                if not word.isprintable() or len(word) > LONGEST:
                    raise InputError(f"argument {word[:50]!r}: give at most {LONGEST} printed signs")
            ended = app(arguments, prog_name=name, standalone_mode=False)
            if ended == 130 and heard:  # typer's own idea of an interrupt, which says nothing
                raise KeyboardInterrupt(heard[-1])
    except Exception as error:
        if heard:  # an interrupt that was made another error on its way: by typer, or by a library as it was imported
            raise SystemExit(interrupted(KeyboardInterrupt(heard[-1]))) from None
        if not hasattr(error, "format_message"):  # of the library that reads command lines
            raise
        given, said = " ".join(arguments), error.format_message()
        print(f"{' '.join(said.split())} Given: {given[:200]!r}; --help says what there is", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(ended or 0)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, without its full stop; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:200]


def told(error: BaseException) -> str:
    """`ValueError: what it says`, the first line, also where a reader's exception cannot be printed."""
    try:
        said = str(error)
    except Exception:  # of its own `__str__`
        said = "what it says cannot be printed"
    return f"{type(error).__name__}: {said}".splitlines()[0]


def meant(name: object, known: Iterable[str]) -> str:
    """`, did you mean 'seed'?` for a name that is nearly one of the known, else nothing."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f", did you mean {close[0]!r}?" if close else ""


def ensure_known(what: str, names: Iterable[str], known: Collection[str], also: Iterable[str] = ()) -> None:
    """Raise InputError for a name that is none of the known. also: what else may stand in their place."""
    for name in names:
        if name not in known:
            every = [*also, *known]
            raise InputError(f"unknown {what} {str(name)[:200]!r}{meant(name, every)}; there are: {', '.join(every)}")
