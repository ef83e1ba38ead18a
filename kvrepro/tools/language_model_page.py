"""The page about a language model that others trained on real text: what the chapters find on it.

From `data/language_model*.csv` (`studies.language_model`) and `data/full_profile.csv`.
"""

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvrepro.chapters.protection.grid import PROTECTION_SEVEN
from kvrepro.experiment import claims, figure, models, wording
from kvrepro.experiment.claims import LABELS, NOT_TESTABLE
from kvrepro.paths import DATA
from kvrepro.tools import family_page
from kvrepro.tools.family_claims import FULL
from kvrepro.tools.rows import words

VERDICTS, RUNS, SCORES = (DATA / f"language_model{part}.csv" for part in ("", "_runs", "_scores"))
NO_PASSAGE = "no_passage"  # in place of a policy's name: the model's answers to the questions alone
NAME = "SmolLM2-135M-Instruct"
WORDS = words("language_model")
ITEMS: dict[str, str] = WORDS["items"]
KEY = ["chapter", "claim", "reading"]
GUARDS = {"0% + 0%": "no guards", "10% + 10%": "guards"}  # shares at both ends -> rows of the figure
WINDOWED = ("streaming_llm", "snapkv", "cake", "ada_kv", "critical_ada_kv", "defensive_kv", "layer_defensive_kv")
BOX = 3  # the first claims of `central` stand in the box, the others below


@cache
def read() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The verdicts, the runs and the scores, with `ITEMS` for items."""
    verdicts, runs, scores = (pd.read_csv(file).replace({"items": ITEMS}) for file in (VERDICTS, RUNS, SCORES))
    return verdicts, runs, scores


def side_by_side(verdicts: pd.DataFrame) -> pd.DataFrame:
    """A row per chapter, claim and reading that some run could test: the verdict of the default model's full profile,
    and of each run, by items."""
    tested = verdicts[verdicts.verdict.isin(claims.VERDICTS) & (verdicts.verdict != NOT_TESTABLE)]
    wide = tested.pivot_table("verdict", KEY, "items", aggfunc="first", sort=False)
    full = pd.read_csv(FULL).set_index(KEY).verdict.replace({NOT_TESTABLE: None})
    wide.insert(0, models.DEFAULT, full.reindex(wide.index))
    return wide.reindex(columns=[models.DEFAULT, *(name for name in ITEMS.values() if name in wide)])


def agreement(wide: pd.DataFrame) -> list[dict[str, object]]:
    """A row per chapter and items: verdicts that both models have, equal ones, both decided, turned over."""
    rows = []
    for chapter, part in wide.groupby(level=0, sort=False):
        for items in [name for name in part if name != models.DEFAULT]:
            both = part[[models.DEFAULT, items]].dropna()
            if len(both):
                rows.append({
                    "chapter": wording.chapter_name(str(chapter)), "items": items, "verdicts on both": len(both),
                    "the same": int((both[models.DEFAULT] == both[items]).sum()),
                    "differently decided": int(both.apply(family_page.decided, axis=1).sum()),
                    "turn over": int(both.apply(family_page.turns, axis=1).sum()),
                })  # fmt: skip
    return rows


def run_rows(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row per run as the page shows it."""
    place = {name: number for number, name in enumerate(ITEMS.values())}
    rows = []
    for row in runs.sort_values("items", key=lambda names: names.map(place), kind="stable").itertuples():
        full = f"{wording.text_of((row.score, row.low, row.high))}, n = {row.n:.0f}"
        rows.append({
            "items": row.items, "chapter": wording.chapter_name(row.chapter),
            "seconds": "-" if pd.isna(row.seconds) else f"{row.seconds:.0f}",
            "answers": f"{row.answers:,}" if row.answers else "-",
            "by kernels": "-" if pd.isna(row.kernels) else f"{row.kernels:.0%}",
            "tokens": "-" if pd.isna(row.tokens) else f"{row.tokens:,.0f}",
            "cut": "-" if pd.isna(row.cut) else f"{row.cut:.0%}",
            "the full cache scores": "-" if pd.isna(row.score) else full,
        })  # fmt: skip
    return rows


def _value(row: Any) -> str:
    """An estimate with its interval and unit, rounded for reading."""
    return wording.spoken(SimpleNamespace(ours=row.estimate, low=row.low, high=row.high, unit=row.unit))


def turned(verdicts: pd.DataFrame, wide: pd.DataFrame) -> list[dict[str, object]]:
    """A row per claim and items whose verdict turns over between the two models."""
    ours = pd.read_csv(FULL).set_index(KEY)
    stated = family_page.statements(wide.index.unique(0))
    rows = []
    for row in verdicts.itertuples():
        key = (row.chapter, row.claim, row.reading)
        if key in wide.index and family_page.turns(pd.Series([wide.loc[key, models.DEFAULT], row.verdict])):
            where = LABELS.get(row.reading, "")
            rows.append({
                "claim": wording.link(row.claim, f"{row.claim} {where}".strip(), "claims.html"), "items": row.items,
                "statement": stated.get(key[:2], ""),
                f"{models.DEFAULT}, full profile": f"{claims.label(ours.verdict[key])}: {_value(ours.loc[key])}",
                NAME: f"{claims.label(row.verdict)}: {_value(row)}",
            })  # fmt: skip
    return rows


def without_passage(scores: pd.DataFrame, kept: int = 256) -> str:
    """What guarded policies score on the protection chapter's items, beside the full cache and the questions alone."""
    of_code = scores[(scores.chapter == "protection") & (scores.reading == "as_run")]
    parts = []
    for items, part in of_code.groupby("items", sort=False):
        of_policy = part.set_index("policy")
        full, alone = of_policy.loc["full"], of_policy.value[NO_PASSAGE]
        guarded = part[part.policy.isin(PROTECTION_SEVEN) & (part.guard == "10% + 10%") & (part.kept == kept)].value
        parts.append(
            f"{guarded.min():.2f} to {guarded.max():.2f} on {items} (the full cache {full.value:.2f}; the model "
            f"without any passage {alone:.2f}, which is {full.gain:.2f} "
            f"[{full.gain_low:.2f}, {full.gain_high:.2f}] less)"
        )
    return (
        f"- Behind guards in the authors' code, with {kept} tokens kept, the seven policies of the paper score "
        f"{'; '.join(parts)}."
    )


def said(verdicts: pd.DataFrame) -> list[str]:
    """A sentence of a list for each central claim: its verdicts by reading and items, with their values."""
    lines = []
    for entry in WORDS["central"]:
        chapter, claim, subject = entry["chapter"], entry["claim"], entry["subject"]
        tested = verdicts[(verdicts.chapter == chapter) & (verdicts.claim == claim)]
        parts = []
        for reading, rows in tested[tested.verdict != NOT_TESTABLE].groupby("reading", sort=False):
            *others, last = [
                f"*{claims.label(row.verdict)}* on {row.items} ({_value(row)})" for row in rows.itertuples()
            ]
            results = " and ".join(filter(None, [", ".join(others), last]))
            parts.append(f"{results} in the {LABELS[reading]}" if reading in LABELS else results)
        lines.append(
            f"- The claim that {subject} ({wording.link(claim, page='claims.html')}) is {'; it is '.join(parts)}."
        )
    return lines


def found(verdicts: pd.DataFrame, runs: pd.DataFrame, wide: pd.DataFrame, scores: pd.DataFrame) -> str:
    """The page's result as a list of sentences."""
    rows = pd.DataFrame(agreement(wide))
    total = rows[["verdicts on both", "the same", "differently decided", "turn over"]].sum()
    pairs = pd.concat([wide[[models.DEFAULT, name]].dropna().set_axis(["a", "b"], axis=1) for name in list(wide)[1:]])
    open_ = (pairs == "inconclusive").sum(axis=1)
    definite = pairs[open_ == 0]
    lines = [
        f"- {NAME} gave {runs.answers.sum():,} answers in {len(runs)} runs of chapters, {runs.failed.sum()} of which "
        f"failed. A verdict on one kind of item can be compared with that of {models.DEFAULT}'s full profile in "
        f"{total['verdicts on both']} cases. **In {total['the same']} of them "
        f"({total['the same'] / total['verdicts on both']:.0%}) both are the same**; in {(open_ == 1).sum()} just one "
        f"is inconclusive. Of the {len(definite)} cases that are definite on both, {(definite.a == definite.b).sum()} "
        f"are the same and {total['differently decided']} differ; {total['turn over']} turn over (*reproduced* on one "
        "model, *not reproduced* on the other)."
    ]
    judged = said(verdicts)
    return "\n".join([*lines, judged[0], without_passage(scores), *judged[1:BOX]])


def _floors(scores: pd.DataFrame) -> pd.DataFrame:
    """The lines to compare with: the full cache's scores, and those without the passage."""
    lines = scores[scores.policy.isin(["full", NO_PASSAGE]) & (scores.value > 0)]
    return lines.rename(columns={"policy": "control"})[["items", "control", "value", "low", "high"]]


def _drawn(scores: pd.DataFrame, kept: str, policies: Sequence[str], **look: Any) -> Figure:
    """The scores of policies by what is kept, on each kind of items. kept: how that is called."""
    part = scores[scores.policy.isin(policies)]
    return figure.estimates(part.assign(kept=part.kept.astype(float)), "kept", "value", colour="policy", line=True,
                            labels={"value": "score", "kept": kept}, **look)  # fmt: skip


def drawn() -> dict[str, Figure]:
    """The page's figures by name; `verdicts` are those of both models, a panel per chapter."""
    verdicts, _, scores = read()
    as_run = scores[scores.reading == "as_run"]
    protection = as_run[as_run.chapter == "protection"]
    guarded = protection.assign(guards=protection.guard.map(GUARDS)).dropna(subset=["guards"])
    fragility = as_run[(as_run.chapter == "fragility") & (as_run.guard == "0% + 0%")]
    synthesis = scores[scores.chapter == "synthesis"]
    published = set(synthesis.policy) - {"full", NO_PASSAGE}
    floors = _floors(synthesis).drop(columns="items")
    return {
        "protection": _drawn(guarded, "tokens kept", PROTECTION_SEVEN, panel="items", row="guards",
                             reference=_floors(protection), height=2.3, sharey="col"),
        "fragility": _drawn(fragility, "share of the context kept", WINDOWED, panel="items",
                            reference=_floors(fragility), height=2.6, sharey=False),
        "synthesis": _drawn(synthesis, "share of the prompt kept", list(published), reference=floors, height=2.8),
        "verdicts": family_page.drawn(side_by_side(verdicts)),
    }  # fmt: skip


def advice(scores: pd.DataFrame) -> str:
    """What the best published methods of the synthesis score on needles, for the page of advice."""
    of_grid = scores[(scores.chapter == "synthesis") & (scores.policy != NO_PASSAGE)]
    methods, [full] = of_grid[of_grid.policy != "full"], of_grid[of_grid.policy == "full"].value
    best = methods.loc[methods.groupby("kept").value.idxmax()]
    parts = [f"{row.value:.2f} at {float(row.kept):.0%} ({figure.look(row.policy).name})" for row in best.itertuples()]
    return (
        f"**Try your model before you choose.** {NAME} was asked for numbers hidden in text, the question visible to "
        f"the policy. By the share of the prompt kept, the best of {methods.policy.nunique()} published methods scores "
        f"{', '.join(parts[:-1])} and {parts[-1]}, where the full cache scores {full:.2f} (n = {methods.n.min()}): "
        "{doc}`language-model`."
    )


def by_claim(chapter: str) -> dict[str, str]:
    """For each claim of a chapter that some run could test, by id: its verdicts there, as text."""
    verdicts = read()[0]
    tested = verdicts[(verdicts.chapter == chapter) & verdicts.claim.notna() & (verdicts.verdict != NOT_TESTABLE)]
    texts: dict[str, list[str]] = {}
    for row in tested.itertuples():
        where = ", ".join(filter(None, [LABELS.get(row.reading, ""), row.items]))
        value = "" if pd.isna(row.estimate) else f" {_value(row)}"
        value += "" if pd.isna(row.n) else f" (n = {row.n:,.0f})"
        texts.setdefault(str(row.claim), []).append(f"{where}: {claims.label(row.verdict)}{value}")
    return {claim: f"{'; '.join(parts)}." for claim, parts in texts.items()}


def page() -> dict[str, Any]:
    """The page's parts by name: sentences, and tables as rows."""
    verdicts, runs, scores = read()
    wide = side_by_side(verdicts)
    names = ("date", "processor", "dtype", "torch")
    date, gpu, dtype, version = (" or ".join(sorted(runs[name].dropna().unique())) for name in names)
    return {
        "found": found(verdicts, runs, wide, scores), "runs": run_rows(runs), "agreement": agreement(wide),
        "also": "\n".join(said(verdicts)[BOX:]), "advice": advice(scores), "turned": turned(verdicts, wide),
        "facts": f"Run on {date}: {gpu}, {dtype}, torch {version}.",
    }  # fmt: skip
