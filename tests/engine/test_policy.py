"""Allowed and refused conditions, how a policy's functions are combined, and rows of the catalogue: every parameter is
read by one of the row's functions, in every reading."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conditions import check, other

from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Prefill, SharedCap, ensure
from kvrepro.engine.policy import Policy, budget_of, find, is_own, own
from kvrepro.errors import InputError

FINE = Condition("snapkv", 40, Prefill(), reading="as_described")
CAPPED = Condition("lru", 64, SharedCap())
REFUSED = {  # of a condition: what it is called with instead -> what the one line says
    "unknown policy 'lruu', did you mean 'lru'?; there are: path/to/file.py:NAME, full, ": {"policy": "lruu"},
    "lru cannot run in regime 'prefill': it chooses one set of tokens for all layers; ": {"policy": "lru"},
    "snapkv cannot run in regime 'shared cap': it chooses for each layer; take pre": {"regime": "shared cap"},
    "kv_zip cannot run in regime 'per step': it repeats": {"policy": "kv_zip", "regime": "per step"},
    "policy 'nowhere/own.py:MINE': there is no file 'nowhere/own.py', give the path": {"policy": "nowhere/own.py:MINE"},
    "policy 'own.py' is a file: add the name of a Policy that it defines, as in own.py:NAME": {"policy": "own.py"},
    "reading 'as_heard': give as_run or as_described": {"reading": "as_heard"},
    "snapkv needs a budget: a number of tokens, or a share such as 0.2": {"budget": None},
    "policy full keeps every token, not 40": {"policy": "full"},
    "budget 0: give a number of tokens such as 64, or a share such as 0.2, at most 1.0": {"budget": 0},
    "interval 0 for decode cap: ": {"regime": "decode cap", "interval": 0},
    "prefix 1.0: should be less than 1; suffix -0.1: should be greater": {"prefix": 1.0, "suffix": -0.1},
    "switches [8]: should be hashable": {"switches": (("window", [8]),)},
    "budget 100 >= 100 tokens to compress: every page is read": {"policy": "quest_pages", "budget": 100},
    "no guards or quotas": {"policy": "quest_pages", "prefix": 0.1},
    "cake has no quota to mix in": {"policy": "cake", "fair": 0.5},
    "streaming_llm has no quota to mix in": {"policy": "streaming_llm", "reading": "as_run", "fair": 0.5},
    "SnapKV has no parameter 'windows': it has window, recent": {"switches": (("windows", 4),)},
    "window 0 for SnapKV: ": {"switches": (("window", 0),)},
    "budget 100 >= 100 tokens to compress: nothing leaves; lower it, or say 1.0": {"budget": 100},
    "budget 31 < 32 protected tokens (32 recent)": {"budget": 31},
    "budget 40 < 42 protected tokens (10 prefix + 8 suffix + 32 recent)": {"prefix": 0.25, "suffix": 0.2},
    "budget 40 < 52 protected tokens (20 prefix + 24 suffix + 32 recent)": {"prefix": 0.5, "suffix": 0.6},
    "budget 0.009 of 100 tokens keeps 0: raise the share": {"budget": 0.009},
    "budget 20 < 32 protected tokens (32 recent)": {
        "regime": "chunked",
        "when": "every_chunk",
        "chunk": 50,
        "budget": 0.4,
    },
}
REFUSED_IN_THE_SHARED_CAP = {
    "budget 7 < 8 protected tokens": {"budget": 7, "prefix": 0.1, "suffix": 0.1},
    "takes a number of tokens in regime 'shared cap', not 0.2": {"budget": 0.2},
    "has neither whitelist nor bits": {"bits": 4, "whitelist": ("a",)},
    "LRU has no parameter 'tiebreak': it has tie_break, ": {"switches": (("tiebreak", "x"),)},
    "lru has no static_suffix as run": {"prefix": 0.1, "suffix": 0.1, "static_suffix": True},
}


@pytest.mark.parametrize("words", [*REFUSED, *REFUSED_IN_THE_SHARED_CAP])
def test_what_cannot_be_met_is_one_line(words):
    changes = REFUSED.get(words) or REFUSED_IN_THE_SHARED_CAP[words]
    with pytest.raises(InputError) as error:
        check(other(FINE if words in REFUSED else CAPPED, **changes), 100)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_whitelisted_tokens_count_once_beside_what_is_protected_anyway():
    inside = [-90, -89, -88]
    check(replace(FINE, budget=35), 100, inside)
    check(replace(FINE, budget=35), 100, [*inside, *inside, -1, -2, -32])
    with pytest.raises(InputError, match=r"budget 34 < 35 protected tokens \(32 recent \+ 3 whitelist\)"):
        check(replace(FINE, budget=34), 100, inside)


def test_shares_round_down_and_never_by_a_hair():
    c = Condition("k_norm", 0.29, Prefill())
    assert [budget_of(c, n) for n in (100, 99, 10, 3)] == [29, 28, 2, 0]
    assert budget_of(Condition("k_norm", 7, SharedCap()), 100) == 7
    assert budget_of(Condition(), 100) == 100


def test_readings_differ_where_the_public_code_does():
    policy = Policy("P", "s", lambda o: o, {"window": 8, "recent": "window", "a": 1}, {"a": 2, "b": 3})
    assert policy.reading("as_described") == {"window": 8, "recent": 8, "a": 1}
    assert policy.reading("as_run") == {"window": 8, "recent": 8, "a": 2, "b": 3}
    assert policy.reading("as_run", (("window", 5), ("a", 9))) == {"window": 5, "recent": 5, "a": 9, "b": 3}
    assert policy.readings == ("as_run", "as_described")
    assert replace(policy, as_run={}).readings == ("as_described",)


def test_a_readers_own_policy_comes_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "own.py"
    text = "from kvrepro.engine.policy import Policy\n\n\ndef last(o):\n    return o.positions.float()\n\n\n"
    file.write_text(text + "MINE = Policy('Mine', 'me', last)\nOTHER = 3\n")
    monkeypatch.chdir(tmp_path)
    assert find("own.py:MINE").title == "Mine"
    assert find(f"{file}:MINE").title == "Mine"
    check(Condition("own.py:MINE", 10, Prefill()), 100)
    with pytest.raises(InputError, match=r"own.py has no Policy called OTHER"):
        find("own.py:OTHER")
    file.write_text(f"{text}raise SystemExit(3)")
    with pytest.raises(InputError, match="policy 'own.py:MINE': own.py raises SystemExit: 3$"):
        find("own.py:MINE")


def test_a_notebooks_own_policy_has_a_name_beside_the_catalogue():
    policy = Policy("Mine", "me", lambda o: o.positions.float())
    assert own("mine", policy) == "mine"
    assert find("mine") is policy
    assert [is_own(name) for name in ("mine", "own.py:MINE", "snapkv", "full")] == [True, True, False, False]
    with pytest.raises(InputError, match="policy 'snapkv' is one of the catalogue's: give your own another name"):
        own("snapkv", policy)


def test_a_repetition_has_no_quota_to_mix_in():
    own("again", Policy("Again", "me", lambda o: o.sums["reconstruction"], needs=("reconstruction",)))
    check(Condition("again", 40, Prefill(fair=1.0)), 100)
    with pytest.raises(InputError, match="again has no quota to mix in"):
        check(Condition("again", 40, Prefill(fair=0.5)), 100)


def test_a_sum_that_no_pass_provides_is_refused():
    with pytest.raises(InputError, match="unknown sum in the needs of policy 'Mine' 'mas', did you mean 'mass'"):
        Policy("Mine", "me", lambda o: 1, needs=("mas",))


# ---- the catalogue

PINNED = yaml.safe_load((Path(__file__).parents[2] / "data" / "words" / "formula_tests.yml").read_text())


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_parameter_is_read_and_says_what_it_may_be(name):
    policy = CATALOGUE[name]
    for key in {**policy.parameters, **policy.as_run}:
        assert policy.kind(key) is not object
        for value in (float("nan"), None, -7, ()):
            with pytest.raises(InputError):
                ensure(policy.kind(key), x=value)


def test_every_policy_names_tests_that_exist():
    assert {"full", *CATALOGUE} <= set(PINNED)
    for test in {test for tests in PINNED.values() for test in tests}:
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (Path(__file__).parents[1] / file).read_text(), re.M), test
