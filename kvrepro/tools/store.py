"""`kvrepro store`: look after folders of results.

kvrepro store verify            is every file whole, with right checksums and columns, and every key there once?
kvrepro store gc --yes          delete what killed runs left and rows that newer ones replaced
kvrepro store diff A B          rows that only one folder has, and rows and verdicts that differ; times do not count
kvrepro store merge A B --into C
kvrepro store bench             seconds of a table of millions of rows: data/reliability/store.csv
"""

import contextlib
import datetime
import re
import shutil
import sys
import tempfile
import time
import timeit
from collections.abc import Sequence
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
from kvrepro.experiment.sharing import UNFINISHED, leftovers
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
    with_identity,
)
from kvrepro.paths import DATA, WORK
from kvrepro.tools.command import with_checked_values
from kvrepro.tools.rows import replace_rows

USUAL = WORK / "data" / "results"
PASSING = {"key", "engine_hash", "chapter", "name", "profile", "seed", "processor", "torch", "transformers",
           "date", "prefill_seconds", "decode_seconds", "peak_bytes",
           "bytes_held"}  # a batch's, divided among its rows  # fmt: skip
COMPARED = [name for name in COLUMNS if name not in PASSING]  # two rows with equal values in these are the same
TIMES = ("seconds", "time", "_ms", "peak", "compress", "decode")  # parts of names of columns that hold measured values
STUDY = 6_000  # rows of the study that the bench looks up
BLOCK = 5_000  # rows that merging adds at a time
ASIDE = re.compile(r".+\.[0-9a-f]{8}\.tmp")  # how `sealed.write` and `paths.replaced` name their unfinished files
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


def items_of(folder: Path) -> dict[str, Tables]:
    """The tables of each item below a results folder, by <chapter>/<name>/<key of the item>."""
    paths = sorted({path.parent for path in folder.glob("*/*/*/*.parquet")})
    return {
        str(path.relative_to(folder)): Tables(folder, path.parts[-3], path.parts[-2])
        for path in paths if KEY.fullmatch(path.name)
    }  # fmt: skip


def ensure_results(*folders: Path) -> None:
    """Raise InputError for a folder without results. Otherwise a chapter's folder, or one too far above, would pass."""
    for folder in folders:
        if not tables_of(folder) and not items_of(folder):
            raise InputError(f"no results in {folder}: give a folder of results, such as {USUAL}")


# ---- verify


def faults(folder: Path) -> tuple[int, list[str]]:
    """The number of files below a results folder, and a line for each fault."""
    count, lines = 0, []
    for name in tables_of(folder):
        files, lines_of_table = unmoved(folder / name, _faults_of)
        count += files
        lines += lines_of_table
    for item in items_of(folder):
        for path in (folder / item).glob("*.parquet"):
            count += 1
            try:
                File(path, f"remove the folder {path.parent}, and it is computed again").table()
            except InputError as error:
                lines.append(str(error))
    return count, lines


def _faults_of(table: Path) -> tuple[int, list[str]]:
    """`faults` of one table. FileNotFoundError where a file was folded into another one meanwhile."""
    paths = [path for path in (table, *parts(table)) if path.exists() or path.is_symlink()]
    lines, readable = [], 0
    for path in paths:
        try:
            keys = RowsFile(path).read(FILED.names).select(["key", "asked"]).to_pandas()
        except FileNotFoundError:
            if not path.is_symlink():
                raise
            lines.append(f"{path}: a link that leads nowhere")
            continue
        except InputError as error:
            lines.append(str(error))
            continue
        readable += 1
        if repeated := int(keys.duplicated().sum() + keys.key.isna().sum()):
            lines.append(f"{path}: {repeated} rows have a key that another row has, or none")
    if readable == len(paths):
        files = files_of(table)
        keys = rows_of(files, index(files), ["key"])["key"]
        if repeated := len(keys) - pc.count_distinct(keys).as_py():
            lines.append(f"{table}: {repeated} rows have the key of a row that was asked otherwise")
    return len(paths), lines


def strays(folder: Path) -> list[Path]:
    """Files in the folders of tables' parts that this package did not write."""
    paths = [path for path in folder.glob("*/*.rows/*") if path.name != "fold.lock" and path.suffix != ".tmp"]
    return [path for path in paths if not PART.fullmatch(path.name)]


@app.command()
def verify(folder: Folder = USUAL) -> None:
    """Check every file: whole, right checksums, right columns, each key once. A line for each fault; exit code 1."""
    ensure_results(folder)
    count, lines = faults(folder)
    print(*lines, sep="\n", end="\n" if lines else "")
    for path in strays(folder):
        print(f"{path} is none of ours: it is never read")
    print(f"{count:,} file{'' if count == 1 else 's'}, {len(lines)} fault{'' if len(lines) == 1 else 's'}")
    raise typer.Exit(1 if lines else 0)


# ---- gc


def garbage(folder: Path) -> list[Path]:
    """What killed processes left half-written: by processes of this host, or older than a day."""
    unfinished = [path for path in (*folder.glob("*/*.tmp"), *folder.glob("*/*/*.tmp")) if _ours(path)]
    of_dead_processes = {path for entry in folder.glob("*/*") if entry.is_dir() for path in leftovers(entry)}
    paths = set()
    for path in (*unfinished, *folder.glob("*/*.rows/fold.lock")):
        with contextlib.suppress(FileNotFoundError):  # its writer has finished
            stat = path.stat()
            left = path in of_dead_processes or time.time() - stat.st_mtime > OLD
            if left and (path.suffix == ".tmp" or stat.st_size == 0):
                paths.add(path)
    return sorted(paths)


def _ours(path: Path) -> bool:
    """Does this package give such a name to half-written files and folders? Those of other programs are left alone."""
    return bool(UNFINISHED.fullmatch(path.name) or (ASIDE.fullmatch(path.name) and path.is_file()))


def _bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())


def _stale(files: list[RowsFile]) -> tuple[int, int, int]:
    """Three counts of a table's files: rows that newer ones replaced, all rows, bytes."""
    rows = sum(file.rows for file in files)
    return rows - len(index(files)), rows, sum(file.path.stat().st_size for file in files)


def compact(table: Path, delete: bool) -> tuple[int, int]:
    """The number of a table's rows that newer ones replaced, and the bytes that deleting them frees. delete: write the
    files again without them. Raises Stopped where another process holds the table's lock."""
    stale, rows, size = steadily(table, _stale)
    if not delete:
        return stale, round(size * stale / max(1, rows))
    opened = Store(table.parents[1], table.parent.name, table.stem)
    try:
        with opened.locked():
            files = files_of(table)
            chosen = index(files)
            for number, file in enumerate(files):
                latest = chosen[chosen.file == number]
                if len(latest) < file.rows:
                    opened.join(files, [file], latest.assign(file=0))
    except filelock.Timeout as error:
        way_out = "call again when it is done; of a process that is gone, remove that file"
        raise Stopped(f"{table} keeps the rows that newer ones replaced: {first_line(error)}; {way_out}") from None
    opened.close()
    return stale, size - steadily(table, _stale)[2]


@app.command()
def gc(folder: Folder = USUAL, yes: Annotated[bool, typer.Option("--yes", help="delete")] = False) -> None:
    """Say what is left over: files that killed runs left half-written, and rows that newer ones replaced, which no
    chapter reads. Nothing is deleted without --yes. Tables per item say nothing about the code that made them: they
    stay. A table that cannot be read stays too, and the exit code is 1."""
    total, tables, unread = 0, tables_of(folder), 0
    if not (left_over := garbage(folder)):
        ensure_results(folder)
    for path in left_over:
        total += (size := _bytes(path))
        print(f"{path}: half-written, {size:,} bytes")
        if yes:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name in tables:
        try:
            rows, size = compact(folder / name, yes)
        except (InputError, Stopped) as error:
            print(error, file=sys.stderr)
            unread += 1
            continue
        total += size
        if rows:
            print(f"{folder / name}: {rows:,} rows that newer ones replaced, {'' if yes else 'about '}{size:,} bytes")
    print(f"{total:,} bytes {'deleted' if yes else 'to delete: --yes deletes them'}")
    if unread:
        raise typer.Exit(1)


# ---- diff


def latest_rows(table: Path, ignored: Sequence[str] = ()) -> pd.DataFrame:
    """The latest row of each question in a table, with the columns that two runs share. The index is `asked`. ignored:
    columns that do not tell two questions apart, such as the device; of rows that differ in these alone the last one is
    taken."""
    latest = steadily(table, lambda files: rows_of(files, index(files), [*COMPARED, "asked"]))
    if ignored:
        for name in ignored:
            place = latest.schema.get_field_index(name)
            latest = latest.set_column(place, SCHEMA.field(name), pa.nulls(len(latest), SCHEMA.field(name).type))
        latest = with_identity(latest.drop_columns("asked"))
    rows = latest.to_pandas().set_index("asked")
    rows["kept"] = rows.kept.map(lambda kept: None if kept is None else tuple(kept))
    return rows[~rows.index.duplicated(keep="last")]


def differing(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """For each row that both tables have, and each common column: does the value differ? Numbers that differ in their
    last bits alone count as equal."""
    both = a.index.intersection(b.index)
    differs = {}
    for name in a.columns.intersection(b.columns, sort=False):
        left, right = a.loc[both, name], b.loc[both, name]
        if pd.api.types.is_float_dtype(left) and pd.api.types.is_float_dtype(right):
            same = pd.Series(np.isclose(left, right, rtol=1e-12, atol=0, equal_nan=True), both)
        else:
            same = (left == right) | (left.isna() & right.isna())
        differs[name] = ~same.astype(bool)
    return pd.DataFrame(differs, index=both)


def unlike(a: dict[str, pd.DataFrame], b: dict[str, pd.DataFrame]) -> bool:
    """Do the tables of two items differ in more than columns of times?"""
    if a.keys() != b.keys():
        return True
    for name, table in a.items():
        columns = [column for column in table if not any(part in str(column) for part in TIMES)]
        if set(table) != set(b[name]) or not table[columns].equals(b[name][columns]):
            return True
    return False


def _named(row: pd.Series) -> str:
    """What was asked for a row: its identity without empty values, as `name=value ...`."""
    identity = {name: row[name] for name in IDENTITY if not pd.isna(row[name]) and row[name] not in ("", "{}", "[]", 0)}
    return " ".join(f"{name}={f'{value:g}' if isinstance(value, float) else value}" for name, value in identity.items())


def verdicts_that_differ(a: Path, b: Path) -> pd.DataFrame:
    """Claims whose verdict differs between two claims.csv, or that one of them lacks: claim, reading, A, B. Of each
    file the first model counts. InputError for a file that holds no verdicts."""
    frames = {}
    for side, path in (("A", a), ("B", b)):
        try:
            table = pd.read_csv(path).drop_duplicates(["claim", "reading"])
            frames[side] = table.set_index(["claim", "reading"]).verdict
        except (ValueError, KeyError, AttributeError) as error:  # raised for files of any other content
            raise InputError(f"{path} is no table of verdicts ({first_line(error)}): run its chapter again") from None
    verdicts = pd.DataFrame(frames).fillna("-")
    return verdicts[verdicts.A != verdicts.B].reset_index()


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
        rows_a, rows_b = latest_rows(a / name), latest_rows(b / name)
        differs = differing(rows_a, rows_b)
        changed_rows = differs[differs.any(axis=1)]
        only = [len(rows_a) - len(differs), len(rows_b) - len(differs)]
        share = len(changed_rows) / max(1, len(differs))
        print(f"{name}: {only[0]:,} only in A, {only[1]:,} only in B, "
              f"{len(changed_rows):,} of {len(differs):,} differ ({share:.2%})")  # fmt: skip
        if len(changed_rows):
            print("    " + ", ".join(f"{column} {count:,}" for column, count in differs.sum().items() if count))
        for question, columns in changed_rows.head(show).iterrows():
            print(f"    {_named(rows_a.loc[question])}")
            for column in columns.index[columns]:
                print(f"      {column}: {str(rows_a[column][question])[:150]} -> {str(rows_b[column][question])[:150]}")
        unequal += len(changed_rows) + sum(only)
    for claims in (path for path in sorted(a.glob("*/claims.csv")) if (b / path.relative_to(a)).is_file()):
        changed = verdicts_that_differ(claims, b / claims.relative_to(a))
        print(f"{claims.relative_to(a)}: {len(changed)} verdicts differ")
        print(*(f"    {row.claim} {row.reading}: {row.A} -> {row.B}\n" for row in changed.itertuples()), sep="", end="")
        unequal += len(changed)
    in_a, in_b = items_of(a), items_of(b)
    both = in_a.keys() & in_b.keys()
    items = sum(unlike(in_a[name].read(Path(name).name), in_b[name].read(Path(name).name)) for name in both)
    only = [len(in_a) - len(both), len(in_b) - len(both)]
    print(f"tables per item: {only[0]:,} only in A, {only[1]:,} only in B, {items:,} of {len(both):,} differ")
    raise typer.Exit(1 if unequal + items + sum(only) else 0)


# ---- merge


def conflicts(folders: list[Path]) -> list[str]:
    """A line for each table in which folders answer the same question differently. Failed rows are not compared."""
    lines = []
    for name in sorted({name for folder in folders for name in tables_of(folder)}):
        seen_rows = pd.DataFrame()
        for folder in (folder for folder in folders if name in tables_of(folder)):
            rows = latest_rows(folder / name)
            rows = rows[rows.error.isna()]
            if len(seen_rows) and (count := int(differing(seen_rows, rows).any(axis=1).sum())):
                lines.append(f"{folder / name}: {count:,} rows differ from those of the folders before")
            new_rows = rows[~rows.index.isin(seen_rows.index)]
            if len(new_rows):
                seen_rows = pd.concat([seen_rows, new_rows]) if len(seen_rows) else new_rows
    seen_items: dict[str, Tables] = {}
    for folder in folders:
        for item, tables in items_of(folder).items():
            key, first = Path(item).name, seen_items.setdefault(item, tables)
            if first is not tables and unlike(first.read(key), tables.read(key)):
                lines.append(f"{folder / item}: differs from that of the folders before")
    return lines


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
    if (conflict_lines := conflicts([*kept, *folders])) and not first:
        print(*conflict_lines, "nothing was merged: --first takes the rows of the folder that comes first", sep="\n")
        raise typer.Exit(1)
    added: list[int] = []
    for folder in folders:
        for name in tables_of(folder):
            with Store(into, name.parent.name, name.stem) as table:
                steadily(folder / name, partial(_add, table, added))
        for item, tables in items_of(folder).items():
            chapter, study, key = Path(item).parts
            Tables(into, chapter, study).add(key, tables.read(key))
    print(*conflict_lines, f"{sum(added):,} rows added to {into}", sep="\n")


def _add(table: Store, counts: list[int], files: Sequence[RowsFile]) -> None:
    """Add the latest rows of another table's files that `table` lacks, or holds as failed where the other's succeeded.
    Append the number of rows of each block to `counts`."""
    chosen, present = index(files), steadily(table.table, index)
    replaces_failure = ~chosen.failed & chosen.asked.isin(present.asked[present.failed])
    chosen = chosen[~chosen.asked.isin(present.asked) | replaces_failure]
    for start in range(0, len(chosen), BLOCK):
        rows = rows_of(files, chosen[start : start + BLOCK], COLUMNS).to_pylist()
        table.add(rows)
        counts.append(len(rows))


# ---- bench


def filled(folder: Path, rows: int, like: Path) -> Store:
    """A table of so many rows: copies of those of the table `like`, each for items of its own and one of ten models.
    Its files are as large as folding makes them."""
    real, table = store.read(like), Store(folder, "bench", "main")
    copies, copies_a_file = -(-rows // len(real)), max(1, store.MOST // len(real))
    for first in range(0, copies, copies_a_file):
        numbers = range(first, min(copies, first + copies_a_file))
        parts = [real.assign(item=real["item"] + f"-{n}", model=f"model-{10 * n // copies}") for n in numbers]
        frame = pd.concat(parts, ignore_index=True)[: rows - first * len(real)]
        random = np.random.default_rng(first).integers(2**63, size=len(frame))
        frame["key"] = [f"{value:016x}" for value in random]
        columns = pa.Table.from_pandas(frame, SCHEMA, preserve_index=False)
        table.write(columns.append_column(FILED.field("asked"), pa.array(random)))
    return table


@app.command()
@with_checked_values
def bench(
    rows: Annotated[list[int], typer.Option(help="of the tables; repeat")] = [10_000, 20_000_000],  # noqa: B006
    like: Annotated[Path, typer.Option(help="a table of real rows")] = USUAL / "leakage" / "answers.parquet",
    out: Annotated[Path, typer.Option(help="the table of seconds")] = DATA / "reliability" / "store.csv",
) -> None:
    """Measure opening, adding, folding and reading with tables of several lengths, in the system's temporary folder."""
    measurements = []
    for count in rows:
        with tempfile.TemporaryDirectory() as scratch:
            measurements.append(measured(Path(scratch), count, like))
        print(measurements[-1])
    print(replace_rows(out, pd.DataFrame(measurements), ["rows", "machine"]).to_string(index=False))


def measured(folder: Path, rows: int, like: Path) -> dict[str, Any]:
    """Seconds that a table of so many rows takes, at best: to open it and look up which of a study's rows are missing;
    to read these rows, those of one item, and two columns of all rows; to add 64 rows, and to fold them in."""
    filled_store = filled(folder, rows, like)
    path = filled_store.table
    real = store.read(like)
    new = pa.Table.from_pandas(real[:64], SCHEMA, preserve_index=False).to_pylist()
    values = np.random.default_rng(0).integers(2**63, size=min(rows, STUDY))  # as `filled` made them
    identities = {f"{value:016x}": value for value in values.tolist()}
    files = files_of(path)
    row: dict[str, Any] = {"rows": rows, "files": len(files), "study": len(identities)}
    row["bytes_per_row"] = sum(file.path.stat().st_size for file in files) / rows
    one_item = {"model": "model-0", "item": f"{real['item'][0]}-0"}
    for name, times, work in (
        ("open", 3, lambda: Store(folder, "bench", "main").missing(identities)),
        ("study", 3, lambda: filled_store.frame(identities)),
        ("one_item", 3, lambda: store.read(path, where=one_item)),
        ("two_columns", 1, lambda: store.read(path, ["policy", "token_f1"])),
        ("add", 10, lambda: filled_store.add(new)),
        ("fold", 1, filled_store.close),
    ):
        row[f"{name}_seconds"] = min(timeit.repeat(work, number=1, repeat=times))
    from kvrepro.experiment import provenance  # imports torch

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return row | {"date": today, "machine": provenance.machine(), "pyarrow": pa.__version__}


def main() -> None:
    """The command `kvrepro store`."""
    program(app, "kvrepro store")


if __name__ == "__main__":
    main()
