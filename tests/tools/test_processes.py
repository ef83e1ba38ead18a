"""How long a chapter in a process of its own will take."""

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
