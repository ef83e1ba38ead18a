"""Jobs on a Ray of this machine with two workers: the rows of local workers, whoever dies."""

import os
import signal
import socket
import subprocess
import sys
import time

import checkpoint
import pandas as pd
import pytest

from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import OWN, Policy
from kvrepro.engine.regime import Prefill
from kvrepro.errors import InputError
from kvrepro.experiment import cluster, models, store, workers
from kvrepro.experiment.plan import Job
from kvrepro.experiment.run import Answers, PerItem, Settings, run
from kvrepro.item import Item

TIMES = ["date", "prefill_seconds", "decode_seconds"]
SIGN = -1.0
ITEMS = [
    Item(f"item-{i}", "doors", ({"role": "user", "content": f"Which door is open, {i}? " + "the red door " * 20},), "x")
    for i in range(12)
]
CONDITIONS = [Condition()] + [
    Condition(name, 0.5, Prefill(), reading="as_described") for name in ("k_norm", "random", "snapkv")
]
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    yield models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=256)))
    ray.shutdown()


def on_ray(folder):
    return Settings(folder, engine="ray", workers=2, batch_rows=1, progress=False)


def quiet(loaded, folder):
    return run(Answers("c", "n", ITEMS, CONDITIONS, 6), loaded, Settings(folder, batch_rows=1, progress=False))


def test_rows_are_those_of_local_workers(loaded, tmp_path):
    """A policy typed here reaches the actors too."""
    OWN["mine"] = Policy("Mine", "here", lambda o: o.keys.float().norm(dim=-1) * SIGN)
    try:
        study = Answers("c", "n", ITEMS, [*CONDITIONS, Condition("mine", 0.5, Prefill())], 4)
        settings = (Settings(tmp_path / "local", workers=1, progress=False), on_ray(tmp_path / "ray"))
        frames = [run(study, loaded, one).drop(columns=TIMES) for one in settings]
    finally:
        del OWN["mine"]
    assert frames[0].error.isna().all()
    pd.testing.assert_frame_equal(*frames)


def process(loaded, item, folder, kill):
    """Writes down each start; the first to do the item named `kill` ends its worker."""
    with open(f"{folder}/{item.id}", "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.05)
    if item.id == kill and len(open(f"{folder}/{item.id}").readlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return pd.DataFrame({"pid": [os.getpid()], "name": loaded.name})


def test_workers_stay_and_a_lost_one_loses_and_doubles_nothing(loaded, tmp_path):
    (tmp_path / "starts").mkdir()

    def pids(name, kill):
        study = PerItem("c", name, ITEMS, process, {"folder": str(tmp_path / "starts"), "kill": kill})
        table = run(study, loaded, on_ray(tmp_path))
        assert table.item.tolist() == [item.id for item in ITEMS]
        assert set(table.name) == {loaded.name}
        return set(table.pid) - {os.getpid()}

    before = pids("quiet", "nobody")
    assert len(before) == 2
    assert pids("again", "none") == before
    after = pids("killed", "item-7") if not list((tmp_path / "starts").glob("item-7")) else None
    assert after is None
    for file in (tmp_path / "starts").iterdir():
        file.unlink()
    after = pids("killed", "item-7")
    starts = [len(file.read_text().split()) for file in (tmp_path / "starts").iterdir()]
    assert sum(starts) in (13, 14)  # the killed one, and what its worker held besides
    assert 1 <= len(after & before) < len(after) <= 3


def deadly(loaded, item):
    if item.id == "item-3":
        os._exit(1)
    return pd.DataFrame({"n": [1]})


def test_a_job_that_kills_its_workers_is_given_up_after_all_others(loaded, tmp_path):
    study = PerItem("c", "deadly", ITEMS, deadly)
    with pytest.raises(cluster.Lost, match=r"1 of 11 parts cost 3 workers each and were given up"):
        run(study, loaded, on_ray(tmp_path))
    assert len(list((tmp_path / "c" / "deadly").iterdir())) == 11


class Fake:
    """What `_shared` asks of Ray and of its actors, with the number of jobs that lie with it."""

    class exceptions:
        RayActorError = ZeroDivisionError
        RayTaskError = KeyError

    def __init__(self):
        self.handed, self.most, self.do, self.begin = [], 0, self, self

    def remote(self, *given):
        self.handed.append(given)
        self.most = max(self.most, len(self.handed))
        return given

    def wait(self, refs, timeout):
        return refs[:1], refs[1:]

    def get(self, ref):
        self.handed.remove(ref)
        return ref[0]


def test_no_more_than_two_jobs_lie_with_a_worker():
    fake = Fake()
    crew = [cluster._Member(fake, None) for _ in range(3)]
    found = []
    for _, result in cluster._shared(fake, crew, [b"%d" % i for i in range(50)], lambda: None):
        found.append(result)
        assert len(fake.handed) <= 3 * cluster.AHEAD
    assert sorted(found) == sorted(b"%d" % i for i in range(50))
    assert fake.most == 3 * cluster.AHEAD


KILLED = """
import sys
sys.path.insert(0, {helpers!r}); sys.path.insert(0, {tests!r})
import test_cluster as t
from kvrepro.experiment import models
from kvrepro.experiment.run import Answers, run
run(Answers("c", "n", t.ITEMS, t.CONDITIONS, 6), models.load({model!r}), t.on_ray({folder!r}))
"""


def test_after_the_death_of_the_driver_the_next_run_goes_on(loaded, tmp_path):
    folder, helpers = tmp_path / "killed", str(checkpoint.__file__).rsplit("/", 1)[0]
    tests = __file__.rsplit("/", 1)[0]
    code = KILLED.format(helpers=helpers, tests=tests, model=str(loaded.path), folder=str(folder))
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    while driver.poll() is None and len(list(folder.glob("c/n.rows/*.parquet"))) < 2:
        time.sleep(0.002)
    driver.kill()
    driver.wait()
    rows = store.read(folder / "c" / "n.parquet")
    assert 0 < len(rows) < 48
    assert rows.key.is_unique
    frame = run(Answers("c", "n", ITEMS, CONDITIONS, 6), loaded, on_ray(folder))
    assert set(rows.date) <= set(frame.date)
    pd.testing.assert_frame_equal(frame.drop(columns=TIMES), quiet(loaded, tmp_path / "quiet").drop(columns=TIMES))


@pytest.mark.parametrize("why", ["code", "folder", "files"])
def test_a_node_that_cannot_do_the_same_says_so(loaded, monkeypatch, tmp_path, why):
    what, code = workers.told(loaded), "other" if why == "code" else cluster.code()
    if why == "folder":
        what = (str(tmp_path / "nowhere"), *what[1:])
    said = {"code": "another kvrepro", "folder": "has no folder", "files": "other files in"}[why]
    assert said in cluster.Worker().begin(what, "other" if why == "files" else loaded.hash, code)
    if why == "folder":
        monkeypatch.setattr(workers, "told", lambda loaded: what)
        jobs = [Job(1, ray.put) for _ in range(2)]
        with pytest.raises(InputError, match="has no folder .*nowhere: put the checkpoint there"):
            list(cluster.each(loaded, jobs, 2, None))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nowhere", "give host:port of its head"),
        ("ray://head:10001", "give host:port of its head"),
        ("127.0.0.1:99999", "nobody answers"),
        (None, "nobody answers at Ray's address 127.0.0.1"),
    ],
)
def test_an_address_where_nobody_listens_is_one_line_at_once(monkeypatch, address, said):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        began = time.monotonic()
        with pytest.raises(InputError, match=said):
            cluster.connect(address or "127.0.0.1:%d" % closed.getsockname()[1])
    assert time.monotonic() - began < 6


def test_without_ray_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'kvrepro\[cluster\]'"):
        cluster.connect()


def test_an_address_needs_the_engine(monkeypatch):
    with pytest.raises(InputError, match="the engine is local: set engine 'ray'"):
        Settings(address="head:6379")
    monkeypatch.setenv("KVREPRO_ENGINE", "ray")
    monkeypatch.setenv("KVREPRO_RAY_ADDRESS", "head:6379")
    assert (Settings().engine, Settings().address) == ("ray", "head:6379")
