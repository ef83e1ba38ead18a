"""The run on the embedded model and on a small one: workers, kills, policies that raise or give NaN."""

import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver, resource_tracker
from types import SimpleNamespace
from unittest import mock

import checkpoint
import pandas as pd
import pytest
import torch
from processes import forked, runs, waited

from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import OWN, Policy
from kvrepro.engine.regime import Prefill
from kvrepro.experiment import data, models, store
from kvrepro.experiment import workers as pool
from kvrepro.experiment.run import Answers, PerItem, Settings, run
from kvrepro.item import Item

SAME = ["key", "item", "policy", "prediction", "kept_hash", "kept_mean", "token_f1", "n_generated", "error"]
ITEMS = [
    Item(f"item-{i}", "doors", ({"role": "user", "content": f"Which door is open, {i}? " + "the red door " * 20},), "x")
    for i in range(12)
]
CONDITIONS = [Condition()] + [
    Condition(name, 0.5, Prefill(), reading="as_described") for name in ("k_norm", "random", "snapkv")
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=256)))


def words(loaded, item, times):
    return pd.DataFrame({"words": [len(item.messages[0]["content"].split()) * times]})


def test_rows_are_the_same_for_any_number_of_workers(loaded, tmp_path):
    """A policy typed here reaches the workers too: it is none of the catalogue's file."""
    OWN["mine"] = Policy("Mine", "here", lambda o: o.keys.float().norm(dim=-1) * SIGN)
    try:
        study = Answers("c", "n", ITEMS, [*CONDITIONS, Condition("mine", 0.5, Prefill())], 4)
        frames = [
            run(study, loaded, Settings(tmp_path / str(workers), workers=workers, batch_rows=3, progress=False))
            for workers in (1, 2)
        ]
        item = PerItem("c", "words", ITEMS, words, {"times": 2})
        tables = [run(item, loaded, Settings(tmp_path / str(workers), workers=workers)) for workers in (1, 2)]
    finally:
        del OWN["mine"]
    assert frames[0].error.isna().all()
    pd.testing.assert_frame_equal(frames[0][SAME], frames[1][SAME])
    pd.testing.assert_frame_equal(*tables)


def process(loaded, item):
    time.sleep(0.1)  # so that each worker gets a share
    return pd.DataFrame({"pid": [os.getpid()], "threads": torch.get_num_threads(), "name": loaded.name})


def test_workers_are_kept_and_after_the_death_of_one_there_are_new_ones(loaded, tmp_path):
    def workers(name):
        table = run(PerItem("c", name, ITEMS, process), loaded, Settings(tmp_path, workers=2, progress=False))
        assert set(table.threads) == {1}
        assert set(table.name) == {loaded.name}
        return set(table.pid) - {os.getpid()}  # the estimate's item was computed here

    pids = workers("first")
    assert len(pids) == 2
    assert workers("second") == pids
    os.kill(min(pids), signal.SIGKILL)
    waited(lambda: not os.path.exists(f"/proc/{max(pids)}"), 20)
    assert not pids & workers("third")


def deadly(loaded, item, marks, always):
    """Kills the worker that computes item-3: the first one, or every one."""
    time.sleep(0.05)
    if item.id == "item-3" and (always or not marks.exists()):
        marks.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return pd.DataFrame({"pid": [os.getpid()]})


def test_a_worker_that_is_killed_costs_nothing_and_a_part_that_kills_workers_is_said(tmp_path, capfd, monkeypatch):
    settings, marks = Settings(tmp_path, workers=2, progress=False), tmp_path / "killed"
    assert len(run(PerItem("c", "once", ITEMS, deadly, {"marks": marks, "always": False}), None, settings)) == 12
    assert re.search(r"a worker process was killed: what is left \((1 part|\d+ parts)\) goes", capfd.readouterr().err)
    monkeypatch.setattr(pool, "TRIES", 1)
    with pytest.raises(pool.Lost, match="killed 1 times in a row, .* is memory too small"):
        run(PerItem("c", "always", ITEMS, deadly, {"marks": marks, "always": True}), None, settings)


SIGN = -1.0


def both(model, folder):
    loaded = models.load(model)
    settings = Settings(folder, batch_rows=1, workers=1, progress=False)
    tables = run(PerItem("c", "words", ITEMS, words, {"times": 3}), loaded, settings)
    return run(Answers("c", "n", ITEMS, CONDITIONS, 6), loaded, settings), tables


def test_a_run_that_is_killed_goes_on_where_it_was(loaded, tmp_path):
    """Killed twice while it stores rows; nothing is lost, nothing is there twice, results are those of a quiet run."""
    folder, model = tmp_path / "killed", str(loaded.path)
    seen: set[str] = set()
    for files in (1, 5):
        process = forked(both, model, folder)
        while process.is_alive() and len(list(folder.glob("c/n/*/*.parquet"))) < files:
            time.sleep(0.002)
        process.kill()
        process.join()
        rows = store.read(folder / "c" / "n")
        assert seen <= set(rows.key)
        assert rows.key.is_unique
        seen = set(rows.key)
    assert 0 < len(seen) < 48
    frame, tables = both(model, folder)
    quiet, others = both(model, tmp_path / "quiet")
    assert frame.key.is_unique
    pd.testing.assert_frame_equal(frame[SAME], quiet[SAME])
    pd.testing.assert_frame_equal(tables, others)


def process_id(loaded, item):
    time.sleep(0.1)
    return pd.DataFrame({"pid": [os.getpid()]})


def test_a_notebooks_workers_end_with_its_studies_and_a_later_study_has_others(tmp_path, monkeypatch):
    """Behind the tests above, whose server it ends: the next one imports everything once more."""
    monkeypatch.setattr(pool, "IMPORTED", pool.IMPORTED[:1])  # no model is loaded
    settings, pids = Settings(tmp_path, workers=2, progress=False), []
    for name in ("before", "after"):
        pids.append(set(run(PerItem("c", name, ITEMS, process_id), None, settings).pid) - {os.getpid()})
        left = {*pids[-1], forkserver._forkserver._forkserver_pid}
        settings.end_studies()
        assert waited(lambda left=left: not any(map(runs, left)), 20)
        assert resource_tracker._resource_tracker._pid is None
    assert not pids[0] & pids[1]


BUSY = """
import multiprocessing, os, time
from pathlib import Path
import pandas as pd
from kvrepro.experiment import run, workers
from kvrepro.item import Item
workers.IMPORTED.remove("transformers.modeling_utils")  # which takes seconds, and no model is loaded

def busy(loaded, item):
    if multiprocessing.parent_process() is None:  # the first item, by which the time is estimated
        return pd.DataFrame({{"done": [1]}})
    Path({pids!r}, f"{{os.getpid()}} {{os.getppid()}}").touch()
    time.sleep(60)
    return pd.DataFrame({{"done": [1]}})

items = [Item(f"item-{{i}}", "t", ({{"role": "user", "content": "x"}},), "x") for i in range(4)]
run.run(run.PerItem("c", "busy", items, busy), None, run.Settings({folder!r}, workers=2, progress=False))
"""


def test_workers_and_their_server_end_with_the_process_that_is_killed(tmp_path):
    marker = tmp_path / "told"
    marker.mkdir()
    code = BUSY.format(pids=str(marker), folder=str(tmp_path / "results"))
    process = subprocess.Popen([sys.executable, "-c", code])
    waited(lambda: process.poll() is not None or len(list(marker.iterdir())) == 2, 120)
    assert process.poll() is None
    process.kill()
    process.wait()
    family = {int(number) for name in marker.iterdir() for number in name.name.split()}
    assert len(family) == 3
    assert waited(lambda: not any(map(runs, family)), 20)


STUCK = """
import os, signal, threading, time
import pandas as pd
from kvrepro.experiment import run, workers
from kvrepro.item import Item
workers.IMPORTED.remove("transformers.modeling_utils")  # which takes seconds, and no model is loaded
ours = os.getpid()

def work(loaded, item):
    if os.getpid() != ours:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return pd.DataFrame({{"pid": [os.getpid()]}})

items = [Item(f"item-{{i}}", "t", ({{"role": "user", "content": "x"}},), "x") for i in range(4)]
rows = run.run(run.PerItem("c", "stuck", items, work), None, run.Settings({folder!r}, workers=2, progress=False))
assert set(rows.pid) - {{ours}}
time.sleep(1)  # the workers that did something have stopped by then
"""


def test_a_finished_program_does_not_wait_for_a_worker_that_hangs(tmp_path):
    code = STUCK.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], timeout=100, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def broken(o):
    """Scores that raise on long prompts' first token, or are no number."""
    scores = o.keys.float().norm(dim=-1)
    if o.keys.shape[-2] >= LONGEST:
        raise ArithmeticError("too long for me")
    return scores


def no_number(o):
    scores = o.keys.float().norm(dim=-1)
    return scores * float("nan") if o.keys.shape[-2] >= LONGEST else scores


LONGEST = 0  # of the test's prompts, as far as they are compressed


IMPORTS = """import time
from kvrepro.experiment import workers
workers.get_ready(None)
print("begun", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    pass"""


def test_an_interrupt_of_the_whole_group_finds_the_server_silent():
    """It imports for seconds, and a terminal sends Ctrl-C to it as well."""
    command = [sys.executable, "-c", IMPORTS]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    """The embedded model, twelve items, and their rows under the conditions that never fail."""
    embedded, items = models.load(), data.load_items("tinyworld:domains", 12, tokens=300)
    study = Answers("c", "alone", items, [Condition(), Condition("k_norm", 0.4, Prefill(until="question"))], 4)
    return embedded, items, run(study, embedded, Settings(tmp_path_factory.mktemp("alone"), progress=False))


@pytest.mark.parametrize("scorer", [broken, no_number])
def test_a_condition_that_fails_on_an_item_costs_that_row(doors, tmp_path, scorer):
    embedded, items, alone = doors
    global LONGEST
    LONGEST = max(min(data.build_prompt(item, embedded.tokenizer, 400).spans["question"]) for item in items)
    OWN["mine"] = Policy("Mine", "here", scorer)
    try:
        conditions = [Condition()] + [Condition(name, 0.4, Prefill(until="question")) for name in ("mine", "k_norm")]
        frame = run(Answers("c", "n", items, conditions, 4), embedded, Settings(tmp_path, progress=False))
    finally:
        del OWN["mine"]
    failed = frame[frame.error.notna()]
    assert 1 <= len(failed) <= 3
    assert set(failed.policy) == {"mine"}
    assert len(frame.attrs["failed"]) == len(failed)
    others = frame[frame.policy != "mine"].reset_index(drop=True)
    pd.testing.assert_frame_equal(others[SAME[1:]], alone[SAME[1:]], check_dtype=False)
    assert torch.get_num_threads() >= 1


def _names(answer):
    """What processes of a process that is a child itself are called."""
    answer.put([multiprocessing.get_context("spawn").Process().name for _ in range(2)])


def test_as_many_workers_start_as_memory_holds_models(loaded, monkeypatch):
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    monkeypatch.setattr(pool.joblib, "cpu_count", lambda: 8)
    for models_held, count in ((0, 1), (6.5, 3), (100, 8)):
        memory = SimpleNamespace(available=models_held * weights)
        monkeypatch.setattr(pool.psutil, "virtual_memory", lambda memory=memory: memory)
        assert pool.default_workers(loaded) == count


def test_workers_are_numbered_whoever_started_them():
    assert [pool._number(name) for name in ("SpawnProcess-1", "SpawnProcess-12")] == [1, 12]
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_names, args=(answer,))
    child.start()
    inside = answer.get()
    child.join()
    assert all(":" in name for name in inside)
    first, second = (pool._number(name) for name in inside)
    assert first >= 1
    assert second == first + 1


HERE = """
import os, sys
sys.path.insert(0, {folder!r})
from kvrepro.experiment import run, workers
from kvrepro.item import Item
import mine
workers.IMPORTED.remove("transformers.modeling_utils")
print("once", flush=True)
os.environ["LATER"] = "seen"
items = [Item(f"item-{{i}}", "t", ({{"role": "user", "content": "x"}},), "x") for i in range(4)]
table = run.run(run.PerItem("c", "n", items, mine.told), None, run.Settings({results!r}, workers=2, progress=False))
print(sorted(set(table.told)), flush=True)
"""
MINE = """
import multiprocessing, os, threading, time
import pandas as pd

def told(loaded, item):
    time.sleep(0.1)
    keeps = "MALLOC_TRIM_THRESHOLD_" in os.environ
    worker = multiprocessing.parent_process() is not None
    told = f"{os.environ.get('LATER')}, {threading.active_count() < 4} threads, {keeps if worker else '-'}"
    return pd.DataFrame({"told": [told]})
"""


FAULTS = """
import resource
import numpy as np
for _ in range(24):  # while blocks of many sizes are made
    np.ones(2**24, np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    np.ones(2**24, np.float32)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_a_process_that_keeps_large_blocks_gets_none_that_the_system_must_clear(monkeypatch):
    def faults() -> int:
        return int(subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, check=True, text=True).stdout)

    for name in pool.KEEP_BLOCKS:
        monkeypatch.delenv(name, raising=False)
    with mock.patch.dict(os.environ):
        usual = faults()
        pool.keep_blocks()
        assert (faults() < usual / 10) == (set(pool.KEEP_BLOCKS) <= set(os.environ))  # older versions: neither
        os.environ["MALLOC_TRIM_THRESHOLD_"] = "7"
        pool.keep_blocks()
        assert os.environ["MALLOC_TRIM_THRESHOLD_"] == "7"


def test_workers_have_our_modules_and_environment_and_do_not_run_our_script_again(tmp_path):
    """A script without `if __name__ == "__main__"`, with a module from a folder that it added itself."""
    (tmp_path / "mine.py").write_text(MINE)
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(HERE.format(folder=str(tmp_path), results=str(tmp_path / "results")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("once") == 1
    keeps = platform.libc_ver()[0] == "glibc" and tuple(map(int, platform.libc_ver()[1].split("."))) >= pool.GLIBC
    assert lines[-1] == f"['seen, True threads, -', 'seen, True threads, {keeps}']"
