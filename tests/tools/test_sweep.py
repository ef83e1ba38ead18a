"""Sweep files: what is refused, what it costs, what runs, and that the book reads its rows and computes none."""

import os
import re
import sys
from pathlib import Path

import checkpoint
import pandas as pd
import pytest
import typer
import yaml

from kvrepro import __main__
from kvrepro.errors import InputError
from kvrepro.experiment import cluster, data, models, store
from kvrepro.experiment.limit import time_limit
from kvrepro.tools import book, sweep

ROOT = Path(__file__).parents[2]
GOOD = {"models": ["small-gqa"], "chapters": ["own_policy"]}
PARAMETERS = "models: [small-gqa]\nchapters: [own_policy]\nparameters:"


def written(folder, **keys):
    file = folder / "sweep.yml"
    file.write_text(yaml.safe_dump(GOOD | keys, allow_unicode=True))
    return file


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The command sets these; they are unset again."""
    for name in ("ENGINE", "RAY_ADDRESS", "WORKERS", "DRY_RUN"):
        monkeypatch.setenv(f"KVREPRO_{name}", "")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"modles": []}, "'modles', did you mean 'models'?"),
        ({"models": "small-gqa"}, "models 'small-gqa': give a list"),
        ({"models": []}, r"models \[\]: give a list of at least one, each once"),
        ({"models": ["small-gqa"] * 2}, "each once"),
        ({"models": ["small-gqa", "nosuch"]}, "unknown model 'nosuch'"),
        ({"chapters": ["leakge"]}, "unknown chapter with studies 'leakge', did you mean 'leakage'?"),
        ({"chapters": ["reanalysis"]}, "unknown chapter with studies 'reanalysis'"),
        ({"profile": "fast"}, "profile 'fast'"),
        ({"parameters": ["n_items"]}, "give names with values"),
        ({"parameters": {"n_item": 3}}, "unknown parameter of any chapter 'n_item', did you mean 'n_items'?"),
        ({"parameters": {"leakage.n_items": 3}}, "unknown chapter 'leakage'"),
        ({"parameters": {"own_policy": {"n_items": 3}}}, "give its parameters as own_policy.n_items"),
        ({"parameters": {"model": "small-mha"}}, "model stands among the parameters: set it by the key models"),
        (
            {"parameters": {"own_policy.profile": "full"}},
            "profile stands among .*: set it by the key profile",
        ),
        ({"parameters": {"own_policy.results": "else"}}, "all chapters of a sweep write into one folder"),
        ({"parameters": {"n_items": 0}}, "own_policy: n_items 0: a whole number, at least 1"),
        ({"parameters": {"workers": "many"}}, "workers 'many'"),
        ({"parameters": {"options": {"workers": 1}}}, "options: give each setting by its own name"),
        ({"parameters": {"n_items=3": 4}}, "unknown parameter of any chapter 'n_items=3'"),
        ({"parameters": {".n_items": 4}}, "unknown chapter ''; there are: own_policy"),
        ({"parameters": {"results": "~/rows"}}, "results '~/rows': write the home folder out"),
        ({"parameters": {"rivals": ["snapkv", *map(str, range(1000))]}}, "rivals has 1,001 values: give at most 1,000"),
        ({"parameters": {"dry_run": True}}, "dry_run stands among .*: set it by --dry-run"),
        ({"parameters": {"own_policy.dry_run": True}}, "dry_run stands among .*: set it by --dry-run"),
    ],
)
def test_what_no_sweep_can_be_is_refused_in_one_line(tmp_path, keys, why):
    with pytest.raises(InputError, match=why) as refused:
        sweep.read(written(tmp_path, **keys))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("models: [", "is no YAML"),
        ("leakage", "holds 'leakage'"),
        ("models: [a]", "no chapters"),
        ("models: [2020-13-45]", "is no YAML .*month"),
        ("models: [" + "9" * 5000 + "]", "is no YAML .*digits"),
        ("models: " + "[" * 3000 + "]" * 3000, "is no YAML .*recursion"),
        (f"{PARAMETERS} {{n_items: 2020-01-01}}", r"n_items datetime.date\(2020, 1, 1\): a whole number"),
        (f"{PARAMETERS} {{n_items: !!set {{a}}}}", r"n_items {'a'}: a whole number"),
        (f"{PARAMETERS} {{n_items: &a [*a]}}", r"is no YAML \(alias \*a: write it out"),
        ("a: &a [1]\nb: &b [*a, *a]\nmodels: [*b]", r"is no YAML \(alias \*a: write it out"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused_in_one_line(tmp_path, text, why):
    file = tmp_path / "sweep.yml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=why) as refused:
        sweep.read(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_is_no_sweep_file_and_keeps_nobody_waiting(tmp_path, make):
    make(tmp_path / "sweep.yml")
    with time_limit(10), pytest.raises(InputError, match="sweep.yml is no regular file"):
        sweep.read(tmp_path / "sweep.yml")


def test_values_reach_the_chapters_as_they_are_written(tmp_path):
    """A small number stays one, a folder's name keeps its letters, and settings go into the options."""
    parameters = {"share": 0.00001, "results": str(tmp_path / "\U0001f600"), "workers": 2, "seed": 1}
    given = sweep.read(written(tmp_path, parameters=parameters)).given("small-gqa")["own_policy"]
    assert {name: given[name] for name in ("share", "results")} == {
        name: parameters[name] for name in ("share", "results")
    }
    assert given["options"] == {"workers": 2, "seed": 1}


def test_models_whose_rows_could_not_be_told_apart_are_refused(tmp_path):
    folders = [checkpoint.save(tmp_path / name / "small", context=256) for name in "ab"]
    with pytest.raises(InputError, match="here small, small: rename one"):
        sweep.read(written(tmp_path, models=[str(folder) for folder in folders]))


def test_the_book_reads_the_rows_of_a_sweep_and_computes_none(tmp_path, capsys):
    """Its price is of what is left; the second call, and the notebook with its analysis, compute nothing, but for the
    exercise at the notebook's end."""
    texts = [message["content"] for item in data.load_items("tinyworld:domains", 6) for message in item.messages]
    model, results = str(checkpoint.save(tmp_path / "small", texts, 1500)), str(tmp_path / "results")
    file = written(tmp_path, models=[model], parameters={"n_items": 1, "results": results})
    sweep.main(file)
    captured = capsys.readouterr()
    [before] = sweep_rows(results)
    assert re.search(rf"small +own_policy +{len(before) + 1} ", captured.out)
    assert re.search(r"small  own_policy .* done", captured.out)
    assert re.search(r"own_policy/main: 0 of \d+", captured.err)
    sweep.main(file, dry_run=True)
    assert "0 results, about 0 s" in capsys.readouterr().out
    given = book.parse_parameters([f"model={model}", f"results={results}", "n_items=1"], ["own_policy"])["own_policy"]
    assert list(book.cells("own_policy", given))
    computed = dict(re.findall(r"own_policy/(\S+): .* (\d+) computed now", capsys.readouterr().out))
    assert {name for name, count in computed.items() if count == "0"} == {"main", "controls"}
    assert set(computed) <= {"main", "controls", "exercise"}
    pd.testing.assert_frame_equal(sweep_rows(results)[0], before)


def sweep_rows(results):
    return [store.read(file) for file in sorted(Path(results).glob("own_policy/main.parquet"))]


def test_a_chapter_that_fails_costs_itself_and_the_exit_code_says_so(tmp_path, monkeypatch, capsys):
    ran = []

    def studies(name, parameters):
        ran.append((parameters["model"], name))
        if ran[-1] == ("small-gqa", "leakage"):
            raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(sweep, "_studies", studies)
    monkeypatch.setattr(sweep, "price", lambda _sweep: pd.DataFrame({"results": [1], "hours": [0.5], "MB": [2.0]}))
    file = written(tmp_path, models=["small-gqa", "small-mha"], chapters=["leakage", "own_policy"],
                   parameters={"results": str(tmp_path)})  # fmt: skip
    with pytest.raises(typer.Exit) as end:
        sweep.main(file)
    assert end.value.exit_code == 1
    assert ran == [(model, name) for model in ("small-gqa", "small-mha") for name in ("leakage", "own_policy")]
    captured = capsys.readouterr()
    assert "failed: RuntimeError: out of luck\n" in captured.out
    assert captured.err == "failed: small-gqa: leakage; the same command tries them again\n"


def test_a_terminal_shows_one_line_per_model(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    line = sweep.Line("small")
    line({"study": "leakage/answers", "done": 3, "total": 1200, "left": 700.0})
    line.end("leakage done")
    captured = capsys.readouterr()
    assert captured.err == "\r\x1b[Ksmall  0 s  leakage/answers: 3 of 1,200, 12 min left of it\r\x1b[K"
    assert captured.out == "small  leakage done\n"


def test_the_command_hands_engine_and_workers_on_and_refuses_mixtures(tmp_path, monkeypatch, capsys):
    connections, file = [], str(written(tmp_path))
    monkeypatch.setattr(cluster, "connect", lambda *given: connections.append(given))
    monkeypatch.setattr(sweep, "price", lambda _sweep: pd.DataFrame({"results": [1], "hours": [0.5], "MB": [2.0]}))
    for arguments, code in (
        (["--engine", "ray", "--address", "head:6379", "--workers", "2", "--dry-run"], 0),
        (["-p", "snapkv"], 2), (["--engine", "slurm"], 2), (["--address", "head:6379"], 2),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["kvrepro", "run", file, *arguments])
        with pytest.raises(SystemExit) as end:
            __main__.main()
        assert end.value.code == code, arguments
        for name in ("ENGINE", "RAY_ADDRESS", "WORKERS"):
            monkeypatch.setenv(f"KVREPRO_{name}", "")
    assert connections == [("head:6379", 2)]
    captured = capsys.readouterr()
    assert "1 results, about 30 min" in captured.out
    lines = captured.err.splitlines()
    assert lines[0].endswith("sweep.yml says what runs: leave out --policy, or the file")
    assert lines[1].startswith("engine 'slurm': local, or ray")
    assert lines[2] == "address 'head:6379' is of a Ray cluster, and the engine is local: set engine 'ray'"


@pytest.mark.parametrize("name", ["sweep.yml", "sweep-gpu.yml"])
def test_the_examples_are_sweeps(monkeypatch, name):
    monkeypatch.setattr(models, "resolve", lambda model: (model, Path(model)))  # nothing is fetched
    monkeypatch.setattr(models, "device_of", lambda device: device)  # and there may be no GPU
    example = sweep.read(ROOT / "examples" / name)
    assert example.given(example.models[0]).keys() == set(example.chapters)


def test_ray_takes_the_cluster_file_and_the_manifest_runs_the_command():
    config = pytest.importorskip("ray.autoscaler._private.util")
    given = yaml.safe_load((ROOT / "examples" / "ray-cluster.yml").read_text())
    config.validate_config(config.prepare_config(given))
    job = yaml.safe_load((ROOT / "examples" / "kuberay.yml").read_text())
    words = job["spec"]["entrypoint"].split()
    assert (job["kind"], words[:2], words[3:]) == ("RayJob", ["kvrepro", "run"], ["--engine", "ray"])
    ray = job["spec"]["rayClusterSpec"]
    assert f"ray=={ray['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_a_log_that_cannot_be_written_is_one_line_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "_studies", lambda *_: pytest.fail("a chapter ran"))
    (tmp_path / "results" / "sweep.log").mkdir(parents=True)
    given = sweep.read(written(tmp_path, parameters={"results": str(tmp_path / "results")}))
    with pytest.raises(InputError, match=r"sweep.log cannot be written \(Is a directory\)") as refused:
        sweep.run(given)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_costs_chapters_and_not_the_sweeps_list_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "_studies", lambda *_: print("a line for the log"))
    given = sweep.read(written(tmp_path, parameters={"results": str(tmp_path / "results")}))
    given.results.mkdir()
    (given.results / "sweep.log").symlink_to("/dev/full")
    assert sweep.run(given) == ["small-gqa: own_policy"]


def test_output_that_nobody_reads_any_more_is_no_fault_of_the_log(tmp_path, monkeypatch):
    def unread(*_):
        raise BrokenPipeError

    monkeypatch.setattr(sweep, "_studies", lambda *_: None)
    monkeypatch.setattr(sweep.Line, "end", unread)
    given = sweep.read(written(tmp_path, parameters={"results": str(tmp_path / "results")}))
    with pytest.raises(BrokenPipeError):
        sweep.run(given)
