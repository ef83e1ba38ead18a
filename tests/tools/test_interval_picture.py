"""A claim's picture holds its estimates inside or outside the rule's band, as the numbers lie."""

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrepro.experiment.judge import state_of
from kvrepro.tools import interval_picture

NUMBER = st.floats(-50, 50).map(lambda x: round(x, 2))


def parts(svg: str, tag: str) -> list[dict[str, str]]:
    return [dict(part.attrib) for part in ElementTree.fromstring(svg).iter(tag)]


@given(
    rule=st.one_of(
        st.builds(lambda kind, x: {kind: x}, st.sampled_from(["at_least", "at_most", "above", "below"]), NUMBER),
        st.builds(lambda kind, x: {kind: abs(x)}, st.sampled_from(["size_at_most", "size_at_least"]), NUMBER),
        st.builds(lambda x, y: {"between": sorted([x, y])}, NUMBER, NUMBER),
    ),
    value=NUMBER,
    unit=st.sampled_from(["%", "F1"]),
)
def test_a_point_lies_in_the_band_if_its_value_satisfies_the_rule(rule, value, unit):
    """Up to the width of a line: the band of a single value is drawn one unit wide."""
    scale = 100 if unit == "%" else 1
    svg = interval_picture.drawn(rule, [("code", value * scale, math.nan, math.nan)], unit)
    [point] = [float(part["cx"]) for part in parts(svg, "circle")]
    bands = [(float(part["x"]), float(part["width"])) for part in parts(svg, "rect")]
    inside = any(x - 0.2 <= point <= x + width + 0.2 for x, width in bands)
    strictly = any(x + 0.2 < point < x + width - 1.2 for x, width in bands)
    holds = state_of(rule, value, value) == "holds"
    assert inside or not holds
    assert holds or not strictly
    assert not parts(svg, "path")  # without an interval, no line


def test_each_interval_is_a_line_on_one_axis():
    rows = [("code", 0.2, 0.1, 0.3), ("text", 0.5, 0.4, 0.8), ("not run", math.nan, math.nan, math.nan)]
    svg = interval_picture.drawn({"at_most": 0.3}, rows, "F1")
    starts = [path["d"].split()[0] for path in parts(svg, "path")]
    assert len(starts) == 2
    assert float(starts[0][1:]) < float(starts[1][1:])
    texts = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert texts == ["code", "text", "0.3"]
    points = [float(point["cx"]) for point in parts(svg, "circle")]
    assert points == sorted(points)
    assert max(points) < interval_picture.WIDTH


@pytest.mark.parametrize("rows", [[], [("code", math.nan, math.nan, math.nan)]])
def test_what_was_not_tested_has_no_picture(rows):
    assert interval_picture.drawn({"at_most": 0.3}, rows, "F1") == ""
