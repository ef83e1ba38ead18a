"""The page of claims: one picture of all verdicts, one table of them that filters and sorts, a folded block per claim.

Computed from the last run's `data/results/<chapter>/claims.csv` and from `data/claims/`, at every build.
"""

import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from kvrepro.experiment import claims, history, wording
from kvrepro.experiment.claims import LABELS
from kvrepro.experiment.wording import LOOKS
from kvrepro.paths import DATA, ROOT
from kvrepro.tools import claims_sources, family_page, filterable, interval_picture, language_model_page
from kvrepro.tools.edition import results_of
from kvrepro.tools.family_claims import FULL
from kvrepro.tools.filterable import TableCell

WRONGLY = {"wrongly_reproduced": "wrongly reproduced", "wrongly_not_reproduced": "wrongly not reproduced"}  # of a rule
FAMILY = "family"  # claims over several models: not of one run, and no chapter's
MOST_UNDECIDED = 0.1  # share of the quick profile's verdicts that may be inconclusive: the aim
READ = {**LABELS, "any": "code and text"}
RUN = ["claim", "reading", "model", "profile"]
RULE = ["claim", "reading"]


def write(chapters: Iterable[str], folder: Path, root: Path = ROOT) -> dict[str, str]:
    """The parts of the page as markdown, by name; all verdicts as `folder`/verdicts.csv."""
    frames = tables(chapters, root)
    if not frames:
        return {"claims": "No chapter of this book has stored verdicts.", "claims_picture": "", "claims_blocks": ""}
    every = pd.concat([frame.assign(chapter=name) for name, frame in frames.items()])
    every = every.assign(
        reading=every.reading.replace(READ), statement=every.statement.map(wording.unmarked),
        deciding_case=every.decided_by.map(wording.case),
    )  # fmt: skip
    every.to_csv(folder / "verdicts.csv", index=False, float_format="%.6g")
    claims_sources.write(list(frames), {name: entries(name) for name in frames}, folder / "static" / "claims")
    titles = {name: title(name, root) for name in frames} | {FAMILY: "Several models"}
    return {
        "claims_picture": filterable.raw(styles() + picture(frames, titles)),
        "claims": runs_sentence(frames) + "\n\n" + listed(frames),
        "claims_blocks": "\n\n".join(f"### {titles[name]}\n\n{blocks(name, frames, root)}" for name in frames),
    }


def tables(chapters: Iterable[str], root: Path = ROOT) -> dict[str, pd.DataFrame]:
    """The verdicts of each chapter that has stored some, and those over the family of models. Those of the full
    profile stand beside them, and the error rates of their rules."""
    verdicts = stored(chapters, root)
    verdicts |= {FAMILY: claims.read(family_page.JUDGED)} if verdicts else {}
    return {name: with_error_rates(with_full_profile(frame, name), name) for name, frame in verdicts.items()}


def stored(chapters: Iterable[str], root: Path = ROOT) -> dict[str, pd.DataFrame]:
    """The verdicts of each chapter that has stored some, of all runs."""
    files = {name: results_of(name, root) / name / "claims.csv" for name in chapters}
    return {name: claims.read(file) for name, file in files.items() if file.is_file()}


def with_full_profile(frame: pd.DataFrame, chapter: str, table: Path = FULL) -> pd.DataFrame:
    """Verdicts with those of the full profile beside them, in columns `full_...`. These are empty where the full
    profile was not run for the model, and in the rows of the full profile itself."""
    full = pd.read_csv(table)
    full = full[full.chapter == chapter].assign(profile="quick")  # so that they join the rows of that profile
    full = full.set_index(RUN)[["verdict", "estimate", "low", "high", "n", "date"]].add_prefix("full_")
    return frame.join(full, on=RUN, validate="m:1").fillna({"full_verdict": "", "full_date": ""})


def with_error_rates(frame: pd.DataFrame, chapter: str) -> pd.DataFrame:
    """Verdicts with the error rates of their rules (`WRONGLY`). Those over the family of models have them already."""
    if chapter == FAMILY:
        return frame.assign(**{name: pd.to_numeric(frame[name], errors="coerce") for name in WRONGLY})
    rates = pd.read_csv(DATA / "error_rates.csv").query("chapter == @chapter").set_index(RULE)[list(WRONGLY)]
    return frame.join(rates, on=RULE, validate="m:1")


def title(chapter: str, root: Path = ROOT) -> str:
    """The first heading of a chapter's notebook; the chapter's name if there is no such file."""
    notebook = root / "notebooks" / f"{chapter}.ipynb"
    if not notebook.is_file():
        return chapter.replace("_", " ")
    return nbformat.read(notebook, as_version=4).cells[0].source.splitlines()[0].lstrip("# ")


# ---- one picture


def picture(frames: Mapping[str, pd.DataFrame], titles: Mapping[str, str]) -> str:
    """All verdicts of each chapter's first run as squares that link to the claims' blocks: a column per claim, with the
    verdict on the authors' code above the one on their text, or one tall square where the two are one question. The
    table says the same in words."""
    block_ids, parts = places(frames), []
    for name, frame in frames.items():
        by_claim = claims.verdicts_of_run(frame).groupby("claim", sort=False)
        columns = [_column(rows, block_ids[name, str(claim)]) for claim, rows in by_claim]
        parts.append(f"<p>{escape(titles[name])}</p>\n<div>{''.join(columns)}</div>")
    parts.append(f"<p>{' '.join(map(pill, LOOKS))}</p>")
    caption = (
        "A square for each verdict. Above: authors' code; below: authors' text; one square where the two are one "
        f"question. A click leads to the claim. {counts_sentence(frames)}"
    )
    squares = '<div aria-hidden="true">' + "\n".join(parts) + "</div>"
    return f'<figure class="verdicts">\n{squares}\n<figcaption>{caption}</figcaption>\n</figure>'


def _column(rows: pd.DataFrame, block_id: str) -> str:
    """One claim's verdicts: a link to its block, with the verdicts as text on hover."""
    title, squares = rows.claim.iloc[0], ""
    for row in rows.itertuples():
        squares += f'<b class="v{list(LOOKS).index(row.verdict)}"></b>'
        title += f"{'' if row.reading == 'any' else f', {LABELS[row.reading]}'}: {claims.label(row.verdict)}"
    return f'<a href="#{block_id}" tabindex="-1" title="{escape(title)}">{squares}</a>'


def counts_sentence(frames: Mapping[str, pd.DataFrame]) -> str:
    """The verdicts counted, in a sentence."""
    verdicts = pd.concat([claims.verdicts_of_run(frame) for frame in frames.values()])
    counts = [f"{(verdicts.verdict == verdict).sum()} {claims.label(verdict)}" for verdict in claims.VERDICTS]
    claimed = sum(frame.claim.nunique() for frame in frames.values())
    return f"{len(verdicts)} verdicts on {claimed} claims: {', '.join(counts)}."


# ---- one table


def runs_sentence(frames: Mapping[str, pd.DataFrame]) -> str:
    """Which runs the table holds, and how many of their verdicts are inconclusive here and in the full profile."""
    of_chapters = [frame for name, frame in frames.items() if name != FAMILY]
    runs = dict.fromkeys(run for frame in of_chapters for run in claims.runs(frame))
    text = f"Runs: {'; '.join(f'model {model}, profile {profile}' for model, profile in runs)}."
    both = pd.concat([frame[frame.full_verdict != ""] for frame in of_chapters])
    if both.empty:
        return text
    undecided = both[["verdict", "full_verdict"]].eq("inconclusive")
    quick, full = (f"{undecided[name].sum()} ({undecided[name].mean():.0%})" for name in undecided)
    outcome = "meets" if undecided.verdict.mean() <= MOST_UNDECIDED else "misses"
    return (
        f"{text} *Full profile*: the same claims of {both.model.iloc[0]}, on more items, run once "
        f"({both.full_date.max()}). Of the {len(both)} verdicts that both runs have, {quick} are inconclusive in this "
        f"run, {full} in the full profile. This run {outcome} the aim of at most {MOST_UNDECIDED:.0%}."
    )


def listed(frames: Mapping[str, pd.DataFrame]) -> str:
    """All verdicts, one row per claim, reading and model."""
    several_models = any(len(claims.runs(frame)) > 1 for name, frame in frames.items() if name != FAMILY)
    any_full = any((frame.full_verdict != "").any() for frame in frames.values())
    block_ids = places(frames)
    rows = [
        _listed(row, name, block_ids[name, row.claim], several_models, any_full)
        for name, frame in frames.items()
        for row in frame.itertuples()
    ]
    filters = ["Chapter", "With", "Verdict", "Model"]
    minor = ["Chapter", "Model", "Full profile", "Printed", "Rule", "Decided by", "n", "What would settle it"]
    wide = ["Statement", "What would settle it"]
    return filterable.interactive(rows, "verdicts", "All verdicts", filters, minor, wide)


def _listed(row: Any, chapter: str, block_id: str, with_model: bool, with_full: bool) -> dict[str, object]:
    """One verdict as a row of the table. Its statement says whether the claim is a late one, with its first verdict."""
    model = {"Model": row.model} if with_model else {}
    same = "the same" if row.full_verdict else ""
    full = TableCell(pill(row.full_verdict)) if row.full_verdict not in ("", row.verdict) else same
    return {
        "Claim": TableCell(f'<a href="#{block_id}">{escape(row.claim)}</a>'),
        "Chapter": wording.chapter_name(chapter),
        "Statement": wording.unmarked(row.statement),
        "With": READ[row.reading],
        **model,
        "Verdict": TableCell(pill(row.verdict)),
        **({"Full profile": full} if with_full else {}),
        "Estimate [95% interval]": _estimate(row),
        "Printed": wording.printed(row),
        "Rule": row.rule,
        "Decided by": wording.case(row.decided_by),
        "n": "" if pd.isna(row.n) else f"{row.n:.0f}",
        "What would settle it": _settling(row),
    }


def _settling(row: Any) -> TableCell:
    """What would settle a verdict. It sorts by the number of items; other needs come after."""
    text = wording.missing(row)
    return TableCell(escape(text, quote=False), text and (f"{row.needed:.0f}" if row.needed > 0 else "needs"))


def _estimate(row: Any) -> TableCell:
    """An estimate with its interval. It sorts by its value; percent are sorted as the shares that they are."""
    value = "" if pd.isna(row.ours) else f"{row.ours / (100 if row.unit == '%' else 1):.6g}"
    return TableCell(escape(wording.shown(row)), value)


def places(frames: Mapping[str, pd.DataFrame]) -> dict[tuple[str, str], str]:
    """The HTML id of each claim's block, by (chapter, claim). An id that an earlier chapter uses gets the chapter's
    name in front."""
    block_ids: dict[tuple[str, str], str] = {}
    for name, frame in frames.items():
        taken = set(block_ids.values())
        ids = {claim: wording.anchor(claim) for claim in dict.fromkeys(frame.claim)}
        block_ids |= {(name, claim): f"{name}-{anchor}" if anchor in taken else anchor for claim, anchor in ids.items()}
    return block_ids


def entries(chapter: str) -> dict[str, dict[str, Any]]:
    """A chapter's claims as they are written down, by id, each with the `figure` that the file names for it, or ""."""
    book = claims.load_claims(chapter)
    figures = book.get("figures", {})
    return {
        claim["id"]: claim | {"figure": figures.get(claim["id"], figures.get(claim["topic"], ""))}
        for claim in book["claims"]
    }


def page_of(chapter: str) -> str:
    """The address of a chapter's evidence, relative to the page of claims."""
    return "family.html" if chapter == FAMILY else f"executed/{chapter}.html"


def figures_of(chapter: str, root: Path) -> list[str]:
    """The figures that a chapter's last run has drawn, by name, in their order."""
    executed = root / "book" / "executed" / f"{chapter}.ipynb"
    text = executed.read_text("utf-8") if executed.is_file() else ""
    return re.findall(rf"::::{{figure}} figures/{chapter}-([a-z0-9-]+)\.svg", text)


def styles() -> str:
    """What verdicts look like, as a style sheet in the page."""
    looks = enumerate(LOOKS.values())
    rules = (f'.v{i} {{ background: {colour} }} .v{i}::before {{ content: "{sign} " }}' for i, (sign, colour) in looks)
    return "<style>\n" + "\n".join(rules) + "\n</style>"


def pill(verdict: str) -> str:
    """A verdict in its colours and behind its sign, both from `styles`."""
    return f'<b class="v{list(LOOKS).index(verdict)}">{claims.label(verdict)}</b>'


# ---- one block for each claim


def blocks(chapter: str, frames: Mapping[str, pd.DataFrame], root: Path = ROOT) -> str:
    """A folded block for each claim of a chapter, with all that is known of it. `claims.html#P12` opens that of P12."""
    entry_of, block_ids, drawn = entries(chapter), places(frames), figures_of(chapter, root)
    elsewhere = language_model_page.by_claim(chapter)
    html = ['<div class="claims">', f'<p>Evidence: <a href="{page_of(chapter)}">the page that judges these</a>.</p>']
    for claim, rows in frames[chapter].groupby("claim", sort=False):
        entry = entry_of.get(str(claim), {})
        links = {"Picture": _picture(rows, entry)} | _links(chapter, entry, drawn) if entry else {}
        other = {language_model_page.NAME: elsewhere[str(claim)]} if str(claim) in elsewhere else {}
        html += [
            f'<details id="{block_ids[chapter, str(claim)]}">',
            f"<summary>{_summary(str(claim), rows, entry)}</summary>",
            f"<dl>{_entries(rows, entry, other, links)}</dl>\n</details>",
        ]
    return filterable.raw("\n".join([*html, "</div>"]))


def _summary(claim: str, rows: pd.DataFrame, entry: Mapping[str, Any]) -> str:
    """The line of a folded block: the claim, its statement, and its verdicts."""
    first = claims.verdicts_of_run(rows)
    short = {"as_run": "code:", "as_described": "text:"}
    pills = " ".join(f"{short.get(row.reading, '')} {pill(row.verdict)}" for row in first.itertuples())
    return f"<b>{escape(claim)}</b> {escape(entry.get('statement', first.statement.iloc[0]), quote=False)} {pills}"


def _picture(rows: pd.DataFrame, entry: Mapping[str, Any]) -> str:
    """A claim's estimates against its rule; empty for an exact statement, which has no interval."""
    if entry.get("exact") or "rule" not in entry:
        return ""
    several, names = len(set(rows.model)) > 1, {"as_run": "code", "as_described": "text", "any": "ours"}
    of_rows = []
    for row in rows.itertuples():
        name = names[row.reading] + f", {row.model}" * several
        of_rows += [(name, row.ours, row.low, row.high)]
        full = (row.full_estimate, row.full_low, row.full_high)
        of_rows += [(f"{name}, full profile", *full)] if row.full_verdict else []
    return interval_picture.drawn(entry["rule"], of_rows, entry.get("unit", "F1"))


def _links(chapter: str, entry: Mapping[str, Any], drawn: list[str]) -> dict[str, str]:
    """Where a claim's figure, printed table and rule are, as HTML by term."""
    name, figure = entry["figure"], "The chapter shows it in no figure."
    if name in drawn:
        at = f"{page_of(chapter)}#fig-{chapter.replace('_', '-')}-{name}"
        figure = f'<a href="{at}">Figure {drawn.index(name) + 1} of the chapter</a>'
    return {"Figure": figure} | claims_sources.links(chapter, entry)


def _entries(rows: pd.DataFrame, entry: Mapping[str, Any], other: Mapping[str, str], links: Mapping[str, str]) -> str:
    """The text of a claim's block, as terms and descriptions in HTML. other: verdicts on another model, by its name.
    links: further terms, whose text is HTML."""
    first = rows.iloc[0]
    terms = {"Source": f"{first.source}. Printed: {wording.printed(first)}."}
    if first.rule:
        terms["Rule"] = f"{first.rule[0].upper()}{first.rule[1:]}. {entry.get('why', '')}"
    for row in rows.itertuples():
        reading = READ[row.reading].capitalize() + (f", {row.model}" if len(set(rows.model)) > 1 else "")
        terms[reading] = (
            f"{_outcome(claims.label(row.verdict).capitalize(), wording.shown(row), row.n)} {wording.evidence(row)}"
        )
        if row.full_verdict:
            full_numbers = (row.full_estimate, row.full_low, row.full_high)
            shown = "" if pd.isna(row.full_estimate) else wording.text_of(full_numbers, row.unit)
            terms[reading] += f" Full profile: {_outcome(claims.label(row.full_verdict), shown, row.full_n)}"
    terms |= other
    rates = rows[list(WRONGLY)].max().dropna()  # of its readings the larger rate counts
    terms["Errors"] = ", ".join(f"{WRONGLY[str(name)]} {share:.0%}" for name, share in rates.items())
    terms |= {head: entry[key] for key, head in NOTES.items() if key in entry}
    if late := history.first_form(first.statement):
        rule, verdicts = late
        terms["As first written"] = f"{verdicts[0].upper()}{verdicts[1:]}." + (f" Rule: {rule}." if rule else "")
    html = {head: escape(text, quote=False) for head, text in terms.items()} | dict(links)
    return "".join(f"<dt>{head}</dt><dd>{text}</dd>" for head, text in html.items() if text)


def _outcome(verdict: str, shown: str, n: float) -> str:
    """A verdict with its estimate and its number of items, where it has them."""
    value = f": {shown}" if shown else ""
    items = "" if pd.isna(n) else f" (n = {n:.0f})"
    return f"{verdict}{value}{items}."


NOTES = {
    "changed": "Changed when results were known",
    "exploratory": "Written when results were known",
    "ours": "Not in the source's words",
}


# ---- how far to trust the verdicts


def error_rates() -> list[dict[str, str]]:
    """A row per chapter: how many rules were tried, which err in more than 5% of tries, which cannot hold or fail."""
    table, rows = pd.read_csv(DATA / "error_rates.csv"), []

    def named(rules: pd.DataFrame) -> str:
        return ", ".join(rules.claim.unique()) or "-"

    for chapter, group in table.groupby("chapter", sort=False):
        tried = group[group.repeats.notna()]
        rows.append({
            "chapter": wording.chapter_name(str(chapter)), "rules tried": str(tried.claim.nunique()),
            **{f"{label} in more than 5%": named(tried[tried[f"{name}_above"].eq(True)])
               for name, label in WRONGLY.items()},
            "cannot hold": named(tried[tried.can_hold.eq(False)]),
            "cannot fail": named(tried[tried.can_fail.eq(False)]),
            "medium effect decided": f"{tried[tried.repeats > 1].decided.mean():.0%}",
            "not tried": named(group[group.repeats.isna()]),
        })  # fmt: skip
    return rows


def seeds_sentence() -> str:
    """How many verdicts differ between two runs whose items have different seeds, over the models."""
    table = pd.read_csv(DATA / "stability.csv")
    runs = table[table.varied.str.startswith("item seed")]
    by_model = runs.assign(differ=runs.pair * runs.verdicts).groupby("varied")[["differ", "verdicts", "turned"]].sum()
    shares = by_model.differ / by_model.verdicts
    return (
        f"On {len(by_model)} models, {shares.min():.0%} to {shares.max():.0%} of a model's verdicts differ between two "
        f"runs with other items; {by_model.turned.sum()} of {by_model.verdicts.sum():,} turn among three."
    )


def stability() -> list[dict[str, str]]:
    """A row for each comparison of runs in data/stability.csv: the share of verdicts that change, and which."""
    table = pd.read_csv(DATA / "stability.csv").fillna({"which": "-"})
    return [
        {
            "varied": row.varied, "runs": row.runs, "chapter": wording.chapter_name(row.chapter),
            "changed": f"{row.changed} of {row.verdicts} ({row.share:.0%})", "between two runs": f"{row.pair:.0%}",
            "turned": row.turned,
            "which, run by run": re.sub("|".join(LABELS), lambda match: LABELS[match[0]], row.which),
        }
        for row in table.itertuples()
    ]  # fmt: skip
