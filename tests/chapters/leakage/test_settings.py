"""Settings: sizes of studies, and what is refused before anything is computed."""

import json

import pytest

from kvrepro.chapters.leakage.cells import Settings
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.policy import Policy, own
from kvrepro.errors import InputError


def test_sizes():
    assert Settings(n_items=3).sizes.singles == 3
    assert Settings(profile="full", ratios=(0.5,)).sizes.varied == (0.5,)
    assert [Settings(profile=name).sizes.tokens for name in ("quick", "full")] == [128, 1280]
    assert Settings(profile="full", max_new_tokens=7).sizes.tokens == 7


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
        ({"ratios": []}, "ratios \\[\\]: give a list of at least one"),
        ({"n_items": 0}, "n_items 0: "),
        ({"n_items": "ten"}, "n_items 'ten'"),
        ({"policies": ["h2o", "dropkv", "h2o"]}, "each once"),
        ({"policies": []}, "policies \\(\\): give a list of at least one"),
        ({"policies": "tova"}, "policies 'tova': "),
        ({"policies": ["lru"]}, "lru cannot run in regime 'offline'"),
        ({"policies": ["full"]}, "full is run in any case"),
        ({"items": "longbank"}, "unknown items 'longbank': use tinyworld, ifeval, or the path of a .jsonl"),
        ({"items": "none.jsonl"}, "unknown items 'none.jsonl': use"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(wrong, message):
    with pytest.raises(InputError, match=message) as raised:
        Settings(**wrong)
    assert "\n" not in str(raised.value)


def test_an_option_that_is_not_there_is_named():
    with pytest.raises(InputError, match="unknown option 'max_new_token', did you mean 'max_new_tokens'"):
        Settings.of({"max_new_token": 4})


def test_a_file_is_of_system_prompts_only_if_every_row_holds_one(tmp_path, capsys):
    file = tmp_path / "own.jsonl"
    turns = [{"role": "system", "content": "Answer in verse."}, {"role": "user", "content": "Tell of the sea."}]
    row, message = {"messages": turns, "answer": "wave"}, "items 'ifeval', which suit this chapter, in the place of"

    def taken(*rows):
        file.write_text("".join(json.dumps(line) + "\n" for line in rows))
        return Settings(items=str(file)).items

    assert taken(row, row) == str(file)
    said = f"leakage: the system turns of {file} are taken as the directives to keep secret"
    assert capsys.readouterr().out.strip() == said
    passage = {"context": "The sea.", "question": "What?", "answer": "sea"}
    chat = {"messages": turns[1:], "answer": "wave"}
    talk = {"messages": [*turns, {"role": "assistant", "content": "No."}], "answer": "wave"}
    for other in (passage, chat, talk, row | passage | {"answer": "wave"}):
        assert taken(row, other) == "ifeval"
        assert message in capsys.readouterr().out
    file.write_bytes(json.dumps(row).encode() + b'\n{"answer": "caf\xe9"}\n')
    with pytest.raises(InputError, match="own.jsonl, line 2: .*0xe9"):
        Settings(items=str(file))
