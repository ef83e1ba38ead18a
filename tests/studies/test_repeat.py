import pandas as pd
import pytest
from typer.testing import CliRunner

from kvrepro.errors import InputError
from kvrepro.experiment import claims
from kvrepro.paths import DATA
from studies import oracle, repeat

VERDICTS = {
    "A1": ("partly", "partly"),
    "A2": ("reproduced", "not reproduced"),
    "A3": ("partly", "inconclusive"),
    "L11": ("partly", "inconclusive"),  # rests on seconds
}
ROW = dict.fromkeys([*oracle.IDENTITY, *oracle.EXACT, *oracle.CLOSE, "error"]) | {
    "chapter": "leakage", "name": "answers", "model": "m", "policy": "full", "date": "2026-11-01", "prediction": "red",
    "kept_hash": "k", "token_f1": 0.5,
}  # fmt: skip


def stored(folder, number, *changes):
    """A results folder: three rows and the verdicts of chapter leakage."""
    (folder / "leakage").mkdir(parents=True)
    rows = [ROW | {"item": f"{i}"} | change for i, change in zip(range(3), [*changes, {}, {}, {}], strict=False)]
    pd.DataFrame(rows).to_parquet(folder / "leakage" / "answers.parquet")
    verdicts = [
        {"claim": name, "verdict": both[number], "reading": "as_run", "model": "m", "profile": "quick"}
        for name, both in VERDICTS.items()
    ]
    claims.write(pd.DataFrame(verdicts).reindex(columns=claims.COLUMNS), folder / "leakage" / "claims.csv")
    return folder


def test_what_differs_between_two_folders_is_counted(tmp_path):
    first = stored(tmp_path / "a", 0)
    other = stored(tmp_path / "b", 1, {"prediction": "blue", "token_f1": 0.0}, {"kept_hash": "l"})
    table = repeat.shares("device", first, other)
    assert table.chapter.tolist() == ["leakage", "all"]
    for row in table.itertuples():
        assert (row.rows, row.text, row.kept, row.score, row.verdicts, row.changed, row.turned) == (3, 1, 1, 1, 3, 2, 1)
    assert repeat.shares("nothing", first, first)[["text", "kept", "score", "changed"]].to_numpy().sum() == 0


def test_folders_are_compared_from_a_shell_and_replace_what_was_stored(tmp_path):
    folders, out = [str(stored(tmp_path / name, number)) for number, name in enumerate("ab")], tmp_path / "d.csv"
    for _ in range(2):
        assert CliRunner().invoke(repeat.app, ["folders", "seed", *folders, "--out", str(out)]).exit_code == 0
    assert pd.read_csv(out).varied.tolist() == ["seed"] * 2
    done = CliRunner().invoke(repeat.app, ["verdicts", "seed", *folders, folders[0], "--out", str(tmp_path / "s.csv")])
    assert done.exit_code == 0
    [row] = pd.read_csv(tmp_path / "s.csv").itertuples()
    assert (row.runs, row.verdicts, row.changed, row.turned) == (3, 4, 3, 1)
    assert (row.share, row.pair) == (0.75, 0.5)
    assert row.which.startswith("A2 as_run: reproduced, not reproduced, reproduced")


def test_what_cannot_be_compared_or_is_unknown_is_refused(tmp_path):
    given = {
        "one folder": ["verdicts", "x", str(tmp_path)],
        "variant": ["run", "--results", str(tmp_path), "--only", "3"],
    }
    for arguments in given.values():
        assert isinstance(CliRunner().invoke(repeat.app, arguments).exception, InputError)
    assert not list(tmp_path.iterdir())


def test_the_shipped_table_adds_up():
    shipped = pd.read_csv(DATA / "stability.csv").fillna({"which": ""})
    assert (shipped.share.sub(shipped.changed / shipped.verdicts).abs() < 1e-3).all()
    assert (shipped.pair <= shipped.share + 1e-3).all()
    assert [len(list(filter(None, text.split("; ")))) for text in shipped.which] == shipped.changed.tolist()


@pytest.mark.slow
def test_runs_with_other_batches_give_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(repeat, "DETERMINISM", tmp_path / "d.csv")
    given = ["--chapters", "dropkv_bound", "-p", "n_items=1"]
    done = CliRunner().invoke(repeat.app, ["run", "--results", str(tmp_path), "--only", "7 rows at a time", *given])
    assert done.exit_code == 0
    assert (pd.read_csv(tmp_path / "d.csv").rows > 0).all()
