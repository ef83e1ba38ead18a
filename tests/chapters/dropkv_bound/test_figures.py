"""The bound's figures: labelled, complete, and drawn from the frames' own numbers."""

import numpy as np
import pandas as pd
import pytest
import tiny

from kvrepro.chapters.dropkv_bound import figures, quality, tables
from kvrepro.chapters.dropkv_bound import study as runs
from kvrepro.chapters.dropkv_bound.study import Settings, Study

SMALL = Settings(pools=(0.9, 24), positions=2, ks=(10,), per_cell=4, shares=(0.2, 0.5), window=4, kernel=3, steps=3)


class Loaded:
    def __init__(self):
        self.model = tiny.model("llama")


@pytest.fixture(scope="module")
def study() -> Study:
    parts: dict[str, list] = {}
    for i, ids in enumerate(tiny.prompts(*[70] * 2)):
        for name, frame in runs.prompt(Loaded(), ids, SMALL, take=4).items():
            parts.setdefault(name, []).extend(frame.assign(item=f"{i}-{copy}", task="any") for copy in range(3))
    return Study(**{name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}, settings=SMALL)


@pytest.mark.parametrize("name", ["lemma", "eps", "cone", "factor", "ratios", "slack", "peers", "alignment", "budgets"])
def test_every_axis_is_labelled_and_the_figure_fits_the_page(study, name):
    figure = getattr(figures, name)(study)
    assert figure.get_size_inches()[0] == pytest.approx(figures.WIDTH)
    for axes in figure.axes:
        assert axes.get_xlabel()
        ticks = [tick.get_text() for tick in axes.get_yticklabels()]
        assert axes.get_ylabel() or any(ticks) or axes.texts or not axes.get_subplotspec().is_first_col()
    figure.canvas.draw()


def test_curves_end_at_the_share_with_a_bound(study):
    figure = figures.factor(study, 5)
    curves = {str(line.get_label()).split(",")[0]: line for line in figure.axes[0].get_lines()}
    for size in SMALL.pools:
        name = runs.pool_name(size)
        rows = tables.with_factor(study.assumptions[study.assumptions.pool == name], 5)
        assert curves[name].get_ydata().max() == pytest.approx(np.isfinite(rows.factor).mean())


def test_lengths_stand_where_they_were_measured(study):
    by_length = pd.concat([study.assumptions.assign(length=length) for length in (500, 1900)])
    left, _ = figures.lengths(by_length).axes
    drawn = {tuple(np.round(line.get_xdata()).astype(int)) for line in left.get_lines() if len(line.get_xdata()) == 2}
    assert (500, 1900) in drawn


def test_every_method_has_its_row():
    names = ["full", *quality.PEERS, "DropKV, adaptive heads"]
    rows = pd.DataFrame(
        {"item": f"i{i}", "method": name, "share": 1.0 if name == "full" else share, "token_f1": 0.5, "length": 1900}
        for i in range(6)
        for name in names
        for share in ((0.05,) if name in ("full", "DropKV, adaptive heads") else (0.05, 0.3))
    )
    labels = [tick.get_text() for tick in figures.answers(rows).axes[0].get_yticklabels()]
    assert len(labels) == len(names) - 1
    assert "DropKV, adaptive heads" in labels
    assert "CriticalKV" in labels
