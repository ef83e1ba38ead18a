"""A folder that several processes write, also from several machines: the names of its files, and what to clear away."""

import contextlib
import os
import platform
import re
import secrets
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import filelock
import psutil

from kvrepro.errors import InputError

UNFINISHED = re.compile(r".*@(.+)-(\d+)-[0-9a-f]{8}(\.parquet)?\.tmp")  # names of `named`; groups: host, process
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


def leftovers(folder: Path) -> list[Path]:
    """Files that a process of this host was writing when it was killed."""
    paths = []
    for path in folder.glob("*.tmp"):
        match = UNFINISHED.fullmatch(path.name)
        if match and match[1] == HOST and not psutil.pid_exists(int(match[2])):
            paths.append(path)
    return paths
