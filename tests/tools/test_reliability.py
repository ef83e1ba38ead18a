"""What the page Reliability says of its tables: which rows are equal on several workers, and which mutants survived."""

import pandas as pd

from kvrepro.tools import reliability


def test_equal_rows_are_those_of_several_workers_as_a_range():
    rows = [("CPU", 1, 1, 1), ("CPU", 4, 1, 1), ("H100", 1, 1, 1), ("H100", 2, 0.0021, 0.69), ("H100", 2, 0.33, 0.79)]
    frame = pd.DataFrame(rows, columns=["device", "workers", "equal", "same_text"]).assign(efficiency=0.9)
    [line] = reliability.summary({"scaling": frame})
    assert line["result"] == (
        "efficiency 0.90 to 0.90; on GPUs 0.21% to 33% of the rows and 69% to 79% of the texts equal "
        "those of one worker; on CPUs 100% of the rows and 100% of the texts equal those of one worker"
    )


def test_a_survivor_shows_the_changed_line_below_the_original():
    tables = reliability.tables()
    survivors = pd.read_csv(reliability.FOLDER / "survivors.csv")
    text = reliability.sections({"mutants": tables["mutants"]})
    assert text.count("```diff") == len(survivors)
    first = survivors.iloc[0]
    assert f"`{first.function}`: {first.reason}\n\n```diff\n- {first.before}\n+ {first.after}\n```" in text


def test_verdicts_are_told_with_the_answers_and_where_there_are_none_alone():
    counts = {"rows": 200, "text": 1, "kept": 3, "verdicts": 40, "changed": 1, "chapter": "all", "must_be_equal": True}
    frame = pd.DataFrame([counts]).assign(varied="a second run")
    [line] = reliability.summary({"determinism": frame})
    counted = "0.50% of the answers, 1.50% of the kept sets and 1 of 40 verdicts differ"
    assert line["result"] == f"on one machine {counted}, more than the aim of 1%"
    [line] = reliability.summary({"determinism": frame.assign(rows=0, text=0, kept=0, changed=0)})
    assert line["result"] == "on one machine 0 of 40 verdicts differ"
