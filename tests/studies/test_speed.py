"""The pages of timings are what their tables say."""

import pandas as pd
import pytest

from kvrepro.paths import ROOT
from kvrepro.tools import command
from studies import speed


@pytest.mark.parametrize(("file", "page"), [("models.md", speed.page), ("first_token.md", speed.first_page)])
def test_pages_are_made_from_the_tables(file, page):
    assert (ROOT / "data" / "gpu" / file).read_text(encoding="utf-8") == page()


def test_what_each_kind_of_policy_adds():
    times = {speed.PLAIN: 2.0, "snapkv, as run": 2.02, "tova, as run": 2.0, "h2o, as run": 3, "cake, as run": 2.1,
             "critical_kv, as run": 2.2, "key_diff, as described": 9, "everything kept": 1.6}  # fmt: skip
    frame = pd.DataFrame({"method": times.keys(), "seconds": times.values()}).assign(model="Qwen2.5-3B", tokens=8192)
    rows = speed.added(frame)
    assert [row["Qwen2.5-3B, 8,192 tokens"] for row in rows[:3]] == ["25.0 to 31.2%", "87.5%", "37.5%"]
    share = 2 * 36 * 8192 * 2048**2 / speed.SUSTAINED / 1.6  # two operations a weight of each layer's projection
    assert [row["Qwen2.5-3B, 8,192 tokens"] for row in rows[3:]] == [f"{share:.1%}", "-20.0%"]


@pytest.mark.parametrize("given", [["--part", "prefil"], ["--model", "Qwen2.5-4B"]])
def test_an_unknown_part_or_model_is_refused_before_anything_is_measured(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.run(speed.main, "speed", given)
    assert f"{given[0][2:]} {given[1]!r}: choose one of " in capsys.readouterr().err
