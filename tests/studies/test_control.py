"""The positive control: data/control.csv is what the authors' rows give; whatever does not come out has a reason."""

from types import SimpleNamespace

import pandas as pd
import pytest

from kvrepro.errors import InputError
from kvrepro.experiment import artifact, claims
from studies import control

BOOK = {claim["id"]: claim for claim in claims.load_claims("protection")["claims"]}
TABLE = claims.read(control.TABLE)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return artifact.scores()


def test_whatever_does_not_come_out_has_a_reason():
    causes = [control.cause(row, BOOK[row.claim])[0] for row in TABLE.itertuples()]
    assert set(causes) == {"", *control.CAUSES}
    assert [cause == "" for cause in causes] == list(TABLE.verdict == "reproduced")


def test_every_reason_is_needed():
    """A reason whose panel has come out since, or is gone, is stale."""
    for claim in BOOK.values():
        off = TABLE[(TABLE.claim == claim["id"]) & (TABLE.verdict != "reproduced")]
        for entry in claim.get("control", []):
            assert entry["cause"] in control.CAUSES
            for part in entry.get("panels", [""]):
                assert off.panel.str.contains(part, regex=False).any(), (claim["id"], part)


def test_a_failing_rule_without_a_reason_stops_the_page():
    row = SimpleNamespace(claim="P4", panel="A model, 10 items", verdict="not reproduced", needed=float("nan"), n=10)
    with pytest.raises(InputError, match="claim P4 is not reproduced on A model, 10 items: say why under `control`"):
        control.cause(row, BOOK["P4"])


def test_the_table_is_what_the_rows_give(rows):
    """Four panels of sixteen, all rules: the credit's, needles at 64K, and LongBench on Qwen2.5-3B and Phi-3.5."""
    book, stored = claims.load_claims("protection"), TABLE.set_index(["panel", "claim"])
    wanted = [("Qwen2.5-3B, LongBench, 162", "main"), ("Qwen2.5-3B, LongBench, 162", "credit")]
    wanted += [("Qwen3-4B, needles at 64K, 60", "needle"), ("Phi-3.5, LongBench, 162", "main")]
    tested = [panel for panel in control.panels(rows) if (panel.name, panel.study) in wanted]
    assert len(tested) == 4
    for panel in tested:
        for row in control.panel_verdicts(panel, book).itertuples():
            if row.verdict == "not testable here":
                assert (panel.name, row.claim) not in stored.index
            else:
                stored_row = stored.loc[(panel.name, row.claim)]
                assert stored_row.verdict == row.verdict, (panel.name, row.claim)
                assert stored_row.ours == pytest.approx(row.ours, rel=1e-4, abs=1e-6)
                assert stored_row.low == pytest.approx(row.low, rel=1e-4, abs=1e-6)


def test_no_row_is_counted_twice_in_a_panel(rows):
    names = []
    for panel in control.panels(rows):
        names.append((panel.name, panel.study))
        keys = ["item", "policy", "capacity", "prefix", "temperature", "seed"]
        assert not panel.rows.duplicated(keys).any(), panel.name
    assert len(names) == len(set(names))
    assert {study for _, study in names} == {"main", "scaling", "credit", "needle", "sampling"}


def test_printed_numbers_come_back():
    """Through the claims' own contrasts; differences of printed means are rounded twice."""
    value = TABLE.set_index(["claim", "panel"]).ours
    assert value["P4", "Qwen2.5-3B, LongBench, 162"] == pytest.approx(0.271, abs=1e-3)  # table 4, LRU at 256
    assert value["P39", "Qwen3-4B, needles at 64K, 60"] == pytest.approx(0.090, abs=5e-4)
    assert value["P16", "Qwen2.5-3B, LongBench, 162"] == pytest.approx(0.035, abs=5e-4)  # table 8
