"""Looks at rows of the decode loop when they end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kvrepro.engine import decode
from kvrepro.engine.rows import Rows


@contextmanager
def watched_ends(note: Callable[[Rows, list[int]], None]) -> Iterator[None]:
    """Inside the block `note` gets the batch and the numbers of its rows that end, whenever some do."""
    finish = decode._finished

    def watched(call, rows, done, picked, seconds):
        generations = list(finish(call, rows, done, picked, seconds))
        if done:
            note(rows, done)
        yield from generations

    with patch.object(decode, "_finished", watched):
        yield
