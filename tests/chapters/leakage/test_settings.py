"""Settings: sizes of studies, and what is refused before anything is computed."""

import pytest

from kvrepro.chapters.leakage.cells import Settings
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.policy import Policy, own
from kvrepro.errors import InputError


def test_sizes():
    assert [Settings(n_items=30).size(study) for study in ("main", "single", "multi")] == [30, 30, 20]
    assert Settings(profile="full", ratios=(0.5,)).dropped("cures") == (0.5,)
    assert Settings(ratios=(0.6, 0.2, 0.4)).dropped("opening") == (0.4,)
    assert [Settings(profile=name).tokens for name in ("quick", "full")] == [128, 1280]
    assert Settings(profile="full", max_new_tokens=7).tokens == 7


def test_the_papers_policies_and_ones_own_take_part_in_every_study():
    own("leakage_test", Policy("Own", "this test", CATALOGUE["k_norm"].score))
    assert Settings(policies=("h2o", "dropkv", "leakage_test")).main == ["h2o", "leakage_test"]
    assert Settings(policies=("dropkv",)).main == ["dropkv"]


def test_questions_are_replaced_by_system_prompts_and_that_is_said(capsys):
    for name in ("longbench", "longbench:trec", "protection-panel"):
        assert Settings(items=name).items == "ifeval"
        assert f"leakage: items 'ifeval', which suit this chapter, in the place of {name!r}" in capsys.readouterr().out
    assert Settings(items="tinyworld:needle").items == "tinyworld"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ratios": [1.0]}, "ratios 1.0: "),
        ({"policies": []}, "policies \\(\\): give a list of at least one"),
        ({"policies": ["lru"]}, "lru cannot run in regime 'offline'"),
        ({"policies": ["full"]}, "policy full keeps every token"),
        ({"items": "longbank"}, "unknown items 'longbank': use tinyworld"),
        ({"items": "none.jsonl"}, "no file 'none.jsonl'"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(wrong, message):
    with pytest.raises(InputError, match=message) as raised:
        Settings.of(**wrong)
    assert "\n" not in str(raised.value)
