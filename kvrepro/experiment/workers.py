"""Processes that share a study's jobs: each loads the model once, works on one thread or one GPU, and ends with us.

They are forked from a server process that imports once what they need, and stay for a chapter's next study. Jobs are
pickled by value, together with code that was typed into a notebook. Only the process that started them writes results.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.util
import os
import pickle
import platform
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

from kvrepro.chat import thinks
from kvrepro.engine.policy import OWN
from kvrepro.errors import Stopped, counted
from kvrepro.experiment import models
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Job

TRIES = 3  # so many times workers may die in a row without a finished job
HELP = "is memory too small? give fewer workers, or smaller batches by batch_rows; what is done is stored"
Recipe = tuple[str, str, str, str, bool | None]  # a model's folder, device, dtype, name, `enable_thinking`: to load it
IMPORTED = [  # by the server, before it forks
    "kvrepro.experiment.run", "transformers.modeling_utils", "transformers.models.auto.modeling_auto",
]  # fmt: skip
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # each worker has one
# What makes glibc keep large blocks that are freed. Usually it returns them to the system, which clears each new one:
# a quarter of the time of protection's main study. Older versions take no such threshold.
KEEP_BLOCKS, GLIBC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}, (2, 36)
studies_ended = threading.Event()  # set after a notebook's studies: its exercises are small, and start no server early
_models: list[Loaded | None] = []  # in a worker: the one that it loaded
_pools: dict[Any, tuple[int, ProcessPoolExecutor]] = {}  # by recipe, one at most: how many workers run, and their pool


class Lost(Stopped):
    """Parts of a study that make workers die."""


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


def results_of(loaded: Loaded | None, jobs: Sequence[Job], count: int) -> Iterator[tuple[Job, Any]]:
    """(job, result) in the order in which jobs are done, by `count` workers; a count of 1 means this process itself.
    Raises a job's exception; Lost where workers die again and again."""
    parts = packed(jobs) if count > 1 else None
    if parts is None:
        with one_thread():
            for job in jobs:
                yield job, job.work(loaded)
        return
    for i, result in _shared(recipe_of(loaded), parts, count):
        yield jobs[i], result


def _shared(recipe: Recipe | None, parts: Sequence[bytes], count: int) -> Iterator[tuple[int, Any]]:
    """(number, result) of every job. Where a worker dies, all are replaced, and the jobs under way are done again after
    the others; if one dies again before any job is done, half as many workers go on."""
    left, deaths = list(range(len(parts))), 0
    while left:
        workers = max(2, count >> deaths)  # one would be this process
        try:
            numbers = _handed_out(recipe, workers, parts, left)
            for future in as_completed(numbers):
                i, result = numbers[future], future.result()
                left.remove(i)
                deaths = 0
                yield i, result
        except BrokenProcessPool:
            end()
            deaths += 1
            if deaths == TRIES:
                lost = f"a worker process was killed {TRIES} times in a row, {counted(len(left), 'part')} left: {HELP}"
                raise Lost(lost) from None
            line = f"a worker process was killed: what is left ({counted(len(left), 'part')}) goes to new ones"
            print(line, file=sys.stderr, flush=True)
            left = left[workers:] + left[:workers]
        except BaseException:  # nobody waits for the other jobs
            end()
            raise


def get_ready(recipe: Recipe | None) -> None:
    """Start the server, which needs some seconds for its imports, while this process does something else."""
    if _forks(recipe):
        from multiprocessing import forkserver

        with _for_processes():
            forkserver.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()
        multiprocessing.util.Finalize(None, _end_server, exitpriority=0)  # at our exit it may still be importing


def _forks(recipe: Recipe | None) -> bool:
    """Whether workers are forked from a server: not those on GPUs, which each process must open for itself."""
    return recipe is None or recipe[1] != "cuda"


def _handed_out(recipe: Recipe | None, count: int, parts: Sequence[bytes], numbers: Sequence[int]) -> dict[Any, int]:
    """Future -> number of these jobs, which go to `count` workers: those of an earlier study, if there are enough."""
    running, pool = _pools.get(recipe, (0, None))
    if pool is None or running < count:
        end()
        get_ready(recipe)
        context = multiprocessing.get_context("forkserver" if _forks(recipe) else "spawn")
        pool = ProcessPoolExecutor(count, context, _begin, (dict(os.environ), list(sys.path), recipe))
        threading._register_atexit(end)  # type: ignore[attr-defined]  # our exit would wait for them, whatever they do
        multiprocessing.util.Finalize(None, end, exitpriority=0)  # so would that of a child process
        _pools[recipe] = count, pool
    if recipe is not None and recipe[1] == "cuda":
        import torch

        torch.cuda.empty_cache()  # gives the memory that torch keeps for us to a worker on our GPU
    with _for_processes():
        return {pool.submit(done, parts[i]): i for i in numbers}


@contextlib.contextmanager
def _for_processes() -> Iterator[None]:
    """A context in which processes start: they find the modules that we find, have one thread, and do not run our main
    script again, as they would by default."""
    main, before = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(dict.fromkeys(THREADS, "1"), PYTHONPATH=os.pathsep.join(sys.path))
    keep_blocks()
    try:
        with _deaf():
            yield
    except KeyboardInterrupt:  # workers that the server starts later would find us gone, and print long errors
        _end_server()
        raise
    finally:
        sys.modules["__main__"] = main
        for name in {*THREADS, *KEEP_BLOCKS, "PYTHONPATH"}:
            os.environ.pop(name, None)
        os.environ.update(before)


def keep_blocks() -> None:
    """Let processes that start from now on keep large blocks of memory for reuse, unless the user says otherwise."""
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(map(int, version.split(".")[:2])) >= GLIBC:
        for name, value in KEEP_BLOCKS.items():
            os.environ.setdefault(name, value)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A context in which Ctrl-C and the signal of a closed terminal wait; processes that start in it inherit that. This
    process gets the signals and ends the others, each of which would print a traceback during its imports."""
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
    """Kill the workers and what multiprocessing keeps for them, for which a notebook's kernel would wait as it ends."""
    from multiprocessing import resource_tracker

    studies_ended.set()
    end()
    _end_server()
    gc.collect()  # frees semaphores of the pool, which the tracker would report as leaked
    tracker: Any = resource_tracker._resource_tracker
    if [child.pid for child in psutil.Process().children()] == [tracker._pid]:  # no other child still needs it
        tracker._stop()


def _end_server() -> None:
    """Kill the server, whatever it does; the next workers start another one."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._forkserver_pid:
        with contextlib.suppress(OSError):  # it is gone, or belongs to the process that forked us
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()  # waits for its end, so that the next start does not believe that it is alive


def are_there(loaded: Loaded | None) -> bool:
    """Whether workers were started for the same model."""
    return recipe_of(loaded) in _pools


def packed(jobs: Sequence[Job]) -> list[bytes] | None:
    """The jobs pickled for another process, with a notebook's policies; None, and a line, if one cannot be pickled."""
    try:
        return [cloudpickle.dumps((OWN, job.work)) for job in jobs]
    except Exception as error:  # whatever the class of an object raises that cannot be pickled
        print(f"one process only: a part of the study cannot be sent to another ({error})".splitlines()[0])
        return None


def recipe_of(loaded: Loaded | None) -> Recipe | None:
    """How another process loads the same model."""
    if loaded is None:
        return None
    return str(loaded.path), loaded.device, loaded.dtype, loaded.name, thinks(loaded.tokenizer)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread on the CPU, as each worker has, so that rows do not depend on the number of workers."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- in a worker


def _begin(environment: dict[str, str], path: list[str], recipe: Recipe | None) -> None:
    """Start a worker: load the model, onto a GPU of its own if it is on a GPU."""
    import torch

    os.environ.update(environment)  # the server's own is from the time when it started
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears an interrupt, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if recipe is not None and recipe[1] == "cuda":  # workers are numbered as they are started
        number = _number(multiprocessing.current_process().name)
        recipe = (recipe[0], f"cuda:{number % torch.cuda.device_count()}", *recipe[2:])
    prepare(recipe)


def _number(process: str) -> int:
    """A worker's number, by its process's name: SpawnProcess-3, or SpawnProcess-2:3 if our parent is itself a child."""
    return int(re.split("[-:]", process)[-1])


def prepare(recipe: Recipe | None) -> Loaded | None:
    """Make this process a worker: one thread, and the model that it holds from now on."""
    import torch

    torch.set_num_threads(1)
    if recipe is None:
        _models[:] = [None]
    else:
        path, device, dtype, name, enable_thinking = recipe
        _models[:] = [replace(models.load(path, device, dtype, enable_thinking), name=name)]
    return _models[0]


def _end_with_parent() -> None:
    """End this worker with the process that started the study; the server that forked us lives as long as we do."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def done(data: bytes) -> Any:
    """The result of a job of `packed`, in a process that `prepare` made a worker."""
    own_policies, work = pickle.loads(data)
    OWN.update(own_policies)
    return work(_models[0])
