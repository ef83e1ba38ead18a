"""Rows of the catalogue: every parameter is read by one of the row's functions, in every reading."""

import inspect

import pytest

from kvrepro.allowed import holds, said
from kvrepro.catalogue import CATALOGUE
from kvrepro.policy import REGIMES, SUMS, call

ENGINES = {"window", "recent", "sinks"}  # what the engine itself reads
PAGES = {"page", "dense_layers"}  # read by the decode attention of a policy that frees nothing


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_parameter_is_read(name):
    policy = CATALOGUE[name]
    read = set().union(*(inspect.signature(f).parameters for f in policy.functions))
    read |= ENGINES if policy.frees else ENGINES | PAGES
    assert set(policy.parameters) | set(policy.as_run) <= read


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_parameter_says_what_it_may_be(name):
    policy = CATALOGUE[name]
    for key in {**policy.parameters, **policy.as_run}:
        kind = policy.kind(key)
        assert said(kind)
        assert not any(holds(kind, value) for value in (float("nan"), None, -7, ()))


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_a_reading_that_differs_says_where_and_how(name):
    policy = CATALOGUE[name]
    assert bool(policy.as_run) <= bool(policy.code)
    assert policy.reading("as_described") != policy.reading("as_run") or not policy.as_run
    assert set(policy.refuses) <= set(REGIMES)
    assert set(policy.needs) <= set(SUMS)
    assert policy.source
    assert policy.formula.startswith(("s_j", "Z_j"))


def test_call_hands_over_only_what_a_function_names():
    assert call(lambda o, kernel=3: (o, kernel), 1, parameters={"kernel": 5, "other": 7}) == (1, 5)
