"""A claim's picture: the values that its rule accepts as a band, and our estimates with their intervals on one axis."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from kvrepro.experiment.judge import region

WIDTH, ROW, LETTER = 300, 14, 4.4  # of the picture, a row, and a letter; as wide as they are drawn at most
Row = tuple[str, float, float, float]  # label, estimate, and the ends of its interval (NaN: none)


def drawn(rule: Mapping[str, Any], rows: Sequence[Row], unit: str) -> str:
    """The picture as an SVG for a page in light or dark; empty without an estimate. The text beside it says the same.

    rule: of a claims file, as `judge.region` reads it; rows: in the unit of the table of verdicts, so that percent are
    100 times what the rule says.
    """
    rows = [row for row in rows if math.isfinite(row[1])]
    if not rows:
        return ""
    scale = 100 if unit == "%" else 1
    accepted = [(low * scale, high * scale) for low, high, _ in region(rule)]
    bounds = sorted({end for ends in accepted for end in ends if math.isfinite(end)})
    points = [*bounds, *(number for row in rows for number in row[1:] if math.isfinite(number))]
    least, most = min(points), max(points)
    left = LETTER * max(len(label) for label, *_ in rows) + 6
    margin = 0.12 * (most - least) or 0.12 * abs(most) or 1.0

    def at(value: float) -> float:
        share = (value - least + margin) / (most - least + 2 * margin)
        return round(left + (WIDTH - left) * float(np.clip(share, 0, 1)), 1)

    bottom = ROW * len(rows) + 4
    parts = [
        f'<rect x="{at(low)}" width="{max(at(high) - at(low), 1):.1f}" height="{bottom}" class="accepted"/>'
        for low, high in accepted
    ]
    for place, (label, value, low, high) in enumerate(rows):
        y = ROW * place + 9
        parts.append(f'<text x="0" y="{y + 3}">{escape(label)}</text>')
        if math.isfinite(low):
            parts.append(f'<path d="M{at(low)} {y}H{at(high)}M{at(low)} {y - 3}v6M{at(high)} {y - 3}v6"/>')
        parts.append(f'<circle cx="{at(value)}" cy="{y}" r="2.5"/>')
    percent = "%" if scale == 100 else ""
    places = [(at(number), f"{number:.4g}{percent}") for number in bounds]
    if len(places) == 2 and places[1][0] - places[0][0] < 40:  # their numbers would overlap
        places = [((places[0][0] + places[1][0]) / 2, " to ".join(text for _, text in places))]
    for x, text in places:
        half = LETTER * len(text) / 2
        x = min(max(x, half), WIDTH - half)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 9}" text-anchor="middle">{text}</text>')
    inside = "".join(parts)
    return f'<svg class="interval" viewBox="0 0 {WIDTH} {bottom + 12}" aria-hidden="true">{inside}</svg>'
