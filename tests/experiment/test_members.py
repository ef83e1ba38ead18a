"""The language of claims: which rows each entry takes, and what is computed of them."""

import types

import numpy as np
import pandas as pd
import pytest

from kvrepro.engine.policy import OWN, Policy
from kvrepro.errors import InputError
from kvrepro.experiment import members
from kvrepro.experiment.judge import Member, NotTestable, Sample
from kvrepro.experiment.members import Language, Table

CLAIM = {"id": "X1", "statement": "So.", "paper": "-", "topic": "t", "source": "s", "contrast": "mean"}
ROWS = pd.DataFrame(
    [
        {"item": f"i{i}", "policy": policy, "size": size, "score": i / 10 + size / 100, "evicted": i}
        for i in range(8)
        for policy in ("lru", "h2o")
        for size in (1, 2)
    ]
    + [{"item": f"i{i}", "policy": "full", "size": np.nan, "score": 1.0, "evicted": 0} for i in range(8)]
)


def check_some(case):
    if case.rows().score.sum() < 1:
        raise NotTestable("too little")


CHAPTER = types.SimpleNamespace(
    CONTRASTS={"count": lambda case: {"a": case.rows().score, "b": case.rows().score}},
    REQUIRES={"some": check_some},
)


def language(rows: pd.DataFrame = ROWS, book: dict | None = None) -> Language:
    return Language({"sets": {"two": ["lru", "h2o"]}, **(book or {})}, {"main": Table(rows)}, CHAPTER)


def asked(table: pd.DataFrame = ROWS, book: dict | None = None, **entries) -> list[Member | NotTestable]:
    return language(table, book).members(CLAIM | entries)


def test_a_row_without_a_value_fits_every_value():
    fitting = Table(ROWS).fitting
    assert len(fitting({"size": 1})) == len(fitting({"size": [1]})) == 16 + 8
    assert len(fitting({"size": {"above": 1}, "policy": None})) == 16 + 8
    assert set(fitting({"size": 1, "policy": "full"}).policy) == {"full"}


@pytest.mark.parametrize(
    ("entries", "labels"),
    [
        ({"filter": {"policy": "lru", "size": 1}}, ["all"]),
        ({"over": {"policy": "two", "size": "all"}}, ["lru, size 1", "lru, size 2", "h2o, size 1", "h2o, size 2"]),
        ({"over": {"policy": ["lru"]}, "members": [{"label": "x", "filter": {"size": 1}}, {}]}, ["lru, x", "lru"]),
    ],
)
def test_members_are_the_product_of_their_axes(entries, labels):
    assert [member.label for member in asked(**entries)] == labels


def test_sides_are_paired_by_unit_and_rows_of_a_unit_are_a_cluster():
    [one] = asked(filter={"size": 1}, sides={"a": {"policy": "lru"}, "b": {"policy": "h2o"}}, contrast="difference")
    assert list(one.what.data) == ["a", "b"]
    assert len(one.what.data) == 8
    [share] = asked(filter={"size": 1}, sides={"a": {"policy": "lru"}}, contrast="share_of_ceiling", bounds=None)
    assert set(share.what.data.full) == {1.0}
    assert share.what.bounds is None
    [mean] = asked(filter={"policy": "lru"}, each="size", limits=[0, "evicted"])
    assert (len(mean.what.data), len(set(mean.what.clusters)), mean.what.each) == (16, 8, 1.5)
    assert mean.what.limits == (0, 3.5)
    with pytest.raises(InputError, match="several rows of an item: lru"):
        asked(sides={"a": {"policy": "lru"}, "b": {"policy": "full"}}, contrast="difference")


def test_units_may_be_chosen_counted_and_averaged():
    sides = {"a": {"policy": "lru"}, "b": {"policy": "h2o"}}
    [some] = asked(filter={"size": 1}, sides=sides, contrast="difference", where={"a.evicted": {"at_least": 6}})
    assert list(some.what.data.index) == ["i6", "i7"]
    [counted] = asked(filter={"policy": "lru", "size": 1}, counts={"at_least": 0.5})
    assert counted.what.data.a.sum() == 3
    gaps = ROWS[~((ROWS.policy == "h2o") & (ROWS["size"] == 2) & (ROWS.item == "i0"))]
    given = {"sides": sides, "contrast": "difference", "mean_over": "size"}
    [mean] = asked(gaps, **given)
    assert mean.what.each == 2
    assert np.isnan(mean.what.data.b["i0"])
    assert mean.what.data.a["i3"] == pytest.approx(0.315)
    [whole] = asked(gaps, **given, whole=True)
    assert whole.what.each == 1
    [apart] = asked(**given | {"sides": {"a": {"policy": "lru", "size": 1}, "b": {"policy": "h2o"}}})
    assert apart.what.data.a["i3"] == pytest.approx(0.31)


def test_parts_hold_together_and_those_that_were_not_run_are_left_out():
    [pair] = asked(filter={"size": 1}, pairs={"policy": ["lru", "h2o", "quest"]}, contrast="difference", some=True)
    assert list(pair.what) == ["lru against h2o"]
    assert pair.some
    pairs = {"pairs": {"policy": "two"}, "both_ways": True, "contrast": "lift_minus_difference"}
    [both] = asked(filter={"size": 1}, sides={"a": {"policy": "lru"}, "b": {"policy": "full"}}, **pairs)
    found = {name: list(part.data) for name, part in both.what.items()}
    assert found == {"lru against h2o": [*"abxy"], "h2o against lru": [*"abxy"]}
    [parts] = asked(filter={"policy": "lru"}, parts={"size": "all"})
    assert list(parts.what) == ["size 1", "size 2"]
    [none] = asked(pairs={"policy": ["quest"]}, contrast="difference")
    assert str(none) == "its parts were not run"
    [own] = asked(contrast="count")
    assert list(own.what) == ["a", "b"]


def test_units_of_two_kinds_are_compared_unpaired():
    rows = ROWS.assign(task=np.where(ROWS.item < "i4", "t", "u"))
    sides = {"a": {"policy": "lru"}, "b": {"policy": "full"}, "x": {"policy": "lru"}, "y": {"policy": "full"}}
    over = {"ab.task": ["t"], "xy.task": ["u"]}
    [one] = asked(rows, filter={"size": 1}, over=over, sides=sides, contrast="unpaired")
    assert one.what.data.a.dropna().index.tolist() == ["i0", "i1", "i2", "i3"]
    assert one.what.data.b.dropna().index.tolist() == ["i4", "i5", "i6", "i7"]


def test_exact_claims_list_their_cases_and_what_cannot_be_tested_says_why():
    [exact] = asked(filter={"policy": "lru"}, exact=True, cases=["item", "size"])
    assert exact.what["i2, size 1"] == pytest.approx(0.21)
    reasons = {
        "not run: quest": {"filter": {"policy": "quest"}},
        "too little": {"filter": {"policy": "lru", "item": "i1"}, "requires": ["some"]},
        "not run: it needs more time": {"rows": "other", "needs": "more time"},
        "not run: quest; it needs a GPU": {"filter": {"policy": "quest"}, "needs": "a GPU"},
    }
    assert {str(asked(**entries)[0]): entries for entries in reasons.values()} == reasons
    failed = ROWS.assign(error="ValueError: no")
    assert str(asked(failed, filter={"size": 1})[0]) == "all 24 items failed (ValueError: no): size 1"


def test_entries_of_a_table_are_shared_and_first_forms_may_lift_them():
    book = {"rows": {"main": {"filter": {"policy": "lru"}, "column": "evicted", "stored": "least to greatest"}}}
    [shared] = asked(book=book, filter={"size": 1})
    assert shared.what.data.a.tolist() == list(range(8))
    assert len(asked(book=book, filter={"policy": None, "size": 1})[0].what.data) == 24
    claims = [CLAIM | {"rule": {"at_least": 3}, "first": {"filter": {"size": 1}, "rule": {"at_least": 30}}}]
    frame = members.verdicts(book | {"claims": claims}, {"main": ROWS}, CHAPTER, model="m", profile="quick")
    assert frame.statement[0].endswith("as first written (at least 30): not reproduced.)")
    assert frame.test[0] == "least to greatest"
    assert frame.model[0] == "stored timings"


def test_a_claim_about_a_set_of_policies_is_put_to_ones_own_in_its_readings(monkeypatch):
    monkeypatch.setitem(OWN, "mine", Policy("Mine", "me", lambda o: o.positions.float()))
    rows = pd.concat([ROWS.assign(reading="as_run"), ROWS[ROWS.policy == "lru"].assign(policy="mine", reading=None)])
    rows.loc[rows.policy == "full", "reading"] = None
    general = CLAIM | {"over": {"policy": "two"}, "readings": "both", "rule": {"at_least": 0}}
    named = general | {"id": "X2", "over": {"policy": ["lru"]}}
    book = {"sets": {"two": ["lru", "h2o"]}, "claims": [general, named, general | {"id": "X3", "own": False}]}
    frame = members.verdicts(book, {"main": rows}, CHAPTER, model="m", profile="quick")
    assert frame.claim.tolist() == ["X1", "X2", "X3", "X1 Mine"]
    assert frame.reading.tolist() == ["as_run"] * 3 + ["any"]
    assert isinstance(language(rows).members(general | {"over": {"policy": ["mine"]}})[0].what, Sample)
    assert [member.label for member in language(rows).members(general | {"over": {"policy": ["mine"]}})] == ["Mine"]
