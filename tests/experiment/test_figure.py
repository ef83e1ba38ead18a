"""Estimates as they are drawn: a point with its interval for every row of the table, where the table says."""

import re
import warnings

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import seaborn as sns

from kvrepro.engine.policy import OWN, Policy
from kvrepro.errors import InputError
from kvrepro.experiment import figure

mpl.use("Agg")
SEVEN = ("lru", "h2o_simple", "snapkv_simple", "slw", "ada_kv_simple", "quest_simple", "random_sample")
TABLE = pd.DataFrame(
    [
        (reading, policy, size, protected, 0.1 * i + 0.2 * protected, 0.1 * i, 0.1 * i + 0.3)
        for reading in ("as_run", "as_described")
        for i, policy in enumerate(("lru", "snapkv", "mine"))
        for size in (128, 512)
        for protected in (False, True)
    ],
    columns=["reading", "policy", "capacity", "protected", "value", "low", "high"],
)


def drawn(axes) -> np.ndarray:
    """Value, low and high of every point in a panel."""
    values = []
    for bars in axes.containers:
        line, _, (collection,) = bars
        along = 1 if collection.get_segments()[0][0, 0] == collection.get_segments()[0][1, 0] else 0
        for value, segment in zip(line.get_xydata()[:, along], collection.get_segments(), strict=True):
            values.append((value, *segment[:, along]))
    return np.array(sorted(values))


@pytest.mark.parametrize(("x", "y"), [("capacity", "value"), ("value", "policy")])
@pytest.mark.parametrize("line", [False, True])
def test_every_row_is_a_point_with_its_interval(x, y, line):
    drawing = figure.estimates(TABLE, x, y, colour="policy", fill="protected", panel="reading", line=line)
    assert drawing.get_size_inches()[0] == pytest.approx(figure.WIDTH)
    assert [axes.get_title(loc="left") for axes in drawing.axes] == ["authors' code", "authors' text"]
    for axes, (_, part) in zip(drawing.axes, TABLE.groupby("reading", sort=False), strict=True):
        expected = np.array(sorted(part[["value", "low", "high"]].itertuples(index=False)))
        assert np.allclose(drawn(axes), expected)


def test_a_row_without_interval_is_a_point_without_bars():
    drawing = figure.estimates(TABLE.assign(low=np.nan, high=np.nan), "capacity", "value", colour="policy")
    [axes] = drawing.axes
    assert np.ptp(drawn(axes), axis=1).max() == pytest.approx(0)


def test_the_full_cache_is_drawn_in_its_own_panel():
    full = pd.DataFrame({"reading": ["as_run", "as_described"], "value": [0.9, 0.8], "low": [0.85, 0.75], "high": 0.95})
    drawing = figure.estimates(TABLE, "capacity", "value", colour="policy", panel="reading", reference=full)
    levels = [[set(line.get_ydata()) for line in axes.lines if line.get_linestyle() == "--"] for axes in drawing.axes]
    assert levels == [[{0.9}], [{0.8}]]


SCORED = pd.DataFrame({"item": list("abcd"), "token_f1": [1.0, 0.8, 0.9, 0.9], "rest_f1": [1.0, 0.6, np.nan, 0.8]})


def test_answers_that_no_policy_gives_are_lines_with_names():
    controls = pd.concat([
        SCORED.assign(control="first_word", token_f1=0.4, rest_f1=0.0), SCORED.assign(control="copy", token_f1=0.2)
    ])  # fmt: skip
    table = figure.floors(controls, SCORED)
    assert dict(zip(table.control, table.value, strict=True)) == pytest.approx(
        {"full": 0.9, "first_word": 0.4, "copy": 0.2}
    )
    assert figure.floors(controls, SCORED, "rest_f1").control.tolist() == ["full", "copy"]  # nothing is drawn at zero
    drawing = figure.estimates(TABLE, "capacity", "value", colour="policy", panel="reading", reference=table)
    for axes in drawing.axes:
        level = [
            line.get_ydata()[0]
            for line in axes.lines
            if len(set(line.get_ydata())) == 1 and line.get_marker() == "None"
        ]
        assert sorted(set(level)) == pytest.approx([0.2, 0.4, 0.9])
    names = [text.get_text() for text in drawing.legends[0].get_texts()]
    assert names[-3:] == ["full cache", "first word", "copy"]


def test_scores_by_the_place_of_the_evidence():
    rows = pd.DataFrame({
        "item": list("abcdef"), "policy": "lru", "evidence_at": [0.0, 0.1, 0.45, 0.95, 1.0, np.nan],
        "token_f1": [1.0, 0.0, 0.5, 0.2, 0.4, 1.0],
    })  # fmt: skip
    table = figure.by_evidence(rows)
    assert table[["evidence_at", "value", "n"]].to_numpy() == pytest.approx(
        np.array([[0.1, 0.5, 2], [0.5, 0.5, 1], [0.9, 0.3, 2]])
    )
    assert figure.by_evidence(rows, parts=2).n.tolist() == [3, 2]
    [axes] = figure.evidence(rows).axes
    assert "evidence" in axes.get_xlabel()
    both = pd.concat([rows.assign(protected=True), rows.assign(protected=False, token_f1=0.0)])
    both = pd.concat([both, both.assign(policy="h2o")]).assign(evidence_coverage=0.25)
    panels = figure.evidence(both, fill="protected").axes
    assert [axes.get_title(loc="left") for axes in panels] == ["LRU", "H2O"]
    assert [len(axes.containers) for axes in panels] == [4, 4]  # score and evidence held, protected and not
    assert (drawn(panels[0]) == 0.25).all(axis=1).sum() == 6
    assert len(figure.evidence(rows[rows.evidence_at.isna()]).axes) == 1  # which says that there is nothing


@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_panels_that_are_wrapped_hold_what_panels_side_by_side_hold(count):
    table = pd.concat([TABLE[TABLE.capacity == 128].assign(place=place) for place in "abcdef"[:count]])
    given = {"x": "value", "y": "policy", "colour": "policy", "panel": "place"}
    wide, wrapped = figure.estimates(table, **given), figure.estimates(table, **given, wrap=3)
    assert wrapped.get_size_inches() == pytest.approx([figure.WIDTH, 3.4 * -(-count // 3)])
    assert sum(bool(axes.get_xlabel()) for axes in wrapped.axes) == 1
    for panel, wrapped_panel in zip(wide.axes, wrapped.axes, strict=True):
        assert panel.get_title(loc="left") == wrapped_panel.get_title(loc="left")
        assert np.array_equal(drawn(panel), drawn(wrapped_panel))


def test_what_cannot_be_drawn_is_said():
    with pytest.raises(InputError, match="24 rows cannot be drawn: it has no column colour"):
        figure.estimates(TABLE, "capacity", "value", colour="colour")
    for empty in (TABLE[:0], TABLE[["value"]][:0]):
        [axes] = figure.estimates(empty, "capacity", "value").axes
        assert "nothing to draw" in axes.texts[0].get_text()


def test_policies_look_alike_everywhere_and_apart_from_each_other(monkeypatch):
    monkeypatch.setitem(OWN, "mine", Policy("My own", "me", lambda o: o.positions.float()))
    seven = figure.looks(SEVEN)
    assert len({look.colour for look in seven.values()}) == len({look.marker for look in seven.values()}) == 7
    assert figure.looks(["mine", "lru"])["lru"] == figure.look("lru") == seven["lru"]
    shown = figure.looks(["lru", "mine", "snapkv"])
    assert shown["mine"].name == "My own"
    assert len({look.colour for look in shown.values()}) == 3
    assert [look.name for look in figure.looks([128.0, 0.25]).values()] == ["128", "0.25"]


def test_a_heat_map_has_a_cell_per_pair_and_a_panel_per_group():
    drawing = figure.heat(TABLE[TABLE.protected], "capacity", "policy", panel="reading")
    assert [axes.get_title(loc="left") for axes in drawing.axes] == ["authors' code", "authors' text"]
    assert [len(axes.texts) for axes in drawing.axes] == [6, 6]
    assert [axes.get_ylabel() for axes in drawing.axes] == ["", ""]


def test_rows_of_a_heat_map_that_are_numbered_say_what_the_numbers_are():
    drawing = figure.heat(TABLE[TABLE.protected], "policy", "capacity", panel="reading")
    assert [axes.get_ylabel() for axes in drawing.axes] == ["capacity", ""]


def test_a_cell_of_a_heat_map_says_its_value_in_its_middle():
    table = TABLE[TABLE.protected & (TABLE.reading == "as_run")].assign(n=40)
    drawing = figure.heat(table, "capacity", "policy", percent=True, form=".0f")
    text = figure.vector(drawing)
    texts = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="6" opacity="0"><title>(.*?)</title>', text)
    first = table.iloc[0]
    assert len(texts) == len(table)
    of_first = [f"{100 * first[name]:.0f}" for name in ("value", "low", "high")]
    assert texts[0][2] == "LRU, capacity 128: {} [{}, {}], n = 40".format(*of_first)
    [axes] = drawing.axes
    assert [(x, y) for x, y, _ in figure.HOVER_TEXTS[axes]] == [number.get_position() for number in axes.texts]
    assert [text.split(": ")[1].split(" ")[0] for *_, text in figure.HOVER_TEXTS[axes]] == [
        t.get_text() for t in axes.texts
    ]
    several = figure.heat(pd.concat([table, table.assign(value=table.value + 0.2)]), "capacity", "policy")
    assert figure.HOVER_TEXTS[several.axes[0]][0][2].startswith(f"LRU, capacity 128: {first.value + 0.1:.2f} [")


def test_a_table_shows_names_and_rounded_numbers_and_no_counting_index():
    rows = pd.DataFrame({"policy": ["lru", "lru"], "reading": ["as_run", "as_described"], "token_f1": [1 / 3, np.nan]})
    text = figure.table(rows).data
    for part in ("<th>policy</th>", "<th>token f1</th>", "LRU", "authors' code", "0.333"):
        assert part in text
    assert not re.search("nan|as_run|<th></th>|<th>0</th>", text, re.I)
    grouped = figure.table(rows.groupby("policy").token_f1.agg(["count", "mean"]), rows=1).data
    assert "<th>policy</th>" in grouped
    assert grouped.count("<tr>") == 1
    cut = figure.table(pd.DataFrame({"kept": [128.0, np.nan], "said": ["word " * 50, None]})).data
    assert "<td>128</td>" in cut
    assert "word …</td>" in cut
    assert "nan" not in cut.lower()
    assert "None" not in cut


def test_the_ends_of_a_table_are_named():
    assert figure.ends(TABLE, "policy", "capacity") == "from 0.00 (LRU, 128) to 0.40 (mine, 128)"
    assert figure.ends(TABLE.assign(value=np.nan), "policy") == "without any value"
    assert figure.ends(TABLE.assign(value=-0.001), "policy") == "from 0.00 (LRU) to 0.00 (LRU)"


def test_a_point_says_its_value_where_it_is_drawn():
    """The titles lie on the markers of the SVG, also on logarithmic axes."""
    table = TABLE[(TABLE.reading == "as_run") & ~TABLE.protected].assign(n=40, value=lambda t: t.value + 0.05)
    text = figure.vector(figure.estimates(table, "capacity", "value", colour="policy", line=True, log="y"))
    titles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="6" opacity="0"><title>(.*?)</title>', text)
    assert len(titles) == len(table)
    assert titles[0][2] == "LRU, 128: 0.05 [0, 0.3], n = 40"
    drawn_at = np.array(re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)"', text), float)
    for x, y, _ in titles:
        assert np.abs(drawn_at - [float(x), float(y)]).max(1).min() < 1.5


def test_curves_points_and_bars_say_where_they_stand_though_nobody_told():
    draws = np.random.default_rng(0).random(80)
    shares = np.tile(np.arange(40) / 40, 2)
    data = pd.DataFrame({"score": draws, "policy": ["LRU"] * 40 + ["H2O"] * 40, "share": shares})

    def hover_texts(axes) -> list[str]:
        return re.findall("<title>(.*?)</title>", figure.vector(axes.figure))

    curve = sns.ecdfplot(data, x="score", hue="policy", ax=plt.figure().gca())
    curve.axvline(0.5)  # a line for the eye says nothing
    texts = hover_texts(curve)
    assert len(texts) == 2 * (figure.EACH - 1)  # the first lies at minus infinity
    assert texts[-1] == f"LRU: score {draws[:40].max():.4g}, Proportion 1"  # drawn last
    points = sns.scatterplot(data, x="share", y="score", hue="policy", ax=plt.figure().gca())
    points.xaxis.set_major_formatter("{x:.1%}")
    assert hover_texts(points)[:1] == [f"LRU: share 0.0%, score {draws[0]:.4g}"]
    bars = sns.barplot(data, x="policy", y="score", hue="policy", legend="full", ax=plt.figure().gca())
    assert hover_texts(bars) == [f"{name}: policy {name}, score {part.mean():.4g}" for name, part in
                                 (("LRU", draws[:40]), ("H2O", draws[40:]))]  # fmt: skip
    points.set_xlim(0, 0.5)
    assert 0 < len(hover_texts(points)) < figure.EACH  # the others are not seen
    quiet = sns.ecdfplot(data, x="score", hue="policy", ax=plt.figure().gca())
    figure.add_hover_texts(quiet, [0.5], [0.5], ["half"])
    assert hover_texts(quiet) == ["half"]
    plt.close("all")


def test_a_large_figure_with_an_endless_line_is_drawn_without_a_warning(monkeypatch):
    monkeypatch.setattr(figure, "LARGE", 0)  # so that every figure is drawn as pixels
    drawn, axes = plt.subplots()
    axes.scatter([1, 2], [1, 2])
    axes.axline((1, 1), (2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = figure.vector(drawn)
    plt.close(drawn)
    assert "<image" in text
