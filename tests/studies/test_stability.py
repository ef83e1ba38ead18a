import pandas as pd
import pytest
from typer.testing import CliRunner

from kvrepro.errors import InputError
from kvrepro.experiment import claims
from kvrepro.paths import DATA
from studies import stability

VERDICTS = {
    "A1": ("reproduced", "reproduced"),
    "A2": ("reproduced", "not reproduced"),
    "A3": ("partly", "inconclusive"),
}


def stored(folder, number, chapter="c"):
    rows = [{"claim": name, "verdict": verdicts[number], "reading": "as_run", "model": "m", "profile": "quick"}
            for name, verdicts in VERDICTS.items()]  # fmt: skip
    rows += [rows[0] | {"claim": "A4", "model": claims.STORED, "verdict": f"{number}"}]
    rows += [rows[0] | {"claim": f"only {number}"}]
    claims.write(pd.DataFrame(rows).reindex(columns=claims.COLUMNS), folder / chapter / "claims.csv")
    return folder


def test_changed_and_turned_verdicts_are_counted_and_named(tmp_path):
    [row] = stability.table("seed", [stored(tmp_path / "a", 0), stored(tmp_path / "b", 1)]).itertuples()
    assert (row.runs, row.verdicts, row.changed, row.turned) == (2, 3, 2, 1)
    assert row.share == pytest.approx(2 / 3)
    assert row.which == "A2 as_run: reproduced, not reproduced; A3 as_run: partly, inconclusive"
    assert row.pair == pytest.approx(2 / 3)
    [three] = stability.table("seed", [tmp_path / name for name in "aab"]).itertuples()
    assert (three.share, three.pair) == pytest.approx((2 / 3, 4 / 9))
    again = stability.table("seed", [tmp_path / "a", tmp_path / "a"])
    assert (again.changed.item(), again.which.item()) == (0, "")


def test_rows_of_the_same_title_are_replaced(tmp_path):
    runner, out, app = CliRunner(), tmp_path / "out.csv", stability.typer.Typer()
    app.command()(stability.main)
    folders = [str(stored(tmp_path / name, number)) for number, name in enumerate("ab")]
    for title in ("seed", "rounding", "seed"):
        result = runner.invoke(app, [title, *folders, "--out", str(out)])
        assert result.exit_code == 0
        assert f"{title}, c: 2 of 3 verdicts change (67%), 1 of them turn over" in result.output
    assert pd.read_csv(out).varied.tolist() == ["rounding", "seed"]


def test_what_cannot_be_compared_is_said(tmp_path):
    first, other = stored(tmp_path / "a", 0), stored(tmp_path / "b", 1, "d")
    with pytest.raises(InputError, match="1 results folder: give two or more"):
        stability.table("seed", [first])
    with pytest.raises(InputError, match="no chapter has verdicts in all"):
        stability.table("seed", [first, other])
    read = stored(tmp_path / "read", 1) / "c" / "claims.csv"
    read.write_text(read.read_text().replace("as_run", "as_described"))
    with pytest.raises(InputError, match="no verdict of c is of the same claim and reading"):
        stability.table("reading", [first, tmp_path / "read"])


def test_the_shipped_table_adds_up():
    shipped = pd.read_csv(DATA / "stability.csv").fillna({"which": ""})
    assert (shipped.share.sub(shipped.changed / shipped.verdicts).abs() < 1e-3).all()
    assert (shipped.pair <= shipped.share + 1e-3).all()
    assert [len(list(filter(None, text.split("; ")))) for text in shipped.which] == shipped.changed.tolist()
