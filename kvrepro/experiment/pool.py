"""Who computes a study's jobs: this process, worker processes of this machine (loky), or a Ray cluster.

Each worker holds one model and works on one thread or one GPU; it stays for the next study. Jobs are pickled by value,
together with a notebook's policies. Only the process that started the study writes results. A
worker that dies costs its job one retry, after all others; a job that dies twice has failed.
"""

import logging
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import loky
import psutil
import torch

from kvrepro.engine.policy import OWN
from kvrepro.errors import InputError, Stopped, first_line
from kvrepro.experiment import models, store
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.settings import Settings
from kvrepro.item import thinks

# Large blocks of memory that are freed are kept: glibc returns them to the system, which clears each new one. A quarter
# of the time of protection's main study.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ENVIRONMENT |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
TWICE = "its worker process died twice: is memory too small? give fewer workers, or smaller batches by batch_rows"
_held: dict[Any, Loaded | None] = {}  # in a worker: the model that it loaded, by how it is loaded
_actors: dict[bool, list[Any]] = {}  # Ray's workers that run, by whether they have a GPU


class Job(NamedTuple):
    """A part of a study that is computed by one process and stored at once."""

    size: int  # results
    work: Callable[[Any], Any]  # of the model; can be pickled
    label: Any  # of the study, which needs it when the result comes


class Plan(NamedTuple):
    """A study as `run` sees it, whatever it computes."""

    unit: str  # what its results are: rows, or items
    total: int  # results, with those that are stored
    jobs: list[Job]  # of those that are missing
    add: Callable[[Any, Any], None]  # stores a job's result by its label; a RuntimeError where its worker died twice
    read: Callable[[], tuple[Any, list[str]]]  # all results, and a text for each that failed


def usual_workers(loaded: Loaded | None, settings: Settings) -> int:
    """The cores, or GPUs for a model on one, of this machine or of the cluster; fewer cores where this machine's memory
    does not hold so many models."""
    on_gpu = loaded is not None and loaded.device == "cuda"
    if settings.engine == "ray":
        return int(connect(settings.address).cluster_resources().get("GPU" if on_gpu else "CPU", 1))
    if on_gpu:
        return int(torch.cuda.device_count())
    weights = 0 if loaded is None else sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    return max(1, min(int(loky.cpu_count()), int(psutil.virtual_memory().available // (2 * weights or 1))))


def results(loaded: Loaded | None, jobs: Sequence[Job], settings: Settings, alone: bool) -> Iterator[tuple[Job, Any]]:
    """(job, result) as jobs are done, by workers. This process itself does a single job, jobs that are to be `alone`,
    and those of a model that is spread over GPUs. Raises a job's exception."""
    count = min(len(jobs), settings.workers or usual_workers(loaded, settings)) if len(jobs) > 1 and not alone else 1
    if count == 1 or (loaded is not None and len({p.device for p in loaded.model.parameters()}) > 1):
        if jobs and settings.address:
            connect(settings.address)  # a wrong address is told, though no worker is needed
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as each worker has, so that rows do not depend on the number of workers
        try:
            yield from ((job, job.work(loaded)) for job in jobs)
        finally:
            torch.set_num_threads(threads)
        return
    on_gpus = loaded is not None and loaded.device == "cuda"  # which Ray numbers
    crew = _Ray(count, on_gpus, settings) if on_gpus or settings.engine == "ray" else _Loky(count)
    died = []
    try:
        for job, future in _done(crew, loaded, jobs, 2 * count):  # none waits for a job
            try:
                yield job, future.result()
            except crew.deaths:
                died.append(job)
                print("a worker process died: its part is computed once more", file=sys.stderr, flush=True)
        for job, future in _done(crew, loaded, died, 1):
            yield job, RuntimeError(TWICE) if isinstance(future.exception(), crew.deaths) else future.result()
    except BaseException:
        crew.end()  # nobody waits for the other jobs
        raise


def _done(crew: Any, loaded: Loaded | None, jobs: Sequence[Job], most: int) -> Iterator[tuple[Job, Future[Any]]]:
    """Jobs that are done, of which at most so many are handed out at a time."""
    waiting, running = deque(jobs), dict[Future[Any], Job]()
    while waiting or running:
        while waiting and len(running) < most:
            job = waiting.popleft()
            running[crew.submit(packed(loaded, job))] = job
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future


def packed(loaded: Loaded | None, job: Job) -> bytes:
    """A job for another process: its work, how the model is loaded, the source's hash, and a reader's own policies."""
    how = loaded and (loaded.hash, loaded.name, str(loaded.path), loaded.device, loaded.dtype, thinks(loaded.tokenizer))
    try:
        return bytes(cloudpickle.dumps((job.work, how, store.code_of(), OWN)))
    except Exception as error:  # whatever the class of an object raises that cannot be pickled
        raise InputError(f"workers cannot be sent this study ({first_line(error)}): give workers=1") from None


def do(packed_job: bytes) -> Any:
    """A job's result, in a worker, which holds one model. Raises InputError on a node with other files."""
    work, how, code, own_policies = cloudpickle.loads(packed_job)
    OWN.update(own_policies)
    if how not in _held:
        torch.set_num_threads(1)
        _held.clear()
        _held[how] = how and replace(models.load(*how[2:]), name=how[1])
    loaded = _held[how]
    if store.code_of() != code or (loaded is not None and loaded.hash != how[0]):
        raise InputError(f"{platform.node()} has another kvrepro or checkpoint than the driver: make them equal")
    return work(loaded)


# ---- the two kinds of workers: `submit` hands a job out, and its future raises one of `deaths` where the worker died


def _end_with(driver: int) -> None:
    """End a worker with the process that started it, even while a result waits in a pipe that nobody reads."""

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Loky:
    """Processes of this machine, which end after a minute without a job. Where one dies, all are replaced."""

    deaths = BrokenProcessPool

    def __init__(self, count: int):
        given = {"max_workers": count, "timeout": 60, "env": ENVIRONMENT}
        given |= {"initializer": _end_with, "initargs": (os.getpid(),)}
        self.executor = partial(loky.get_reusable_executor, **given)

    def submit(self, packed_job: bytes) -> Any:
        return self.executor().submit(do, packed_job)

    def end(self) -> None:
        self.executor().shutdown(wait=True, kill_workers=True)


class _Worker:
    def do(self, packed_job: bytes) -> Any:
        return do(packed_job)


class _Ray:
    """Workers of a Ray cluster, or of a Ray of this machine, which starts a lost one again."""

    def __init__(self, count: int, on_gpus: bool, settings: Settings):
        self.ray = connect(settings.address, count)
        self.deaths = self.ray.exceptions.RayActorError
        needs = {"num_gpus": 1} if on_gpus else {"num_cpus": 1}
        kind = self.ray.remote(**needs, max_restarts=-1, max_task_retries=1)(_Worker)
        self.crew = _actors.setdefault(on_gpus, [])
        self.crew += [kind.remote() for _ in range(count - len(self.crew))]
        self.given: list[tuple[Any, Future[Any]]] = []

    def submit(self, packed_job: bytes) -> Any:
        self.given = [(actor, future) for actor, future in self.given if not future.done()]  # lets go of results
        actor = min(self.crew, key=[actor for actor, _ in self.given].count)
        self.given.append((actor, actor.do.remote(packed_job).future()))
        return self.given[-1][1]

    def end(self) -> None:
        for actor in self.crew:
            self.ray.kill(actor)
        _actors.clear()


def connect(address: str | None = None, least: int = 1) -> Any:
    """The package ray, connected to the cluster at `host:port`, or to a Ray of this machine, which starts here and ends
    with this process. None: `$RAY_ADDRESS`, or this machine. least: workers that this machine must take, however few
    cores it has. Raises Stopped where nobody answers at the address."""
    import ray

    if not ray.is_initialized():
        _actors.clear()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address, how = address or os.environ.get("RAY_ADDRESS", "local"), dict[str, Any]()
        try:
            if address == "local":
                variables = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
                how = {"num_cpus": max(least, os.cpu_count() or 1), "runtime_env": {"env_vars": variables}}
            else:  # Ray itself would try for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=5).close()
            ray.init(address, **how, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # no cluster there, other versions: whatever Ray raises
            raise Stopped(f"Ray at {address}: {first_line(error)}; `ray status` shows a cluster's nodes") from None
    return ray
