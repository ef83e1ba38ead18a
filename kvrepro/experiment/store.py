"""Results that grow as they arrive and survive a kill at any moment.

`Store`: rows of generations. `data/results/<chapter>/<name>.parquet` is the table; beside it `<name>.rows/` holds what
has arrived since, one small file per `add`, each written aside and renamed, so that a reader or a resumed run meets
whole files only. Closing the store folds them in. A row is known by its `key`: a hash of configuration, model, prompt
and the code that decides it. A row whose key changed is stale: it is computed again, and the new row takes its place.

`Tables`: whatever else is computed per item, a folder of tables for each, which appears whole or not at all.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvrepro.errors import InputError
from kvrepro.paths import replaced

MARK = {b"kvrepro": b"results 1"}
TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()
SCHEMA = pa.schema(
    {
        "key": TEXT, "chapter": TEXT, "name": TEXT, "item": TEXT, "task": TEXT,
        "model": TEXT, "model_hash": TEXT, "data_hash": TEXT, "engine_hash": TEXT,
        "policy": TEXT, "capacity": WHOLE, "prefix": REAL, "suffix": REAL, "suffix_mode": TEXT, "interval": WHOLE,
        "reading": TEXT, "execution": TEXT, "switches": TEXT, "regime": TEXT, "share": REAL, "until": TEXT,
        "whitelist": TEXT, "spans": TEXT, "fair": REAL, "chunk": WHOLE, "chunk_mode": TEXT, "bits": WHOLE,
        "limit": WHOLE, "max_new_tokens": WHOLE, "prompt_tokens": WHOLE, "cut": WHOLE, "n_generated": WHOLE,
        "prediction": TEXT, "answer": TEXT,
        "token_f1": REAL, "token_f1_longbench": REAL, "exact_match": REAL, "rouge_l": REAL, "repetition_4gram": REAL,
        "first_right": REAL, "rest_f1": REAL, "evidence_at": REAL, "evidence_coverage": REAL,
        "official": REAL, "metric": TEXT,
        "kept": pa.list_(WHOLE), "kept_mean": REAL, "kept_hash": TEXT, "evicted": WHOLE, "policy_calls": WHOLE,
        "pages": WHOLE, "bytes_held": WHOLE, "bytes_state": WHOLE, "bytes_full": WHOLE, "peak_bytes": WHOLE,
        "prefill_seconds": REAL, "decode_seconds": REAL,
        "backend": TEXT, "dtype": TEXT, "device": TEXT, "torch": TEXT, "transformers": TEXT,
        "profile": TEXT, "seed": WHOLE, "date": TEXT, "error": TEXT, "note": TEXT,
    },
    metadata=MARK,
)  # fmt: skip
COLUMNS = SCHEMA.names
IDENTITY = ["item", "model", "dtype", "device", "limit", "max_new_tokens", "policy", "capacity", "prefix", "suffix",
            "suffix_mode", "interval", "reading", "execution", "switches", "regime", "share", "until", "whitelist",
            "spans", "fair", "chunk", "chunk_mode", "bits"]  # fmt: skip


class Store:
    """One results table, open for adding rows; use as a context manager. One writer at a time."""

    def __init__(self, results: str | Path, chapter: str, name: str):
        """Open or create. Raises InputError for a file that is not ours, is half-written, or is open elsewhere."""
        self.table = Path(results) / chapter / f"{name}.parquet"
        self.folder = self.table.with_name(f"{name}.rows")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            way_out = "wait for it, or choose another name"
            raise InputError(f"{self.table} is being written by another process: {way_out}") from None
        try:
            parts = sorted(self.folder.glob("*.parquet"))
            self._next = int(parts[-1].stem) + 1 if parts else 0
            rows = self.frame()
            self.keys = set(rows.key[rows.error.isna()])
        except BaseException:
            os.close(self._lock)
            raise

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys without a row; a row with an error counts as missing, so that a resumed run tries it again."""
        return [key for key in keys if key not in self.keys]

    def add(self, rows: Collection[dict[str, Any]]) -> None:
        """Write rows (columns as in SCHEMA, absent ones null) so that they outlive this process."""
        unknown = {column for row in rows for column in row} - set(COLUMNS)
        if unknown:
            raise InputError(f"unknown column {sorted(unknown)[0]}: a results row has {', '.join(COLUMNS)}")
        _write(pa.Table.from_pylist(list(rows), schema=SCHEMA), self.folder / f"{self._next:08d}.parquet")
        self._next += 1
        self.keys |= {row["key"] for row in rows if row.get("error") is None}

    def frame(self) -> pd.DataFrame:
        """All rows so far, the latest of each (item, condition)."""
        return _latest(_tables(self.table)).to_pandas()

    def close(self) -> None:
        """Fold the arrived rows into the table. The order (replace, then remove) loses nothing if killed in between."""
        parts = sorted(self.folder.glob("*.parquet"))
        if parts:
            _write(_latest(_tables(self.table)), self.table)
        for part in parts:
            part.unlink()
        for leftover in self.folder.glob("*.tmp"):
            leftover.unlink()
        if not self.table.exists():  # nothing was ever stored: leave no trace
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                self.folder.parent.rmdir()
        os.close(self._lock)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read(table: str | Path) -> pd.DataFrame:
    """The rows of a table, also of one whose run was interrupted or is under way."""
    tables = _tables(Path(table))
    if not tables:
        raise InputError(f"no results at {table}: run the chapter first")
    return _latest(tables).to_pandas()


def _tables(table: Path) -> list[pa.Table]:
    paths = [table, *sorted(table.with_name(f"{table.stem}.rows").glob("*.parquet"))]
    return [_read(path) for path in paths if path.exists()]


def _latest(tables: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    return table.filter(pa.array(~table.select(IDENTITY).to_pandas().duplicated(keep="last").to_numpy()))


def _read(path: Path) -> pa.Table:
    way_out = "nothing was changed; move it away, or choose another results folder or name"
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no whole parquet file ({str(error).splitlines()[0]}): {way_out}") from None
    for name in set(COLUMNS) - set(table.schema.names):  # written before that column existed
        table = table.append_column(name, pa.nulls(len(table), SCHEMA.field(name).type))
    if len(table.schema.names) == len(COLUMNS) and MARK.items() <= (table.schema.metadata or {}).items():
        with contextlib.suppress(pa.ArrowException):
            return table.select(COLUMNS).cast(SCHEMA)
    raise InputError(f"{path} is not a results table of this version of kvrepro: {way_out}")


def _write(table: pa.Table, path: Path) -> None:
    with replaced(path) as aside:
        pq.write_table(table, aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())


def replace_rows(table: Path, rows: pd.DataFrame, by: Sequence[str], digits: int = 6) -> pd.DataFrame:
    """Write rows into a table of the project (CSV), in the place of those whose columns `by` have the same values; the
    whole table. digits: of its numbers."""
    known = pd.read_csv(table) if table.is_file() else rows[:0]
    same = pd.MultiIndex.from_frame(known[list(by)]).isin(pd.MultiIndex.from_frame(rows[list(by)]))
    whole = pd.concat([part for part in (known[~same], rows) if len(part)] or [rows], ignore_index=True)
    with replaced(table) as aside:
        whole.to_csv(aside, index=False, float_format=f"%.{digits}g")
    return whole


class Tables:
    """Tables of items, `<results>/<chapter>/<name>/<key>/<table>.parquet`."""

    def __init__(self, results: str | Path, chapter: str, name: str):
        self.folder = Path(results) / chapter / name

    def __contains__(self, key: str) -> bool:
        return (self.folder / key).is_dir()

    def add(self, key: str, tables: Mapping[str, pd.DataFrame]) -> None:
        """Write an item's tables aside, then give the folder its name. Of two writers the first wins."""
        aside = self.folder / f"{key}.{os.getpid()}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, table in tables.items():
            _write(pa.Table.from_pandas(table, preserve_index=False), aside / f"{name}.parquet")
        try:
            os.rename(aside, self.folder / key)
        except OSError:
            if key not in self:
                raise
            shutil.rmtree(aside)

    def read(self, key: str) -> dict[str, pd.DataFrame]:
        """The tables of one item. Raises InputError for a file that is not whole."""
        files = sorted((self.folder / key).glob("*.parquet"))
        try:
            return {file.stem: pd.read_parquet(file) for file in files}
        except (pa.ArrowException, OSError) as error:
            what, folder = str(error).splitlines()[0], self.folder / key
            way_out = f"remove the folder {folder}, and it is computed again"
            raise InputError(f"{folder} holds a broken file ({what}): {way_out}") from None
