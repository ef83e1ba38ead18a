"""Marks the first occurrence of every word of the glossary on each page, with its meaning: a Sphinx extension."""

import functools
import html
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.addnodes import glossary
from sphinx.application import Sphinx

PAGE = "book/glossary"
ONLY = {  # everyday words -> the pages on which they have the glossary's sense
    "pool": ("dropkv_bound",), "split": ("synthesis", "decide", "methods"),
}  # fmt: skip
LEFT_ALONE = (nodes.reference, nodes.literal, nodes.title, nodes.caption, nodes.term, nodes.raw, nodes.math,
              nodes.table, nodes.literal_block, nodes.strong)  # fmt: skip


class Explained(nodes.inline):
    """A word as it stands on the page; behind it, its meaning."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_node(Explained, html=(_begin, _end))
    app.connect("doctree-resolved", mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


@functools.cache  # read once, and not for every page
def meanings(app: Sphinx) -> dict[str, tuple[str, str]]:
    """Each word -> (its anchor on the glossary's page, its meaning as plain text)."""
    meaning_of: dict[str, tuple[str, str]] = {}
    if PAGE in app.env.all_docs:
        for entry in app.env.get_doctree(PAGE).findall(glossary):
            for item in entry.findall(nodes.definition_list_item):
                meaning = next(item.findall(nodes.definition)).astext()
                for word in item.findall(nodes.term):
                    meaning_of[word.astext()] = (word["ids"][0], " ".join(meaning.split()))
    return meaning_of


def pattern(words: list[str]) -> re.Pattern[str]:
    """Any of the words, the longest first, also in the plural and at the beginning of a sentence."""
    forms = []
    for word in sorted(words, key=len, reverse=True):
        stem = re.escape(word[:-1]) + "(?:y|ies)" if word.endswith("y") else re.escape(word) + "(?:s|es)?"
        first = stem[0]
        forms.append(f"(?:{first}|{first.upper()}){stem[1:]}" if first.islower() else stem)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(f'({form})' for form in forms)})(?![\w-])")


def fits(word: str, page: str) -> bool:
    """Does a page use a word in the glossary's sense?"""
    return page.rpartition("/")[2] in ONLY.get(word, (page.rpartition("/")[2],))


def mark(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Make the first occurrence of each word in running text a link that shows its meaning."""
    if app.builder.format != "html" or name == PAGE or name.startswith("book/api-"):
        return
    words = meanings(app)
    if not words:
        return
    ordered, find, seen = sorted(words, key=len, reverse=True), pattern(list(words)), set[str]()
    page = app.builder.get_relative_uri(name, PAGE)
    for text in list(doctree.findall(nodes.Text)):
        if not _running(text):
            continue
        parts, at = list[nodes.Node](), 0
        for match in find.finditer(text):
            word = next(word for word, group in zip(ordered, match.groups(), strict=True) if group)
            if word not in seen and fits(word, name):
                seen.add(word)
                anchor, meaning = words[word]
                explained = Explained("", match[0], page=f"{page}#{anchor}", tip=f"tip-{anchor}", meaning=meaning)
                parts += [nodes.Text(text[at : match.start()]), explained]
                at = match.end()
        if parts:
            text.parent.replace(text, [*parts, nodes.Text(text[at:])])


def _begin(translator: Any, node: Explained) -> None:
    page, tip = (html.escape(node[name]) for name in ("page", "tip"))
    translator.body.append(f'<a class="term" href="{page}" aria-describedby="{tip}">')


def _end(translator: Any, node: Explained) -> None:
    """Write the meaning as an attribute, which the style sheet shows. As text it would appear in the middle of the
    sentences that the page of search quotes."""
    tip, meaning = (html.escape(node[name]) for name in ("tip", "meaning"))
    translator.body.append(f'</a><span class="tip" role="tooltip" id="{tip}" aria-label="{meaning}"></span>')


def _running(text: nodes.Text) -> bool:
    """Is the text part of a paragraph, and of no element whose words are left alone?"""
    above = list(_above(text))
    left_alone = any(isinstance(node, LEFT_ALONE) for node in above)
    return not left_alone and any(isinstance(node, nodes.paragraph) for node in above)


def _above(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node
