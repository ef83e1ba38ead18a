"""What became of claims, as readers see it: sentences, links, lists, tables.

A frame is a table of verdicts, as `kvrepro.experiment.judge` makes it (columns: `claims.COLUMNS`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown
from pandas.io.formats.style import Styler

from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.policy import READINGS, find, is_own
from kvrepro.errors import InputError, counted
from kvrepro.experiment import stats
from kvrepro.experiment.claims import LABELS, NOT_TESTABLE, STORED, VERDICTS, label

FOUND = "**What we found**"  # above a chapter's findings; the book shows it as a box's title
LABELS_IN = {reading: f"the {name}" for reading, name in LABELS.items()}
LOOKS = {  # verdict -> its sign, and its colour below black letters, after Okabe and Ito's palette
    "reproduced": ("✓", "#009E73"),
    "partly": ("◐", "#F0E442"),
    "not reproduced": ("✗", "#D55E00"),
    "inconclusive": ("?", "#D9D9D9"),
    NOT_TESTABLE: ("–", "#FFFFFF"),
}
SAYS = {  # verdict -> what a sentence says of its subject
    "reproduced": "comes out",
    "partly": "comes out in part",
    "not reproduced": "does not come out",
    "inconclusive": "is undecided",
    NOT_TESTABLE: "cannot be tested here",
    "not run": "was not run",
}
PLAIN = {  # units of numbers up to 1, as a sentence writes them; a table's cell leaves them out
    "F1": "F1", "accuracy": "in accuracy", "correlation": "in correlation", "cos": "in cosine",
    "keep rate": "in keep rate", "log ratio": "in log ratio",
    "rank correlation": "in rank correlation", "recall": "in recall", "share": "of the importance",
}  # fmt: skip
STATE_VERBS = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "open": ("is undecided", "are undecided")}
LEADS = {"reproduced": "holds", "partly": "holds", "not reproduced": "fails", "inconclusive": "open"}  # case counted


def anchor(claim: str) -> str:
    """Where the page of claims shows a claim: `claims.html#<anchor>`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", claim).strip("-")


def link(claim: str, text: str = "", page: str = "claims.html") -> str:
    """A link to a claim, with its id or a text. page: that of the claims, as seen from the chapters' folder."""
    return f'<a href="{page}#{anchor(claim)}">{text or claim}</a>'


def summary(frame: pd.DataFrame) -> str:
    """The verdicts in sum, as Markdown: the claims of each verdict by reading, then those where the authors' code and
    the authors' text disagree.

    They disagree where a case holds with one and fails with the other. A verdict can also differ without that: where
    only one of them decides a case.
    """
    lines = []
    names = {"as_run": "Authors' code", "as_described": "Authors' text", "any": "The same for code and text"}
    if set(frame.reading) == {"any"}:
        names["any"] = "All claims"
    names |= {STORED: "Judged by timings that are stored with the project, and not by this run"}
    stored = frame.get("model", frame.reading) == STORED
    for reading, group in frame.groupby(frame.reading.mask(stored, STORED), sort=False):
        parts = []
        for verdict in VERDICTS:
            if len(ids := group[group.verdict == verdict].claim):
                parts.append(f"{len(ids)} *{label(verdict)}* ({', '.join(map(link, ids))})")
        lines.append(f"- **{names[str(reading)]}**, {counted(len(group), 'claim')}: {'; '.join(parts)}.")
    compared = frame[frame.claim.isin(frame[frame.claim.duplicated()].claim)]
    decides = compared.depends_on_reading == "yes"
    differs = compared.groupby("claim").verdict.transform("nunique") > 1
    turned = "holds with one and fails with the other"
    for split, heading in (
        (compared[decides], f"**Code and text disagree** on {{}}: a case {turned}"),
        (compared[differs & ~decides], f"**The verdict differs** for {{}}, though no case {turned}"),
    ):
        if len(split):
            claims = "\n".join(f"  - {_both(group)}" for _, group in split.groupby("claim", sort=False))
            lines.append(f"- {heading.format(counted(split.claim.nunique(), 'claim'))}.")
            lines.append(f"  <details><summary>Which they are</summary>\n\n{claims}\n\n  </details>")
    if len(compared) and not (decides | differs).any():
        lines.append("- No verdict depends on whether the authors' code or their text is followed.")
    return "\n".join(lines)


def _both(group: pd.DataFrame) -> str:
    """One claim, and its verdicts with the authors' code and with their text."""
    code, text = (label(group[group.reading == reading].verdict.iloc[0]) for reading in READINGS)
    results = f"*{code.capitalize()}* with the authors' code, *{text}* with their text."
    if code == text:
        results = f"*{code.capitalize()}* with both, but different cases hold."
    return f"{link(group.claim.iloc[0])} {group.statement.iloc[0]} {results}"


def sentence(frame: pd.DataFrame, claim: str, subject: str, numbers: bool = True) -> str:
    """A claim's verdicts as a sentence to be read aloud: `Recovery does not come out in the authors' code (23%
    [17, 31]) or in their text (26% [18, 36]).` The verb links to the claim. For a claim of several cases the sentence
    says how many hold and to which case the number belongs (`weighed`).

    subject: what the claim is about, a noun that begins the sentence (`Recovery`, `The gain at every capacity`).
    numbers: False leaves the parentheses out, for the box at a chapter's top.
    """
    rows = frame[frame.claim == claim]
    row_of = {row.reading: row for row in rows.itertuples()}
    verdicts = {reading: row.verdict for reading, row in row_of.items()} or {"any": "not run"}

    def verb(reading: str) -> str:
        return link(claim, SAYS[verdicts[reading]])

    def where(reading: str, whose: str) -> str:
        value = weighed(row_of[reading]) if numbers and reading in row_of else ""
        return " ".join(filter(None, [f"in {whose}" if whose else "", f"({value})" if value else ""]))

    if len(verdicts) == 1:
        [only] = verdicts
        return " ".join(filter(None, [subject, verb(only), where(only, LABELS_IN.get(only, ""))])) + "."
    code, text = where("as_run", "the authors' code"), where("as_described", "their text")
    if verdicts["as_run"] == verdicts["as_described"]:
        either = "or" if "not" in SAYS[verdicts["as_run"]] else "and"
        return f"{subject} {verb('as_run')} {code} {either} {text}."
    return f"{subject} {verb('as_run')} {code} but {verb('as_described')} {text}."


def outcome(frame: pd.DataFrame, claim: str, reading: str = "") -> str:
    """A claim's verdict in one reading, as a verb that links to the claim: `comes out in part`."""
    rows = frame[(frame.claim == claim) & (frame.reading.isin([reading, "any"]) | (not reading))]
    return link(claim, SAYS[rows.verdict.iloc[0] if len(rows) else "not run"])


def weighed(row: Any) -> str:
    """The cases and the number behind a verdict, for a sentence: `1 of 2 cases holds; the hardest, Layer-DefensiveKV:
    -0.09 F1 [-0.15, -0.02]`, or `7 of 8 cases hold; one is undecided: ...` where none fails; of an inconclusive
    claim the hardest case that is undecided, and how many fail. For a single case only the number."""
    value = spoken(row)
    counts = {state: int(n) for n, state in re.findall(r"(\d+) (holds|fails|open)\b", row.members)} if value else {}
    total, n = sum(counts.values()), counts.get(LEADS.get(row.verdict, ""), 0)
    if total < 2 or not n:
        return value
    singular, plural = STATE_VERBS[LEADS[row.verdict]]
    cases = f"{n} of {total} cases" if n < total else "both cases" if n == 2 else f"all {n} cases"
    cases = f"{cases} {singular if n == 1 else plural}; "
    label = case(row.decided_by).split(": ")[0]  # the case, without its worst counterexample
    if row.verdict == "inconclusive" and (lost := counts.get("fails", 0)):
        failing = "one fails" if lost == 1 else f"{lost} fail"
        return f"{cases}the hardest{label and ', '}{label}: {value}; {failing}, not clearly enough among {total}"
    if row.verdict != "partly" or n + counts.get("open", 0) < total:
        return f"{cases}the hardest{label and ', '}{label}: {value}"
    if n + 1 == total:
        return f"{cases}one is undecided: {label}{label and ', '}{value}"
    return f"{cases}{total - n} are undecided, the hardest of them{label and ', '}{label}: {value}"


def spoken(row: Any) -> str:
    """Our value with interval and unit, rounded for speech: `23% [17, 31]`, `-0.09 F1 [-0.15, -0.02]`; or empty."""
    if pd.isna(row.ours):
        return ""
    size = max((abs(x) for x in (row.ours, row.low, row.high) if np.isfinite(x)), default=np.inf)
    whole = row.unit == "%" or size >= 100
    times = row.unit.split()[:1] == ["x"]
    fixed = row.unit in PLAIN or (times and abs(row.ours) < 10)  # near 1 the second decimal counts

    def number(x: float) -> str:
        plain = whole or (float(x).is_integer() and not fixed)
        text = f"{x:,.0f}" if plain else f"{x:.2f}" if fixed else f"{x:.2g}"
        return text if re.search("[1-9]", text) else text.lstrip("-")  # no "-0.00"

    exact = row.low == row.ours == row.high or not np.isfinite([row.low, row.high]).all()
    interval = "" if exact else f" [{number(row.low)}, {number(row.high)}]"
    unit = f" {PLAIN[row.unit]}" if row.unit in PLAIN else _after(row.ours, row.unit)
    return number(row.ours) + unit + interval


def _after(value: float, unit: str) -> str:
    """The text that follows a number of this unit; empty for the units of numbers up to 1 (`PLAIN`)."""
    units = {"%": "%", "x": " times"} | dict.fromkeys(PLAIN, "")
    return units.get(unit, f" {re.sub('^x ', 'times ', unit.removesuffix('s') if value == 1 else unit)}")


def text_of(values: Sequence[float], unit: str = "F1") -> str:
    """(value, low, high) as text, in a unit."""
    value, low, high = values
    if pd.isna(value):
        return "no value"
    after = _after(value, unit)
    if value == low == high and float(value).is_integer():  # counted, not estimated
        return f"{value:g}{after}"
    rounding = 0 < np.nanmax(np.abs([value, low, high])) < 5e-4  # zeros would hide such errors
    small = rounding and unit not in ("F1", "%")
    form = ".1g" if small else ".1f" if unit == "%" else ".3f"
    if not np.isfinite([low, high]).all():
        return f"{value:{form}}{after} (no interval)"
    if value == low == high:
        return f"{value:{form}}{after}"
    return f"{value:{form}}{after} [{low:{form}}, {high:{form}}]"


def shown(row: Any) -> str:
    """Our value with its interval; empty without a value."""
    return "" if pd.isna(row.ours) else text_of((row.ours, row.low, row.high), row.unit)


def _needed(row: Any) -> str:
    """How many items would decide the open cases; empty where that is not known."""
    if pd.isna(row.needed):
        return ""
    at_a_threshold = row.needed > 100_000
    return "no practical number of items" if at_a_threshold else f"about {row.needed:,.0f} items"


def missing(row: Any) -> str:
    """What would settle a verdict that is open; empty where it is settled."""
    if row.verdict == NOT_TESTABLE:
        return evidence(row)
    return _needed(row) if row.verdict in ("inconclusive", "partly") else ""


def beside(frame: pd.DataFrame, *topics: str, page: str = "claims.html") -> str:
    """The claims of some topics as a Markdown list: what the paper printed, and our result in each reading. page: that
    of the claims, as seen from the list's page."""
    lines = []
    for claim, group in frame[frame.topic.isin(topics)].groupby("claim", sort=False):
        first = group.iloc[0]
        rule = f" Rule: {first.rule}." if first.rule else ""
        lines.append(f"- {link(str(claim), f'**{claim}**', page)} {stated(first)} Printed: {printed(first)}.{rule}")
        for row in group.itertuples():
            name = {"any": "Here"}.get(row.reading, LABELS.get(row.reading, "").capitalize())
            value = f", {shown(row)}" if shown(row) else ""
            lines.append(f"    - {name}: *{label(row.verdict)}*{value}. {evidence(row)}")
    return "\n".join(line.rstrip() for line in lines)


def folded(frame: pd.DataFrame, *topics: str) -> str:
    """`beside` for a chapter's section, folded under a line that names the claims."""
    ids = ", ".join(frame[frame.topic.isin(topics)].claim.unique())
    return f"<details><summary>Claims judged here: {ids}</summary>\n\n{beside(frame, *topics)}\n\n</details>"


def printed(row: Any) -> str:
    """What the source prints, with its unit."""
    text = str(row.paper)
    return text + _after(1 if text == "1" else 0, row.unit) if re.search(r"(^|\s)[-+]?[\d.,]+$", text) else text


def evidence(row: Any) -> str:
    """The evidence for a verdict, in sentences: the deciding case, how many cases hold, the test, the items that would
    settle it; or why it cannot be tested."""
    members, decided, note = (text if isinstance(text, str) else "" for text in (row.members, row.decided_by, row.note))
    if not shown(row):
        why = case(note).rstrip(".")
        return f"{why[:1].upper()}{why[1:]}." if why else ""
    total = sum(map(int, re.findall(r"\d+(?= (?:holds|fails|open))", members)))
    cases = members.partition(", though ")[2]
    if total > 1:
        cases = f"of {total} cases, " + re.sub(r"(\d+) (holds|fails|open)", _cases, members)
    p = "" if pd.isna(row.p) else f"{row.test}: p {'< 0.001' if row.p < 0.001 else f'= {row.p:.3f}'}"
    needed = f"{_needed(row)} would settle what is open" if _needed(row) else ""
    parts = [f"Decided by {case(decided)}" if decided else "", cases, p, needed]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in parts if text)


def _cases(match: re.Match[str]) -> str:
    singular, plural = STATE_VERBS[match[2]]
    return f"{match[1]} {singular if match[1] == '1' else plural}"


def case(label: str) -> str:
    """A case or a note with policies by their titles: `h2o, C=512` is H2O at 512 tokens."""
    alone = re.split(r"(, | against | minus |: | of )", label)
    text = "".join(map(_titled, alone))
    text = re.sub(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", _title, text)
    return re.sub(r"\bC=(\d+)", r"\1 tokens", text)


def _titled(part: str) -> str:
    with suppress(InputError):  # the part is no policy, or a policy's file is gone
        return find(part).title if part in CATALOGUE or is_own(part) else part
    return part


def _title(match: re.Match[str]) -> str:
    return CATALOGUE[match[0]].title if match[0] in CATALOGUE else match[0].replace("_", " ")


def chapter_name(chapter: str) -> str:
    """A chapter's name in a table or a sentence: `DropKV bound`."""
    return " ".join(map(_titled, chapter.split("_")))


def overview(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per claim: statement, the paper's value, rule, verdict and value per reading, does the reading decide."""
    rows = []
    for claim, group in frame.groupby("claim", sort=False):
        first = group.iloc[0]
        results = {row.reading: f"{label(row.verdict)} {shown(row)}".strip() for row in group.itertuples()}
        row = {"claim": claim, "statement": stated(first), "printed": printed(first), "rule": first.rule}
        if set(frame.reading) == {"any"}:
            row["here"] = results["any"]
        else:
            row |= {LABELS[name]: results.get(name, results.get("any", "not run")) for name in READINGS}
            row["reading decides"] = first.depends_on_reading
        rows.append(row)
    return pd.DataFrame(rows).set_index("claim")


def styled(frame: pd.DataFrame) -> Styler:
    """`overview` for a page: ids link to the claims, verdicts have their colours."""
    table = overview(frame).reset_index()
    readings = [column for column in table if column in {*LABELS.values(), "here"}]
    table = table.assign(claim=table.claim.map(link), statement=table.statement.map(unmarked))
    shown = table.style.hide(axis="index").map(_colours, subset=readings)
    return shown.set_table_attributes('class="dataframe"')  # the theme colours these in the dark


def _colours(text: str) -> str:
    for verdict, (_, colour) in LOOKS.items():
        if text.startswith(label(verdict)):
            return f"background-color: {colour}; color: #000"
    return ""


def stated(row: Any) -> str:
    """A claim's statement, with a note where the verdict rests on stored timings."""
    timed = " (Timed earlier on another machine, not in this run.)" if row.model == STORED else ""
    return f"{row.statement}{timed}"


def unmarked(statement: str) -> str:
    """A statement without the asterisks of Markdown's emphasis; one that belongs to a name, such as c*, stays."""
    return re.sub(r"\*(\w[^*]*)\*", r"\1", statement)


def beats(gap: Any, other: str) -> str:
    """How a policy's token F1 compares with that of another, in a sentence. gap: a row of `stats.contrasts`."""
    words = "as much as" if gap.value == 0 else "more than" if gap.value > 0 else "less than"
    chance = "" if gap.low > 0 or gap.high < 0 else f"; {gap.n:.0f} items cannot tell whether that is chance"
    interval = "" if pd.isna(gap.low) else f" [{gap.low:.2f}, {gap.high:.2f}]"
    return f"It scored {words} {other} (a difference of {gap.value:+.2f}{interval}){chance}."


def against_chance(gap: Any | None) -> str:
    """Whether a policy's idea is worth using, in a sentence. gap: the row of `stats.contrasts` that compares it with a
    random choice; None: it was not compared."""
    if gap is None:
        return "Whether the idea does better than chance is not known: this run has no random choice beside it."
    if gap.high < 0:
        return "The example shows how to write a policy, but is not one to use: a random choice scored more here."
    if gap.low > 0:
        return "On these items the idea does better than chance; other tasks would have to confirm it."
    return "On these items it stays open whether the idea does better than chance; more of them are needed to tell."


def findings(*sentences: str, unanswered: str = "") -> Markdown:
    """A chapter's findings, which the book shows in a box at its top; empty sentences are left out.

    unanswered: why the model's own answers say nothing (`judge.unanswered`). The box then begins with that and leaves
    out sentences that lack a number (`stats.NO_VALUE`).
    """
    if unanswered:
        sentences = tuple(s for s in sentences if stats.NO_VALUE not in s)
        way_out = "Read its answers first; then take other items, more of them, or another model."
        warning = f"**This run cannot say what the model forgets**: {unanswered}. {way_out}"
        sentences = (warning, *sentences)
    return Markdown("\n".join([FOUND, "", *(f"- {s}" for s in sentences if s)]))
