"""Results that grow as they arrive and survive a kill at any moment: one parquet file for each finished job.

    <results>/<chapter>/<study>/<model>/<job>-<digest>.parquet     rows of generations
    <results>/<chapter>/<study>/<key>/<table>-<digest>.parquet     tables of an item (`PerItem`)

A file is written beside its place and renamed. Its name ends with a hash of its bytes, so that a damaged one is seen. A
row is known by its `key`, a hash of all that decides it: condition, model, prompt and code. Nothing is ever changed.
"""

import hashlib
import inspect
import secrets
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvrepro.errors import InputError
from kvrepro.paths import CODE, replaced

TEXT, WHOLE, REAL, TRUTH = pa.string(), pa.int64(), pa.float64(), pa.bool_()
SCHEMA = pa.schema(
    {
        "key": TEXT, "chapter": TEXT, "name": TEXT, "item": TEXT, "task": TEXT,
        "model": TEXT, "model_hash": TEXT, "data_hash": TEXT, "engine_hash": TEXT,
        "policy": TEXT, "capacity": WHOLE, "prefix": REAL, "suffix": REAL, "suffix_mode": TEXT, "interval": WHOLE,
        "reading": TEXT, "execution": TEXT, "switches": TEXT, "regime": TEXT, "share": REAL, "until": TEXT,
        "whitelist": TEXT, "spans": TEXT, "fair": REAL, "chunk": WHOLE, "chunk_mode": TEXT, "bits": WHOLE,
        "limit": WHOLE, "max_new_tokens": WHOLE, "prompt_tokens": WHOLE, "cut": WHOLE, "n_generated": WHOLE,
        "enable_thinking": TRUTH,
        "prediction": TEXT, "answer": TEXT,
        "thought": TEXT,  # the <think> block that the prediction leaves out
        "any_script": TRUTH,  # true where texts are compared in any script; null where as the papers do (`Item.papers`)
        "token_f1": REAL, "token_f1_longbench": REAL, "exact_match": REAL, "rouge_l": REAL, "repetition_4gram": REAL,
        "first_right": REAL, "rest_f1": REAL, "evidence_at": REAL, "evidence_coverage": REAL,
        "official": REAL, "metric": TEXT,
        "kept": pa.list_(WHOLE), "kept_mean": REAL, "kept_hash": TEXT, "evicted": WHOLE, "policy_calls": WHOLE,
        "pages": WHOLE, "bytes_held": WHOLE, "bytes_full": WHOLE,
        "prefill_seconds": REAL, "decode_seconds": REAL,
        "backend": TEXT, "dtype": TEXT, "device": TEXT, "torch": TEXT, "transformers": TEXT,
        "profile": TEXT, "seed": WHOLE, "date": TEXT, "error": TEXT, "note": TEXT,
    }
)  # fmt: skip
COLUMNS = SCHEMA.names
IDENTITY = """item model model_hash data_hash dtype device limit max_new_tokens enable_thinking
    policy capacity prefix suffix suffix_mode interval reading switches
    regime share until whitelist spans fair chunk chunk_mode bits""".split()
LIBRARIES = sys.stdlib_module_names | {"kvrepro", "kvrepro_kernels", "torch", "numpy"}


# ---- what decides a result


@cache
def code_of(chapter: str = "") -> str:
    """Hash of the source that decides a chapter's results: engine, kernels, world, measures, and its own folder."""
    package, modules = CODE["kvrepro"], "answers data jsonl measure prompt run".split()
    roots = [CODE["kvrepro_kernels"], package / "engine", package / "world", package / "item.py"]
    roots += [package / "experiment" / f"{module}.py" for module in modules]
    roots += [package / "chapters" / chapter] if chapter else []
    files = [file for root in roots for file in ([root] if root.suffix else sorted(root.rglob("*.py")))]
    return digest([[file.name, _hash(file.read_bytes())] for file in files])


def digest(*values: Any) -> str:
    """Hash of plain data, of dataclasses, and of functions by their name and the file that they come from. What was
    typed into a notebook has no file: its results are never found again."""
    return _hash(repr(_plain(values)).encode())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, partial):
        return ["partial", _plain([value.func, value.args, value.keywords])]
    if isinstance(value, FunctionType | type):
        return [value.__module__, value.__qualname__, _source(value)]
    if is_dataclass(value):
        return [type(value).__qualname__, _plain({f.name: getattr(value, f.name) for f in fields(value)})]
    if isinstance(value, Mapping | set | frozenset):
        return sorted(map(_plain, value.items() if isinstance(value, Mapping) else value), key=repr)
    if isinstance(value, list | tuple | range):
        return [_plain(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _source(value: Any) -> str:
    """The content of the file that a function or class comes from, as a hash; "" for the project's own, which
    `code_of` covers, and for libraries; another one each time for what has no file."""
    if (value.__module__ or "").split(".")[0] in LIBRARIES:
        return ""
    try:
        return _hash(Path(inspect.getfile(value)).read_bytes())
    except (OSError, TypeError):
        return secrets.token_hex(8)


def write(table: pa.Table, folder: Path, name: str) -> None:
    """Write `<name>-<digest>.parquet` into a folder, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data = sink.getvalue().to_pybytes()
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / f"{name}-{_hash(data)}.parquet") as aside:
        aside.write_bytes(data)


def _table(file: Path) -> pa.Table:
    """A file's table. Raises InputError where its bytes are not those that were written."""
    data = file.read_bytes()
    if _hash(data) != file.stem.rpartition("-")[2]:
        raise InputError(f"{file} is damaged: move it away, and what it holds is computed again")
    return pq.read_table(pa.BufferReader(data))


# ---- rows of a study, of one model or of all


def add(folder: Path, rows: Collection[dict[str, Any]]) -> None:
    """Write rows (columns as in SCHEMA, absent ones null) so that they outlive this process."""
    if rows:
        write(pa.Table.from_pylist(list(rows), schema=SCHEMA), folder, digest([row["key"] for row in rows]))


def read(folder: Path | str, names: Collection[str] = IDENTITY) -> pd.DataFrame:
    """Of a folder's rows of equal `names` the one that was written last, of these one without an error where there is
    one. Files with other columns, of another version, are left out, and a line says how many. Raises InputError for a
    damaged file."""
    files = sorted(Path(folder).rglob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    ours = [table for table in map(_table, files) if table.schema.equals(SCHEMA)]
    if len(ours) < len(files):
        print(f"{folder}: {len(files) - len(ours)} files of another version of kvrepro are left as they are")
    rows = pa.concat_tables([SCHEMA.empty_table(), *ours]).to_pandas()
    failures_first = rows.sort_values("error", key=lambda error: error.isna(), kind="stable")
    return failures_first.drop_duplicates(list(names), keep="last").sort_index().reset_index(drop=True)


# ---- tables of an item, in a folder that appears whole or not at all


def add_tables(folder: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write an item's tables by name. Of two writers the first wins."""
    aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        for name, table in tables.items():
            write(pa.Table.from_pandas(table, preserve_index=False), aside, name)
        if not any(folder.glob("*.parquet")):
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of one item by name. Raises InputError for a damaged file."""
    files = sorted(folder.glob("*.parquet"))
    return {file.stem.rpartition("-")[0]: _table(file).to_pandas() for file in files}
