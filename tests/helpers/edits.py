"""Whose keys an edit of this package changes. No file is touched: an edited module stands in for its own."""

from collections.abc import Callable, Hashable
from functools import cache
from typing import TypeVar

import pytest

from kvrepro.experiment import fingerprint
from kvrepro.experiment.fingerprint import Code, Module
from kvrepro.paths import CODE

Named = TypeVar("Named", bound=Hashable)
UNCHANGED = Code()


def stale(keys: Callable[[], dict[Named, str]], file: str, line: str) -> set[Named]:
    """Of `keys()` those that change with a line of a file: a decorator before a function or class, a comment before
    anything else."""
    text = (CODE["kvrepro"] / file).read_text(encoding="utf-8")
    edit = "@staticmethod" if line.startswith(("def", "class")) else "# why"
    edited = text.replace(f"\n{line}", f"\n{edit}\n{line}", 1)
    assert edited != text
    first = unchanged(keys)
    module = "kvrepro." + file.removesuffix(".py").replace("/", ".")
    code = Code()  # the other modules need no second parsing, and their definitions read what they read
    code._modules = UNCHANGED._modules | {module: Module(module, edited)}
    code._reads = {reader: read for reader, read in UNCHANGED._reads.items() if reader[0] != module}
    second = under(code, keys)
    return {name for name, key in first.items() if second[name] != key}


@cache
def unchanged(keys: Callable[[], dict[Named, str]]) -> dict[Named, str]:
    """`keys()` of this package's code as it is."""
    return under(UNCHANGED, keys)


def under(code: Code, keys: Callable[[], dict[Named, str]]) -> dict[Named, str]:
    """`keys()` of other code than this package's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fingerprint, "PROJECT", code)
        fingerprint.code.cache_clear()
        fingerprints = keys()
    fingerprint.code.cache_clear()
    return fingerprints


def edit_of(function: Callable) -> tuple[str, str]:
    """The file and line at which `stale` edits a function or class of this package."""
    file = function.__module__.removeprefix("kvrepro.").replace(".", "/") + ".py"
    return file, f"{'class' if isinstance(function, type) else 'def'} {function.__name__}("
