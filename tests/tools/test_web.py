"""What the built pages get: formulas, icons, the glossary, mended markup, buttons."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from docutils import nodes

from kvrepro.errors import InputError
from kvrepro.tools import glossary, web

ROOT = Path(__file__).parents[2]


def test_a_formula_becomes_mathml():
    translator = SimpleNamespace(body=[])
    with pytest.raises(nodes.SkipNode):
        web._inline(translator, nodes.math("", r"\lVert v W_O\rVert_1"))
    assert translator.body[0].startswith("<math")
    assert "W" in translator.body[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('<th></th>', "<td></td>"),
        ('<th class="blank level0">&nbsp;</th>', '<td class="blank level0"></td>'),
        ('<th class="head"><p></p></th>', '<td class="head"></td>'),
        ("<th>policy</th>", "<th>policy</th>"),
        ('<div role="list" class="citation-list">', '<div class="citation-list">'),
    ],
)  # fmt: skip
def test_markup_that_readers_tools_stumble_over_is_mended(before, after):
    for pattern, text in web.MENDED:
        before = pattern.sub(text, before)
    assert before == after


def test_no_page_loads_all_icons():
    head = (
        '<head>\n<link href="../_static/vendor/fontawesome/6.5.2/css/all.min.css?digest=1" rel="stylesheet" />\n'
        '<script src="../_static/vendor/fontawesome/6.5.2/js/all.min.js?digest=1"></script>\n<link href="a.css"></head>'
    )
    text = web.framed(head)
    assert "fontawesome" not in text
    assert '<link href="../_static/icons.css" rel="stylesheet" />' in text
    assert "a.css" in text


def test_several_names_of_one_icon_are_all_known():
    rules = web._spread('.fa-magnifying-glass:before,.fa-search:before{content:"\\f002"}')
    assert re.findall(r"fa-([\w-]+)", rules) == ["magnifying-glass", "search"]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("Two guards and a sliding window.", ["guards", "sliding window"]),
        ("Policies differ; a safeguard does not.", ["Policies"]),
        ("TOST is a test, tost is none.", ["TOST"]),
    ],
)
def test_words_of_the_glossary_are_found_in_their_forms(text, matches):
    words = ["guard", "window", "sliding window", "policy", "TOST"]
    assert [match[0] for match in glossary.pattern(words).finditer(text)] == matches


def test_an_everyday_word_is_explained_only_where_it_has_that_sense():
    assert glossary.fits("pool", "book/executed/dropkv_bound")
    assert not glossary.fits("pool", "book/executed/reanalysis")
    assert glossary.fits("guard", "book/executed/reanalysis")


def test_a_word_leads_to_its_meaning_and_carries_it():
    word = glossary.Explained(
        "", "Guards", page="../glossary.html#term-guard", tip="tip-1", meaning="Tokens that <stay>."
    )
    page = SimpleNamespace(body=[])
    glossary._begin(page, word)
    glossary._end(page, word)
    assert page.body[0] == '<a class="term" href="../glossary.html#term-guard" aria-describedby="tip-1">'
    assert 'role="tooltip" id="tip-1" aria-label="Tokens that &lt;stay&gt;."></span>' in page.body[1]
    assert re.sub("<[^>]*>", "", "".join(page.body)) == ""  # search quotes the text alone


def test_a_figures_points_are_laid_over_its_image():
    svg = '<svg viewBox="0 0 200 50"><circle cx="50" cy="25" r="6" opacity="0"><title>LRU: "1" &lt; 2</title></circle>'
    assert web._points(svg) == (
        '<span class="points" aria-hidden="true">'
        '<i style="left:25.0%;top:50.0%" data-tip="LRU: &quot;1&quot; &lt; 2"></i></span>'
    )
    assert web._points('<svg viewBox="0 0 200 50"></svg>') == ""


def test_figures_are_counted_on_each_page():
    numbers = {"a": {"figure": {"x": (7,), "y": (8,)}}, "b": {"figure": {"z": (9,)}, "table": {"t": (1,)}}}
    web._number(None, SimpleNamespace(toc_fignumbers=numbers))
    assert numbers == {"a": {"figure": {"x": (1,), "y": (2,)}}, "b": {"figure": {"z": (1,)}, "table": {"t": (1,)}}}


@pytest.mark.parametrize(
    ("css", "left"),
    [
        (".a .b, .c{x:1}", ".c{x:1}"),
        (".a.b,.unknown{x:1}", ""),
        ("p:not(.unknown),[title=\",\"] > .c{x:1}", "p:not(.unknown),[title=\",\"] > .c{x:1}"),
        ("@media (min-width:3px){.unknown{x:1}}", ""),
        ("@media (min-width:3px){.unknown{x:1}.a{y:2}}", "@media (min-width:3px){.a{y:2}}"),
        ("@font-face{src:url(a.woff)}@keyframes k{from{x:1}}", "@font-face{src:url(a.woff)}@keyframes k{from{x:1}}"),
        ("/* .a */:root{--x:\".b\"}", ":root{--x:\".b\"}"),
    ],
)  # fmt: skip
def test_a_style_sheet_keeps_what_the_pages_name(css, left):
    assert web.trimmed(css, {"a", "c"}) == left


def shown(page, monkeypatch, repository="owner/name"):
    monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    context = {"header_buttons": ["others"]}
    web.add_buttons(None, page, "page.html", context, None)
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
