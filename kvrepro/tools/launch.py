"""A Sphinx extension: buttons that open a chapter's notebook on Binder and on Colab.

A book knows its repository where a workflow builds it, from $GITHUB_REPOSITORY; elsewhere its pages have no such
buttons. Colab opens the branch `colab`, whose notebooks install the package first (.github/workflows/publish.yml).
"""

import os
import re
from typing import Any

from kvrepro.errors import InputError


def places(chapter: str, repository: str) -> dict[str, str]:
    """Name of a service -> address at which it opens the chapter. repository: owner/name on GitHub."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise InputError(f"GITHUB_REPOSITORY is {repository!r}: it has the form owner/name")
    return {
        "Binder": f"https://mybinder.org/v2/gh/{repository}/HEAD?urlpath=lab/tree/notebooks/{chapter}.ipynb",
        "Colab": f"https://colab.research.google.com/github/{repository}/blob/colab/{chapter}.ipynb",
    }


def add_buttons(_app: Any, page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Put the buttons above a page that is a chapter."""
    folder, _, chapter = page.rpartition("/")
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    if folder != "book/executed" or not repository:
        return
    rocket = {"icon": "fas fa-rocket"}
    buttons = [
        rocket | {"type": "link", "text": name, "tooltip": f"Open on {name}, to run and to edit", "url": to}
        for name, to in places(chapter, repository).items()
    ]
    group = rocket | {"type": "group", "tooltip": "Run this chapter", "label": "launch-buttons", "buttons": buttons}
    context["header_buttons"].insert(0, group)


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", add_buttons, priority=502)  # the theme fills its list at 501
    return {"parallel_read_safe": True, "parallel_write_safe": True}
