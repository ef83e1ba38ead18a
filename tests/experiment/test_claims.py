"""Claims: the file refers to printed numbers; the table of verdicts survives its file."""

import pandas as pd
import pytest
import synthetic

from kvrepro.errors import InputError
from kvrepro.experiment import claims

BOOK = claims.load_claims("protection")
BY_ID = {claim["id"]: claim for claim in BOOK["claims"]}


# ------------------------------------------------------------------ the file


def test_every_printed_number_is_found_in_a_table():
    for claim in BOOK["claims"]:
        text = claims.paper_text(claim["paper"], claim.get("unit", ""))
        assert text, claim["id"]
        assert "nan" not in text, claim["id"]


@pytest.mark.parametrize(
    ("claim_id", "printed"),
    [
        ("P1", "0.004 to 0.038"),  # table 3, Ada-KV at 128 and H2O at 256
        ("P8", "-0.105 to -0.087"),  # 0.124 - 0.229, 0.184 - 0.282, 0.198 - 0.285
        ("P9", "15 of 15 not significant"),
        ("P12", "0.271 lift, 0.040 spread"),
        ("P20", "0.092 to 0.108"),  # 0.283 - 0.191 and 0.283 - 0.175
        ("P22", "0.145 to 0.421"),  # Qasper 0.156 - 0.011, MuSiQue 0.421 - 0
        ("P31", "-0.002"),
    ],
)
def test_printed_values(claim_id, printed):
    assert claims.paper_text(BY_ID[claim_id]["paper"], BY_ID[claim_id].get("unit", "")) == printed


def test_a_reference_to_no_printed_number_raises():
    with pytest.raises(InputError, match="no printed number in protection_t08"):
        claims.cells("protection_t08_protection_sweep_qwen25_3b.csv", {"protect_frac": 0.33})


def test_what_a_claim_presumes_is_another_of_its_file(tmp_path):
    def written(*presumed):
        entries = "".join(f"  - {{id: X{i}, presumes: {name}}}\n" for i, name in enumerate(presumed))
        (tmp_path / "mine.yml").write_text(f"claims:\n{entries}")
        return claims.load_claims("mine", tmp_path)

    assert [claim["presumes"] for claim in written("X1", "X2", "null")["claims"]] == ["X1", "X2", None]
    with pytest.raises(InputError, match="X0 presumes P4, which is no claim of this file: name another"):
        written("P4")
    for circle, last in ((("X1", "X2", "X0"), "X2"), (("X0",), "X0")):
        with pytest.raises(InputError, match=f"{last} presumes X0, which goes round in a circle"):
            written(*circle)


def test_another_model_leaves_the_verdicts_of_the_first(tmp_path):
    few = BOOK | {"claims": [BY_ID[name] for name in ("P1", "P9")]}
    first = synthetic.verdicts(few, main=synthetic.results(synthetic.paper_like)).assign(model="first")
    other = first.assign(model="other", verdict="partly")
    timed = first.assign(model=claims.STORED, claim="T1").head(1)
    path = tmp_path / "protection" / "claims.csv"
    claims.write(pd.concat([timed, first]), path)
    claims.write(pd.concat([timed, other]), path)
    both = claims.read(path)
    assert claims.runs(both) == [("first", "quick"), ("other", "quick")]
    assert claims.verdicts_of_run(both).verdict.tolist() == [*timed.verdict, *first.verdict]
    assert claims.verdicts_of_run(both, ("other", "quick")).claim.tolist().count("T1") == 1
    claims.write(pd.concat([timed.assign(verdict="partly"), other]), path)  # with newer timings
    assert claims.read(path).claim.tolist() == both.claim.tolist()
    assert claims.verdicts_of_run(claims.read(path)).verdict.tolist() == ["partly", *first.verdict]
    claims.write(pd.concat([timed, first.assign(verdict="inconclusive")]), path)  # the first again: at its place
    both = claims.read(path)
    assert claims.runs(both) == [("first", "quick"), ("other", "quick")]
