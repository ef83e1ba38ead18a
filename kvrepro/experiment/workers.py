"""Processes that share a study's jobs: each loads the model once, works on one thread or one GPU, and ends with us.

Jobs and results go through a worker's pipes, pickled by value where they were typed into a notebook. Only the process
that started the workers writes results.
"""

import atexit
import contextlib
import io
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import cloudpickle

from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Job


def default_workers(loaded: Loaded | None) -> int:
    """As many as there are cores, or GPUs for a model on one; fewer where memory does not hold so many models."""
    import torch

    if loaded is not None and loaded.device == "cuda":
        return int(torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if loaded is None:
        return cores
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return max(1, min(cores, int(free // (2 * weights))))


class Pool:
    """Workers for one model; the last one is kept, so that a chapter's next study finds it ready."""

    kept: ClassVar["Pool | None"] = None

    def __init__(self, loaded: Loaded | None, count: int):
        self.loaded, self.count, self.used = loaded, count, count
        self.processes: list[subprocess.Popen[bytes]] = []

    @classmethod
    def of(cls, loaded: Loaded | None, count: int) -> "Pool":
        """The pool that is kept, if it serves, or a new one. One worker is this process itself."""
        kept = cls.kept
        if count == 1:
            return cls(loaded, 1)
        if kept is None or kept.loaded is not loaded or kept.count < count or not kept.alive:
            if kept is not None:
                kept.close()
            cls.kept = cls(loaded, count)
        cls.kept.used = count
        return cls.kept

    @staticmethod
    def possible(loaded: Loaded | None) -> bool:
        """Whether another process can load the same model: from its folder, onto one device."""
        if loaded is None:
            return True
        spread = len({p.device for p in loaded.model.parameters()}) > 1
        return not spread and loaded.path is not None and loaded.path.is_dir()

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def each(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
        """(job, result) as they are done. An exception of a job is raised here."""
        packed = None
        if self.count > 1:
            try:
                packed = [_packed(job) for job in jobs]
            except Exception as error:  # whatever a part says that cannot be pickled
                print(f"one process only: a part of the study cannot be sent to another ({error})".splitlines()[0])
        if packed is None:
            with one_thread():
                for job in jobs:
                    yield job, job.work(self.loaded)
            return
        done = False
        try:
            yield from self._shared(jobs, packed)
            done = True
        finally:
            if not done:  # interrupted, or failed: nobody waits for what they are at
                self.close()

    def _shared(self, jobs: Sequence[Job], packed: Sequence[bytes]) -> Iterator[tuple[Job, Any]]:
        if not self.processes:
            self.processes = [_started(self.loaded, i) for i in range(self.count)]
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        results: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for i in range(len(jobs)):
            waiting.put(i)

        def serve(process: subprocess.Popen[bytes]) -> None:
            while True:
                try:
                    i = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    _send(process.stdin, packed[i])
                    results.put((i, pickle.loads(_received(process.stdout))))
                except (OSError, EOFError, pickle.UnpicklingError):
                    ended = RuntimeError(
                        f"a worker process ended (exit status {process.wait()}) on {jobs[i].size} results"
                    )
                    results.put((i, ended))
                    return

        for process in self.processes[: self.used]:
            threading.Thread(target=serve, args=(process,), daemon=True).start()
        for _ in jobs:
            i, result = results.get()
            if isinstance(result, Exception):
                raise result
            yield jobs[i], result

    def close(self) -> None:
        """End the workers at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []


@atexit.register
def _end() -> None:
    if Pool.kept is not None:
        Pool.kept.close()


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


# ---- the parent's side of a pipe, and the worker's


def _packed(job: Job) -> bytes:
    from kvrepro.engine.policy import OWN

    return bytes(cloudpickle.dumps((OWN, job.work)))  # with what a notebook added to it


def _started(loaded: Loaded | None, number: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvrepro.experiment.workers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment, start_new_session=True,  # an interrupt reaches us alone, and we end them
    )  # fmt: skip
    what = None
    if loaded is not None:
        device = f"cuda:{number}" if loaded.device == "cuda" else loaded.device
        what = (str(loaded.path), device, loaded.dtype, loaded.name)
    _send(process.stdin, pickle.dumps((os.getpid(), what)))
    return process


def _send(stream: Any, data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _received(stream: Any) -> bytes:
    size = stream.read(8)
    data = stream.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError
    return data


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    """A worker: reads jobs until its parent ends."""
    stdin, stdout = sys.stdin.buffer, io.FileIO(os.dup(1), "wb")
    os.dup2(2, 1)  # what a job prints is no result
    parent, what = pickle.loads(_received(stdin))
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    from dataclasses import replace

    from kvrepro.engine.policy import OWN
    from kvrepro.experiment import models

    out = io.BufferedWriter(stdout)
    loaded = None
    with one_thread(), contextlib.suppress(EOFError):
        if what is not None:
            path, device, dtype, name = what
            loaded = replace(models.load(path, device, dtype), name=name)
        while True:
            data = _received(stdin)
            try:
                own, work = pickle.loads(data)
                OWN.update(own)
                reply = cloudpickle.dumps(work(loaded))
            except Exception as error:  # the parent raises it
                reply = _raised(error)
            _send(out, reply)


def _raised(error: Exception) -> bytes:
    with contextlib.suppress(Exception):
        reply = bytes(cloudpickle.dumps(error))
        pickle.loads(reply)
        return reply
    return bytes(cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    main()
