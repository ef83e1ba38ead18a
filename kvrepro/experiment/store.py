"""Results that grow as they arrive and survive a kill at any moment: one parquet file for each finished job.

    <results>/<chapter>/<study>/<model>/<job>-<digest>.parquet     rows of generations
    <results>/<chapter>/<study>/<key>/<table>-<digest>.parquet     tables of an item (`PerItem`)

A file is written beside its place and renamed. Its name ends with a hash of its bytes, so that a damaged one is seen. A
row is known by its `key`, a hash of all that decides it: condition, model, prompt and code (`code_of`). Nothing is ever
changed: other code, another checkpoint or other data give other keys, and their rows stand side by side.
"""

import hashlib
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from kvrepro.errors import InputError
from kvrepro.paths import CODE

VERSION = b"results 4"
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
        "pages": WHOLE, "bytes_held": WHOLE, "bytes_state": WHOLE, "bytes_full": WHOLE,
        "prefill_seconds": REAL, "decode_seconds": REAL,
        "backend": TEXT, "dtype": TEXT, "device": TEXT, "processor": TEXT, "torch": TEXT, "transformers": TEXT,
        "profile": TEXT, "seed": WHOLE, "date": TEXT, "error": TEXT, "note": TEXT,
    },
    metadata={b"kvrepro": VERSION},
)  # fmt: skip
COLUMNS = SCHEMA.names
IDENTITY = """item model model_hash data_hash dtype device limit max_new_tokens enable_thinking
    policy capacity prefix suffix suffix_mode interval reading switches
    regime share until whitelist spans fair chunk chunk_mode bits""".split()
MODULES = ("answers", "data", "jsonl", "measure", "prompt", "run")
DECIDING = (
    "kvrepro/engine",
    "kvrepro/world",
    "kvrepro/item.py",
    "kvrepro_kernels",
    *(f"kvrepro/experiment/{name}.py" for name in MODULES),
)
LIBRARIES = sys.stdlib_module_names | {"kvrepro", "kvrepro_kernels", "torch", "numpy"}
whole: set[Path] = set()  # files whose bytes this process has checked


# ---- what decides a result


@cache
def code_of(chapter: str = "") -> str:
    """Hash of the source that decides a chapter's results: engine, kernels, world, measures, and its own folder."""
    roots = [CODE[name.split("/")[0]].joinpath(*name.split("/")[1:]) for name in DECIDING]
    roots += [CODE["kvrepro"] / "chapters" / chapter] if chapter else []
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
    if isinstance(value, BaseModel):
        return [type(value).__qualname__, _plain(dict(value))]
    if isinstance(value, Mapping):
        return sorted(([_plain(name), _plain(entry)] for name, entry in value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, list | tuple | range):
        return [_plain(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _source(value: Any) -> str:
    """The content of the file that a function or class comes from, as a hash; "" for the project's own, which
    `code_of` covers, and for libraries; another one each time for what has no file."""
    if (value.__module__ or "").split(".")[0] in LIBRARIES:
        return ""
    code = getattr(value, "__code__", None)
    file = Path(code.co_filename if code else getattr(sys.modules.get(value.__module__), "__file__", None) or "")
    return _hash(file.read_bytes()) if file.is_file() else secrets.token_hex(8)


# ---- files


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context in which an error of the system becomes an InputError."""
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).splitlines()[0]
        way_out = "make room or take away what stands there, or choose another results folder"
        raise InputError(f"{path} cannot be written ({why}): {way_out}. What was stored before is whole") from None


def write(table: pa.Table, folder: Path, name: str) -> None:
    """Write `<name>-<digest>.parquet` into a folder, whole or not at all. Raises InputError."""
    aside = folder / f"{name}.{secrets.token_hex(4)}.tmp"
    with writing(aside):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, aside, compression="zstd")
            aside.replace(folder / f"{name}-{_hash(aside.read_bytes())}.parquet")
        finally:
            aside.unlink(missing_ok=True)


def checked(file: Path) -> Path:
    """The file. Raises InputError where its bytes are not those that were written."""
    if file not in whole:
        if _hash(file.read_bytes()) != file.stem.rpartition("-")[2]:
            raise InputError(f"{file} is damaged: move it away, and what it holds is computed again")
        whole.add(file)
    return file


# ---- rows of a study, of one model or of all


def folder_name(model: str) -> str:
    """A model's name as a folder's."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-") or "model"


def add(folder: Path, rows: Collection[dict[str, Any]]) -> None:
    """Write rows (columns as in SCHEMA, absent ones null) so that they outlive this process. Raises InputError."""
    if rows:
        write(pa.Table.from_pylist(list(rows), schema=SCHEMA), folder, digest([row["key"] for row in rows]))


def latest(folder: Path, names: Collection[str] = ("key",), columns: Collection[str] = COLUMNS) -> pd.DataFrame:
    """Of a folder's rows of equal `names` the one that was written last, of these one without an error where there is
    one. Files of another version are left out, and a line says how many. Raises InputError for a damaged file."""
    files = sorted(folder.rglob("*.parquet"), key=lambda file: file.stat().st_mtime_ns)
    ours = [file for file in files if (pq.read_schema(checked(file)).metadata or {}).get(b"kvrepro") == VERSION]
    if len(ours) < len(files):
        print(f"{folder}: {len(files) - len(ours)} files of another version of kvrepro are left as they are")
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    tables = [pq.read_table(file, columns=list(columns)).cast(schema) for file in ours]
    rows = pa.concat_tables([schema.empty_table(), *tables]).to_pandas()
    failures_first = rows.sort_values("error", key=lambda error: error.isna(), kind="stable")
    return failures_first.drop_duplicates(list(names), keep="last").sort_index()


def read(study: Path | str, columns: Collection[str] = COLUMNS) -> pd.DataFrame:
    """Rows of a study's folder, of all its models: of each question the one that was stored last, of these one without
    an error where there is one. Raises InputError where nothing is stored."""
    if not Path(study).is_dir():
        raise InputError(f"no results at {study}: run the chapter first")
    return latest(Path(study), IDENTITY)[list(columns)].reset_index(drop=True)


# ---- tables of an item, in a folder that appears whole or not at all


def has_tables(folder: Path) -> bool:
    """Whether an item's tables are stored; an emptied folder holds none."""
    return next(folder.glob("*.parquet"), None) is not None


def add_tables(folder: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write an item's tables by name. Of two writers the first wins. Raises InputError."""
    aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        for name, table in tables.items():
            write(pa.Table.from_pandas(table, preserve_index=False), aside, name)
        with writing(aside):
            try:
                aside.rename(folder)
            except OSError:
                if not has_tables(folder):
                    raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of one item by name. Raises InputError for a damaged file."""
    files = sorted(folder.glob("*.parquet"))
    return {file.stem.rpartition("-")[0]: pq.read_table(checked(file)).to_pandas() for file in files}
