import json

import pandas as pd
import pytest

from kvrepro.errors import InputError
from kvrepro.paths import DATA
from studies import mutants

WERE = {
    "m.x_f__mutmut_1": 1,
    "m.x_f__mutmut_2": 0,
    "m.x_f__mutmut_3": 33,
    "m.x_f__mutmut_4": -24,
    "m.x_f__mutmut_5": None,
}


def test_a_mutant_that_no_test_reaches_survives_and_one_that_was_not_tried_is_not_counted(tmp_path):
    pytest.importorskip("mutmut")
    (tmp_path / "m.py.meta").write_text(json.dumps({"exit_code_by_key": WERE}))
    table = mutants.outcomes(tmp_path)
    assert table.outcome.tolist() == ["killed", "survived", "survived", "timeout", "not checked"]
    explained = pd.DataFrame({"module": ["m.py"] * 2, "reason": ["the same number", ""]})
    new = mutants.counted(table, explained)
    [of_module] = new.to_dict("records")
    assert [of_module[name] for name in mutants.COUNTS] == [5, 4, 1, 1, 2, 1]


def test_without_a_run_there_is_nothing_to_count(tmp_path):
    pytest.importorskip("mutmut")
    with pytest.raises(InputError, match="no mutant was tested in .*: first mutmut run"):
        mutants.outcomes(tmp_path)


def test_the_shipped_tables_agree():
    file = DATA / "reliability" / "mutants.csv"
    if not file.is_file():
        pytest.skip("not measured yet")
    counts = pd.read_csv(file).set_index("module")
    survivors = pd.read_csv(file.with_name("survivors.csv")).fillna("")
    assert counts.loc["all", "survived"] == len(survivors) == counts.survived.drop("all").sum()
    assert counts.loc["all", "explained"] == (survivors.reason != "").sum()
