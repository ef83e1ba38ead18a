"""A folder that several processes write, also from several machines: file names of each process, a lock, and the files
that killed processes left."""

import contextlib
import os
import platform
import re
import secrets
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import psutil

from kvrepro.errors import InputError

UNFINISHED = re.compile(r".*@(.+)-(\d+)-[0-9a-f]{8}(\.parquet)?\.tmp")  # names of `named`; groups: host, process
PATIENCE = 5.0  # seconds for which a lock file may be empty
LOG = "sweep.log"  # in a folder of results: what a sweep's chapters printed
HOST = re.sub(r"[^\w.]", "_", platform.node() or f"{uuid.getnode():x}")  # a machine without a name has a number


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which an error of the system becomes an InputError, but not a lock's timeout or a missing file."""
    try:
        yield
    except (filelock.Timeout, FileNotFoundError):
        raise
    except OSError as error:
        why = (error.strerror or str(error)).splitlines()[0]
        way_out = "make room or take away what stands there, or choose another results folder"
        raise InputError(f"{path} cannot be written ({why}): {way_out}. What was stored before is whole") from None


def prepare(results: Path, folder: Path) -> None:
    """Make a folder below the results folder, and try whether it can be written. Prints a line where the results folder
    holds other things only."""
    ours = ("*/*.rows", "*/*.parquet", "*/claims.csv", "*/*/*/*.parquet")
    if results.is_dir() and not any(any(results.glob(pattern)) for pattern in ours):
        others = sorted(path.name for path in results.iterdir() if path.name != LOG)
        if others:
            print(f"results go into {results}, which holds other things ({others[0]}): in folders of their own")
    make_folder(folder)


def make_folder(folder: Path) -> None:
    """Make a folder where it is missing, and try whether it can be written. Raises InputError."""
    with writing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:  # below /proc, for instance
            raise PermissionError(None, "no folder can be made there") from None
        tempfile.TemporaryFile(dir=folder).close()


def named(number: int) -> str:
    """A file name that no other process uses: a number, by which files are ordered, the host and the process."""
    return f"{number:08d}@{HOST}-{os.getpid()}-{secrets.token_hex(4)}.parquet"


def acquired(path: Path, wait: float) -> contextlib.AbstractContextManager[Any]:
    """The lock at a path. Raises filelock.Timeout after `wait` seconds. A lock file that stays empty for PATIENCE
    is that of a process that was killed before it wrote its name; it is removed, since filelock would keep it."""
    lock, unnamed = filelock.SoftFileLock(path, poll_interval=0.05), _unnamed(path)
    try:
        return lock.acquire(timeout=min(wait, PATIENCE))
    except filelock.Timeout:
        if wait < PATIENCE:
            raise
        if unnamed is not None and _unnamed(path) == unnamed:
            path.unlink(missing_ok=True)
        return lock.acquire(timeout=wait - PATIENCE)


def _unnamed(path: Path) -> tuple[int, int] | None:
    """The inode and time of an empty file; None for another one."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return None if stat.st_size else (stat.st_ino, stat.st_mtime_ns)
    return None


def leftovers(folder: Path) -> list[Path]:
    """Files that a process of this host was writing when it was killed."""
    paths = []
    for path in folder.glob("*.tmp"):
        match = UNFINISHED.fullmatch(path.name)
        if match and match[1] == HOST and not psutil.pid_exists(int(match[2])):
            paths.append(path)
    return paths
