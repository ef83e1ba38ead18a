import pandas as pd
import pytest
from typer.testing import CliRunner

from kvrepro.experiment import claims
from kvrepro.experiment.store import Store
from studies import repeat

VERDICTS = {
    "A1": ("partly", "partly"),
    "A2": ("reproduced", "not reproduced"),
    "A3": ("partly", "inconclusive"),
    "L11": ("partly", "inconclusive"),  # rests on seconds
}
ROW = {"model": "m", "dtype": "float32", "device": "cpu", "policy": "full", "regime": "none", "max_new_tokens": 8,
       "prediction": "red", "kept_hash": "k", "token_f1": 0.5}  # fmt: skip


def stored(folder, number, *changes, **device):
    """A results folder: three rows and three verdicts of chapter leakage."""
    with Store(folder, "leakage", "answers") as table:
        rows = [ROW | {"item": f"{i}", "key": f"{i}", "name": "answers"} | device for i in range(3)]
        table.add([row | change for row, change in zip(rows, [*changes, {}, {}, {}], strict=False)])
    verdicts = [{"claim": name, "verdict": both[number], "reading": "as_run", "model": "m", "profile": "quick"}
            for name, both in VERDICTS.items()]  # fmt: skip
    claims.write(pd.DataFrame(verdicts).reindex(columns=claims.COLUMNS), folder / "leakage" / "claims.csv")
    return folder


def test_rows_of_another_device_are_the_same_rows_and_what_differs_is_counted(tmp_path):
    first = stored(tmp_path / "a", 0)
    other = stored(tmp_path / "b", 1, {"prediction": "blue", "token_f1": 0.0}, {"kept_hash": "l"}, device="cuda")
    table = repeat.shares("device", first, other, ["leakage", "fragility"])
    assert table.chapter.tolist() == ["leakage", "all"]
    for row in table.itertuples():
        assert (row.rows, row.text, row.kept, row.score, row.verdicts, row.changed, row.turned) == (3, 1, 1, 1, 3, 2, 1)
    same = repeat.shares("nothing", first, first, ["leakage"])
    assert same[["text", "kept", "score", "changed"]].to_numpy().sum() == 0


def test_of_a_folder_that_two_devices_answered_each_row_counts_once(tmp_path):
    both = stored(tmp_path / "a", 0)
    with Store(both, "leakage", "answers") as table:
        table.add([ROW | {"item": f"{i}", "key": f"cuda {i}", "name": "answers", "device": "cuda"} for i in range(3)])
    assert repeat.shares("device", both, both, ["leakage"]).rows.tolist() == [3, 3]


def test_a_chapter_that_one_folder_lacks_or_holds_other_rows_of_is_left_out(tmp_path):
    first = stored(tmp_path / "a", 0)
    others = [tmp_path / "empty", stored(tmp_path / "b", 1, *[{"item": f"other {i}"} for i in range(3)])]
    assert all(repeat.shares("items", first, other, ["leakage"]).empty for other in others)


def test_of_a_chapter_without_answers_the_verdicts_are_compared(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder, number in zip(folders, (0, 1), strict=True):
        pairs = VERDICTS | {"R4f": ("reproduced", "not reproduced")}  # of reclamation, where this one rests on seconds
        verdicts = [{"claim": name, "verdict": both[number], "reading": "any", "model": "m", "profile": "quick"}
                    for name, both in pairs.items()]  # fmt: skip
        claims.write(pd.DataFrame(verdicts).reindex(columns=claims.COLUMNS), folder / "reclamation" / "claims.csv")
    [chapter, total] = repeat.shares("a second run", *folders, ["reclamation"]).itertuples()
    assert (chapter.rows, chapter.verdicts, chapter.changed, chapter.turned) == (0, 4, 3, 1)
    assert (total.rows, total.changed) == (0, 3)


def test_folders_are_compared_from_a_shell_and_replace_what_was_stored(tmp_path):
    folders = [str(stored(tmp_path / name, number)) for number, name in enumerate("ab")]
    for _ in range(2):
        done = CliRunner().invoke(repeat.app, ["folders", "seed", *folders, "--out", str(tmp_path / "out" / "d.csv")])
        assert "seed: of 3 rows 0 have another text" in done.output
    assert pd.read_csv(tmp_path / "out" / "d.csv").varied.tolist() == ["seed"] * 2


def test_the_stored_sum_counts_chapters_that_were_measured_before(tmp_path):
    counts = dict.fromkeys("rows text kept score verdicts changed turned".split(), 2)
    measured = pd.DataFrame([{"varied": "seed", "chapter": name, "which": f"A1 of {name}"} | counts for name in "ab"])
    for chapter in "aba":
        repeat.print_and_store(repeat.with_sum(measured[measured.chapter == chapter]), tmp_path / "d.csv")
    table = pd.read_csv(tmp_path / "d.csv")
    assert sorted(table.chapter) == ["a", "all", "b"]
    total = table[table.chapter == "all"].iloc[0]
    assert (total.rows, total.changed) == (4, 4)
    assert total.which == "b A1 of b; a A1 of a"


def test_an_unknown_variant_is_refused_before_anything_runs(tmp_path):
    done = CliRunner().invoke(repeat.app, ["run", "--results", str(tmp_path), "--only", "3 rows"])
    assert done.exit_code != 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_runs_with_other_batches_give_the_same_rows(tmp_path):
    given = ["--chapters", "dropkv_bound", "-p", "n_items=1", "--out", str(tmp_path / "d.csv")]
    done = CliRunner().invoke(repeat.app, ["run", "--results", str(tmp_path), "--only", "7 rows at a time", *given])
    assert done.exit_code == 0
    table = pd.read_csv(tmp_path / "d.csv")
    assert (table.rows > 0).all()
    assert (table[["text", "kept", "score", "changed"]] == 0).all(axis=None)
