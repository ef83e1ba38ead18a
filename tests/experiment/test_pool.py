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
from kvrepro.errors import InputError
from kvrepro.experiment import models, pool, store
from kvrepro.experiment.run import Answers, PerItem, Settings, StudyFailed, run
from kvrepro.item import Item

SAME = ["key", "item", "policy", "prediction", "kept_hash", "kept_mean", "token_f1", "n_generated", "error"]
ITEMS = [
    Item(f"item-{i}", "doors", ({"role": "user", "content": f"Which door is open, {i}? " + "the red door " * 20},), "x")
    for i in range(12)
]
CONDITIONS = [Condition()] + [
    Condition(name, 0.5, Prefill(), reading="as_described") for name in ("k_norm", "random", "snapkv")
]
SIGN = -1.0


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    yield models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=256)))
    pool.end()


@pytest.fixture
def mine():
    """A policy typed here, in none of the catalogue's files, which uses a name of this module."""
    OWN["mine"] = Policy("Mine", "here", lambda o: o.keys.float().norm(dim=-1) * SIGN)
    yield "mine"
    del OWN["mine"]


def where(folder, engine, workers):
    return Settings(folder / f"{engine}-{workers}", engine=engine, workers=workers, batch_rows=3, progress=False)


def words(loaded, item, times):
    return pd.DataFrame({"words": [len(item.messages[0]["content"].split()) * times]})


def same_rows(loaded, mine, tmp_path, engine):
    study = Answers("c", "n", ITEMS, [*CONDITIONS, Condition(mine, 0.5, Prefill())], 4)
    here, there = (run(study, loaded, where(tmp_path, *who)) for who in (("local", 1), (engine, 2)))
    assert here.error.isna().all()
    columns = [name for name in SAME if name != "key"]  # of what is typed here, the key is another one each time
    pd.testing.assert_frame_equal(here[columns], there[columns])
    item = PerItem("c", "words", ITEMS, words, {"times": 2})
    pd.testing.assert_frame_equal(*(run(item, loaded, where(tmp_path, *who)) for who in (("local", 1), (engine, 2))))


def test_rows_are_the_same_for_any_number_of_workers(loaded, mine, tmp_path):
    same_rows(loaded, mine, tmp_path, "local")


def process(loaded, item):
    time.sleep(0.1)  # so that each worker gets a share
    return pd.DataFrame({"pid": [os.getpid()], "threads": torch.get_num_threads(), "name": loaded.name})


def test_workers_stay_for_the_next_study_until_they_are_ended(loaded, tmp_path):
    def pids(name):
        table = run(PerItem("c", name, ITEMS, process), loaded, where(tmp_path, "local", 2))
        assert set(table.threads) == {1}
        assert set(table.name) == {loaded.name}
        return set(table.pid) - {os.getpid()}  # the estimate's item was computed here

    first = pids("first")
    assert len(first) == 2
    assert pids("second") == first
    pool.end()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in first)


def deadly(loaded, item):
    """Kills every worker that computes item-3."""
    if item.id == "item-3":
        os.kill(os.getpid(), signal.SIGKILL)
    return pd.DataFrame({"pid": [os.getpid()]})


def deaths(tmp_path, engine, capfd):
    settings = where(tmp_path, engine, 2)
    with pytest.raises(StudyFailed, match="1 of 4 items failed, the first item-3: its worker process died twice"):
        run(PerItem("c", "always", ITEMS[:4], deadly), None, settings)
    assert "a worker process died: its part is computed once more" in capfd.readouterr().err
    assert len(run(PerItem("c", "always", ITEMS[:3], deadly), None, settings)) == 3


def test_a_part_whose_worker_dies_is_computed_once_more_and_has_then_failed(tmp_path, capfd):
    deaths(tmp_path, "local", capfd)


def test_what_cannot_be_pickled_is_computed_here(capsys):
    lock = multiprocessing.get_context("fork").Lock()
    jobs = [pool.Job(1, lambda loaded, i=i: (i, lock is not None)) for i in range(3)]
    assert [result for _, result in pool.results(None, jobs, 2)] == [(0, True), (1, True), (2, True)]
    assert "one process only: a part of the study cannot be sent to another" in capsys.readouterr().out


# ---- Ray


@pytest.fixture(scope="module")
def ray():
    package = pytest.importorskip("ray")
    pool.connect(least=2)
    yield package
    package.shutdown()


@pytest.mark.slow
def test_rows_of_a_ray_are_those_of_this_process(ray, loaded, mine, tmp_path):
    same_rows(loaded, mine, tmp_path, "ray")


@pytest.mark.slow
def test_a_ray_s_worker_that_dies_costs_nothing(ray, tmp_path, capfd):
    deaths(tmp_path, "ray", capfd)


@pytest.mark.parametrize(("change", "words"), [
    ({"code": "other"}, "has another kvrepro than this machine"),
    ({"recipe": ("/nowhere", "cpu", "float32", "m", None)}, "has no folder /nowhere"),
    ({"model_hash": "other"}, "has other files in"),
])  # fmt: skip
def test_a_node_that_cannot_do_the_same_says_so(loaded, change, words):
    given = {
        "recipe": pool.recipe_of(loaded),
        "model_hash": loaded.hash,
        "code": store.code_of(),
        "where": [os.getcwd()],
    }
    assert words in pool._Worker().begin(**(given | change))


@pytest.mark.parametrize(("address", "words"), [
    ("10.0.0.1", "give host:port of its head"), ("ray://head:1", "give host:port"),
    ("127.0.0.1:9", "nobody answers at Ray's address 127.0.0.1:9"),
])  # fmt: skip
def test_an_address_where_nobody_answers_is_refused_at_once(address, words):
    with pytest.raises(InputError, match=words):
        pool.reach(address)
