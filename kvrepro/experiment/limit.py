"""A time limit for code in a process's main thread, such as a policy that never returns."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from kvrepro.errors import InputError


class TimeLimit(Exception):
    """Something took longer than it may."""


class _Alarm(BaseException):
    """Raised wherever the code is. It is no Exception, which a policy or the engine may catch."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """A context that raises TimeLimit after so many seconds, as soon as Python runs again: within a second in pure
    Python (two where the clock rings as the context begins), after the current operation of PyTorch, and never in a C
    function that does not end. None: no limit.

    Raises InputError outside the main thread, which alone gets the system's signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise InputError(f"time_limit {seconds:g}: only a process's main thread can be stopped; leave it out here")

    over = False

    def ring(number: int, frame: FrameType | None) -> None:
        # An alarm as this context begins or ends would leave its clock running. While it begins, the next one counts.
        if not over and not (frame is not None and frame.f_code.co_filename in (contextlib.__file__, __file__)):
            raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, max(1.0, seconds))  # repeated, in case `except:` swallows it
        yield
    except _Alarm:
        over = True
        raise TimeLimit(f"more than {seconds:g} s") from None
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
