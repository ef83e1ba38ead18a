"""The book's first page: what each chapter found, in a sentence with its number, and all verdicts at a glance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure

from kvrepro.chapters.leakage import drawings, study
from kvrepro.chapters.reanalysis import comparisons, printed
from kvrepro.chapters.reclamation import members
from kvrepro.chapters.synthesis import grid, stored, variance
from kvrepro.errors import InputError, counted
from kvrepro.experiment import artifact, claims, figure, stats, wording
from kvrepro.paths import ROOT
from kvrepro.tools import claims_page, language_model_page
from kvrepro.tools.edition import computed_figure, figure_data, results_of
from kvrepro.tools.family_page import COLOURS, SIGNS
from kvrepro.tools.rows import words

QUESTIONS: dict[str, dict[str, Any]] = words("questions")


def parts(root: Path = ROOT) -> dict[str, str]:
    """The page's computed parts by name: `answers`, `citation`, and `verdicts`, a figure; as markdown."""
    return {"answers": answers(root), "citation": citation(), "verdicts": picture(root)}


def answers(root: Path = ROOT) -> str:
    """A list: each chapter's question, its answer in a sentence, and a link; then what a language model changes."""
    special = {"reanalysis": _reanalysis, "synthesis": _synthesis, "reclamation": _reclamation, "leakage": _leakage}
    lines = []
    for chapter, entry in QUESTIONS.items():
        text = special[chapter](root) if chapter in special else _judged(chapter, root)
        lines.append(f"- **{entry['question']}** {text} {{doc}}`The chapter <executed/{chapter}>`.")
    other = f"{language_model_page.headline()} {{doc}}`The page <language-model>`."
    lines.append(f"- **Does this hold on a language model?** {other}")
    return "\n".join(lines)


def _judged(chapter: str, root: Path) -> str:
    """The answer of a chapter by the claims that `QUESTIONS` lists: a sentence for each."""
    table, sentences = verdicts([chapter], root).get(chapter), []
    for answer in QUESTIONS[chapter]["answers"]:
        claim = answer["claim"]
        if table is not None and claim in set(table.claim):
            frame = _in_points(table[table.claim == claim], answer.get("points", ""))
            sentences.append(_linked(wording.sentence(frame, claim, answer["subject"])) + _in_print(frame.iloc[0]))
    return " ".join(sentences) or "This run has no verdict on that yet."


def _in_points(frame: pd.DataFrame, points: str) -> pd.DataFrame:
    """Verdicts with their numbers times 100, in the unit `points`; as they are if that is ""."""
    if not points:
        return frame
    numbers = {name: 100 * frame[name] for name in ("ours", "low", "high")}
    paper, rule = (
        frame[name].str.replace(r"\d+\.\d+", lambda number: f"{100 * float(number[0]):.0f}", regex=True)
        for name in ("paper", "rule")
    )
    return frame.assign(**numbers, paper=paper, rule=rule, unit=points)


def _linked(text: str) -> str:
    return text.replace('"../claims.html', '"claims.html')


def _in_print(row: pd.Series) -> str:
    """What the source prints, if it holds a number; and the claim's rule, where the verdict is neither yes nor no."""
    in_print = wording.printed(row)
    demand = f"; the claim asks for {row.rule}" if row.verdict in ("partly", "inconclusive") and row.rule else ""
    return f" In print: {in_print}{demand}." if any(sign.isdigit() for sign in in_print) else ""


def _reclamation(root: Path) -> str:
    """The claim with the numbers of all policies, where the chapter has drawn them; otherwise as `_judged`."""
    [answer], shown = QUESTIONS["reclamation"]["answers"], figure_data("reclamation", "granularity", root)
    frame = verdicts(["reclamation"], root).get("reclamation")
    if frame is None or shown is None:
        return _judged("reclamation", root)
    drawn = members.uncompacted(shown)
    return (
        f"{answer['subject']} {_linked(wording.outcome(frame, answer['claim']))}: with {drawn.kept.iloc[0]:.0%} of the "
        f"tokens kept, the same for all heads, {drawn.freed.min():.0%} to {drawn.freed.max():.0%} of the blocks are "
        f"freed, depending on the policy.{_in_print(frame[frame.claim == answer['claim']].iloc[0])}"
    )


def _leakage(root: Path) -> str:
    """What each policy forgets first, and how much is leaked with half of the prompt dropped, from the chapter's
    figure."""
    drawn = figure_data("leakage", "curves", root)
    if drawn is None:
        return "This chapter has no results yet."
    curves = drawn[drawn.reading == drawn.reading[drawn.measure == "following"].iloc[0]]
    lost = study.forgotten_first(curves[curves.measure.isin(["following", "leakage"])])
    sooner = {order: drawings.sooner(part) for order, part in lost.groupby("order")}
    half = curves[(curves.measure == "leakage") & (curves.order == "defense first") & (curves.ratio > 0)]
    half = half[(half.ratio - 0.5).abs() == (half.ratio - 0.5).abs().min()].sort_values("value")
    most, dropped = half.tail(1), half.ratio.iloc[0]
    return (
        f"If the directive comes first, {sooner['directive first']}; if the defense does, {sooner['defense first']}, "
        f"and with {dropped:.0%} of the system prompt dropped the model then reveals "
        f"{stats.as_text(most, unit='%', digits=0)} of its secret rules under {figure.look(most.policy.iloc[0]).name}, "
        "where it reveals most."
    )


def _reanalysis(root: Path) -> str:
    """How many printed numbers come out of the public rows, and how much protection changes in these."""
    beside = printed.beside_public_scores()
    public = beside[beside.same.notna()]
    other = public[~public.same.astype(bool)]
    where = "once rounded as the authors did" if other.why.str.contains("round").all() else "only in part or not at all"
    rows = comparisons.panels(artifact.scores())
    lru = rows[(rows["items"] == "longbench-pool") & (rows.policy == "lru")]
    guarded, bare, group = lru[lru.prefix == 0.1], lru[lru.prefix == 0], ["model_name", "capacity"]
    lift = stats.contrasts(guarded, bare, group, "token_f1", on=["item", *group]).value
    verb, form = ("lifts", ".2f") if lift.min() > 0 else ("changes", "+.2f")
    changes = f"{verb} the F1 of LRU by {lift.min():{form}} to {lift.max():{form}}"
    return (
        f"Of {len(beside)} printed numbers {len(public)} have public rows; {int(public.same.sum())} of these come out "
        f"in every digit, the other {len(other)} {where}. In these rows protection {changes}, depending on the model."
    )


def _synthesis(root: Path) -> str:
    """The part of a method that explains the largest share of the variance."""
    try:
        rows = stored.rows_of_main_model(stored.rows(results_of("synthesis", root)))
    except InputError:
        return "This chapter has no results yet."
    cells = rows[rows.kind == "grid"]
    factors = list(grid.factors(()))
    share = variance.by_model(cells, factors, "score", draws=2)[0].set_index("term").value.loc[factors]
    if share.isna().all():  # a model that cannot answer, for instance
        return "All cells score alike in this run, so that no part of a method explains more than another."
    most, other = share.idxmax(), "guard" if share.idxmax() != "guard" else "scorer"
    return (
        f"Of a method's parts the {most} explains more than any other: {share[most]:.0%} of the variance of the "
        f"scores on {cells['item'].nunique()} items; the {other} explains {max(share[other], 0):.0%}. {{doc}}`decide` "
        "has the table."
    )


def verdicts(chapters: Sequence[str], root: Path = ROOT) -> dict[str, pd.DataFrame]:
    """The verdicts of the run, by chapter; chapters without any are left out."""
    return {name: claims.verdicts_of_run(frame) for name, frame in claims_page.stored(chapters, root).items()}


def title(chapter: str) -> str:
    """What a chapter is called: the heading of its notebook."""
    return claims_page.title(ROOT / "notebooks" / f"{chapter}.ipynb").replace("_", " ")


def picture(root: Path = ROOT) -> str:
    """The figure of all verdicts as a directive: the file that `drawn` gives, and a caption that counts them and names
    the chapters without any."""
    frames = verdicts(list(QUESTIONS), root)
    none = " and ".join(f"*{title(chapter)}*" for chapter in QUESTIONS if chapter not in frames)
    judge = "judges no claims, so it is" if " and " not in none else "judge no claims, so they are"
    missing = f" {none} {judge} not in it." if none else ""
    signs = ", ".join(f"{sign} {claims.label(verdict)}" for verdict, sign in SIGNS.items())
    n = counted(sum(map(len, frames.values())), "verdict")
    facts = {"n": n, "missing": missing, "signs": signs, "alt": _counts(frames), "more": _on_more_items(frames)}
    return computed_figure("verdicts", "generated/verdicts.csv", **facts)


def _on_more_items(frames: Mapping[str, pd.DataFrame]) -> str:
    """How many of the verdicts are inconclusive here and in the full profile, where that was run for the model."""
    both = claims_page.in_both_profiles(claims_page.with_full_profile(frame, name) for name, frame in frames.items())
    if both.empty:
        return ""
    inconclusive, full = both[["verdict", "full_verdict"]].eq("inconclusive").sum()
    return (
        f" The full profile has {len(both)} of them, too; of these, {inconclusive} are inconclusive in this run and "
        f"{full} there."
    )


def _counts(frames: Mapping[str, pd.DataFrame]) -> str:
    """How many verdicts of each kind a chapter has, in words."""
    chapters = []
    for name, frame in frames.items():
        counts = frame.verdict.value_counts()
        kinds = [f"{counts[verdict]} {claims.label(verdict)}" for verdict in claims.VERDICTS if verdict in counts]
        chapters.append(f"{wording.chapter_name(name)}: {', '.join(kinds)}")
    return "; ".join(chapters) + "."


def drawn(frames: Mapping[str, pd.DataFrame]) -> Figure:
    """The figure: a bar for each chapter, divided by verdict, with the number of each."""
    drawing, [axes] = figure.panels(1, height=0.5 + 0.42 * max(len(frames), 1))
    counts = pd.DataFrame({name: frame.verdict.value_counts() for name, frame in frames.items()})
    counts = counts.reindex(claims.VERDICTS).fillna(0).T[::-1]
    left = pd.Series(0.0, counts.index)
    for verdict, colour in zip(claims.VERDICTS, COLOURS, strict=True):
        label = f"{SIGNS[verdict]} {claims.label(verdict)}"
        names = [title(name) for name in counts.index]
        bars = axes.barh(names, counts[verdict], 0.7, left, color=colour, ec="grey", lw=0.5, label=label)
        wide = [f"{SIGNS[verdict]} {n:.0f}" if n >= 3 else "" for n in counts[verdict]]
        axes.bar_label(bars, wide, label_type="center", fontsize=8, color="black")
        left += counts[verdict]
    axes.set(xlabel="verdicts: a claim in one reading", xlim=(0, max(left.max() if len(left) else 1, 1)))
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.35, 1.0))
    axes.grid(visible=False)
    return drawing


def citation(root: Path = ROOT) -> str:
    """How to cite the book, as CITATION.cff says it: a sentence, and BibTeX."""
    cff = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    names = [person.get("name") or f"{person['given-names']} {person['family-names']}" for person in cff["authors"]]
    fields = {
        "author": " and ".join(f"{{{name}}}" for name in names),
        "title": f"{{{cff['title']}}}",
        "version": cff["version"],
    }
    fields |= {"url": cff["repository-code"]} if "repository-code" in cff else {}
    fields |= {"year": str(cff["date-released"])[:4]} if "date-released" in cff else {}
    body = "\n".join(f"  {name} = {{{value}}}," for name, value in fields.items())
    return f"{cff['message']}\n\n```bibtex\n@software{{kvrepro,\n{body}\n}}\n```"
