"""Rows of the catalogue: every parameter is read by one of the row's functions, in every reading."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from kvrepro.engine import evict
from kvrepro.engine import policy as policies
from kvrepro.engine.catalogue import CATALOGUE, SHARED
from kvrepro.engine.condition import ensure
from kvrepro.engine.shared import SWITCHES
from kvrepro.errors import InputError

PINNED = yaml.safe_load((Path(__file__).parents[2] / "data" / "words" / "formula_tests.yml").read_text())
ENGINES = {"window", "recent", "sinks"}  # what the engine itself reads
PAGES = {"page", "dense_layers"}  # read by the decode attention of a policy that frees nothing


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_parameter_is_read(name):
    policy = CATALOGUE[name]
    read = set().union(*map(policies.hints_of, policy.functions))
    read |= set(SWITCHES) if policy.shared else ENGINES if policy.frees else ENGINES | PAGES
    assert set(policy.parameters) | set(policy.as_run) <= read


def test_every_switch_of_the_shared_cap_is_read():
    """By a policy's function, or by the engine under its name."""
    read = {name for p in SHARED.values() for f in p.functions for name in inspect.signature(f).parameters}
    for module in (evict, policies):
        read |= set(re.findall(r"""p(?:arameters)?(?:\[|\.get\()"(\w+)\"""", inspect.getsource(module)))
    for name in SHARED:  # the first step may be any other number than the policy's own, so it is read from there
        chosen = {switch: 1000 + number for number, switch in enumerate(SWITCHES)}
        read.add(list(chosen)[SHARED[name].first_step(chosen) - 1000])
    assert set(SWITCHES) <= read


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_parameter_says_what_it_may_be(name):
    policy = CATALOGUE[name]
    for key in {**policy.parameters, **policy.as_run}:
        kind = policy.kind(key)
        for value in (float("nan"), None, -7, ()):
            with pytest.raises(InputError):
                ensure(kind, x=value)


def test_every_policy_names_tests_that_exist():
    assert {"full", *CATALOGUE} <= set(PINNED)
    for test in {test for tests in PINNED.values() for test in tests}:
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (Path(__file__).parents[1] / file).read_text(), re.M), test
