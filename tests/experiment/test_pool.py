"""Jobs by this process, by worker processes and by Ray: the same rows, whoever dies."""

import multiprocessing
import os
import signal
import time

import checkpoint
import pandas as pd
import pytest
import torch

from kvrepro.engine.condition import Condition, Prefill
from kvrepro.engine.policy import OWN, Policy
from kvrepro.errors import InputError, Stopped
from kvrepro.experiment import models, pool
from kvrepro.experiment.run import Answers, PerItem, Settings, run
from kvrepro.item import Item

SAME = ["item", "policy", "prediction", "kept_hash", "kept_mean", "token_f1", "n_generated", "error"]
ITEMS = [
    Item(f"item-{i}", "doors", ({"role": "user", "content": f"Which door is open, {i}? " + "the red door " * 20},), "x")
    for i in range(6)
]
SIGN = -1.0


def end_workers():
    pool._Loky(2).end()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    yield models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=256)))
    end_workers()


@pytest.fixture
def mine():
    """A policy typed here, in none of the catalogue's files, which uses a name of this module."""
    OWN["mine"] = Policy("Mine", "here", lambda o: o.keys.float().norm(dim=-1) * SIGN)
    yield "mine"
    del OWN["mine"]


def where(folder, engine, workers):
    return Settings(folder / f"{engine}-{workers}", engine=engine, workers=workers, batch_rows=3, progress=False)


def process(loaded, item, times):
    """Who computed an item; item-3 kills its worker wherever the driver is another process."""
    if item.id == "item-3" and times == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)  # so that each worker gets a share
    return pd.DataFrame({"pid": [os.getpid()], "threads": torch.get_num_threads(), "name": loaded.name})


def same_rows_whoever_dies(loaded, mine, tmp_path, engine, capfd):
    """Rows as here, a reader's own policy among them; the workers stay, and one that dies costs its own job alone."""
    conditions = [Condition(), Condition("random", 0.5, Prefill()), Condition(mine, 0.5, Prefill())]
    study, there = Answers("c", "n", ITEMS, conditions, 4), where(tmp_path, engine, 2)
    frames = [run(study, loaded, settings)[SAME] for settings in (where(tmp_path, "local", 1), there)]
    assert frames[0].error.isna().all()
    pd.testing.assert_frame_equal(*frames)
    first, second = (run(PerItem("c", name, ITEMS, process, {"times": name}), loaded, there) for name in "ab")
    assert set(first.pid) == set(second.pid)
    assert len(set(first.pid) - {os.getpid()}) == 2
    assert (set(first.threads), set(first.name)) == ({1}, {loaded.name})
    deadly = PerItem("c", "deadly", ITEMS, process, {"times": "deadly"})
    with pytest.raises(Stopped, match="1 of 6 items failed, the first item-3: its worker process died twice"):
        run(deadly, loaded, there)
    assert "a worker process died: its part is computed once more" in capfd.readouterr().err
    rest = PerItem("c", "deadly", [item for item in ITEMS if item.id != "item-3"], process, {"times": "deadly"})
    assert len(run(rest, loaded, there)) == 5
    assert "5 items, 0 computed now" in capfd.readouterr().out
    return set(second.pid)


def test_rows_of_workers_are_those_of_this_process(loaded, mine, tmp_path, capfd):
    pids = same_rows_whoever_dies(loaded, mine, tmp_path, "local", capfd)
    end_workers()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_what_cannot_be_pickled_is_refused():
    lock = multiprocessing.get_context("fork").Lock()
    jobs = [pool.Job(1, lambda loaded: lock, None) for _ in range(3)]
    with pytest.raises(InputError, match="workers cannot be sent this study .*: give workers=1"):
        list(pool.results(None, jobs, Settings(workers=2), alone=False))


# ---- Ray


@pytest.mark.slow
def test_rows_of_a_ray_are_those_of_this_process(loaded, mine, tmp_path, capfd):
    package = pytest.importorskip("ray")
    pool.connect(least=2)
    same_rows_whoever_dies(loaded, mine, tmp_path, "ray", capfd)
    package.shutdown()


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://head:1", "127.0.0.1:9"])
def test_an_address_where_nobody_answers_is_one_line_at_once(address):
    pytest.importorskip("ray")
    with pytest.raises(Stopped, match=f"Ray at {address}: .*ray status"):
        pool.connect(address)
