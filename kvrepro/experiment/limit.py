"""A time limit for whatever runs in a process's main thread, a policy that never returns above all."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

from kvrepro.errors import InputError


class TimeLimit(Exception):
    """Something took longer than it may."""


class _Alarm(BaseException):
    """Raised wherever the code is; none of the Exceptions that a policy or the engine may catch."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeLimit in what takes longer, as soon as it runs Python again: within a second of pure Python, after the
    operation of PyTorch that is under way, and never in a C function that does not end. None: no limit.

    Raises InputError outside the main thread, which alone hears the system's clock.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise InputError(f"time_limit {seconds:g}: only a process's main thread can be stopped; leave it out here")

    def ring(number: int, frame: object) -> NoReturn:
        raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, max(1.0, seconds))  # again, where `except:` swallows it
    try:
        yield
    except _Alarm:
        raise TimeLimit(f"more than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
