"""What the site needs beyond its theme: formulas without a script, links of notebooks, buttons that open a chapter."""

import os
import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

EXECUTED = "book/executed"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("config-inited", _configure, priority=900)
    app.connect("source-read", _relink)
    app.connect("autodoc-process-docstring", _as_written)
    app.connect("html-page-context", _without_thebe, priority=900)
    app.connect("html-page-context", _with_roles)
    app.connect("html-page-context", _add_buttons, priority=502)  # the theme fills its list at 501
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _configure(app: Sphinx, config: Any) -> None:
    config.html_math_renderer = "mathml"
    address = os.environ.get("KVREPRO_SITE_URL", "")  # under which the book is published
    config.ogp_site_url = address and address.rstrip("/") + "/"


def _inline(translator: Any, node: nodes.Node) -> None:
    translator.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.Node) -> None:
    translator.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def _relink(app: Sphinx, name: str, source: list[str]) -> None:
    """Notebooks lie in notebooks/ and link from there; their executed copies lie in book/executed. References to
    figures, which only the notebook's own reader resolves, become plain text."""
    if name.startswith(EXECUTED):
        text = source[0].replace("](../book/", "](../")
        source[0] = re.sub(r"\[([^\[\]\n]*)\]\(#fig-[a-z0-9-]+\)", r"\1", text)


def _as_written(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings as they stand in the source: their formulas are no markup."""
    lines[:] = [".. code-block:: text", "", *("   " + line for line in lines), ""] if any(lines) else []


def _without_thebe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """No scripts of Thebe, which nothing here uses: each page would declare its variables twice."""
    scripts = context.get("script_files", [])
    context["script_files"] = [script for script in scripts if "thebe" not in f"{script.filename} {script.attributes}"]


def _with_roles(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """A role for each entry of a bibliography in the place of docutils', which ARIA no longer has."""
    context["body"] = context.get("body", "").replace('role="doc-biblioentry"', 'role="listitem"')


def _add_buttons(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Buttons for Binder and Colab above a notebook, where a workflow names the repository in $GITHUB_REPOSITORY. Colab
    opens the branch `colab`, whose notebooks install the package first (publish.yml)."""
    folder, _, chapter = page.rpartition("/")
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    if folder != EXECUTED or not repository:
        return
    addresses = {
        "Binder": f"https://mybinder.org/v2/gh/{repository}/HEAD?urlpath=lab/tree/notebooks/{chapter}.ipynb",
        "Colab": f"https://colab.research.google.com/github/{repository}/blob/colab/{chapter}.ipynb",
    }
    rocket = {"icon": "fas fa-rocket"}
    buttons = [
        rocket | {"type": "link", "text": name, "tooltip": f"Open on {name}, to run and to edit", "url": address}
        for name, address in addresses.items()
    ]
    group = rocket | {"type": "group", "tooltip": "Run this chapter", "label": "launch-buttons", "buttons": buttons}
    context["header_buttons"].insert(0, group)
