"""The one exception for bad input, and how a program ends with it."""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Bad input, told in one line: what was asked, what stands in its way (both values), and the way out."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around or above a command: an InputError becomes one line on stderr and the exit code 2."""
    try:
        yield
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def meant(name: object, known: Iterable[str]) -> str:
    """`, did you mean 'seed'?` for a name that is nearly one of the known, else nothing."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f", did you mean {close[0]!r}?" if close else ""
