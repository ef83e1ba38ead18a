"""Processes that a test starts, and what it waits for."""

import time
from collections.abc import Callable

import psutil


def runs(pid: int) -> bool:
    """Whether it does; one that has ended may be kept as a zombie, where nobody asks for its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def waited(there: Callable[[], bool], seconds: float) -> bool:
    """Whether it is, at last."""
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.05)
    return there()
