"""The buttons that open a chapter elsewhere: on chapters of a book that knows its repository, and nowhere else."""

from pathlib import Path

import pytest
import yaml

from kvrepro.errors import InputError
from kvrepro.tools import launch

ROOT = Path(__file__).parents[2]


def shown(page, monkeypatch, repository="owner/name"):
    monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    context = {"header_buttons": ["others"]}
    launch.add_buttons(None, page, "page.html", context, None)
    return context["header_buttons"]


def test_a_chapter_opens_its_notebook_on_both_services(monkeypatch):
    group, *others = shown("book/executed/leakage", monkeypatch)
    binder, colab = (button["url"] for button in group["buttons"])
    assert others == ["others"]
    assert "/gh/owner/name/" in binder
    assert "/github/owner/name/blob/colab/leakage.ipynb" in colab
    assert (ROOT / binder.partition("tree/")[2]).is_file()


def test_the_branch_that_colab_opens_is_the_one_that_is_published():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())["jobs"]
    commands = "\n".join(step.get("run", "") for step in jobs["colab"]["steps"])
    assert "git push --force origin colab" in commands
    assert commands.index("pip install -c constraints.txt -e .") < commands.index("kvrepro.tools.notebooks")


@pytest.mark.parametrize(("page", "repository"), [("book/claims", "owner/name"), ("book/executed/leakage", "")])
def test_other_pages_and_other_books_have_none(page, repository, monkeypatch):
    assert shown(page, monkeypatch, repository) == ["others"]


def test_a_repository_of_another_form_is_refused(monkeypatch):
    with pytest.raises(InputError, match="owner/name"):
        shown("book/executed/leakage", monkeypatch, "name")
