"""Verdicts on a few claims alone: a test of one claim need not judge all of a chapter's."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrepro.experiment import claims


@contextmanager
def only(*ids: str) -> Iterator[None]:
    """Claims files hold no claims but these. As a decorator of a test too."""
    load = claims.load_claims

    def few(chapter: str) -> dict:
        book = load(chapter)
        return book | {"claims": [claim for claim in book["claims"] if claim["id"] in ids]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "load_claims", few)
        yield
