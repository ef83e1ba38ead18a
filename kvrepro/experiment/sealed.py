"""Parquet files that appear whole or not at all, and whose every byte is checked when it is read.

Checksums of a file's columns and of its footer stand between data and footer, where readers of parquet ignore them.
"""

import contextlib
import hashlib
import os
import secrets
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvrepro.errors import InputError

GROUP = 32_768  # rows that are read together
SEAL = b"kvrepro\x01"
AWAY = "nothing was changed; move it away, or choose another results folder or name"


def write(table: pa.Table, path: Path, aside: Path | None = None) -> None:
    """Write a parquet file whole or not at all, with checksums before its footer. aside: the temporary file."""
    aside = aside or path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        pq.write_table(table, aside, row_group_size=GROUP, compression="zstd")
        _seal(aside)
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _seal(path: Path) -> None:
    """Insert a checksum of every column chunk, and one of these and the footer, between data and footer."""
    with path.open("r+b") as file:
        footer, _ = _footer(file)
        sums = np.array([_sum(file, *span) for _, span in _chunks(pq.read_metadata(path))], "<u4").tobytes()
        file.seek(-len(footer), os.SEEK_END)
        file.write(sums + SEAL + _digest(sums + footer) + footer)
        file.flush()
        os.fsync(file.fileno())


def _footer(file: Any) -> tuple[bytes, int]:
    """The footer, with its length and the last four letters, and where it starts."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    start = max(0, end - 8 - int.from_bytes(file.read(4), "little"))
    file.seek(start)
    return file.read(), start


def _chunks(metadata: pq.FileMetaData, columns: Collection[str] | None = None) -> list[tuple[int, tuple[int, int]]]:
    """(number, (start, length)) of the columns' chunks, in bytes of the file."""
    count = metadata.num_columns
    names = [metadata.schema.column(i).path.split(".")[0] for i in range(count)]
    chosen = [i for i in range(count) if columns is None or names[i] in columns]
    chunks = []
    for group in range(metadata.num_row_groups):
        for i in chosen:
            chunk = metadata.row_group(group).column(i)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            chunks.append((group * count + i, (start, chunk.total_compressed_size)))
    return chunks


def _sum(file: Any, start: int, length: int) -> int:
    return zlib.crc32(os.pread(file.fileno(), length, start))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class File:
    """A parquet file whose checksums are verified: the footer's here, those of columns when they are read.

    `sealed` is False for a file of an earlier version, without checksums. Raises InputError for one that is not whole.
    """

    def __init__(self, path: Path, way_out: str = AWAY):
        self.path, self.way_out, self.sums = path, way_out, np.array([], "<u4")
        with self._whole(), path.open("rb") as file:
            self.state = _state(os.fstat(file.fileno()))
            footer, start = _footer(file)
            self.metadata = pq.read_metadata(file)
            size = 4 * self.metadata.num_columns * self.metadata.num_row_groups
            seal = os.pread(file.fileno(), size + 24, max(0, start - size - 24))
            self.sealed = seal[size : size + 8] == SEAL
            if self.sealed:
                if _digest(seal[:size] + footer) != seal[size + 8 :]:
                    raise pa.ArrowException("its footer's checksum is wrong")
                self.sums = np.frombuffer(seal[:size], "<u4")
        self.label = self.metadata.metadata or {}
        self.rows = self.metadata.num_rows
        self.columns = self.metadata.schema.to_arrow_schema().names

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """A context in which an error of a broken file becomes an InputError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            why = str(error).splitlines()[0]
            raise InputError(f"{self.path} is no whole parquet file ({why}): {self.way_out}") from None

    def changed(self) -> bool:
        """Whether another file has taken its place."""
        return not self.path.exists() or _state(self.path.stat()) != self.state

    def table(self, columns: Collection[str] | None = None, groups: Sequence[int] | None = None) -> pa.Table:
        """Some columns of some groups of rows, or all. FileNotFoundError where another file has taken its place."""
        with self._whole(), self.path.open("rb") as file:
            if _state(os.fstat(file.fileno())) != self.state:
                raise FileNotFoundError(self.path)
            for number, span in _chunks(self.metadata, columns) if self.sealed else []:
                wanted = groups is None or number // self.metadata.num_columns in groups
                if wanted and _sum(file, *span) != self.sums[number]:
                    raise pa.ArrowException("a column's checksum is wrong")
            parquet = pq.ParquetFile(file, metadata=self.metadata)
            names = None if columns is None else [name for name in self.columns if name in columns]
            if groups is None:
                return parquet.read(names)
            return parquet.read_row_groups(list(groups), names)


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """What differs between two files that had the same path."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
