"""Settings and a notebook's parameters: what cannot be run with is refused in one line before anything is loaded."""

from types import SimpleNamespace

import pytest

from kvrepro.chapters.dropkv_bound.study import Settings as DropKV
from kvrepro.chapters.fragility.study import Settings as Fragility
from kvrepro.chapters.protection.study import Settings as Protection
from kvrepro.chapters.reclamation.study import Settings as Reclamation
from kvrepro.chapters.synthesis.study import Settings as Synthesis
from kvrepro.errors import InputError
from kvrepro.experiment import settings
from kvrepro.experiment.settings import Settings, check_parameters

CELLS = ["import x", "n_items = None  # all\nseed = 0", "# Parameters\nn_items = 8\n", "%magic", "Settings.of()"]


@pytest.fixture
def notebook(monkeypatch):
    """Settings of a notebook whose cells are given."""

    def of(cells, **variables):
        shell = SimpleNamespace(user_ns={"In": cells} | variables)
        monkeypatch.setattr(settings, "get_ipython", lambda: shell)
        return Settings.of()

    return of


def test_what_the_notebook_has_passes_also_when_a_cell_runs_again(notebook):
    check_parameters()  # no notebook
    notebook(CELLS)
    notebook(CELLS[:2])
    notebook([*CELLS, "n_items = 9\nother = 1", "Settings.of()"])


def test_a_misspelt_parameter_is_refused_with_what_was_meant(notebook):
    for later in ([], ["n_item = 3"]):  # an edited cell that ran in between
        with pytest.raises(InputError, match="unknown parameter 'n_item', did you mean 'n_items'"):
            notebook([*CELLS[:2], "# Parameters\nn_item = 8\nseed = 1\n", *later])


WRONG = {
    "results 5: ": {"results": 5},
    "results '/dev/null/x' is no folder": {"results": "/dev/null/x"},
    "seed 'a': .*; profile|profile 'slow': .*; seed 'a'": {"seed": "a", "profile": "slow"},  # all at once
    "seed -1: ": {"seed": -1},
    "workers 0: ": {"workers": 0},
    "unknown option 'sede', did you mean 'seed'": {"options": {"sede": 1}},
    "options 'a=1': ": {"options": "a=1"},
    "unknown model 'nosuch': ": {"model": "nosuch"},
    "unknown items 'squad'": {"items": "squad"},
    "device 'tpu'": {"device": "tpu"},
    "n_items 0: ": {"n_items": 0},
    "n_items 'ten'": {"n_items": "ten"},
    r"policies \('lru', 'lru'\): give a list .* each once": {"policies": ["lru", "lru"]},
    r"policies 'lru': should be a list, such as \['lru'\]": {"policies": "lru"},
    "policies None: should be a list$": {"policies": None},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_nothing_can_be_run_with_is_refused(words):
    with pytest.raises(InputError, match=words) as error:
        Settings.of(**WRONG[words])
    assert "\n" not in str(error.value)


def test_every_model_of_a_family_is_looked_at_before_the_first_one_runs():
    with pytest.raises(InputError, match="^unknown model 'nosuch'"):
        Synthesis.of(family=["small-mha", "nosuch"])
    assert not Synthesis.of(family=[]).family


def test_own_policies_are_looked_at_before_anything_is_loaded(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from kvrepro.engine.policy import Policy\nA = Policy('A', 'me', lambda o: o.positions)\nB = A\n")
    assert Settings.of(policies=["snapkv", f"{file}:A"]).policies == ("snapkv", f"{file}:A")
    with pytest.raises(InputError, match="mine.py:A' and .*mine.py:B' are both called 'A': rename yours"):
        Settings.of(policies=[f"{file}:A", f"{file}:B"])
    with pytest.raises(InputError, match="mine.py has no Policy called C"):
        Settings.of(policies=[f"{file}:C"])


@pytest.mark.parametrize(
    ("chapter", "policies", "words"),
    [
        (Settings, ["snapkv", "nope"], "^unknown policy 'nope'; there are: "),
        (Settings, ["full"], "'full' evicts nothing: .* leave it out$"),
        (Fragility, ["snapkv", "lru"], "^lru cannot run in regime 'prefill'"),
        (Protection, ["kv_zip"], "^kv_zip cannot run in regime 'decode cap'"),
        (Reclamation, ["window", "lru"], "^lru cannot run in regime 'prefill'"),
        (DropKV, ["full", "dropkv", "nope"], "^unknown policy 'nope'"),
    ],
)
def test_policies_that_a_chapter_cannot_run_are_refused_before_anything_is_loaded(chapter, policies, words):
    assert chapter.of(policies=policies[:-1] or ["snapkv"])
    with pytest.raises(InputError, match=words):
        chapter.of(policies=policies)


def test_workers_in_the_environment_are_a_number_that_can_be_read(monkeypatch):
    for given in ("many", "-1", "0", "\u00b2"):
        monkeypatch.setenv("KVREPRO_WORKERS", given)
        with pytest.raises(InputError, match=rf"workers '?{given}'?: "):
            Settings()
    monkeypatch.setenv("KVREPRO_WORKERS", "3")
    assert Settings().workers == 3
