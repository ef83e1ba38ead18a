"""The first page and the page of advice: sentences from results, and what they say without any."""

import nbformat
import pandas as pd

from kvrepro.experiment import claims, wording
from kvrepro.tools import decide, edition, landing


def verdict(claim: str, name: str, reading: str = "any", ours: float = 23.0) -> dict:
    row = dict.fromkeys(claims.COLUMNS, "") | {"claim": claim, "verdict": name, "reading": reading, "unit": "%"}
    return row | {"ours": ours, "low": ours - 6, "high": ours + 6, "paper": "79.5", "model": "m", "profile": "quick"}


def test_answers_are_the_first_findings_of_each_chapters_box(tmp_path):
    box = wording.findings('Guards help: <a href="../claims.html#P6">it comes out</a>.', "Two.", "Three.")
    output = nbformat.v4.new_output("display_data", data={"text/markdown": box.data})
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("found", outputs=[output])])
    folder = tmp_path / "book" / "executed"
    edition.edit(notebook, "protection", folder)
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / "protection.ipynb")
    *answers, elsewhere = landing.answers(tmp_path).splitlines()
    assert "language model" in elsewhere
    assert len(answers) == len(landing.QUESTIONS)
    assert answers[0] == (
        f'- **{landing.QUESTIONS["protection"]}** Guards help: <a href="claims.html#P6">it comes out</a>. Two. '
        "{doc}`The chapter <executed/protection>`."
    )
    assert "This chapter has no results yet." in answers[1]


def test_the_figure_counts_the_verdicts():
    table = pd.DataFrame([verdict(f"P{i}", "reproduced") for i in range(4)] + [verdict("P9", "partly")])
    [axes] = landing.drawn({"protection": table}).axes
    assert [bar.get_width() for bar in axes.patches] == [4, 1, 0, 0, 0]
    assert landing.drawn({}).axes  # a book without results has an empty one


def rows() -> pd.DataFrame:
    """Two scorers in one regime, on three tasks; one loses a long answer, and frees its blocks."""
    usual = {"model": "m", "guard": "none", "quota": "none", "regime": "question seen", "kept": 0.1, "held": 0.1,
             "bytes_kept": 1, "freed_compacted": 0.9, "evidence_coverage": 1.0, "evidence_heads": 0.5,
             "evidence_best": 1.0, "aggregator": None, "pooling": None, "method": None}  # fmt: skip
    table = []
    for task in ("needle_multikey", "several", "entries"):
        for i in range(3):
            item = usual | {"item": f"{task}-{i}", "task": task}
            poor = 0.2 if task == "entries" else 0.9
            table += [
                item | {"kind": "full", "scorer": None, "split": None, "score": 1.0, "freed": 0.0, "kept": None},
                item | {"kind": "grid", "scorer": "key difference", "split": "uniform", "score": 0.95, "freed": 0.1},
                item | {"kind": "grid", "scorer": "attention of all", "split": "one set", "score": poor, "freed": 0.8},
            ]
    return pd.DataFrame(table)


def test_advice_names_the_best_and_where_the_others_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(decide.stored, "rows", lambda results: rows())
    parts = decide.parts(tmp_path)
    assert "The full cache scores 1.00 on the 9 items" in parts["advice"]
    assert "choose *key difference; heads: per head, even budgets*" in parts["advice"]
    assert "It scores 0.95 on the items on which it was chosen." in parts["advice"]
    assert "a condition chosen in this way scores 0.95." in parts["advice"]
    assert "published" not in parts["advice"]
    assert "returns 80% of the blocks on average over all scorers" in parts["advice"]
    assert "heads that choose for themselves return 10%." in parts["advice"]
    conditions = decide.conditions(rows(), tmp_path).set_index("scores by")
    assert conditions.loc["attention of all", "loses most at"] == "a long answer (-0.80)"
    assert conditions.loc["attention of all", "heads"] == "shared by all heads"
    assert conditions.loc["key difference", "blocks returned"] == "10%"
    assert parts["all"].count("<tr") == 3


def test_advice_chooses_among_published_methods_too(tmp_path, monkeypatch):
    other = rows().query("scorer == 'attention of all'")
    other = other.assign(kind="published", method="key_diff", scorer=None, split=None, score=0.97)
    monkeypatch.setattr(decide.stored, "rows", lambda results: pd.concat([rows(), other]))
    parts = decide.parts(tmp_path)
    assert "choose KeyDiff as published. It scores 0.97 on the items on which it was chosen." in parts["advice"]
    assert "KeyDiff (as published): key difference" in parts["all"]


def test_a_condition_has_the_costs_of_the_method_with_its_scorer_and_its_aggregator(tmp_path, monkeypatch):
    scores = {"attention": "key difference", "attention x value": "attention of all"}
    window = pd.concat(
        rows().query("scorer == @was").assign(scorer=scorer, aggregator=aggregator, pooling="none")
        for scorer, was in scores.items() for aggregator in ("mean", "mean_var", "defensive")
    )  # fmt: skip
    monkeypatch.setattr(decide, "_first_token", lambda: {"snapkv": decide.NOTHING, "critical_kv": "+3.8%"})
    table = pd.concat([rows().query("kind == 'full'"), window])
    conditions = decide.conditions(table, tmp_path).set_index("scores by")
    assert dict(conditions.of) == {
        "attention, mean over queries": "snapkv", "attention, mean and variance over queries": "cake",
        "attention, defensive over queries": "", "attention x value, mean over queries": "critical_kv",
        "attention x value, mean and variance over queries": "",
        "attention x value, defensive over queries": "defensive_kv",
    }  # fmt: skip
    assert conditions.loc["attention, defensive over queries", "first token"] == decide.MISSING
    page = decide._all(conditions.reset_index())
    assert f'<td data-key="0">{decide.NOTHING}</td>' in page  # is sorted before what adds something
    assert "<td>+3.8%</td>" in page
    assert "display: none" not in page  # on a narrow screen the frame scrolls, and no column is left out


def test_leak_safe_shares_come_from_the_chapter_on_leakage(tmp_path):
    folder = tmp_path / "book" / "executed" / "figures"
    folder.mkdir(parents=True)
    table = {
        "order": ["defense first"] * 4 + ["directive first", "alone"],
        "policy": ["h2o", "k_norm", "snapkv", "h2o", "h2o", "h2o"],
        "value": [0.1, 1.0, 0.2, 0.5, 0.2, 0.1],
    }
    table |= {"variant": ["default"] * 3 + ["fair"] + ["default"] * 2, "usable": [0.3, None, None, 0.9, 0.5, 0.9]}
    pd.DataFrame(table).to_csv(folder / "leakage-safe-budgets.csv")
    safe_from = {"h2o": "50% kept", "k_norm": "never", "snapkv": decide.DEAF}
    assert decide.leak_safe_from(tmp_path) == safe_from


def test_without_results_the_page_says_so(tmp_path):
    assert "no results yet" in decide.parts(tmp_path)["advice"]
