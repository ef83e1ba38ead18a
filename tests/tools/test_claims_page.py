"""The page of claims: one row per claim and reading, one block per claim with an address, one square per verdict."""

import ast
import json
import re
from html.parser import HTMLParser

import nbformat
import pandas as pd
import pytest
import synthetic

from kvrepro.chapters.protection import members
from kvrepro.experiment import claims, models, wording
from kvrepro.paths import DATA, ROOT
from kvrepro.tools import claims_page, claims_sources

CHAPTERS = ["protection", "fragility", "dropkv_bound", "leakage", "reclamation"]
PROTECTION = claims.load_claims("protection")


class Balanced(HTMLParser):
    """Counts starts and ids, and holds every start to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The parts of the page for four claims of one chapter, and the verdicts behind them."""
    root = tmp_path_factory.mktemp("root")
    wanted = ("P1", "P9", "P30", "P38")
    few = PROTECTION | {"claims": [claim for claim in PROTECTION["claims"] if claim["id"] in wanted]}
    frame = members.evaluate(synthetic.results(synthetic.paper_like, n_items=8), few)
    claims.write(frame, root / "data" / "results" / "protection" / "claims.csv")
    return claims_page.write(["protection", "not_run"], root, root), frame, root


def read(text: str) -> Balanced:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return parser


def test_the_page_shows_the_results_that_the_chapter_was_told_to_use(page, tmp_path):
    _, frame, _ = page
    claims.write(frame, tmp_path / "elsewhere" / "protection" / "claims.csv")
    assert claims_page.tables(["protection"], tmp_path) == {}
    executed = tmp_path / "book" / "executed" / "protection.ipynb"
    executed.parent.mkdir(parents=True)
    executed.write_text(json.dumps({"metadata": {"papermill": {"parameters": {"results": "elsewhere"}}}, "cells": []}))
    assert len(claims_page.tables(["protection"], tmp_path)["protection"]) == len(frame)


def test_every_verdict_is_a_row_that_links_to_its_claims_block(page):
    parts, frame, _ = page
    blocks, rows, picture = (read(parts[name]) for name in ("claims_blocks", "claims", "claims_picture"))
    assert len(set(blocks.ids)) == len(blocks.ids)
    for claim in frame.claim.unique():
        assert blocks.ids.count(claim) == 1
        assert rows.links.count(f"#{claim}") == (frame.claim == claim).sum()
        assert picture.links.count(f"#{claim}") == 1
    assert set(rows.links) == set(picture.links) == {f"#{at}" for at in blocks.ids}
    assert "nan" not in re.sub(r"<[^>]*>", "", "".join(parts.values()))


def test_a_claim_that_two_chapters_ask_has_two_blocks():
    frames = {name: pd.DataFrame({"claim": ["L2b", "L2b, seeds"]}) for name in ("leakage", "family")}
    at = claims_page.places(frames)
    assert at["leakage", "L2b"] == "L2b"
    assert at["family", "L2b"] == "family-L2b"
    assert len(set(at.values())) == 4


def test_the_table_says_what_decides_and_what_would_settle_it(page):
    parts, frame, _ = page
    text = parts["claims"]
    assert "not_run" not in text
    row = next(row for row in frame.itertuples() if not pd.isna(row.needed))
    assert f'<td data-key="{row.needed:.0f}">about {row.needed:,.0f} items</td>' in text
    assert f"<td>{wording.case(row.decided_by)}</td>" in text
    for column in ("Statement", "Rule", "Decided by", "n", "What would settle it"):
        assert re.search(rf'<th scope="col"[^>]*>{column}</th>', text)


def test_the_full_profiles_verdict_stands_beside_the_quick_ones(page, tmp_path):
    _, frame, _ = page
    table = tmp_path / "full.csv"
    full_row = (
        frame.iloc[:1].rename(columns={"ours": "estimate"}).assign(chapter="protection", n=162, date="2026-01-02")
    )
    full_row.assign(verdict="partly", profile="full").to_csv(table, index=False)
    beside = claims_page.with_full_profile(frame, "protection", table)
    beside = claims_page.with_error_rates(beside, "protection")
    first, *others = beside.itertuples()
    assert (first.verdict, first.full_verdict, first.full_n) == (frame.verdict[0], "partly", 162)
    assert {row.full_verdict for row in others} == {""}
    assert "Full profile" in claims_page.listed({"protection": beside})
    assert "(n = 162)" in claims_page.blocks("protection", {"protection": beside})
    quick, open_ = len(beside[beside.full_verdict != ""]), int(first.verdict == "inconclusive")
    assert f"Of the {quick} verdicts that both runs have, {open_} (" in claims_page.runs_sentence(
        {"protection": beside}
    )
    for verdict, outcome in (("partly", "meets"), ("inconclusive", "misses")):
        assert f"This run {outcome} the aim" in claims_page.runs_sentence(
            {"protection": beside.assign(verdict=verdict)}
        )
    for other in (frame.assign(model="other"), frame.assign(profile="full")):
        none = claims_page.with_full_profile(other, "protection", table)
        assert not none.full_verdict.any()
        page_text = claims_page.listed({"protection": none}) + claims_page.runs_sentence({"protection": none})
        assert "ull profile" not in page_text.replace("it needs the full profile (profile=full)", "")
    assert not claims_page.with_full_profile(frame, "leakage", table).full_verdict.any()


def test_the_stored_full_profile_has_every_claim_of_the_default_model():
    full = pd.read_csv(claims_page.FULL)
    assert (set(full.model), set(full.profile)) == ({models.DEFAULT}, {"full"})
    for chapter in CHAPTERS:
        claim_ids = {claim["id"] for claim in claims.load_claims(chapter)["claims"]}
        assert set(full[full.chapter == chapter].claim) <= claim_ids
        assert not full[full.chapter == chapter].duplicated(["claim", "reading"]).any()


def test_rows_of_a_second_model_are_named(page):
    _, frame, root = page
    claims.write(frame.assign(model="other"), root / "data" / "results" / "protection" / "claims.csv")
    parts = claims_page.write(["protection"], root, root)
    assert '<th scope="col" data-filter>Model</th>' in parts["claims"]
    assert "model other, profile quick" in parts["claims"]
    assert "<dt>Authors' code, other</dt>" in parts["claims_blocks"]
    assert len(pd.read_csv(root / "verdicts.csv").query("model == 'other'")) == len(frame)


def test_the_file_to_download_has_the_error_rates_of_each_rule_and_deciding_cases_by_their_names(page, tmp_path):
    claims.write(page[1], tmp_path / "data" / "results" / "protection" / "claims.csv")
    claims_page.write(["protection"], tmp_path, tmp_path)
    table = pd.read_csv(tmp_path / "verdicts.csv", keep_default_na=False, na_values="")
    [row] = table[(table.claim == "P9") & (table.reading == "authors' code")].itertuples()
    rates = pd.read_csv(DATA / "error_rates.csv").query("claim == 'P9' and reading == 'as_run'")
    assert row.wrongly_not_reproduced == rates.wrongly_not_reproduced.item()
    assert row.decided_by != row.deciding_case == wording.case(row.decided_by)
    assert table[table.chapter == "family"].wrongly_reproduced.notna().any()  # from another table


def test_a_name_keeps_its_asterisk_in_the_table_and_in_the_file_to_download(page, tmp_path):
    _, frame, _ = page
    starred = frame.assign(statement="It holds (c* > 0). (Changed; as first written: *partly reproduced*.)")
    claims.write(starred, tmp_path / "data/results/protection/claims.csv")
    parts = claims_page.write(["protection"], tmp_path, tmp_path)
    table = pd.read_csv(tmp_path / "verdicts.csv")
    for text in (parts["claims"], *table[table.chapter == "protection"].statement):
        assert "(c* &gt; 0)" in text or "(c* > 0)" in text
        assert "as first written: partly reproduced." in text


def test_a_book_without_verdicts_says_so(tmp_path):
    assert "No chapter" in claims_page.write(["protection"], tmp_path, tmp_path)["claims"]


def test_a_block_holds_rule_reason_and_what_was_changed(page):
    text = page[0]["claims_blocks"]
    [claim] = [claim for claim in PROTECTION["claims"] if claim["id"] == "P1"]
    block = text[text.index('id="P1"') : text.index('id="P9"')]
    for text_in_block in (
        claim["statement"],
        claim["source"],
        claim["why"],
        "Changed when results were known",
        "at most 0.064",
    ):
        assert text_in_block in block


def test_a_block_leads_to_figure_printed_table_and_rule(tmp_path):
    executed = tmp_path / "book" / "executed"
    executed.mkdir(parents=True)
    (executed / "dropkv_bound.ipynb").write_text("".join(f"::::{{figure}} figures/dropkv_bound-{n}.svg" for n in "ab"))
    drawn = claims_page.figures_of("dropkv_bound", tmp_path)
    entry = claims_page.entries("dropkv_bound")["D1"]
    links = claims_page._links("dropkv_bound", entry | {"figure": "b"}, drawn)
    assert links["Figure"] == '<a href="executed/dropkv_bound.html#fig-dropkv-bound-b">Figure 2 of the chapter</a>'
    assert "no figure" in claims_page._links("dropkv_bound", entry | {"figure": "c"}, drawn)["Figure"]
    claims_sources.write(["dropkv_bound"], {"dropkv_bound": {"D1": entry}}, tmp_path)
    assert "dropkv_t14_cone_thresholds.csv" in links["Printed table"]
    for text in links.values():
        for page, line in re.findall(rf'"{claims_sources.PAGES}/([^"#]+)(?:#L-(\d+))?"', text):
            shown = (tmp_path / page).read_text(encoding="utf-8")
            if line:
                [row] = [row for row in shown.splitlines() if f'id="L-{line}"' in row]
                assert "D1" in row or "cone_share" in row


@pytest.mark.parametrize("chapter", [*CHAPTERS, "family"])
def test_every_claim_has_an_entry_and_a_computation_to_show(chapter):
    for claim in claims_page.entries(chapter).values():
        assert claims_sources.links(chapter, claim)["In code"].count("#L-") == 2


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_claims_name_figures_that_their_chapter_shows(chapter):
    book = claims.load_claims(chapter)
    shown = set()
    for cell in nbformat.read(ROOT / "notebooks" / f"{chapter}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
            shown |= {call.args[1].value for call in calls if ast.unparse(call.func) == "figure.show"}
    assert set(book["figures"].values()) <= shown
    assert set(book["figures"]) <= {claim[key] for claim in book["claims"] for key in ("id", "topic")}
