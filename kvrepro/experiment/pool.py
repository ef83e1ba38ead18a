"""Who computes a study's jobs: this process, worker processes of this machine (loky), or a Ray cluster.

Each worker loads the model once and works on one thread or one GPU; it stays for the next study of the same model. Jobs
are pickled by value, together with a notebook's policies. Only the process that started the study writes results. A
worker that dies costs its job one retry, after all others; a job that dies twice has failed.
"""

import contextlib
import logging
import os
import platform
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import loky
import psutil
import torch

from kvrepro.chat import thinks
from kvrepro.engine.policy import OWN
from kvrepro.errors import InputError, Stopped, first_line
from kvrepro.experiment import models, store
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Job

Recipe = tuple[str, str, str, str, bool | None]  # a model's folder, device, dtype, name, `enable_thinking`: to load it
# Large blocks of memory that are freed are kept: glibc returns them to the system, which clears each new one. A quarter
# of the time of protection's main study.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ENVIRONMENT |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
IDLE = 600  # seconds after which a worker without a job ends
AHEAD = 2  # jobs that are handed out for each worker
DIED = "its worker process died twice: is memory too small? give fewer workers, or smaller batches by batch_rows"
_held: list[Loaded | None] = []  # in a worker: the model that it loaded
_executors: list[Any] = []  # loky's, one at most
_actors: dict[Any, list[Any]] = {}  # Ray's workers that run, by recipe; one recipe at a time


class Died(Exception):
    """A job whose worker died twice."""


def usual_workers(loaded: Loaded | None, engine: str, address: str | None = None) -> int:
    """The number of workers where the user gives none: cores, or GPUs for a model on one, of this machine or of the
    cluster; fewer where memory does not hold so many models."""
    on_gpu = loaded is not None and loaded.device == "cuda"
    if engine == "ray" and len(connect(address).nodes()) > 1:
        return max(1, int(connect(address).cluster_resources().get("GPU" if on_gpu else "CPU", 0)))
    if on_gpu:
        return int(torch.cuda.device_count())
    cores = int(loky.cpu_count())
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


def recipe_of(loaded: Loaded | None) -> Recipe | None:
    """How another process loads the same model."""
    if loaded is None:
        return None
    return str(loaded.path), loaded.device, loaded.dtype, loaded.name, thinks(loaded.tokenizer)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread on the CPU, as each worker has, so that rows do not depend on the number of workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def results(
    loaded: Loaded | None, jobs: Sequence[Job], count: int, engine: str = "local", address: str | None = None
) -> Iterator[tuple[Job, Any]]:
    """(job, result) in the order in which jobs are done, by `count` workers; a count of 1 means this process itself. A
    result is a Died where a job's worker died twice. Raises a job's exception."""
    try:
        packed = [cloudpickle.dumps((OWN, job.work)) for job in jobs] if count > 1 else None
    except Exception as error:  # whatever the class of an object raises that cannot be pickled
        print(f"one process only: a part of the study cannot be sent to another ({first_line(error)})")
        packed = None
    if packed is None:
        with one_thread():
            yield from ((job, job.work(loaded)) for job in jobs)
        return
    several_gpus = loaded is not None and loaded.device == "cuda"  # Ray numbers them
    crew = _Ray(loaded, count, address) if engine == "ray" or several_gpus else _Loky(loaded, count)
    waiting, deaths, alone = deque(range(len(jobs))), [0] * len(jobs), deque[int]()
    try:
        while waiting or alone or crew.running:
            if alone and not waiting and not crew.running:
                crew.submit(alone.popleft(), packed)
            while waiting and len(crew.running) < AHEAD * count:
                crew.submit(waiting.popleft(), packed)
            for number, result in crew.done():
                if not isinstance(result, Died):
                    yield jobs[number], result
                elif deaths[number]:
                    yield jobs[number], Died(DIED)
                else:
                    deaths[number] = 1
                    alone.append(number)
                    print("a worker process died: its part is computed once more", file=sys.stderr, flush=True)
    except BaseException:
        crew.end()  # nobody waits for the other jobs
        raise


def end() -> None:
    """End the workers of this machine, whatever they do."""
    while _executors:
        _executors.pop().shutdown(wait=True, kill_workers=True)


# ---- in a worker


def prepare(recipe: Recipe | None) -> Loaded | None:
    """Make this process a worker: one thread, and the model that it holds from now on."""
    torch.set_num_threads(1)
    if recipe is None:
        _held[:] = [None]
    else:
        path, device, dtype, name, enable_thinking = recipe
        _held[:] = [replace(models.load(path, device, dtype, enable_thinking), name=name)]
    return _held[0]


def do(packed: bytes) -> Any:
    """A job's result, in a process that `prepare` made a worker."""
    own_policies, work = cloudpickle.loads(packed)
    OWN.update(own_policies)
    return work(_held[0])


# ---- the two kinds of workers: `submit` hands a job out, `done` waits for the next results


class _Loky:
    """Processes of this machine. Where one dies, all are replaced."""

    def __init__(self, loaded: Loaded | None, count: int):
        self.recipe, self.count, self.running = recipe_of(loaded), count, dict[Any, int]()

    def submit(self, number: int, packed: Sequence[bytes]) -> None:
        _executors[:] = [
            loky.get_reusable_executor(
                self.count, timeout=IDLE, initializer=prepare, initargs=(self.recipe,), env=ENVIRONMENT
            )
        ]
        self.running[_executors[0].submit(do, packed[number])] = number

    def done(self) -> list[tuple[int, Any]]:
        finished, _ = wait(self.running, return_when=FIRST_COMPLETED)
        outcomes: list[tuple[int, Any]] = []
        for future in finished:
            try:
                outcomes.append((self.running[future], future.result()))
            except BrokenProcessPool as error:
                outcomes.append((self.running[future], Died(first_line(error))))
            del self.running[future]
        return outcomes

    def end(self) -> None:
        end()


class _Worker:
    """One model on one GPU or one core of a cluster."""

    def begin(self, recipe: Recipe | None, model_hash: str, code: str, where: Sequence[str]) -> str:
        """Load the model from its folder. Returns "", or why it cannot be used. code: the hash of the driver's source;
        where: its working folder and module search path, used as far as this node has them."""
        node = platform.node()
        if Path(where[0]).is_dir():
            os.chdir(where[0])
        sys.path += [path for path in where[1:] if path not in sys.path]
        if store.code_of() != code:
            return f"node {node} has another kvrepro than this machine: install the same one on every node"
        if recipe is not None and not Path(recipe[0]).is_dir():
            return f"node {node} has no folder {recipe[0]}: put the checkpoint there, or on a disk that all share"
        try:
            loaded = prepare(recipe)
        except InputError as error:
            return f"node {node}: {error}"
        if loaded is not None and loaded.hash != model_hash:
            return f"node {node} has other files in {loaded.path}: copy the checkpoint there again"
        return ""

    def do(self, packed: bytes) -> Any:
        return do(packed)


class _Ray:
    """Workers of a Ray cluster, or of a Ray of this machine. A lost one is replaced."""

    def __init__(self, loaded: Loaded | None, count: int, address: str | None):
        self.ray, self.loaded, self.running = connect(address, count), loaded, dict[Any, tuple[Any, int]]()
        recipe = recipe_of(loaded)
        for other in _actors.keys() - {recipe}:
            for actor in _actors.pop(other):
                self.ray.kill(actor)
        self.crew = _actors.setdefault(recipe, [])
        self.crew += [self._hire() for _ in range(count - len(self.crew))]

    def _hire(self) -> Any:
        on_gpu = self.loaded is not None and self.loaded.device == "cuda"
        kind = self.ray.remote(num_cpus=0 if on_gpu else 1, num_gpus=int(on_gpu))(_Worker)
        actor, model_hash = kind.remote(), "" if self.loaded is None else self.loaded.hash
        where = [os.getcwd(), *sys.path]
        if problem := self.ray.get(actor.begin.remote(recipe_of(self.loaded), model_hash, store.code_of(), where)):
            raise InputError(problem)
        return actor

    def submit(self, number: int, packed: Sequence[bytes]) -> None:
        jobs = [actor for actor, _ in self.running.values()]
        actor = min(self.crew, key=jobs.count)
        self.running[actor.do.remote(packed[number])] = actor, number

    def done(self) -> list[tuple[int, Any]]:
        [finished], _ = self.ray.wait(list(self.running), num_returns=1)
        actor, number = self.running.pop(finished)
        try:
            return [(number, self.ray.get(finished))]
        except self.ray.exceptions.RayActorError as error:
            lost = [reference for reference, (other, _) in self.running.items() if other is actor]
            numbers = [number, *(self.running.pop(reference)[1] for reference in lost)]
            self.crew[self.crew.index(actor)] = self._hire()
            return [(n, Died(first_line(error))) for n in numbers]
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None

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
    where: dict[str, Any] = {"address": address or os.environ.get("RAY_ADDRESS") or "local"}
    if where["address"] == "local":
        where |= {"num_cpus": max(least, os.cpu_count() or 1), "include_dashboard": False}
        where |= {"runtime_env": {"env_vars": ENVIRONMENT}}
    else:
        reach(where["address"])
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # other versions there, a head that is gone: whatever Ray raises
        way_out = "the same Python and Ray must run everywhere; `ray status` shows the nodes"
        raise Stopped(f"Ray at {where['address']}: {first_line(error)}; {way_out}; what was done is stored") from None
    return ray


def reach(address: str) -> None:
    """Raise InputError unless somebody listens at the address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        way_out = "give host:port of its head, such as 10.0.0.1:6379, from a machine of the cluster"
        raise InputError(f"Ray's address {address!r}: {way_out}")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        way_out = "start it with `ray start --head`, or leave the address out to use this machine"
        raise InputError(f"nobody answers at Ray's address {address} ({error}): {way_out}") from None
