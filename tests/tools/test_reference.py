"""The API reference shows what the source says."""

import ast

import pytest

from kvrepro.tools import reference

SOURCE = '''"""A module of `one` function, a class."""

class Shape(Base):
    """Has fields."""

    side: int = 3  # in metres

    def area(self) -> int:
        """Side * side."""

    def _hidden(self):
        """Not shown."""


def scale(x: Float[Tensor, "batch tokens"], /, by: float = 2.0, *rest, plain=None, **more) -> Shape:
    """Scores [batch, tokens] of `x_y`.

        y = x^2

    Raises InputError.
    """


def _private():
    """Not shown."""
'''


def test_a_module_is_shown_with_its_public_members(tmp_path):
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "empty.py").write_text('"""No members."""\nX = 1\n')
    text = reference.page(("*.py",), tmp_path)
    assert text.count("## one\n") == 1
    assert "class Shape(Base):\n    side: int = 3  # in metres\n" in text
    assert "def area(self) -> int" in text
    assert "Side \\* side." in text
    assert 'x: Float[Tensor, "batch tokens"], /, by: float = 2.0, *rest, plain=None, **more) -> Shape\n' in text
    assert "Scores \\[batch, tokens\\] of `x_y`." in text
    assert "```text\n    y = x^2\n```" in text
    assert "idden" not in text
    assert "_private" not in text
    assert "empty" not in text


@pytest.mark.parametrize("name", reference.PAGES)
def test_every_page_of_the_book_has_members_and_is_in_the_toc(name):
    text = reference.page(reference.PAGES[name])
    assert text.count("\n### ") > 10
    assert f"- file: book/{name}\n" in (reference.ROOT / "_toc.yml").read_text()
    assert f"generated/{name}.md" in (reference.ROOT / "book" / f"{name}.md").read_text()


def test_a_long_signature_keeps_its_lines():
    lines = ["@cache", "def f(", "    a, b=1,", ") -> dict[str, int]:  # fmt: skip", '    """Long."""']
    [function] = ast.parse("\n".join(lines)).body
    assert reference.signature(function, lines).splitlines() == [*lines[1:3], ") -> dict[str, int]"]


def test_every_setting_stands_in_its_table_with_its_comment():
    text = reference.settings()
    for line in ("| `seed` | `0` | of the items |", "| `protect_frac` | `0.1` | of the capacity, at each end |"):
        assert line in text
    assert "## Is protection nearly all you need?" in text  # a chapter's title, as the contents have it
    assert text.count("## ") == 1 + len(list((reference.ROOT / "kvrepro" / "chapters").glob("*/settings.py")))
    assert not [line for line in text.splitlines() if line.endswith("|  |")]
