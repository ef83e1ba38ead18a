"""A time limit for code in a process's main thread, such as a policy that never returns."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from kvrepro.errors import InputError


class TimeLimit(Exception):
    """Something took longer than it may."""


class _Alarm(BaseException):
    """Raised wherever the code is. It is no Exception, which a policy or the engine may catch."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """A context that raises TimeLimit after so many seconds, as soon as Python runs again: within a second in pure
    Python, after the current operation of PyTorch, and never in a C function that does not end. None: no limit.

    Raises InputError outside the main thread, which alone gets the system's signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise InputError(f"time_limit {seconds:g}: only a process's main thread can be stopped; leave it out here")

    def ring(number: int, frame: object) -> NoReturn:
        raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, max(1.0, seconds))  # repeated, in case that `except:` swallows it
    try:
        yield
    except _Alarm:
        raise TimeLimit(f"more than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
