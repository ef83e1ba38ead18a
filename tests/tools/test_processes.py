"""Chapters in processes of their own: how long they take, when the next one begins, what became of each."""

import os
import signal
import time

import pytest
from processes import waited

from kvrepro.experiment import progress
from kvrepro.tools import book, processes


def test_chapters_that_run_a_model_say_how_their_time_is_shared():
    sources = {name: (book.ROOT / "notebooks" / f"{name}.ipynb").read_text() for name in book.chapters()}
    assert set(processes.SECONDS) == {name for name, source in sources.items() if "models.load(" in source}


def test_time_left_is_the_chapters(monkeypatch):
    monkeypatch.setattr(processes, "SECONDS", {"first": {"a": 10, "b": 30}})
    assert processes.chapter_left("first", {"study": "first/a", "done": 1, "total": 2, "left": 4.0}, 6.0) == 6 * 7
    assert processes.chapter_left("first", {"study": "first/b", "done": 3, "total": 3, "left": 0.0}, 20.0) == 0
    assert processes.chapter_left("first", {"study": "first/c", "done": 1, "total": 3, "left": 5.0}, 20.0) == 5
    assert processes.chapter_left("first", {"study": "first/a", "done": 0, "total": 3, "left": None}, 20.0) is None


def first_and_second(folder, most, studies_end=True):
    """What `in_turn` makes of a chapter that waits for the studies of the next one after its own, and of that one."""

    def first():
        waited((folder / "second begins").exists, 30 if most > 1 else 1.5)
        if studies_end:
            progress.end_studies()
        waited((folder / "second").exists, 30 if most > 1 and studies_end else 1.5)
        (folder / "first").touch()
        return (folder / "second").exists()

    def second():
        (folder / "second begins").touch()
        began_late = (folder / "first").exists()
        progress.wait_for_turn()
        (folder / "second").touch()
        return began_late or (folder / "first").exists()

    ended = processes.in_turn([("a", first), ("b", second)], most)
    return {name: (ran, error) for name, _, ran, error in ended}


@pytest.mark.parametrize("most", [2, 3])
def test_the_next_chapter_loads_at_once_and_computes_when_studies_have_ended(tmp_path, most):
    assert first_and_second(tmp_path, most) == {"a": (True, ""), "b": (False, "")}


@pytest.mark.parametrize(("most", "studies_end"), [(1, True), (3, False)])
def test_otherwise_it_waits_for_its_end(tmp_path, most, studies_end):
    assert first_and_second(tmp_path, most, studies_end) == {"a": (False, ""), "b": (True, "")}
    began_late = (tmp_path / "second begins").stat().st_mtime > (tmp_path / "first").stat().st_mtime
    assert began_late == (most == 1)


def test_of_three_chapters_one_computes_one_waits_and_the_last_begins_later(tmp_path):
    """A chapter that begins while another one waits would only take memory."""

    def chapter(name, after):
        def work():
            (tmp_path / f"{name} begins").touch()
            progress.wait_for_turn()
            began = (tmp_path / f"{after} begins").exists()
            progress.end_studies()
            return began

        return name, work

    works = [chapter("a", "c"), chapter("b", "a"), chapter("c", "b")]
    assert {name: ran for name, _, ran, _ in processes.in_turn(works)} == {"a": False, "b": True, "c": True}


@pytest.mark.parametrize("shared", ["ab", "bc", "abc", ""])
def test_studies_of_two_chapters_compute_at_a_time_where_both_may_share(tmp_path, shared):
    """Each chapter says which others compute as it begins to; the first goes on until the second waits or computes."""

    def chapter(name):
        def work():
            (tmp_path / f"{name} is here").touch()
            progress.wait_for_turn()
            others = len(list(tmp_path.glob("* computes")))  # before it shows itself, since the other one then ends
            (tmp_path / f"{name} computes").touch()
            if name == "a":
                waited((tmp_path / "b is here").exists, 30)
                waited((tmp_path / "b computes").exists, 30 if {"a", "b"} <= set(shared) else 1.5)
            if name == "b":
                waited((tmp_path / "c is here").exists, 30)
                waited((tmp_path / "c computes").exists, 30 if {"b", "c"} <= set(shared) else 1.5)
            (tmp_path / f"{name} computes").unlink()
            progress.end_studies()
            return others

        return name, work

    ended = processes.in_turn([chapter(name) for name in "abc"], most=3, shared=shared)
    beside = {name: (others, error) for name, _, others, error in ended}
    assert beside == {"a": (0, ""), "b": (int("ab" in shared), ""), "c": (int("bc" in shared), "")}


def test_what_fails_or_dies_leaves_the_others(tmp_path):
    def fails():
        raise ValueError("no such thing")

    works = [("a", fails), ("b", lambda: os.kill(os.getpid(), signal.SIGKILL)), ("c", lambda: True)]
    outcomes = {name: (ran, error) for name, _, ran, error in processes.in_turn(works)}
    assert outcomes == {"a": (True, "ValueError: no such thing"), "b": (False, processes.DIED), "c": (True, "")}


def test_an_interrupt_ends_whoever_is_at_work(tmp_path, monkeypatch):
    pid = tmp_path / "pid"

    def slow():
        pid.write_text(str(os.getpid()))
        time.sleep(60)

    def interrupted(chapter):
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(processes.Chapter, "show", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(processes.in_turn([("a", slow)]))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
