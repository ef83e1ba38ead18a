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
    """What `in_turn` makes of a chapter that waits for the next one after its studies, and of that next one."""

    def first():
        if studies_end:
            progress.end_studies()
        waited((folder / "second").exists, 30 if most == 2 and studies_end else 1.5)
        (folder / "first").touch()
        return (folder / "second").exists()

    def second():
        (folder / "second").touch()
        return (folder / "first").exists()

    ended = processes.in_turn([("a", first), ("b", second)], most)
    return {name: (ran, error) for name, _, ran, error in ended}


def test_a_chapter_begins_when_the_studies_of_the_one_before_have_ended(tmp_path):
    assert first_and_second(tmp_path, most=2) == {"a": (True, ""), "b": (False, "")}


@pytest.mark.parametrize(("most", "studies_end"), [(1, True), (2, False)])
def test_otherwise_it_waits_for_its_end(tmp_path, most, studies_end):
    assert first_and_second(tmp_path, most, studies_end) == {"a": (False, ""), "b": (True, "")}


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
