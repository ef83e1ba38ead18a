"""Processes that share a study's jobs: each loads the model once, works on one thread or one GPU, and ends with us.

They are forked from a server process that has imported what they need, once, and stay for a chapter's next study. Jobs
travel pickled by value, with what was typed into a notebook. Only the process that started them writes results.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.util
import os
import pickle
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import cloudpickle
import joblib
import psutil

from kvrepro.engine.policy import OWN
from kvrepro.errors import Stopped
from kvrepro.experiment import models
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Job

TRIES = 3  # workers that may die one after the other while nothing is done
HELP = "is memory too small? give fewer workers, or smaller batches by batch_rows; what is done is stored"
Told = tuple[str, str, str, str]  # folder, device, dtype and name of a model
IMPORTED = ["kvrepro.experiment.run", "transformers.models.auto.modeling_auto"]  # by the server, before it forks
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # each worker has one
studies_ended = threading.Event()  # of a notebook: its exercises are small, and start no server beforehand
_models: list[Loaded | None] = []  # in a worker: the one that it loaded
_pools: dict[Any, tuple[int, ProcessPoolExecutor]] = {}  # by model, one at most: how many workers run, and they


class Lost(Stopped):
    """Parts of a study of which workers die."""


def default_workers(loaded: Loaded | None) -> int:
    """As many as there are cores, or GPUs for a model on one; fewer where memory does not hold so many models."""
    import torch

    if loaded is not None and loaded.device == "cuda":
        return int(torch.cuda.device_count())
    cores = int(joblib.cpu_count())
    if loaded is None:
        return cores
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    return max(1, min(cores, int(psutil.virtual_memory().available // (2 * weights))))


def possible(loaded: Loaded | None) -> bool:
    """Whether another process can load the same model: from its folder, onto one device."""
    if loaded is None:
        return True
    spread = len({p.device for p in loaded.model.parameters()}) > 1
    return not spread and loaded.path is not None and loaded.path.is_dir()


def each(loaded: Loaded | None, jobs: Sequence[Job], count: int) -> Iterator[tuple[Job, Any]]:
    """(job, result) as they are done, by `count` workers; one is this process itself. Raises a job's exception here;
    Lost where workers die of it."""
    parts = packed(jobs) if count > 1 else None
    if parts is None:
        with one_thread():
            for job in jobs:
                yield job, job.work(loaded)
        return
    for i, result in _shared(told(loaded), parts, count):
        yield jobs[i], result


def _shared(what: Told | None, parts: Sequence[bytes], count: int) -> Iterator[tuple[int, Any]]:
    """(number, result) of every job. Where a worker dies, all are replaced and what was under way is done again, after
    the rest; if one dies again before anything is done, half as many go on."""
    left, deaths = list(range(len(parts))), 0
    while left:
        workers = max(2, count >> deaths)  # one would be this process
        try:
            numbers = _handed_out(what, workers, parts, left)
            for future in as_completed(numbers):
                i, result = numbers[future], future.result()
                left.remove(i)
                deaths = 0
                yield i, result
        except BrokenProcessPool:
            end()
            deaths += 1
            if deaths == TRIES:
                raise Lost(
                    f"a worker process was killed {TRIES} times in a row, {len(left)} parts are left: {HELP}"
                ) from None
            said = f"a worker process was killed: {len(left)} parts of the study go to new ones"
            print(said, file=sys.stderr, flush=True)
            left = left[workers:] + left[:workers]
        except BaseException:  # nobody waits for the others
            end()
            raise


def get_ready(what: Told | None) -> None:
    """Start the server, which imports for some seconds, while something else is done."""
    if _forks(what):
        from multiprocessing import forkserver

        with _for_processes():
            forkserver.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()
        multiprocessing.util.Finalize(None, _end_server, exitpriority=0)  # it may be at its imports for seconds yet


def _forks(what: Told | None) -> bool:
    """Whether workers come from a server: not those on GPUs, which each process must open for itself."""
    return (what is None or what[1] != "cuda") and "forkserver" in multiprocessing.get_all_start_methods()


def _handed_out(what: Told | None, count: int, parts: Sequence[bytes], numbers: Sequence[int]) -> dict[Any, int]:
    """Number by future of these jobs, given to `count` workers; those of an earlier study, if there are as many."""
    running, pool = _pools.get(what, (0, None))
    if pool is None or running < count:
        end()
        get_ready(what)
        context = multiprocessing.get_context("forkserver" if _forks(what) else "spawn")
        pool = ProcessPoolExecutor(count, context, _begin, (dict(os.environ), list(sys.path), what))
        multiprocessing.util.Finalize(None, end, exitpriority=0)  # a process that is a child itself would wait for them
        _pools[what] = count, pool
    if what is not None and what[1] == "cuda":
        import torch

        torch.cuda.empty_cache()  # a worker on our GPU has what torch keeps for us
    with _for_processes():
        return {pool.submit(done, parts[i]): i for i in numbers}


@contextlib.contextmanager
def _for_processes() -> Iterator[None]:
    """While processes start: they find the modules that we find, have one thread, and do not run our main script again,
    as multiprocessing would have them do."""
    main, before = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(dict.fromkeys(THREADS, "1"), PYTHONPATH=os.pathsep.join(sys.path))
    try:
        with _deaf():
            yield
    except KeyboardInterrupt:  # what it would start finds us gone, and says so at length
        _end_server()
        raise
    finally:
        sys.modules["__main__"] = main
        for name in {*THREADS, "PYTHONPATH"}:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """While processes start, which inherit it: Ctrl-C and a terminal that is closed wait. This process hears them and
    ends the others; as those still import, each would answer with a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end() -> None:
    """Kill the workers, whatever they do."""
    while _pools:
        _, (_, pool) = _pools.popitem()
        processes = list((pool._processes or {}).values())  # from Python 3.14 on: pool.kill_workers()
        manager: Any = pool._executor_manager_thread
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        if manager is not None:
            manager.join(10)  # it holds semaphores


def end_all() -> None:
    """The same, and what multiprocessing keeps beside them: a notebook's kernel would wait for it at its own end."""
    from multiprocessing import resource_tracker

    studies_ended.set()
    end()
    _end_server()
    gc.collect()  # semaphores of the pool, which the tracker would call leaked
    tracker: Any = resource_tracker._resource_tracker
    if [child.pid for child in psutil.Process().children()] == [tracker._pid]:  # others may hold it, and be waited for
        tracker._stop()


def _end_server() -> None:
    """Kill the server, wherever it is; the next workers start another."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._forkserver_pid:
        with contextlib.suppress(OSError):  # that of the process that forked us, or gone
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()  # waits for its end, so that the next start does not take it for alive


def are_there(loaded: Loaded | None) -> bool:
    """Whether workers were started for the same model."""
    return told(loaded) in _pools


def packed(jobs: Sequence[Job]) -> list[bytes] | None:
    """The jobs as another process takes them, with what a notebook added to the policies; None, and a printed line,
    where one cannot be sent."""
    try:
        return [cloudpickle.dumps((OWN, job.work)) for job in jobs]
    except Exception as error:  # whatever a part says that cannot be pickled
        print(f"one process only: a part of the study cannot be sent to another ({error})".splitlines()[0])
        return None


def told(loaded: Loaded | None) -> Told | None:
    """What another process must know to load the same model."""
    return (str(loaded.path), loaded.device, loaded.dtype, loaded.name) if loaded is not None else None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread on the CPU, as each worker has: rows do not depend on how many share the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- in a worker


def _begin(environment: dict[str, str], path: list[str], what: Told | None) -> None:
    """Load the model, onto a GPU of its own where it lies on one."""
    import torch

    os.environ.update(environment)  # the server has that of its start
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears an interrupt, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if what is not None and what[1] == "cuda":  # workers are numbered as they are started
        number = _number(multiprocessing.current_process().name)
        what = (what[0], f"cuda:{number % torch.cuda.device_count()}", *what[2:])
    prepare(what)


def _number(process: str) -> int:
    """Of a worker, by its process's name: SpawnProcess-3, or SpawnProcess-2:3 where our parent is a child itself."""
    return int(re.split("[-:]", process)[-1])


def prepare(what: Told | None) -> Loaded | None:
    """Make this process a worker: one thread, and the model that it holds from now on."""
    import torch

    torch.set_num_threads(1)
    if what is None:
        _models[:] = [None]
    else:
        path, device, dtype, name = what
        _models[:] = [replace(models.load(path, device, dtype), name=name)]
    return _models[0]


def _end_with_parent() -> None:
    """The process that started the study, not the server that forked us: the server lives as long as we do."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def done(data: bytes) -> Any:
    """The result of a job that `packed` made, in a process that is prepared."""
    own, work = pickle.loads(data)
    OWN.update(own)
    return work(_models[0])
