import json

import pandas as pd
import pytest

from kvrepro.experiment import claims
from kvrepro.experiment.store import Store
from studies import family, language_model

ROW = {"item": "a", "policy": "lru", "reading": "as_run", "capacity": 128, "share": None, "prefix": 0.1, "suffix": 0.1,
       "token_f1": 0.5, "official": None, "prediction": "", "error": None, "backend": "triton", "model": "m",
       "processor": "GPU", "dtype": "float32", "torch": "2", "name": "main", "model_hash": "h", "data_hash": "d",
       "limit": 400, "max_new_tokens": 8,
       "prompt_tokens": 100, "cut": 0}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A run of the protection chapter on two items, one of which cannot meet one condition."""
    place = tmp_path / "run" / "m-0" / "protection"
    place.mkdir(parents=True)
    full = ROW | {"policy": "full", "capacity": None, "prefix": None, "suffix": None}
    long = full | {"item": "b", "token_f1": 0.6, "prompt_tokens": 300, "cut": 50}
    rows = [ROW, ROW | {"item": "b", "official": 1.0}, full | {"token_f1": 0.8}, long,
            ROW | {"item": "b", "policy": "h2o", "error": "InputError: budget 4 < 8", "token_f1": None},
            ROW | {"policy": "h2o", "error": "RuntimeError: why", "token_f1": None},
            ROW | {"policy": "file.py:MINE", "backend": "torch"}]  # fmt: skip
    keyed = [row | {"key": str(number)} for number, row in enumerate(rows)]
    Store(tmp_path / "run" / "m-0", "protection", "main", "m").add(keyed)
    Store(tmp_path / "run" / "m-0", "protection", "once", "m").add(keyed[:1])  # a row that another study had first
    scores = {"a": 0.2, "b": 0.4, "c": 0.9}
    alone = [full | {"item": item, "token_f1": score, "name": "controls"} for item, score in scores.items()]
    keyed = [row | {"key": str(10 + number)} for number, row in enumerate(alone)]
    Store(tmp_path / "run" / "m-0", "protection", "controls", "m").add(keyed)
    verdict = {"claim": "P1", "verdict": "partly", "reading": "as_run", "model": "m", "profile": "quick", "ours": 0.3}
    claims.write(pd.DataFrame([verdict]).reindex(columns=claims.COLUMNS), place / "claims.csv")
    facts = {"date": "2026-11-27", "seconds": 9, "items": "ifeval"}
    (place / family.DONE).write_text(json.dumps(facts))
    return tmp_path / "run"


def test_the_tables_of_a_run_are_its_verdicts_what_it_computed_and_mean_scores(folder):
    verdicts, runs, scores = language_model.collected([folder])
    assert verdicts[["items", "claim", "verdict"]].to_numpy().tolist() == [["ifeval", "P1", "partly"]]
    [run] = runs.to_dict("records")
    assert (run["answers"], run["failed"], run["n"]) == (9, 1, 2)  # what no item can meet is no answer
    assert run["kernels"] == pytest.approx(7 / 8)
    assert (run["score"], run["tokens"], run["cut"]) == pytest.approx((0.7, 200, 0.5))
    by = scores.set_index(["policy", "guard", "kept"]).value.to_dict()
    assert by == pytest.approx({("full", "0% + 0%", ""): 0.7, ("lru", "10% + 10%", "128"): 0.75,
                                (language_model.NO_PASSAGE, "0% + 0%", ""): 0.3})  # fmt: skip
    gain = scores.set_index("policy").gain.to_dict()
    assert gain == pytest.approx({"full": 0.4, "lru": 0.45, language_model.NO_PASSAGE: 0})
    assert set(scores) == {
        *language_model.BY,
        "value",
        "low",
        "high",
        "n",
        "gain",
        "gain_low",
        "gain_high",
    }  # item c is not in it
