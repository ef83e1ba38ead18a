"""What a time limit stops, and what it leaves behind."""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvrepro.errors import InputError
from kvrepro.experiment import limit


@limit.time_limit(0.1)
def forever():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def test_a_loop_that_catches_everything_is_stopped():
    with pytest.raises(limit.TimeLimit, match="more than 0.1 s"):
        forever()


def test_a_time_limit_leaves_no_clock_behind_and_needs_the_main_thread():
    with limit.time_limit(0.05):
        pass
    time.sleep(0.1)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match="only a process's main thread"):
        pool.submit(limit.time_limit(1.0).__enter__).result()


def test_an_alarm_at_any_moment_is_a_time_limit_and_leaves_nothing_behind():
    before = signal.getsignal(signal.SIGALRM)
    for number in range(3000):
        with contextlib.suppress(limit.TimeLimit), limit.time_limit(1e-6 * (1 + number % 50)):
            sum(range(number % 500))
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        assert signal.getsignal(signal.SIGALRM) == before
