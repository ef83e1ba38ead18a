"""Processes that a test starts, and what it waits for."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import psutil

from kvrepro.experiment import workers


def forked(work: Callable, *given: Any) -> BaseProcess:
    """A process that does this work, forked from the server that forks workers: it has imported everything already."""
    workers.get_ready(None)
    process = multiprocessing.get_context("forkserver").Process(target=_do, args=(cloudpickle.dumps((work, given)),))
    with workers._for_processes():
        process.start()
    return process


def _do(packed: bytes) -> None:
    work, given = cloudpickle.loads(packed)
    work(*given)


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
