"""The scaling tool: efficiency and equal rows from measurements that are given; a real one on two layers."""

import pandas as pd
import pytest

from kvrepro.errors import InputError
from kvrepro.tools import command, scaling


def test_efficiency_is_the_time_of_one_over_that_of_all_together(monkeypatch):
    times = {("local", 1): (10, 100, 104), ("local", 2): (20, 60, 66), ("ray", 2): (30, 50, 57)}
    texts = {("local", 1): "abcd", ("local", 2): "abcd", ("ray", 2): "abxd"}

    def measured_apart(model, device, engine, count, *rest):
        start, seconds, wall = times[engine, count]
        return {"rows": 4, "start": start, "seconds": seconds, "wall": wall}

    monkeypatch.setattr(scaling, "measured_apart", measured_apart)
    monkeypatch.setattr(scaling, "table", lambda folder, *run: pd.DataFrame({"prediction": list(texts[run])}))
    table = scaling.measured("m", "cpu", ["local", "ray"], [1, 2], 4, 3, "folder")
    assert list(zip(table.engine, table.workers, strict=True)) == list(times)
    assert table.efficiency.tolist() == pytest.approx([1, 100 / 60 / 2, 1])
    assert table.efficiency_whole.tolist() == pytest.approx([1, 114 / 86 / 2, 114 / 87 / 2])
    assert table.equal.tolist() == table.same_text.tolist() == [1, 1, 0.75]


@pytest.mark.parametrize("workers", ["2,4", "1,x", "", "1,0", "1,²"])
def test_the_first_number_of_workers_is_one(workers):
    with pytest.raises(InputError, match="the first one 1"):
        scaling.main(workers=workers)


@pytest.mark.parametrize(
    "given", [["--shape", "huge"], ["--device", "tpu"], ["--engines", "local,slurm,ray"], ["--cell", "3"]]
)
def test_unknown_words_are_refused(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.run(scaling.main, "scaling", given)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_two_workers_compute_the_rows_of_one(tmp_path):
    out = tmp_path / "scaling.csv"
    scaling.main("two-layer", "cpu", "1,2", "local,ray", 4, 8, out)
    table = pd.read_csv(out)
    assert table.equal.tolist() == [1, 1, 1]
    assert (table.efficiency > 0).all()
