import re
from types import SimpleNamespace

import pytest

from kvrepro.errors import InputError
from kvrepro.experiment import parameters
from kvrepro.experiment.parameters import check_parameters, check_values, read

CELLS = ["import x", "n_items = None  # all\nseed = 0", "# Parameters\nn_items = 8\n", "%magic", "check_parameters()"]


@pytest.fixture
def check(monkeypatch):
    """`check_parameters` of a notebook whose cells are given."""

    def of(cells):
        shell = SimpleNamespace(user_ns={"In": cells})
        monkeypatch.setattr(parameters, "get_ipython", lambda: shell)
        check_parameters()

    return of


def test_what_the_notebook_has_passes(check):
    check_parameters()  # no notebook
    check(CELLS)
    check(CELLS[:2])


def test_a_misspelt_parameter_is_refused_with_what_was_meant(check):
    with pytest.raises(InputError, match="no parameter 'n_item', did you mean 'n_items'?"):
        check([*CELLS[:2], "# Parameters\nn_item = 8\n"])
    with pytest.raises(InputError, match="no parameter 'colour': see"):
        check([*CELLS[:2], "# Parameters\ncolour = 8\n"])


def test_a_list_that_came_as_text_is_refused_with_the_way_to_give_it(check):
    message = """n_items is the text '[8, 9]': papermill passes text with -p, use -y "n_items: [8, 9]\""""
    with pytest.raises(InputError, match=re.escape(message)):
        check([*CELLS[:2], "# Parameters\nseed = 3\nn_items = '[8, 9]'\n"])
    check([*CELLS[:2], "# Parameters\nn_items = [8, 9]\nseed = 'a [b]'\n"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("-2.5E3", -2500.0), ("[1e+2, 3]", [100.0, 3]), ("1e-5x", "1e-5x"), ("3", 3), (".5e3", 500.0)],
)
def test_numbers_are_read_as_people_write_them(text, value):
    result = read(text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "text",
    ["!!bool x", "!!int", "!!float ''", "[!!timestamp soon]", "2020-13-45", "1:1" + ":1" * 190 + ".5", "[" * 3000],
)
def test_what_is_none_of_its_kind_is_refused_in_one_line(text):
    with pytest.raises(InputError, match="is no YAML value") as refused:
        read(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["policies", "rivals"])
def test_own_policies_are_looked_at_before_anything_is_loaded(name, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from kvrepro.engine.policy import Policy\nA = Policy('A', 'me', lambda o: o.positions)\nB = A\n")
    check_values({name: ["snapkv", f"{file}:A"]})
    with pytest.raises(InputError, match="mine.py:A' and .*mine.py:B' are both called 'A': rename yours"):
        check_values({name: [f"{file}:A", f"{file}:B"]})
    with pytest.raises(InputError, match="mine.py has no Policy called C"):
        check_values({name: [f"{file}:C"]})


def test_every_model_of_a_family_is_looked_at_before_the_first_one_runs():
    with pytest.raises(InputError, match="^unknown model 'nosuch': use "):
        check_values({"model": "small-gqa", "family": ["small-mha", "nosuch"]})
    check_values({"model": "small-gqa", "family": []})
