"""Every parameter of the notebooks and of the programs, given what it may not be: one line, and nothing is computed.

`pytest tests/hostile -m slow --table` tries all of them and writes data/reliability/bad_values.csv.
"""

import datetime
import functools
import random
from collections import Counter
from pathlib import Path

import bad_values
import pandas as pd
import pytest
from bad_values import Pair

from kvrepro import errors
from kvrepro.engine import generate
from kvrepro.errors import InputError
from kvrepro.experiment import models, provenance, run
from kvrepro.tools import book

TABLE = book.ROOT / "data" / "reliability" / "bad_values.csv"
ANY_FOLDER = ("a word", "a folder", "no such path", "a path that leaves", "markup", "twins", "a template")
ANY_FILE = ("a word", "a negative number", "zero", "NaN", "infinity", "huge", "markup", "twins")
TAKEN: dict[str, tuple[str, ...]] = {  # parameter of a notebook: what it may be after all
    **dict.fromkeys(  # nothing: as many as the profile says, or what is usual
        """n_items options batch_rows workers positions triples ratios max_new_tokens
        wording family cells engine address""".split(), ("nothing",),
    ),
    "time_limit": ("nothing", "a fraction", "above one"),  # seconds; none: no limit
    "family": ("nothing", "an empty list"),  # no model beside the first
    **dict.fromkeys("progress dry_run forced joined later".split(), ("True",)),
    **dict.fromkeys("head layer".split(), ("nothing", "zero")),  # the first of its kind has the number 0
    **dict.fromkeys("seed steps".split(), ("zero",)),
    "protect_frac": ("zero",),  # no guards; in the protection chapter, whose subject they are, it is refused
    **dict.fromkeys("since share guarded".split(), ("a fraction",)), "margin": ("a fraction", "above one"),
    **dict.fromkeys("lengths places pools cadences timed_cadences".split(), ("a list",)),  # two sizes
    "results": ANY_FOLDER,  # a folder of any name may be made
    "until": ("an empty text", *ANY_FOLDER),  # the name of a span of items, which are not loaded yet
    **dict.fromkeys(("quoted", "compare"), ("an empty text",)),  # as by default: none
}  # fmt: skip
TAKEN_BY_PROGRAMS = {
    "out": (*ANY_FILE, "an empty text"),  # a file of any name may be written; some programs have a usual one
    "setting": ANY_FILE + ("a folder", "no such path"),  # here the name of a span, as above
    "option": ("zero",), "seed": ("zero", "huge"),  # here seed=0
    "name": ("a word", "zero", "NaN", "infinity", "huge", "twins", "an empty text"),  # of a study; none: all are listed
    **dict.fromkeys("regime threads".split(), ("an empty text", "zero")),  # as by default: the policy's first; all
    **dict.fromkeys("sinks recent weight".split(), ("zero",)),
}  # fmt: skip


class ReachedError(BaseException):
    """Something was computed."""


@pytest.fixture(autouse=True)
def _nothing_is_computed(monkeypatch):
    def reached(*_, **__):
        raise ReachedError

    for place, name in ((models, "load"), (generate, "generate"), (run, "run"), (Path, "mkdir"), (Path, "write_text")):
        monkeypatch.setattr(place, name, reached)
    monkeypatch.setattr(bad_values, "commands", functools.cache(bad_values.commands))


def of_notebook(pair: Pair) -> str:
    """What becomes of a notebook's parameter, before anything is loaded."""
    given = {pair.parameter: pair.value}
    try:
        book.check(pair.where, {"options": given} if pair.option else given)
    except InputError as error:
        message = str(error)
        named = message.startswith(f"{pair.where}: ") and message.isprintable() and len(message) < 2000
        return "one line" if named else f"not one line: {message[:200]!r}"
    return "accepted" if pair.label in TAKEN.get(pair.parameter, ()) else "taken"


def of_program(pair: Pair, capsys: pytest.CaptureFixture[str]) -> str:
    """What becomes of a command line."""
    capsys.readouterr()
    try:
        errors.program(bad_values.commands()[pair.where][0], pair.where, bad_values.arguments(pair))
    except SystemExit as end:
        printed = capsys.readouterr().err
        if end.code == 2:
            short = printed.count("\n") == 1 and len(printed) < 2000
            return "one line" if short else f"not one line: {printed[:200]!r}"
    except ReachedError:
        pass
    return "accepted" if pair.label in TAKEN_BY_PROGRAMS.get(pair.parameter, ()) else "taken"


def test_a_sample_of_bad_values_gets_one_line_each(capsys):
    drawn = random.Random(15)
    tried = {pair[:3]: of_notebook(pair) for pair in drawn.sample(list(bad_values.of_notebooks()), 320)}
    tried |= {pair[:3]: of_program(pair, capsys) for pair in drawn.sample(list(bad_values.of_programs()), 190)}
    assert len(tried) > 500
    assert not {pair: outcome for pair, outcome in tried.items() if outcome not in ("one line", "accepted")}
    assert Counter(tried.values())["one line"] > 400


@pytest.mark.slow
def test_every_bad_value_gets_one_line(capsys, request, monkeypatch):
    outcomes = [("notebooks", pair.label, of_notebook(pair)) for pair in bad_values.of_notebooks()]
    outcomes += [("programs", pair.label, of_program(pair, capsys)) for pair in bad_values.of_programs()]
    counts = Counter(outcomes)
    assert not [case for case in counts if case[2] not in ("one line", "accepted")]
    if request.config.getoption("--table"):
        monkeypatch.undo()
        rows = [
            {"where": where, "value": value, "outcome": end, "count": n} for (where, value, end), n in counts.items()
        ]
        TABLE.parent.mkdir(exist_ok=True)
        origin = {"date": datetime.date.today().isoformat(), "machine": provenance.machine()}
        pd.DataFrame(rows).sort_values(["where", "value"]).assign(**origin).to_csv(TABLE, index=False)
