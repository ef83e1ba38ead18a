"""`kvrepro store`: look after folders of results.

kvrepro store verify            is every file whole, with right checksums and columns, and every key there once?
kvrepro store gc --yes          delete what killed runs left and rows that newer ones replaced
kvrepro store diff A B          rows that only one folder has, and rows and verdicts that differ; times do not count
kvrepro store merge A B --into C
kvrepro store bench             seconds of a table of millions of rows: data/reliability/store.csv
"""

import contextlib
import datetime
import os
import re
import shutil
import tempfile
import time
import timeit
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import filelock
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import typer

from kvrepro.errors import InputError, Stopped, first_line, program
from kvrepro.experiment import store
from kvrepro.experiment.sealed import File
from kvrepro.experiment.sharing import UNFINISHED, leftovers, make_folder
from kvrepro.experiment.store import Store, Tables
from kvrepro.experiment.table import (
    COLUMNS,
    FILED,
    IDENTITY,
    PART,
    SCHEMA,
    RowsFile,
    files_of,
    index,
    parts,
    rows_of,
    steadily,
    unmoved,
    with_asked,
)
from kvrepro.paths import DATA, WORK
from kvrepro.tools.rows import replace_rows

USUAL = WORK / "data" / "results"
PASSING = {"key", "engine_hash", "chapter", "name", "profile", "seed", "processor", "torch", "transformers",
           "date", "prefill_seconds", "decode_seconds", "peak_bytes",
           "bytes_held"}  # a batch's, divided among its rows  # fmt: skip
SAID = [name for name in COLUMNS if name not in PASSING]  # what two rows must share to be the same
TIMES = ("seconds", "time", "_ms", "peak", "compress", "decode")  # in names of columns that differ between two runs
STUDY = 6_000  # rows of the study that the bench looks up
BLOCK = 5_000  # rows that merging adds at a time
ASIDE = re.compile(r".+\.[0-9a-f]{8}\.tmp")  # as `sealed.write` and `paths.replaced` name what they write
KEY = re.compile(r"[0-9a-f]{16}")  # as `fingerprint.digest` names an item
OLD = 86_400  # seconds after which a file that another machine left half-written is a leftover
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Look after folders of results.")
Folder = Annotated[Path, typer.Argument(help="a folder of results")]


def tables_of(folder: Path) -> list[Path]:
    """The tables of rows below a results folder, as <chapter>/<name>.parquet. InputError where there is no folder."""
    if not folder.is_dir():
        raise InputError(f"no folder {folder}: give a folder of results, such as {USUAL}")
    rows = {path.with_suffix(".parquet") for path in folder.glob("*/*.rows") if parts(path.with_suffix(".parquet"))}
    return sorted(path.relative_to(folder) for path in {*folder.glob("*/*.parquet"), *rows})


def items_of(folder: Path) -> Iterator[tuple[Tables, str]]:
    """The tables per item below a results folder, with the key of each item."""
    for path in sorted({path.parent for path in folder.glob("*/*/*/*.parquet")}):
        if KEY.fullmatch(path.name):
            yield Tables(folder, path.parent.parent.name, path.parent.name), path.name


def ensure_results(*folders: Path) -> None:
    """Raise InputError for a folder without results: that of a chapter, or one too far above, would pass for whole."""
    for folder in folders:
        if not tables_of(folder) and next(items_of(folder), None) is None:
            raise InputError(f"no results in {folder}: give a folder of results, such as {USUAL}")


# ---- verify


def faults(folder: Path) -> tuple[int, list[str]]:
    """How many files there are, and a line for each fault."""
    count, found = 0, []
    for name in tables_of(folder):
        files, lines = unmoved(folder / name, _faults_of)
        count += files
        found += lines
    for tables, key in items_of(folder):
        for path in (tables.folder / key).glob("*.parquet"):
            count += 1
            try:
                File(path, f"remove the folder {path.parent}, and it is computed again").table()
            except InputError as error:
                found.append(str(error))
    return count, found


def _faults_of(table: Path) -> tuple[int, list[str]]:
    """`faults` of one table. FileNotFoundError where a file was folded into another one meanwhile."""
    paths = [path for path in (table, *parts(table)) if path.exists() or path.is_symlink()]
    found, whole = [], 0
    for path in paths:
        try:
            keys = RowsFile(path).read(FILED.names).select(["key", "asked"]).to_pandas()
        except FileNotFoundError:
            if not path.is_symlink():
                raise
            found.append(f"{path}: a link that leads nowhere")
            continue
        except InputError as error:
            found.append(str(error))
            continue
        whole += 1
        if twice := int(keys.duplicated().sum() + keys.key.isna().sum()):
            found.append(f"{path}: {twice} rows have a key that another row has, or none")
    if whole == len(paths):
        files = files_of(table)
        keys = rows_of(files, index(files), ["key"])["key"]
        if twice := len(keys) - pc.count_distinct(keys).as_py():
            found.append(f"{table}: {twice} rows have the key of a row that was asked otherwise")
    return len(paths), found


def strays(folder: Path) -> list[Path]:
    """What lies among the parts of tables and is none of them."""
    ours = {"fold.lock"}
    paths = [path for rows in folder.glob("*/*.rows") if rows.is_dir() for path in rows.iterdir()]
    return [path for path in paths if path.name not in ours and not PART.fullmatch(path.name) and path.suffix != ".tmp"]


@app.command()
def verify(folder: Folder = USUAL) -> None:
    """Check every file: whole, right checksums, right columns, each key once. A line for each fault; exit code 1."""
    ensure_results(folder)
    count, found = faults(folder)
    print(*found, sep="\n", end="\n" if found else "")
    for path in strays(folder):
        print(f"{path} is none of ours: it is never read")
    print(f"{count:,} files, {len(found)} fault{'' if len(found) == 1 else 's'}")
    raise typer.Exit(1 if found else 0)


# ---- gc


def garbage(folder: Path) -> list[Path]:
    """What killed processes left half-written: of this host, or older than a day by the clock that dates files."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            now = os.stat(file.name).st_mtime
    except OSError:  # a folder that one may only read: this machine's clock has to do
        now = time.time()
    named = [path for path in (*folder.glob("*/*.tmp"), *folder.glob("*/*/*.tmp")) if _ours(path)]
    ours = {path for of in folder.glob("*/*") if of.is_dir() for path in leftovers(of)}
    found = []
    for path in (*named, *folder.glob("*/*.rows/fold.lock")):
        with contextlib.suppress(FileNotFoundError):  # its writer has finished
            stat = path.stat()
            if (path in ours or now - stat.st_mtime > OLD) and (path.suffix == ".tmp" or stat.st_size == 0):
                found.append(path)
    return sorted({*found})


def _ours(path: Path) -> bool:
    """Does a half-written file or folder have a name that this package gives? Another program's is left alone."""
    return bool(UNFINISHED.fullmatch(path.name) or (ASIDE.fullmatch(path.name) and path.is_file()))


def _bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())


def _stale(files: list[RowsFile]) -> tuple[int, int, int]:
    """Of a table: rows that newer ones replaced, rows, bytes."""
    rows = sum(file.rows for file in files)
    return rows - len(index(files)), rows, sum(file.path.stat().st_size for file in files)


def compact(table: Path, delete: bool) -> tuple[int, int]:
    """Rows of a table that newer ones replaced, and bytes that are free without them. delete: write its files again
    without them. Stopped where another process holds the table's lock."""
    stale, rows, size = steadily(table, _stale)
    if not delete:
        return stale, round(size * stale / max(1, rows))
    opened = Store(table.parents[1], table.parent.name, table.stem)
    try:
        with opened.locked():
            files = files_of(table)
            chosen = index(files)
            for number, file in enumerate(files):
                mine = chosen[chosen.file == number]
                if len(mine) < file.rows:
                    opened.join(files, [file], mine.assign(file=0))
    except filelock.Timeout as error:
        way_out = "call again when it is done; of a process that is gone, remove that file"
        raise Stopped(f"{table} keeps the rows that newer ones replaced: {first_line(error)}; {way_out}") from None
    opened.close()
    return stale, size - steadily(table, _stale)[2]


@app.command()
def gc(folder: Folder = USUAL, yes: Annotated[bool, typer.Option("--yes", help="delete")] = False) -> None:
    """Say what is left over: files that killed runs left half-written, and rows that newer ones replaced, which no
    chapter reads. Nothing is deleted without --yes. Tables per item say nothing about the code that made them: they
    stay."""
    total, tables = 0, tables_of(folder)
    for path in garbage(folder):
        total += (size := _bytes(path))
        print(f"{path}: half-written, {size:,} bytes")
        if yes:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name in tables:
        rows, size = compact(folder / name, yes)
        total += size
        if rows:
            print(f"{folder / name}: {rows:,} rows that newer ones replaced, {'' if yes else 'about '}{size:,} bytes")
    print(f"{total:,} bytes {'deleted' if yes else 'to delete: --yes deletes them'}")


# ---- diff


def said(table: Path, whatever: Sequence[str] = ()) -> pd.DataFrame:
    """The latest rows of a table by what was asked, those columns alone that two runs share. whatever: columns that do
    not tell two rows apart, such as the device; of rows that differ in these alone the last one is taken."""
    found = steadily(table, lambda files: rows_of(files, index(files), [*SAID, "asked"]))
    if whatever:
        for name in whatever:
            at = found.schema.get_field_index(name)
            found = found.set_column(at, SCHEMA.field(name), pa.nulls(len(found), SCHEMA.field(name).type))
        found = with_asked(found.drop_columns("asked"))
    rows = found.to_pandas().set_index("asked")
    rows["kept"] = rows.kept.map(lambda kept: None if kept is None else tuple(kept))
    return rows[~rows.index.duplicated(keep="last")]


def differing(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Of rows that both have: which columns differ, True or False, by what was asked. Numbers are equal up to the last
    bits."""
    both = a.index.intersection(b.index)
    left, right, found = a.loc[both], b.loc[both], {}
    for name in (name for name in a if name in b):
        one, two = left[name], right[name]
        if pd.api.types.is_float_dtype(one) and pd.api.types.is_float_dtype(two):
            same = pd.Series(np.isclose(one, two, rtol=1e-12, atol=0, equal_nan=True), both)
        else:
            same = (one == two) | (one.isna() & two.isna())
        found[name] = ~same.astype(bool)
    return pd.DataFrame(found, index=both)


def _unlike(a: dict[str, pd.DataFrame], b: dict[str, pd.DataFrame]) -> bool:
    """Do two items' tables differ, but for columns of times?"""
    if {name: len(table) for name, table in a.items()} != {name: len(table) for name, table in b.items()}:
        return True
    for name, one in a.items():
        columns = [column for column in one if not any(part in str(column) for part in TIMES)]
        if set(one) != set(b[name]) or not one[columns].equals(b[name][columns]):
            return True
    return False


def _named(row: pd.Series) -> str:
    """What was asked, as far as it says something."""
    told = {name: row[name] for name in IDENTITY if not pd.isna(row[name]) and row[name] not in ("", "{}", "[]", 0)}
    return " ".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in told.items())


def _verdicts(a: Path, b: Path) -> pd.DataFrame:
    """Claims whose verdict is another, or that only one of two claims.csv has, of the first model in each: claim,
    reading, A, B. InputError for a file that holds no verdicts."""
    frames = {}
    for side, path in (("A", a), ("B", b)):
        try:
            table = pd.read_csv(path).drop_duplicates(["claim", "reading"])
            frames[side] = table.set_index(["claim", "reading"]).verdict
        except (ValueError, KeyError, AttributeError) as error:  # whatever a file that is none of ours holds
            raise InputError(f"{path} is no table of verdicts ({first_line(error)}): run its chapter again") from None
    found = pd.DataFrame(frames).fillna("-")
    return found[found.A != found.B].reset_index()


@app.command()
def diff(
    a: Folder, b: Folder, show: Annotated[int, typer.Option(min=0, help="differing rows to print of each table")] = 0
) -> None:
    """Compare two folders of results: rows that only one has, rows that differ, by column, and verdicts. Times, dates
    and versions do not count. Exit code 1 where anything differs."""
    ensure_results(a, b)
    unequal = 0
    tables = {folder: tables_of(folder) for folder in (a, b)}
    for name in sorted({*tables[a], *tables[b]}):
        if lacking := [str(folder) for folder in (a, b) if name not in tables[folder]]:
            print(f"{name}: not in {lacking[0]}")
            unequal += 1
            continue
        one, two = said(a / name), said(b / name)
        found = differing(one, two)
        others = found[found.any(axis=1)]
        only = [len(one) - len(found), len(two) - len(found)]
        share = len(others) / max(1, len(found))
        print(f"{name}: {only[0]:,} only in A, {only[1]:,} only in B, "
              f"{len(others):,} of {len(found):,} differ ({share:.2%})")  # fmt: skip
        if len(others):
            print("    " + ", ".join(f"{column} {count:,}" for column, count in found.sum().items() if count))
        for asked, columns in others.head(show).iterrows():
            print(f"    {_named(one.loc[asked])}")
            for column in columns.index[columns]:
                print(f"      {column}: {str(one[column][asked])[:150]} -> {str(two[column][asked])[:150]}")
        unequal += len(others) + sum(only)
    for claims in (path for path in sorted(a.glob("*/claims.csv")) if (b / path.relative_to(a)).is_file()):
        changed = _verdicts(claims, b / claims.relative_to(a))
        print(f"{claims.relative_to(a)}: {len(changed)} verdicts differ")
        print(*(f"    {row.claim} {row.reading}: {row.A} -> {row.B}\n" for row in changed.itertuples()), sep="", end="")
        unequal += len(changed)
    each = [{f"{t.folder.relative_to(folder)}/{key}": (t, key) for t, key in items_of(folder)} for folder in (a, b)]
    both = each[0].keys() & each[1].keys()
    rows = sum(_unlike(*(found[name][0].read(found[name][1]) for found in each)) for name in both)
    only = [len(found) - len(both) for found in each]
    print(f"tables per item: {only[0]:,} only in A, {only[1]:,} only in B, {rows:,} of {len(both):,} differ")
    raise typer.Exit(1 if unequal + rows + sum(only) else 0)


# ---- merge


def conflicts(folders: list[Path]) -> list[str]:
    """A line for each table whose rows, asked the same, differ between folders. A row that failed differs from none."""
    found = []
    for name in sorted({name for folder in folders for name in tables_of(folder)}):
        known = pd.DataFrame()
        for folder in (folder for folder in folders if name in tables_of(folder)):
            rows = said(folder / name)
            rows = rows[rows.error.isna()]
            if len(known) and (count := int(differing(known, rows).any(axis=1).sum())):
                found.append(f"{folder / name}: {count:,} rows differ from those of the folders before")
            known = pd.concat([part for part in (known, rows[~rows.index.isin(known.index)]) if len(part)] or [rows])
    seen: dict[str, tuple[Tables, str]] = {}
    for folder in folders:
        for tables, key in items_of(folder):
            item = f"{tables.folder.relative_to(folder)}/{key}"
            first, _ = seen.setdefault(item, (tables, key))
            if first is not tables and _unlike(first.read(key), tables.read(key)):
                found.append(f"{folder / item}: differs from that of the folders before")
    return found


@app.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(help="folders of results")],
    into: Annotated[Path, typer.Option(help="a folder of results, new or not; its own rows come first")],
    first: Annotated[bool, typer.Option("--first", help="where rows differ, take the first folder's")] = False,
) -> None:
    """Join folders of results, from several machines for instance. Where a file is not whole, or rows that were asked
    the same differ, nothing is written and the exit code is 1; a row that failed makes room for one that did not.
    Verdicts are not merged: the chapters compute them from the rows."""
    ensure_results(*folders)
    kept = [into] if into.is_dir() else []
    if broken := [line for folder in [*kept, *folders] for line in faults(folder)[1]]:
        print(*broken, "nothing was merged", sep="\n")
        raise typer.Exit(1)
    if (found := conflicts([*kept, *folders])) and not first:
        print(*found, "nothing was merged: --first takes the rows of the folder that comes first", sep="\n")
        raise typer.Exit(1)
    added: list[int] = []
    for folder in folders:
        for name in tables_of(folder):
            with Store(into, name.parent.name, name.stem) as table:
                steadily(folder / name, partial(_add, table, added))
        for tables, key in items_of(folder):
            Tables(into, tables.folder.parent.name, tables.folder.name).add(key, tables.read(key))
    print(*found, f"{sum(added):,} rows added to {into}", sep="\n")


def _add(table: Store, counts: list[int], files: Sequence[RowsFile]) -> None:
    """Add the latest rows of another table's files that this one lacks or has as failed; how many, to `counts`."""
    chosen, mine = index(files), steadily(table.table, index)
    there = chosen.asked.isin(mine.asked) & (chosen.failed | ~chosen.asked.isin(mine.asked[mine.failed]))
    chosen = chosen[~there]
    for start in range(0, len(chosen), BLOCK):
        rows = rows_of(files, chosen[start : start + BLOCK], COLUMNS).to_pylist()
        table.add(rows)
        counts.append(len(rows))


# ---- bench


def filled(folder: Path, rows: int, like: Path) -> Store:
    """A table of so many rows: those of a real one again and again, for other items and ten models, in files as folding
    leaves them."""
    real = store.read(like)
    source = pa.Table.from_pandas(real, SCHEMA, preserve_index=False)
    table = Store(folder, "bench", "main")
    copies = min(store.MOST, rows + len(source) - 1) // len(source)
    files = -(-rows // (copies * len(source)))
    for file in range(files):
        each = []
        for copy in range(file * copies, (file + 1) * copies):
            told = {"item": [f"{item}-{copy}" for item in real["item"]]}
            told["model"] = [f"model-{file * 10 // files}"] * len(real)
            random = np.random.default_rng(copy).integers(2**63, size=len(real))
            told["key"] = [f"{value:016x}" for value in random]
            one = source
            for name, values in told.items():
                one = one.set_column(one.schema.get_field_index(name), SCHEMA.field(name), pa.array(values))
            each.append(one.append_column(FILED.field("asked"), pa.array(random)))
        table.write(pa.concat_tables(each)[: rows - file * copies * len(source)])
    return table


@app.command()
def bench(
    rows: Annotated[list[int], typer.Option(help="of the tables; repeat")] = [10_000, 20_000_000],  # noqa: B006
    like: Annotated[Path, typer.Option(help="a table of real rows")] = USUAL / "leakage" / "answers.parquet",
    out: Annotated[Path, typer.Option(help="the table of seconds")] = DATA / "reliability" / "store.csv",
    folder: Annotated[Path | None, typer.Option(help="for about 200 bytes a row, deleted afterwards")] = None,
) -> None:
    """Measure opening, adding, folding and reading with tables of several lengths."""
    found = []
    if folder is not None:
        make_folder(folder)
    for count in rows:
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            found.append(measured(Path(aside), count, like))
        print(found[-1])
    table = pd.DataFrame(found)
    print(replace_rows(out, table, ["rows", "machine"]).to_string(index=False))


def measured(folder: Path, rows: int, like: Path) -> dict[str, Any]:
    """Seconds with a table of so many rows: to open it and look up which of a study's rows are missing, to read these
    rows, those of one item, two columns of all rows, to add 64 rows, and to fold what was added."""
    filled_store = filled(folder, rows, like)
    path = filled_store.table
    real = store.read(like)
    new = pa.Table.from_pandas(real[:64], SCHEMA, preserve_index=False).to_pylist()
    values = np.random.default_rng(0).integers(2**63, size=len(real))[: min(rows, STUDY)]  # as `filled` made them
    keys, asked = [f"{value:016x}" for value in values], values.tolist()
    files = files_of(path)
    said: dict[str, Any] = {"rows": rows, "files": len(files), "study": len(keys)}
    said["bytes_per_row"] = sum(file.path.stat().st_size for file in files) / rows
    one = {"model": "model-0", "item": f"{real['item'][0]}-0"}
    for name, times, work in (
        ("open", 3, lambda: Store(folder, "bench", "main").missing(keys, asked)),
        ("study", 3, lambda: filled_store.frame(keys, identities=asked)),
        ("one_item", 3, lambda: store.read(path, where=one)),
        ("two_columns", 1, lambda: store.read(path, ["policy", "token_f1"])),
        ("add", 10, lambda: filled_store.add(new)),
        ("fold", 1, filled_store.close),
    ):
        said[f"{name}_seconds"] = min(timeit.repeat(work, number=1, repeat=times))
    from kvrepro.experiment import provenance  # imports torch

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return said | {"date": today, "machine": provenance.machine(), "pyarrow": pa.__version__}


def main() -> None:
    """The command `kvrepro store`."""
    program(app, "kvrepro store")


if __name__ == "__main__":
    main()
