"""Who computes a study's jobs: this process, worker processes of this machine (loky), or a Ray cluster.

Each worker loads the model once and works on one thread or one GPU; it stays for the next study of the same model. Jobs
are pickled by value, together with a notebook's policies. Only the process that started the study writes results. A
worker that dies costs its job one retry, after all others; a job that dies twice has failed.
"""

import logging
import os
import platform
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import loky
import psutil
import torch

from kvrepro.engine.policy import OWN
from kvrepro.errors import InputError, Stopped, first_line
from kvrepro.experiment import models, store
from kvrepro.experiment.models import Loaded
from kvrepro.item import thinks

Recipe = tuple[str, str, str, str, bool | None]  # a model's folder, device, dtype, name, `enable_thinking`: to load it
# Large blocks of memory that are freed are kept: glibc returns them to the system, which clears each new one. A quarter
# of the time of protection's main study.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ENVIRONMENT |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
IDLE = 600  # seconds after which a worker without a job ends
AHEAD = 2  # jobs that are handed out for each worker
TWICE = "its worker process died twice: is memory too small? give fewer workers, or smaller batches by batch_rows"
_held: list[Loaded | None] = []  # in a worker: the model that it loaded
_executors: list[Any] = []  # loky's, one at most
_actors: dict[Any, list[Any]] = {}  # Ray's workers that run, by recipe; one recipe at a time


class Died(Exception):
    """A job whose worker died twice."""


@dataclass(frozen=True)
class Job:
    """A part of a study that is computed by one process and stored at once."""

    size: int  # results
    work: Callable[[Any], Any]  # of the model; can be pickled
    label: Any = None  # of the study, which needs it when the result comes


def usual_workers(loaded: Loaded | None, engine: str | None = None, address: str | None = None) -> int:
    """The number of workers where the user gives none: cores, or GPUs for a model on one, of this machine or of the
    cluster; fewer where memory does not hold so many models."""
    on_gpu = _on_gpu(loaded)
    if engine == "ray" and len((ray := connect(address)).nodes()) > 1:
        return max(1, int(ray.cluster_resources().get("GPU" if on_gpu else "CPU", 0)))
    if on_gpu:
        return int(torch.cuda.device_count())
    weights = 0 if loaded is None else sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    return max(1, min(int(loky.cpu_count()), int(psutil.virtual_memory().available // (2 * weights or 1))))


def _on_gpu(loaded: Loaded | None) -> bool:
    return loaded is not None and loaded.device == "cuda"


def results(
    loaded: Loaded | None, jobs: Sequence[Job], count: int, engine: str | None = None, address: str | None = None
) -> Iterator[tuple[Job, Any]]:
    """(job, result) in the order in which jobs are done, by `count` workers; a count of 1 means this process itself. A
    result is a Died where a job's worker died twice. Raises a job's exception."""
    if count == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as each worker has, so that rows do not depend on the number of workers
        try:
            yield from ((job, job.work(loaded)) for job in jobs)
        finally:
            torch.set_num_threads(threads)
        return
    crew = _Ray(loaded, count, address) if engine == "ray" or _on_gpu(loaded) else _Loky(loaded, count)
    waiting, again, running = deque(jobs), deque[Job](), dict[Future[Any], Job]()
    try:
        while waiting or again or running:
            alone = not waiting and not running
            while (waiting and len(running) < AHEAD * count) or (alone and not running):
                job = (again if alone else waiting).popleft()
                running[crew.submit(job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    yield job, future.result()
                except crew.deaths:
                    if alone:
                        yield job, Died(TWICE)
                    else:
                        again.append(job)
                        print("a worker process died: its part is computed once more", file=sys.stderr, flush=True)
    except BaseException:
        crew.end()  # nobody waits for the other jobs
        raise


def end() -> None:
    """End the workers of this machine, whatever they do."""
    while _executors:
        _executors.pop().shutdown(wait=True, kill_workers=True)


# ---- in a worker


def prepare(recipe: Recipe | None) -> None:
    """Make this process a worker: one thread, and the model that it holds from now on."""
    torch.set_num_threads(1)
    _held[:] = [None]
    if recipe is not None:
        path, device, dtype, name, enable_thinking = recipe
        _held[:] = [replace(models.load(path, device, dtype, enable_thinking), name=name)]


def recipe_of(loaded: Loaded | None) -> Recipe | None:
    """How another process loads the same model."""
    if loaded is None:
        return None
    return str(loaded.path), loaded.device, loaded.dtype, loaded.name, thinks(loaded.tokenizer)


def packed(job: Job) -> bytes:
    """A job's work with a reader's own policies. Raises InputError for what cannot be sent to another process."""
    try:
        return bytes(cloudpickle.dumps((OWN, job.work)))
    except Exception as error:  # whatever the class of an object raises that cannot be pickled
        raise InputError(f"workers cannot be sent this study ({first_line(error)}): give workers=1") from None


def do(packed_job: bytes) -> Any:
    """A job's result, in a process that `prepare` made a worker."""
    own_policies, work = cloudpickle.loads(packed_job)
    OWN.update(own_policies)
    return work(_held[0])


# ---- the two kinds of workers: `submit` hands a job out, and its future raises one of `deaths` where the worker died


class _Loky:
    """Processes of this machine. Where one dies, all are replaced."""

    deaths = BrokenProcessPool

    def __init__(self, loaded: Loaded | None, count: int):
        self.how = {"max_workers": count, "timeout": IDLE, "initializer": prepare, "initargs": (recipe_of(loaded),)}

    def submit(self, job: Job) -> Future[Any]:
        _executors[:] = [loky.get_reusable_executor(**self.how, env=ENVIRONMENT)]
        future: Future[Any] = _executors[0].submit(do, packed(job))
        return future

    def end(self) -> None:
        end()


class _Worker:
    """One model on one GPU or one core of a cluster."""

    def __init__(self, recipe: Recipe | None, model_hash: str, code: str, where: Sequence[str]):
        """code: the hash of the driver's source; where: its working folder and module search path, used as far as this
        node has them."""
        if Path(where[0]).is_dir():
            os.chdir(where[0])
        sys.path += [path for path in where[1:] if path not in sys.path]
        try:
            problem = self._load(recipe, model_hash, code)
        except InputError as error:
            problem = f": {error}"
        self.problem = problem and f"node {platform.node()}{problem}"

    def _load(self, recipe: Recipe | None, model_hash: str, code: str) -> str:
        if store.code_of() != code:
            return " has another kvrepro than this machine: install the same one on every node"
        if recipe is not None and not Path(recipe[0]).is_dir():
            return f" has no folder {recipe[0]}: put the checkpoint there, or on a disk that all share"
        prepare(recipe)
        if _held[0] is not None and _held[0].hash != model_hash:
            return f" has other files in {_held[0].path}: copy the checkpoint there again"
        return ""

    def why_not(self) -> str:
        """Why this node cannot do the same as the driver."""
        return self.problem

    def do(self, packed_job: bytes) -> Any:
        return do(packed_job)


class _Ray:
    """Workers of a Ray cluster, or of a Ray of this machine, which starts a lost one again."""

    def __init__(self, loaded: Loaded | None, count: int, address: str | None):
        self.ray, recipe, on_gpu = connect(address, count), recipe_of(loaded), _on_gpu(loaded)
        self.deaths = self.ray.exceptions.RayActorError
        for other in _actors.keys() - {recipe}:
            for actor in _actors.pop(other):
                self.ray.kill(actor)
        self.crew = _actors.setdefault(recipe, [])
        needs = {"num_cpus": 0 if on_gpu else 1, "num_gpus": int(on_gpu)}
        kind = self.ray.remote(**needs, max_restarts=-1, max_task_retries=1)(_Worker)
        given = recipe, "" if loaded is None else loaded.hash, store.code_of(), [os.getcwd(), *sys.path]
        self.crew += [kind.remote(*given) for _ in range(count - len(self.crew))]
        if problems := list(filter(None, self.ray.get([actor.why_not.remote() for actor in self.crew]))):
            self.end()
            raise InputError(problems[0])
        self.given: list[tuple[Any, Future[Any]]] = []

    def submit(self, job: Job) -> Future[Any]:
        self.given = [(actor, future) for actor, future in self.given if not future.done()]  # lets go of results
        actor = min(self.crew, key=[actor for actor, _ in self.given].count)
        future: Future[Any] = actor.do.remote(packed(job)).future()
        self.given.append((actor, future))
        return future

    def end(self) -> None:
        for actor in self.crew:
            self.ray.kill(actor)
        _actors.clear()


def connect(address: str | None = None, least: int = 1) -> Any:
    """The package ray, connected to the cluster at `host:port`, or to a Ray of this machine, which starts here and ends
    with this process. None: `$RAY_ADDRESS`, or this machine. least: workers that this machine must take, however few
    cores it has. Raises InputError where ray is not installed, or nobody answers at the address."""
    try:
        import ray
    except ImportError:
        raise InputError("engine 'ray' needs the package ray: pip install 'kvrepro[cluster]'") from None
    if ray.is_initialized():
        return ray
    _actors.clear()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address, where = address or os.environ.get("RAY_ADDRESS") or "local", dict[str, Any]()
    if address == "local":
        where = {"num_cpus": max(least, os.cpu_count() or 1), "include_dashboard": False}
        where["runtime_env"] = {"env_vars": ENVIRONMENT}
    else:  # Ray itself would try for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, OverflowError, ValueError) as error:
            way_out = "give host:port of its head, which `ray start --head` prints, or none to use this machine"
            raise InputError(f"nobody answers at Ray's address {address!r} ({error}): {way_out}") from None
    try:
        ray.init(address, **where, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # other versions there, a head that is gone: whatever Ray raises
        way_out = "the same Python and Ray must run everywhere; `ray status` shows the nodes"
        raise Stopped(f"Ray at {address}: {first_line(error)}; {way_out}; what was done is stored") from None
    return ray
