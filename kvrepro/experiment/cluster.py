"""A study's jobs on a Ray cluster: one model on each GPU or core.

The process that runs the study hands out jobs, at most `AHEAD` to a worker, and takes results as they come, so that
Ray's object store never holds more than these. It alone writes rows. A worker that is lost, alone or with its node, is
replaced, and its jobs are done again; a job that costs three workers is given up, after all others are done.
"""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import queue
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrepro.errors import InputError, Stopped, first_line
from kvrepro.experiment import workers
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Job
from kvrepro.experiment.workers import TRIES, Lost
from kvrepro.paths import CODE

AHEAD = 2  # jobs that a worker holds: the one that it does, and the next
PATIENCE = 15.0  # seconds without an answer until a line says that the run is waiting for workers
START = 60.0  # seconds that Ray may take to start here, or to connect; then the run ends with one line
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # no usage reports, no warning
ALONE = {  # a Ray of this machine: no idle process for every core, and time to start on a busy machine, below START
    "RAY_prestart_worker_first_driver": "0", "RAY_raylet_start_wait_time_s": "45",
}  # fmt: skip
ENDED = "this process was ended, by Ray as its node died or by a kill: call again, what was done is stored"
_crew: dict[Any, list["_Member"]] = {}  # by recipe, one at most: the workers that run


# ---- the cluster


def connect(address: str | None = None, least: int = 1) -> Any:
    """The package ray, connected to the cluster at `host:port`, or to a Ray of this machine, which starts here and ends
    with this process. None: `$RAY_ADDRESS`, which Ray's own job runner sets, or else this machine.

    least: workers that this machine must take, however few cores it has. Raises InputError within seconds where ray is
    not installed, nobody is at the address, or Python or Ray have other versions there. Raises Stopped, after START at
    most, where Ray does not answer, or does not start in two attempts.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    try:
        import ray
    except ImportError:
        raise InputError("engine 'ray' needs the package ray: pip install 'kvrepro[cluster]'") from None
    if ray.is_initialized():
        return ray
    _crew.clear()
    arguments: dict[str, Any] = {"address": address or os.environ.get("RAY_ADDRESS") or "local"}
    if arguments["address"] != "local":
        reach(arguments["address"])
        error = _begun(ray, arguments)
        if isinstance(error, TimeoutError):
            way_out = "look at its nodes with `ray status`, or leave the address out to use this machine"
            raise Stopped(f"Ray at {arguments['address']}: {error}: {way_out}; what was done is stored")
        if error:
            way_out = "the same Python and Ray must run everywhere"
            raise InputError(f"Ray at {arguments['address']}: {first_line(error)}; {way_out}")
        return ray
    os.environ.update(ALONE)
    workers.keep_blocks()
    arguments |= {"num_cpus": max(least, os.cpu_count() or 1), "include_dashboard": False}
    if (error := _begun(ray, arguments)) and not isinstance(error, TimeoutError):
        print(f"Ray did not start ({first_line(error)}): once more", file=sys.stderr, flush=True)
        error = _begun(ray, arguments)
    if error:
        way_out = "end what is left of earlier ones by `ray stop --force`, or take engine 'local'"
        raise Stopped(f"Ray does not start on this machine ({first_line(error)}): {way_out}; what was done is stored")
    return ray


def _begun(ray: Any, arguments: dict[str, Any]) -> Exception | None:
    """Call `ray.init`. Returns None, or what it raised, or a TimeoutError after START. The call waits in C++, where
    nothing can interrupt it, so it has a thread of its own. On Linux Ray's processes end with the thread that started
    them, so it stays as long as this process does; where the start failed, it ends, and they end with it."""
    answer: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def begin() -> None:
        try:
            ray.init(**arguments, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            answer.put(error)
            return
        answer.put(None)
        threading.Event().wait()

    threading.Thread(target=begin, daemon=True).start()
    try:
        return answer.get(timeout=START)
    except queue.Empty:
        return TimeoutError(f"no answer within {START:.0f} seconds")


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


def usual_workers(loaded: Loaded | None, engine: str | None, address: str | None) -> int:
    """The number of workers where the user gives none: as many as this machine has room for, or as many as the cluster
    has cores (GPUs, for a model on one)."""
    if engine == "ray":
        ray = connect(address)
        if len(ray.nodes()) > 1:
            kind = "GPU" if loaded is not None and loaded.device == "cuda" else "CPU"
            return max(1, int(ray.cluster_resources().get(kind, 0)))
    return workers.default_workers(loaded)


@functools.cache
def code() -> str:
    """Hash of the package's source. A worker with other source would compute other rows under the same keys."""
    total = hashlib.sha256()
    for name, folder in CODE.items():
        for file in sorted(folder.rglob("*.py")):
            total.update(f"{name}/{file.relative_to(folder).as_posix()}".encode() + file.read_bytes())
    return total.hexdigest()[:16]


# ---- a worker


class Worker:
    """One model on one GPU or one core."""

    def begin(self, recipe: workers.Recipe | None, model_hash: str, driver: str, where: Sequence[str]) -> str:
        """Load the model from its folder. Returns "", or why it cannot be used. driver: the hash of the driver's code.
        where: the driver's working folder and its module search path, which are used as far as this node has them."""
        node = platform.node()
        if Path(where[0]).is_dir():
            os.chdir(where[0])
        sys.path += [path for path in where[1:] if path not in sys.path]
        if code() != driver:
            way_out = "install the same one on every node; if it was edited during the run, start the command again"
            return f"node {node} has another kvrepro than this machine: {way_out}"
        if recipe is not None and not Path(recipe[0]).is_dir():
            return (
                f"node {node} has no folder {recipe[0]}: put the checkpoint there, or on a file system that all share"
            )
        try:
            loaded = workers.prepare(recipe)
        except InputError as error:
            return f"node {node}: {error}"
        if loaded is not None and loaded.hash != model_hash:
            return f"node {node} has other files in {loaded.path}: copy the checkpoint there again"
        return ""

    def do(self, packed: bytes) -> Any:
        """A job's result."""
        return workers.done(packed)


@dataclass
class _Member:
    """A worker as the driver sees it."""

    actor: Any
    begun: Any  # the reference to the result of `begin`; None: the worker is ready
    jobs: deque[tuple[Any, int]] = field(default_factory=deque)  # references and numbers of its jobs, oldest first

    @property
    def next(self) -> Any:
        """The reference whose result comes next; None if it has nothing to do."""
        return self.begun if self.begun is not None else self.jobs[0][0] if self.jobs else None


def _hire(ray: Any, loaded: Loaded | None) -> _Member:
    on_gpu = loaded is not None and loaded.device == "cuda"
    kind = ray.remote(num_cpus=0 if on_gpu else 1, num_gpus=int(on_gpu), max_restarts=0, max_task_retries=0)(Worker)
    actor, model_hash = kind.remote(), "" if loaded is None else loaded.hash
    return _Member(actor, actor.begin.remote(workers.recipe_of(loaded), model_hash, code(), [os.getcwd(), *sys.path]))


# ---- the driver


def results_of(
    loaded: Loaded | None, jobs: Sequence[Job], count: int, address: str | None
) -> Iterator[tuple[Job, Any]]:
    """(job, result) in the order in which jobs are done, by up to `count` workers of a cluster; a count of 1 means this
    process itself.

    Workers stay for a chapter's next study. Raises a job's exception; InputError for a node that cannot load the model;
    Lost for jobs that were given up, after all others, and where no node is left.
    """
    packed = workers.packed(jobs) if count > 1 else None
    if packed is None:
        yield from workers.results_of(loaded, jobs, 1)
        return
    ray = connect(address, count)
    recipe = workers.recipe_of(loaded)
    if recipe not in _crew:
        _dismiss(ray)
    crew = _crew.setdefault(recipe, [])
    crew += [_hire(ray, loaded) for _ in range(count - len(crew))]
    try:
        with _last_word():
            for i, result in _shared(ray, crew, packed, lambda: _hire(ray, loaded)):
                yield jobs[i], result
    finally:
        if any(member.jobs for member in crew):  # jobs are under way, and nobody waits for them
            _dismiss(ray)


@contextlib.contextmanager
def _last_word() -> Iterator[None]:
    """A context for work with Ray, which ends this process in C++, with exit code 1 and no message, when it finds its
    node dead. A shell that waits for our end prints the message then."""
    shell = subprocess.Popen(["sh", "-c", f'read -r _ || echo "{ENDED}" >&2'], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # an interrupt has ended the shell, too
            shell.communicate(b"\n")


def _dismiss(ray: Any) -> None:
    for member in (member for crew in _crew.values() for member in crew if ray.is_initialized()):
        ray.kill(member.actor)
    _crew.clear()


def _shared(
    ray: Any, crew: list[_Member], packed: Sequence[bytes], hire: Callable[[], _Member]
) -> Iterator[tuple[int, Any]]:
    """(number, result) of every job, in the order in which they are done."""
    waiting, left, printed = deque(range(len(packed))), len(packed), False
    cost = Counter[int]()  # number of a job -> workers that died of it; -1: of loading the model
    given_up: dict[int, str] = {}  # number of a job -> why
    while left:
        while (member := _next(crew, len(waiting))) is not None:
            member.jobs.append((member.actor.do.remote(packed[waiting[0]]), waiting.popleft()))
        busy = {member.next: member for member in crew if member.next is not None}
        done, _ = ray.wait(list(busy), timeout=PATIENCE)
        if not done:
            _ensure_a_node(ray)
            if not printed and all(member.begun is not None for member in crew):
                print("Ray: waiting for its workers: they are starting, or no GPU or core is free", flush=True)
                printed = True
            continue
        member = busy[done[0]]
        try:
            result = ray.get(done[0])
        except ray.exceptions.RayActorError as error:
            _ensure_a_node(ray)
            waiting.extendleft(i for _, i in reversed(member.jobs))
            died_of = member.jobs[0][1] if member.jobs else -1
            cost[died_of] += 1
            print(f"Ray: a worker was lost ({_reason(error)}); another one takes its jobs", file=sys.stderr, flush=True)
            if cost[-1] >= TRIES:
                raise Lost(f"{TRIES} workers died as they loaded the model: {_reason(error)}") from None
            if died_of >= 0 and cost[died_of] >= TRIES:
                given_up[died_of] = _reason(error)
                waiting.remove(died_of)
                left -= 1
            crew[crew.index(member)] = hire()
            continue
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        if member.begun is not None:
            if result:
                raise InputError(result)
            member.begun = None
            cost[-1] = 0
            continue
        left -= 1
        yield member.jobs.popleft()[1], result
    if given_up:
        why = next(iter(given_up.values()))
        raise Lost(f"{len(given_up)} of {len(packed)} parts cost {TRIES} workers each and were given up: {why}")


def _ensure_a_node(ray: Any) -> None:
    """Raise Lost where no node is left."""
    if not any(node["Alive"] for node in ray.nodes()):
        ray.shutdown()
        raise Lost("Ray's last node is gone: call again, what was done is stored")


def _next(crew: list[_Member], waiting: int) -> _Member | None:
    """The worker that gets the next of `waiting` jobs: the one with the fewest. A worker gets a second job only while
    enough are left for those that have none or are still loading their model."""
    idle = sum(not member.jobs for member in crew)
    ready = [member for member in crew if member.begun is None]
    if not waiting or not ready:
        return None
    member = min(ready, key=lambda candidate: len(candidate.jobs))
    return member if not member.jobs or (len(member.jobs) < AHEAD and waiting > idle) else None


def _reason(error: Exception) -> str:
    """The cause of an actor's death, from Ray's long message."""
    lines = [line.strip() for line in str(error).partition("Some common causes")[0].splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line or "exit" in line.lower()]
    return (causes or lines or [type(error).__name__])[-1].rpartition("exit detail: ")[2].strip()[:200]
