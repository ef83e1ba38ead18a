"""What the built pages need to read well on every device: a Sphinx extension, named in `_config.yml`.

Formulas become MathML, so that no script draws them. Icons come from a font cut down to those that the pages show, and
the theme's style sheets lose what no page needs. What nobody here uses is left out: Thebe, and Font Awesome's scripts.
Markup that readers' tools stumble over is mended. A book that knows its repository has buttons that open a chapter.
"""

import functools
import itertools
import os
import re
import shutil
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import tinycss2
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from fontTools import subset
from sphinx.application import Sphinx

from kvrepro.errors import InputError

SITE_URL = "KVREPRO_SITE_URL"  # the environment variable with the address under which the book is published
# What a page must hold to need a style sheet or a script; None: nothing does.
UNUSED: dict[str | None, re.Pattern[str]] = {
    None: re.compile(r"\s*<link\b[^>]*sphinx-thebe\.css[^>]*>"),
    'class="sd-': re.compile(
        r"\s*<(?:link|script)\b[^>]*(?:sphinx-design\.min\.css|design-tabs\.js)[^>]*>(?:</script>)?"
    ),
    'class="cell': re.compile(r"\s*<link\b[^>]*mystnb\.[^>]*>"),
}
AWESOME = re.compile(
    r"\s*<(?:link|script)\b[^>]*?([\"'])(?P<root>[^\"']*?)_static/vendor/fontawesome/[^>]*>(?:</script>)?"
)
MENDED = (  # in a page's text
    (re.compile(r'<th([^>]*)>(?:\s|&nbsp;|<p>\s*</p>)*</th>'), r"<td\1></td>"),  # a header without text heads nothing
    (re.compile(r' role="doc-biblioentry"'), ""),  # deprecated
    (re.compile(r'<div role="list" class="citation-list">'), '<div class="citation-list">'),
    (re.compile(r'<script type="text/x-thebe-config">.*?</script>\s*<script>kernelName.*?</script>', re.S), ""),
)  # fmt: skip
SIDEBAR = 'class="bd-sidebar-primary bd-sidebar'  # around it
FIGURE = re.compile(r'<img\b[^>]*kvrepro-figure[^>]*\bsrc="[^"]*_images/([^"]+\.svg)"[^>]*>')
POINT = re.compile(r'<circle cx="([\d.-]+)" cy="([\d.-]+)" r="6" opacity="0"><title>(.*?)</title>')  # of figures
SHEETS = ("bootstrap.css", "pydata-sphinx-theme.css")  # of the theme: most of it is for pages that look otherwise
NAME = re.compile(r"[A-Za-z_][\w-]*")  # of a class, among other words
FOOTER = """<p>MIT licence. <a href="{about}">Cite this book, licence, changes</a>.</p>"""


def setup(app: Sphinx) -> dict[str, Any]:
    """Register everything here with Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("config-inited", _configure, priority=900)
    app.connect("env-check-consistency", _number)
    app.connect("html-page-context", add_buttons, priority=502)  # the theme fills its list at 501
    app.connect("html-page-context", _page, priority=900)
    app.connect("build-finished", _finish, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _configure(app: Sphinx, config: Any) -> None:
    config.html_math_renderer = "mathml"
    config.numfig_format = {"figure": "Figure %s"}
    address = os.environ.get(SITE_URL, "")
    config.ogp_site_url = address and address.rstrip("/") + "/"
    for listeners in app.events.listeners.values():  # Thebe's: it would fetch itself from another server
        homes = [getattr(listener.handler, "__module__", "") for listener in listeners]
        listeners[:] = [
            listener for listener, home in zip(listeners, homes, strict=True) if not home.startswith("sphinx_thebe")
        ]


def _number(app: Sphinx, env: Any) -> None:
    """Figures are counted within their page."""
    for kinds in env.toc_fignumbers.values():
        figures = kinds.get("figure", {})
        figures.update({name: (n,) for n, name in enumerate(figures, start=1)})


def _inline(translator: Any, node: nodes.Node) -> None:
    translator.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.Node) -> None:
    formula = tex2mathml(node.astext(), as_block=True)
    translator.body.append(f'<div class="formula">{formula}</div>')
    raise nodes.SkipNode


def _page(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """One page's text, before it goes into its frame."""
    context["default_mode"] = "auto"
    for pattern, text in MENDED:
        context["body"] = pattern.sub(text, context.get("body", ""))
    context["theme_extra_footer"] = FOOTER.format(about=context["pathto"]("book/about"))


def add_buttons(_app: Any, page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Put buttons for Binder and Colab above a chapter, where a workflow that builds the book names its repository in
    $GITHUB_REPOSITORY. Colab opens the branch `colab`, whose notebooks install the package first (publish.yml)."""
    folder, _, chapter = page.rpartition("/")
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    if folder != "book/executed" or not repository:
        return
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise InputError(f"GITHUB_REPOSITORY is {repository!r}: it has the form owner/name")
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


def _finish(app: Sphinx, error: Exception | None) -> None:
    """All pages, once they are written: mended frames, and a font of the icons that they show."""
    if error or app.builder.format != "html":
        return
    out = Path(app.outdir)
    points = functools.cache(lambda name: _points((out / "_images" / name).read_text(encoding="utf-8")))
    pages = {page: page.read_text(encoding="utf-8") for page in out.rglob("*.html") if "_static" not in page.parts}
    for page, text in pages.items():
        text = FIGURE.sub(lambda image: image[0] + points(image[1]), framed(text))
        page.write_text(text, encoding="utf-8")
    whole = "".join(pages.values())
    icons(out / "_static", whole)
    scripts = [script.read_text(encoding="utf-8") for script in (out / "_static").rglob("*.js")]
    names = set(NAME.findall(whole)).union(*(NAME.findall(script) for script in scripts))
    for sheet in (out / "_static" / "styles" / name for name in SHEETS):
        if sheet.is_file():
            sheet.write_text(trimmed(sheet.read_text(encoding="utf-8"), names), encoding="utf-8")


def trimmed(css: str | list[Any], names: Set[str]) -> str:
    """A style sheet, or what a rule holds, without the selectors of classes that are none of `names`."""
    rules = tinycss2.parse_stylesheet(css, skip_comments=True, skip_whitespace=True)
    return "".join(_trimmed(rule, names) for rule in rules)


def _trimmed(rule: Any, names: Set[str]) -> str:
    """A rule as text; "" where no selector of it, and no rule inside it, is left."""
    if rule.type == "at-rule" and rule.lower_at_keyword in ("media", "supports") and rule.content:
        inside = trimmed(rule.content, names)
        return f"@{rule.at_keyword}{tinycss2.serialize(rule.prelude)}{{{inside}}}" if inside else ""
    if rule.type != "qualified-rule":
        return str(rule.serialize())
    selectors = [list(part) for comma, part in itertools.groupby(rule.prelude, lambda token: token == ",") if not comma]
    kept = [tinycss2.serialize(tokens).strip() for tokens in selectors if _classes(tokens) <= names]
    return f"{','.join(kept)}{{{tinycss2.serialize(rule.content)}}}" if kept else ""


def _classes(tokens: Sequence[Any]) -> set[str]:
    """The classes that a selector demands, but for those inside functions such as :not(.a)."""
    return {name.value for dot, name in itertools.pairwise(tokens) if dot == "." and name.type == "ident"}


def _points(svg: str) -> str:
    """HTML that shows the text of a figure's points on hover, without a script: small elements laid over its image."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if not box or not (points := POINT.findall(svg)):
        return ""
    marks = (
        f'<i style="left:{100 * float(x) / float(box[1]):.1f}%;top:{100 * float(y) / float(box[2]):.1f}%" '
        f'data-tip="{text.replace(chr(34), "&quot;")}"></i>'
        for x, y, text in points
    )
    return f'<span class="points" aria-hidden="true">{"".join(marks)}</span>'


def framed(text: str) -> str:
    """A whole page with its frame mended, and with a short style sheet of icons instead of Font Awesome's files."""
    for needed, unused in UNUSED.items():
        if needed is None or needed not in text:
            text = unused.sub("", text)
    text = text.replace(SIDEBAR, f'role="complementary" aria-label="Book" {SIDEBAR}')
    if link_of_icons := AWESOME.search(text):
        link = f'\n  <link href="{link_of_icons["root"]}_static/icons.css" rel="stylesheet" />'
        text = AWESOME.sub("", text[: link_of_icons.start()] + link + text[link_of_icons.start() :])
    return text


def icons(static: Path, text: str) -> None:
    """`icons.css` and its font: the part of Font Awesome that pages and style sheets name. The rest is removed.

    static: the built book's folder of that name; text: the pages.
    """
    [awesome] = (static / "vendor" / "fontawesome").iterdir()
    css = _spread((awesome / "css" / "all.min.css").read_text())
    code_points = dict(re.findall(r"\.fa-([\w-]+):before\{content:\"\\(\w+)\"", css))
    named = {name: code_points[name] for name in sorted(set(re.findall(r"\bfa-([\w-]+)", text))) if name in code_points}
    styles = "".join(sheet.read_text(encoding="utf-8") for sheet in (static / "styles").glob("*.css"))
    points = {int(point, 16) for point in [*named.values(), *re.findall(r"[\"']\\(f[0-9a-f]{3})[\"']", styles)]}
    points |= {ord(sign) for sign in styles if 0xE000 <= ord(sign) < 0xF900}  # written out
    options = subset.Options(flavor="woff", notdef_outline=True)
    font = subset.load_font(awesome / "webfonts" / "fa-solid-900.ttf", options)
    cut = subset.Subsetter(options)
    cut.populate(unicodes=points)
    cut.subset(font)
    subset.save_font(font, static / "icons.woff", options)
    faces = [  # both names are in the theme's style sheets
        f'@font-face{{font-family:"Font Awesome {n} Free";font-weight:900;src:url(icons.woff) format("woff")}}'
        for n in (5, 6)
    ]
    root = ':root{--fa-font-solid:normal 900 1em/1 "Font Awesome 6 Free"}'
    kind = '.fas,.fa-solid{display:inline-block;font:900 1em/1 "Font Awesome 6 Free";text-rendering:auto}'
    size = ".fa-lg{font-size:1.25em;line-height:.05em;vertical-align:-.075em}"
    rules = [f'.fa-{name}::before{{content:"\\{point}"}}' for name, point in named.items()]
    (static / "icons.css").write_text("\n".join([*faces, root, kind, size, *rules]) + "\n", encoding="utf-8")
    (awesome / "LICENSE.txt").replace(static / "icons-LICENSE.txt")
    shutil.rmtree(static / "vendor")


def _spread(css: str) -> str:
    """Rules for several names as one rule for each."""
    return re.sub(
        r"((?:\.fa-[\w-]+:before,)+)(\.fa-[\w-]+:before)(\{[^}]*\})",
        lambda m: "".join(f"{name}{m[3]}" for name in [*m[1].rstrip(",").split(","), m[2]]), css,
    )  # fmt: skip
