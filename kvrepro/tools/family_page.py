"""The page of models x claims: which verdicts are the same for all models of the family, and what the others depend on.

From `data/family.csv` and `data/family_claims.csv` (`studies.family`).
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvrepro.experiment import claims, figure, models, wording
from kvrepro.experiment.claims import NOT_TESTABLE
from kvrepro.tools.family_claims import JUDGED, RATES, TABLE, Kind, kinds

CAUSES = ("seed", "KV heads", "sliding layers", "size")
CAUSE = pd.CategoricalDtype(CAUSES, ordered=True)
ONE = "one seed alone"
TURNED = {"reproduced", "not reproduced"}
SIGNS = {verdict: sign for verdict, (sign, _) in wording.LOOKS.items()}
COLOURS = [colour for _, colour in wording.LOOKS.values()]
UNABLE = "the full cache itself answers"  # what a verdict's note says of a model that knows too little


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """Verdicts, with a row per (chapter, claim, reading) and a column per model, the default's kind first. The field of
    a model without a verdict, or with one that is not testable, is empty."""
    judged = table[table.verdict.isin(claims.VERDICTS) & (table.verdict != NOT_TESTABLE)]
    index, kind_of = ["chapter", "claim", "reading"], kinds()
    verdicts = judged.pivot_table("verdict", index, "model", aggfunc="first", sort=False)
    names = [name for name in kind_of if name in set(table.model)]
    names.sort(key=lambda name: (kind_of[models.DEFAULT].differs_in(kind_of[name]) != "seed", name))
    return verdicts.reindex(columns=names).dropna(how="all")


def depends_on(row: pd.Series, kind_of: Mapping[str, Kind]) -> str:
    """What one claim's verdict depends on, as text. row: its verdict by model; kind_of: each model's kind.

    "seed" where models of the default's kind differ. Otherwise the properties of the models whose verdicts differ from
    those; `ONE` where only one seed of the default's kind has a verdict, so that chance may be the reason; "" where all
    agree; "too few" where fewer than two models, or none of the default's kind, have a verdict.
    """
    verdicts, reference = row.dropna(), kind_of[models.DEFAULT]
    usual = [verdict for name, verdict in verdicts.items() if kind_of[str(name)] == reference]
    if not usual or len(verdicts) < 2:
        return "too few"
    if len(set(usual)) > 1:
        return "seed"
    causes = {reference.differs_in(kind_of[str(name)]) for name, verdict in verdicts.items() if verdict not in usual}
    if causes and len(usual) < 2:
        return ONE
    return ", ".join(cause for cause in CAUSES if cause in causes)


def turns(row: pd.Series) -> bool:
    """Whether some model says reproduced and another not reproduced."""
    return set(row.dropna()) >= TURNED


def decided(row: pd.Series) -> bool:
    """Whether two models have different verdicts other than *inconclusive*, which only says that items are too few."""
    return len(set(row.dropna()) - {"inconclusive"}) > 1


def counts(verdicts: pd.DataFrame, causes: pd.Series) -> pd.DataFrame:
    """By chapter, and in all, the numbers of verdicts: compared, the same for all models, by what they depend on,
    `decided` differently, and turned over (`turns`)."""
    turned, differ = (verdicts.apply(test, axis=1) for test in (turns, decided))
    rows = []
    for name, group in [*causes.groupby(level=0, sort=False), ("all", causes)]:
        comparable = group[group != "too few"]
        row = {"chapter": wording.chapter_name(str(name)), "asked of two models or more": len(comparable)}
        row |= {"the same for all": int((comparable == "").sum())}
        row |= {f"depends on {cause}": sum(cause in text.split(", ") for text in comparable) for cause in CAUSES}
        row |= {"differs, one seed asked": int(comparable.eq(ONE).sum())}
        row |= {"both decided": int(differ[comparable.index].sum()), "turn over": int(turned[comparable.index].sum())}
        rows.append(row)
    return pd.DataFrame(rows)


def differences_of_pairs(verdicts: pd.DataFrame, kind_of: Mapping[str, Kind]) -> pd.DataFrame:
    """A row for each property in which two models may differ: the number of such pairs, and the shares of a pair's
    verdicts that differ (mean, and from least to most) and that turn over."""
    parts = []
    for a, b in itertools.combinations(verdicts, 2):
        both = verdicts[[a, b]].dropna()
        differ = both[a] != both[b]
        turned = differ & both.isin(TURNED).all(axis=1)
        if len(both):
            parts.append((kind_of[a].differs_in(kind_of[b]), len(both), differ.mean(), turned.mean()))
    table = pd.DataFrame(parts, columns=["cause", "verdicts", "share", "turned"]).astype({"cause": CAUSE})
    rows = [
        {"the models differ in": cause, "pairs": len(pairs), "verdicts of a pair": f"{pairs.verdicts.mean():.0f}",
         "differ": f"{pairs.share.mean():.0%} ({pairs.share.min():.0%} to {pairs.share.max():.0%})",
         "turn over": f"{pairs.turned.mean():.1%}"}
        for cause, pairs in table.groupby("cause", observed=True)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def members(table: pd.DataFrame, kind_of: Mapping[str, Kind]) -> pd.DataFrame:
    """A row per model: its kind, the numbers of its verdicts, and the chapters that its answers are too poor for."""
    rows = []
    for name, group in table.groupby("model"):
        kind, poor = kind_of[str(name)], group[group.note.fillna("").str.contains(UNABLE)]
        slides = f"{kind.window} tokens" if kind.window else "-"
        count_of = group.verdict.value_counts()
        rows.append({
            "model": name, "KV heads of query heads": f"{kind.kv_heads} of {kind.heads}", "layers": kind.layers,
            "width": kind.width, "window": slides,
            **{f"{SIGNS[v]} {claims.label(v)}": int(count_of.get(v, 0)) for v in claims.VERDICTS},
            "answers too little in": ", ".join(dict.fromkeys(poor.chapter)) or "-",
            "failed": "; ".join(f"{row.chapter} ({row.note})" for row in group[group.claim.isna()].itertuples()) or "-",
        })  # fmt: skip
    return pd.DataFrame(rows)


def summary(verdicts: pd.DataFrame, causes: pd.Series, pairs: pd.DataFrame) -> str:
    """The page's result in sentences. causes: as of `depends_on`; pairs: as of `differences_of_pairs`."""
    [*_, total] = counts(verdicts, causes).to_dict("records")
    n, same = total["asked of two models or more"], total["the same for all"]
    seed, single = total["depends on seed"], total["differs, one seed asked"]
    shares = zip(pairs["the models differ in"], pairs["differ"], strict=True)
    return (
        f"- Of {n} verdicts (a claim in one reading) that {verdicts.shape[1]} models were asked for, **{same} "
        f"({same / n:.0%}) are the same for all that can test them**. For "
        f"{total['both decided']}, two models reach different definite verdicts ({total['turn over']} turn over: "
        f"*reproduced* for one model, *not reproduced* for another). The other "
        f"{n - same - total['both decided']} differ only in that some models have too few items to decide.\n"
        f"- {seed} differ between models that differ only in their seed, so they cannot show what else they depend on; "
        f"{n - same - seed - single} are the same for every seed and differ for a model of another kind"
        + (f"; {single} differ from the one seed that was asked.\n" if single else ".\n")
        + f"- Two models differ in this share of the verdicts (mean over pairs, and range), by what tells them apart: "
        f"{'; '.join(f'{cause}: {share}' for cause, share in shares)}. Only a share above that of seeds can be due to "
        "the kind of model, and only if every pair is above it."
    )


def statements(chapters: Iterable[str]) -> dict[tuple[str, str], str]:
    """The statement of each claim, by (chapter, claim)."""
    return {
        (name, claim["id"]): claim["statement"] for name in chapters for claim in claims.load_claims(name)["claims"]
    }


def dependent(verdicts: pd.DataFrame, causes: pd.Series) -> list[dict[str, str]]:
    """A row for each claim whose verdict is not the same for all: what it depends on, and every model's verdict. Those
    that differ between seeds come last."""
    stated = statements(causes.index.unique(0))
    rows, differ = [], causes[~causes.isin(["", "too few"])]
    differ = differ.sort_values(key=lambda c: c.isin(["seed", ONE]), kind="stable")
    for (chapter, claim, reading), cause in differ.items():
        row = verdicts.loc[chapter, claim, reading]
        rows.append({
            "claim": f"{claim} {claims.LABELS.get(reading, '')}".strip(), "statement": stated.get((chapter, claim), ""),
            "depends on": cause + (", turns over" if turns(row) else "" if decided(row) else ", or on items"),
            **{name: SIGNS.get(verdict, SIGNS[NOT_TESTABLE]) for name, verdict in row.items()},
        })  # fmt: skip
    return rows


def rates(judged: pd.DataFrame) -> list[dict[str, object]]:
    """How often the rules of the claims about several models err. The reading in which a rule errs more counts."""
    tried = judged[judged.can_hold.ne("")].astype(dict.fromkeys(RATES, float))
    worst = tried.groupby("claim", sort=False).agg(dict(zip(RATES, ("max", "max", "min", "min"), strict=True)))
    words = {1.0: "yes", 0.0: "no"}
    return [
        {"claim": row.Index, "wrongly reproduced": f"{row.wrongly_reproduced:.0%}",
         "wrongly not reproduced": f"{row.wrongly_not_reproduced:.0%}",
         "can hold": words[row.can_hold], "can fail": words[row.can_fail]}
        for row in worst.itertuples()
    ]  # fmt: skip


def drawn(verdicts: pd.DataFrame) -> Figure:
    """The figure: a panel per chapter, with a row per model that has verdicts there and a column per claim and reading;
    those with equal verdicts come first. verdicts: as of `wide`."""
    by_chapter = verdicts.groupby(level=0, sort=False)
    panels = [(str(name), part.dropna(axis=1, how="all")) for name, part in by_chapter]
    heights = [part.shape[1] + 2 for _, part in panels]
    with plt.rc_context(figure.STYLE | {"axes.grid": False}):
        size = (figure.WIDTH, 0.9 + 0.17 * sum(heights))
        shown, grid = plt.subplots(len(panels), 1, figsize=size, squeeze=False, height_ratios=heights)
        for axes, (chapter, part) in zip(grid[:, 0], panels, strict=True):
            down = part.shape[1]
            differ = part.nunique(axis=1).sub(1).clip(0)
            part = part.loc[differ.sort_values(kind="stable").index]
            numbers = {verdict: number for number, verdict in enumerate(claims.VERDICTS)}
            codes = part.fillna(NOT_TESTABLE).replace(numbers).to_numpy(float).T
            axes.pcolormesh(codes, cmap=ListedColormap(COLOURS), vmin=-0.5, vmax=4.5, edgecolors="white", lw=0.3)
            axes.axvline(int((differ == 0).sum()), color="black", lw=1)
            axes.set_yticks(np.arange(down) + 0.5, list(part), fontsize=6.5)
            axes.set(xticks=[], ylim=(down, 0), xlim=(0, codes.shape[1]))
            axes.set_title(f"{chapter.replace('_', ' ')}: {len(part)} verdicts", fontsize=8, loc="left")
        legend = [Patch(fc=c, ec="grey", label=claims.label(v)) for c, v in zip(COLOURS, claims.VERDICTS, strict=True)]
        below = dict(loc="upper center", bbox_to_anchor=(0.5, -0.08))
        grid[-1, 0].legend(handles=legend, ncols=5, fontsize=7, frameon=False, **below)
    return figure.done(shown)


def page(table: Path = TABLE, judged: Path = JUDGED) -> dict[str, Any]:
    """The page's parts by name: sentences, and tables as rows or frames."""
    frame = pd.read_csv(table)
    verdicts, kind_of = wide(frame), kinds()
    causes, verdicts_on_family = verdicts.apply(depends_on, axis=1, kind_of=kind_of), claims.read(judged)
    pairs = differences_of_pairs(verdicts, kind_of)
    days, profiles = (sorted(frame[name].dropna().unique()) for name in ("date", "profile"))
    runs = f"Run from {days[0]} to {days[-1]}" if days[0] != days[-1] else f"Run on {days[0]}"
    not_run = [name for name in kind_of if name not in set(frame.model)]
    runs += f"; not run yet: {', '.join(not_run)}" if not_run else ""
    return {
        "found": summary(verdicts, causes, pairs), "runs": f"Profile {', '.join(profiles)}. {runs}.",
        "models": members(frame, kind_of), "pairs": pairs,
        "counts": counts(verdicts, causes), "dependent": dependent(verdicts, causes),
        "judged": wording.beside(verdicts_on_family, *verdicts_on_family.topic.unique(), page="claims.html"),
        "rates": rates(verdicts_on_family),
    }  # fmt: skip
