"""Statistics of another model never take the place of the embedded one's, which git keeps."""

import hashlib
import json

import checkpoint
import typer
from typer.testing import CliRunner

from kvrepro.engine.score import learned
from kvrepro.experiment import models
from kvrepro.paths import ROOT
from studies import calibrate


def test_a_checkpoints_statistics_lie_beside_it(tmp_path):
    ours = ROOT / learned.QUERIES.replace("*", models.DEFAULT)
    before = hashlib.sha256(ours.read_bytes()).hexdigest()
    folder = checkpoint.save(tmp_path / "small-qwen2")
    app = typer.Typer()
    app.command()(calibrate.main)
    given = ["--model", str(folder), "--n", "2", "--tokens", "200"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    written = tmp_path / "small-qwen2-queries.json"
    assert json.loads(written.read_text())["layers"] == 2
    assert str(written) in result.output.replace("\n", "")
    result = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "own.json")])
    assert (result.exit_code, (tmp_path / "own.json").read_bytes()) == (0, written.read_bytes())
    assert hashlib.sha256(ours.read_bytes()).hexdigest() == before
