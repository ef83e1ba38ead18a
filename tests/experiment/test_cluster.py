"""Jobs on a Ray of this machine with two workers: the rows of local workers, whoever dies."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import checkpoint
import pandas as pd
import pytest
from processes import forked

from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import OWN, Policy
from kvrepro.engine.regime import Prefill
from kvrepro.errors import InputError, Stopped
from kvrepro.experiment import cluster, models, store, workers
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


def on_ray(folder, address=None):
    """Two workers, and there is room for two of another driver."""
    if address is None:
        cluster.connect(least=4)
    return Settings(folder, engine="ray", address=address, workers=2, batch_rows=1, progress=False)


def quiet(loaded, folder):
    return run(Answers("c", "n", ITEMS, CONDITIONS, 6), loaded, Settings(folder, batch_rows=1, progress=False))


def test_rows_are_those_of_local_workers(loaded, tmp_path):
    """A policy typed here reaches the actors too."""
    OWN["mine"] = Policy("Mine", "here", lambda o: o.keys.float().norm(dim=-1) * SIGN)
    try:
        study = Answers("c", "n", ITEMS, [*CONDITIONS, Condition("mine", 0.5, Prefill())], 4)
        settings = (Settings(tmp_path / "local", workers=1, batch_rows=1, progress=False), on_ray(tmp_path / "ray"))
        frames = [run(study, loaded, chosen).drop(columns=TIMES) for chosen in settings]
    finally:
        del OWN["mine"]
    assert frames[0].error.isna().all()
    pd.testing.assert_frame_equal(*frames)


def process(loaded, item, folder, kill):
    """Writes down each start; the first to do the item named `kill` ends its worker."""
    mark = Path(folder, item.id)
    before = mark.read_text() if mark.is_file() else ""
    mark.write_text(f"{before}{os.getpid()} ")
    time.sleep(0.05)
    if item.id == kill and not before:
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
    for mark in (tmp_path / "starts").iterdir():
        mark.unlink()
    after = pids("killed", "item-7")
    starts = sum(len(mark.read_text().split()) for mark in (tmp_path / "starts").iterdir())
    assert starts == 13  # the item whose worker was killed, twice
    assert len(before & after) >= 1


def without_node(loaded, item, mark):
    """The first to do the fourth item ends its node: the raylet, which started this worker."""
    if item.id == "item-3" and not Path(mark).is_file():
        Path(mark).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return pd.DataFrame({"name": [loaded.name]})


@pytest.mark.parametrize(("end", "message"), [("os._exit(1)", f"{cluster.ENDED}\n"), ("sys.exit(1)", "")])
def test_a_process_that_ray_ends_at_once_has_a_last_word(end, message):
    code = f"""
import os, sys
from kvrepro.experiment import cluster
with cluster._last_word():
    {end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.slow
def test_ray_ends_a_process_that_asks_a_dead_node_for_a_large_result():
    """And nothing that could be caught: this is what the last word is for."""
    code = """
import psutil
from kvrepro.experiment import cluster

ray = cluster.connect(None, 2)
large = ray.remote(lambda: b"x" * 10_000_000).remote()
ray.wait([large])
with cluster._last_word():
    [node] = [one for one in psutil.Process().children() if one.name() == "raylet"]
    node.kill()
    node.wait()
    ray.get(large)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert cluster.ENDED in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_raylet_that_is_killed_as_it_starts_is_replaced(tmp_path):
    """Ray itself waits for the dead one; what it started goes, and the second start has everything of its own."""
    code = """
import threading, time
import psutil
from kvrepro.experiment import cluster

def kill():
    while not (found := [one for one in psutil.Process().children() if one.name() == "raylet"]):
        time.sleep(0.01)
    found[0].kill()

cluster.ALONE["RAY_raylet_start_wait_time_s"] = "8"
threading.Thread(target=kill, daemon=True).start()
ray = cluster.connect()
names = [one.name() for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
print(ray.get(ray.remote(lambda: 5).remote()), names.count("gcs_server"), names.count("raylet"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == ["5", "1", "1"]
    assert done.stderr.count("once more") == 1


@pytest.mark.slow
def test_the_last_node_ends_the_run_in_one_line_and_the_next_call_goes_on(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", 1.0)
    study = PerItem("c", "n", ITEMS, without_node, {"mark": str(tmp_path / "mark")})
    with pytest.raises(Stopped, match="^Ray's last node is gone: call again, what was done is stored$"):
        run(study, loaded, on_ray(tmp_path))
    assert run(study, loaded, on_ray(tmp_path)).item.tolist() == [item.id for item in ITEMS]


class Fake:
    """What `_shared` asks of Ray and of its actors, with the number of jobs that lie with it."""

    class exceptions:
        RayActorError = ZeroDivisionError
        RayTaskError = KeyError

    def __init__(self, deadly=(), alive=True):
        self.handed, self.most, self.do, self.deadly, self.alive = [], 0, self, deadly, alive

    def nodes(self):
        return [{"Alive": self.alive}]

    def shutdown(self):
        pass

    def remote(self, *given):
        self.handed.append(given)
        self.most = max(self.most, len(self.handed))
        return given

    def wait(self, refs, timeout):
        return refs[:1], refs[1:]

    def get(self, ref):
        if ref in self.handed:
            self.handed.remove(ref)
        if ref[0] in self.deadly:
            raise ZeroDivisionError("it died. Worker exit detail: killed.\nSome common causes include: many")
        return ref[0]


def test_no_more_than_two_jobs_lie_with_a_worker():
    fake = Fake()
    crew = [cluster._Member(fake, ("",)) for _ in range(3)]
    results = []
    for _, result in cluster._shared(fake, crew, [b"%d" % i for i in range(50)], lambda: None):
        results.append(result)
        assert len(fake.handed) <= 3 * cluster.AHEAD
    assert sorted(results) == sorted(b"%d" % i for i in range(50))
    assert fake.most == 3 * cluster.AHEAD


def test_two_jobs_go_to_two_workers_though_one_is_still_loading():
    crew = [cluster._Member(Fake(), None) for _ in range(2)]
    assert cluster._next(crew, 2) is crew[0]
    crew[0].jobs.append((None, 0))
    assert cluster._next(crew, 1) is crew[1]
    crew[1].begun = b""
    assert cluster._next(crew, 1) is None
    assert cluster._next(crew, 2) is crew[0]


def test_a_job_that_kills_its_workers_is_given_up_after_all_others(capsys):
    fake = Fake([b"3"])
    crew, results = [cluster._Member(fake, ("",)) for _ in range(2)], []
    done = cluster._shared(fake, crew, [b"%d" % i for i in range(9)], lambda: cluster._Member(fake, ("",)))
    with pytest.raises(cluster.Lost, match="1 of 9 parts cost 3 workers each and were given up: killed.$"):
        results.extend(i for i, _ in done)
    assert sorted(results) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert capsys.readouterr().err.count("a worker was lost (killed.)") == 3


def test_workers_that_die_as_they_load_the_model_end_the_run():
    fake = Fake([b"load"])
    crew = [cluster._Member(fake, (b"load",))]
    with pytest.raises(cluster.Lost, match="3 workers died as they loaded the model: killed"):
        list(cluster._shared(fake, crew, [b"1"], lambda: cluster._Member(fake, (b"load",))))


def test_where_no_node_is_left_no_other_worker_is_promised(capsys):
    fake = Fake([b"1"], alive=False)
    crew = [cluster._Member(fake, ("",))]
    with pytest.raises(cluster.Lost, match="^Ray's last node is gone: call again, what was done is stored$"):
        list(cluster._shared(fake, crew, [b"1"], lambda: pytest.fail("nobody can be hired")))
    assert capsys.readouterr().err == ""


def drive(model, folder, address):
    run(Answers("c", "n", ITEMS, CONDITIONS, 6), models.load(model), on_ray(folder, address))


@pytest.mark.slow
def test_after_the_death_of_the_driver_the_next_run_goes_on(loaded, tmp_path):
    folder, settings = tmp_path / "killed", on_ray(tmp_path / "killed")
    driver = forked(drive, str(loaded.path), folder, ray.get_runtime_context().gcs_address)
    while driver.is_alive() and len(list(folder.glob("c/n/*/*.parquet"))) < 2:
        time.sleep(0.002)
    driver.kill()
    driver.join()
    rows = store.read(folder / "c" / "n")
    assert 0 < len(rows) < 48
    assert rows.key.is_unique
    frame = run(Answers("c", "n", ITEMS, CONDITIONS, 6), loaded, settings)
    assert set(rows.date) <= set(frame.date)
    pd.testing.assert_frame_equal(frame.drop(columns=TIMES), quiet(loaded, tmp_path / "quiet").drop(columns=TIMES))


@pytest.mark.parametrize("why", ["code", "folder", "files"])
def test_a_node_that_cannot_do_the_same_says_so(loaded, monkeypatch, tmp_path, why):
    monkeypatch.chdir(tmp_path)
    what, code = workers.recipe_of(loaded), "other" if why == "code" else cluster.code()
    if why == "folder":
        what = (str(tmp_path / "nowhere"), *what[1:])
    reason = {"code": "another kvrepro", "folder": "has no folder", "files": "other files in"}[why]
    assert reason in cluster.Worker().begin(what, "other" if why == "files" else loaded.hash, code, [str(tmp_path)])
    fake = Fake()
    with pytest.raises(InputError, match="node x has no folder"):
        list(cluster._shared(fake, [cluster._Member(fake, ("node x has no folder",))], [b"1"], lambda: None))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere", "give host:port of its head"),
        ("10.0.0.1:6379²", "give host:port of its head"),  # a digit, and no number
        ("ray://head:10001", "give host:port of its head"),
        ("127.0.0.1:99999", "nobody answers"),
        (None, "nobody answers at Ray's address 127.0.0.1"),
    ],
)
def test_an_address_where_nobody_listens_is_one_line_at_once(monkeypatch, address, message):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        began = time.monotonic()
        with pytest.raises(InputError, match=message):
            cluster.connect(address or f"127.0.0.1:{closed.getsockname()[1]}")
    assert time.monotonic() - began < 6


@pytest.fixture
def not_begun(monkeypatch):
    """Ray as if it had not been started; START is short. Starts are counted."""
    starts = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "START", 0.3)
    monkeypatch.setattr(cluster, "_crew", {})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(*outcomes):
        def begin(**given):
            starts.append(given["address"])
            outcomes[len(starts) - 1]()

        monkeypatch.setattr(ray, "init", begin)
        return starts

    return init


def fails():
    raise RuntimeError("the raylet is dead.\nand so on")


@pytest.mark.parametrize("listens", [False, True])
def test_a_ray_that_never_answers_ends_the_run_in_one_line(not_begun, listens):
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        address = f"127.0.0.1:{head.getsockname()[1]}" if listens else None
        starts, began = not_begun(threading.Event().wait), time.monotonic()
        with pytest.raises(Stopped, match="no answer within 0 seconds.*what was done is stored$") as error:
            cluster.connect(address)
    assert time.monotonic() - began < 3
    assert "\n" not in str(error.value)
    assert ("ray status" if listens else "ray stop --force") in str(error.value)
    assert starts == [address or "local"]


def test_a_ray_of_this_machine_that_fails_to_start_is_started_once_more(not_begun, capsys):
    starts = not_begun(fails, lambda: None)
    assert cluster.connect() is ray
    assert starts == ["local", "local"]
    assert capsys.readouterr().err == "Ray did not start (the raylet is dead): once more\n"


def test_a_ray_of_this_machine_that_fails_twice_ends_the_run_in_one_line(not_begun):
    starts = not_begun(fails, fails)
    with pytest.raises(Stopped, match=r"^Ray does not start on this machine \(the raylet is dead\): .*engine 'local'"):
        cluster.connect()
    assert len(starts) == 2


def test_without_ray_the_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'kvrepro\[cluster\]'"):
        cluster.connect()


def test_a_wrong_address_is_refused_before_anything_is_computed(tmp_path):
    """By a study that is too small for workers, too. What is stored is read without the cluster."""
    settings = Settings(tmp_path, progress=False)
    study = PerItem("c", "small", {"one": 1}, lambda loaded, item: pd.DataFrame({"value": [item]}))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        wrong = replace(settings, engine="ray", address=f"127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(InputError, match="nobody answers at Ray's address"):
            run(study, None, wrong)
        assert not list(tmp_path.rglob("*.parquet"))
        pd.testing.assert_frame_equal(run(study, None, settings), run(study, None, wrong))


def test_an_address_needs_the_engine(monkeypatch):
    with pytest.raises(InputError, match="the engine is local: set engine 'ray'"):
        Settings(address="head:6379")
    monkeypatch.setenv("KVREPRO_ENGINE", "ray")
    monkeypatch.setenv("KVREPRO_RAY_ADDRESS", "head:6379")
    assert (Settings().engine, Settings().address) == ("ray", "head:6379")
