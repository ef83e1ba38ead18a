"""The one exception for bad input, and how a program ends with it."""

import sys
from collections.abc import Iterator
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
