"""A table that is whole without a script, and says what its script may filter."""

from kvrepro.tools.filterable import TableCell, interactive, table

ROWS = [{"what": "a < b", "size": TableCell("<b>2</b>", 2)}, {"what": "c", "size": TableCell("-", "")}]


def test_text_is_escaped_and_html_is_not():
    text = interactive(ROWS, "sizes", "All sizes", filters=["what"])
    assert "<td>a &lt; b</td>" in text
    assert '<td data-key="2"><b>2</b></td>' in text
    assert '<th scope="col" data-filter>what</th><th scope="col">size</th>' in text
    assert 'aria-label="All sizes" tabindex="0"' in text  # what scrolls can be reached with the keyboard


def test_columns_that_narrow_screens_leave_out_are_named_by_their_place():
    text = interactive(ROWS, "sizes", "All sizes", minor=["size", "not there"])
    assert "#sizes :is(th,td):nth-child(2) { display: none }" in text
    assert "min-width" not in text


def test_a_plain_table_escapes_bars():
    assert table([{"a": "x|y"}]) == "| a |\n| --- |\n| x\\|y |"
