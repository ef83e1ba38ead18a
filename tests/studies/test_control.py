"""The positive control: data/control.csv is what the authors' rows give; whatever does not come out has a reason."""

import pandas as pd
import pytest

from kvrepro.experiment import artifact, claims
from studies import control

BOOK = {claim["id"]: claim for claim in claims.load_claims("protection")["claims"]}
TABLE = pd.read_csv(control.TABLE)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return artifact.scores()


def test_whatever_does_not_come_out_has_a_reason():
    """An open verdict has too few items; any other names its cause and says why, for all panels or for some."""
    for row in TABLE[~TABLE.verdict.isin(["reproduced", "inconclusive"])].itertuples():
        said = [entry for entry in BOOK[row.claim]["control"] if entry["cause"] in ("paper", "scope", "data")]
        assert any(not entry.get("panels") or any(part in row.panel for part in entry["panels"]) for entry in said)
        assert all(entry["why"] for entry in said)


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
