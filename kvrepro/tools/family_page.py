"""The page of models x claims: which verdicts are the same for all models of the family, and what the others depend on.

From `data/family.csv` and `data/family_claims.csv` (`kvrepro.tools.family`).
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

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
ONE = "one seed alone"
SIGNS = {verdict: sign for verdict, (sign, _) in wording.LOOKS.items()}
COLOURS = [colour for _, colour in wording.LOOKS.values()]
UNABLE = "the full cache itself answers"  # what a verdict's note says of a model that knows too little


def wide(table: pd.DataFrame) -> pd.DataFrame:
    """Verdicts, a row per (chapter, claim, reading), a column per model: the default's kind first. A verdict that is
    not there, or could not be asked, is empty."""
    known = table[table.verdict.isin(claims.VERDICTS) & (table.verdict != NOT_TESTABLE)]
    index = ["chapter", "claim", "reading"]
    found = known.pivot_table("verdict", index, "model", aggfunc="first", sort=False)
    own = [name for name in kinds() if name in set(table.model)]
    own.sort(key=lambda name: (kinds()[models.DEFAULT].differs_in(kinds()[name]) != "seed", name))
    return found.reindex(columns=own).dropna(how="all")


def depends_on(row: pd.Series, of: Mapping[str, Kind]) -> str:
    """What one claim's verdict changes with: the seed, where models of the default's kind differ; otherwise in what the
    models differ from these whose verdicts differ; "one seed alone" where that cannot be told from chance; nothing
    where all are the same; "too few" where fewer than two models, or none of the default's kind, could be asked."""
    known, reference = row.dropna(), of[models.DEFAULT]
    own = [verdict for name, verdict in known.items() if of[str(name)] == reference]
    if not own or len(known) < 2:
        return "too few"
    if len(set(own)) > 1:
        return "seed"
    others = {reference.differs_in(of[str(name)]) for name, verdict in known.items() if verdict not in own}
    if others and len(own) < 2:
        return ONE
    return ", ".join(cause for cause in CAUSES if cause in others)


def turns(row: pd.Series) -> bool:
    """Whether some model says reproduced and another not reproduced."""
    return {"reproduced", "not reproduced"} <= set(row.dropna())


def decided(row: pd.Series) -> bool:
    """Whether two models differ that both decide: *inconclusive* says that items are too few, no more."""
    return len(set(row.dropna()) - {"inconclusive"}) > 1


def counts(verdicts: pd.DataFrame, causes: pd.Series) -> pd.DataFrame:
    """By chapter, and in all: verdicts, how many are the same for all models, how many depend on what, in how many
    models differ that decide, how many turn over."""
    over, differ = (verdicts.apply(of, axis=1) for of in (turns, decided))
    rows = []
    for name, own in [*causes.groupby(level=0, sort=False), ("all", causes)]:
        asked = own[own != "too few"]
        row = {"chapter": name, "asked of two models or more": len(asked), "the same for all": int((asked == "").sum())}
        row |= {f"depends on {one}": sum(one in cause.split(", ") for cause in asked) for one in CAUSES}
        row |= {"differs, one seed asked": int(asked.eq(ONE).sum())}
        row |= {"both decided": int(differ[asked.index].sum()), "turn over": int(over[asked.index].sum())}
        rows.append(row)
    return pd.DataFrame(rows)


def apart(verdicts: pd.DataFrame, of: Mapping[str, Kind]) -> pd.DataFrame:
    """Pairs of models by what they differ in: how many pairs, and the share of verdicts that differ within a pair
    (mean, and from least to most) and that turn over."""
    parts = []
    for a, b in itertools.combinations(verdicts, 2):
        both = verdicts[[a, b]].dropna()
        differ, turned = both[a] != both[b], both.apply(turns, axis=1)
        if len(both):
            parts.append((of[a].differs_in(of[b]), len(both), differ.mean(), turned.mean()))
    found = pd.DataFrame(parts, columns=["the models differ in", "verdicts", "share", "turned"])
    rows = []
    for cause in CAUSES:
        own = found[found["the models differ in"] == cause]
        if len(own):
            ends = f"{own.share.mean():.0%} ({own.share.min():.0%} to {own.share.max():.0%})"
            rows.append({
                "the models differ in": cause, "pairs": len(own), "verdicts of a pair": f"{own.verdicts.mean():.0f}",
                "differ": ends, "turn over": f"{own.turned.mean():.1%}",
            })  # fmt: skip
    return pd.DataFrame(rows)


def members(table: pd.DataFrame, of: Mapping[str, Kind]) -> pd.DataFrame:
    """A row per model: its kind, its verdicts, and the chapters in which its own answers are too poor to judge by."""
    rows = []
    for name, own in table.groupby("model"):
        kind, poor = of[str(name)], own[own.note.fillna("").str.contains(UNABLE)]
        slides = f"{kind.window} tokens" if kind.window else "-"
        said = own.verdict.value_counts()
        rows.append({
            "model": name, "KV heads of heads": f"{kind.kv_heads} of {kind.heads}", "layers": kind.layers,
            "width": kind.width, "window": slides, **{f"{SIGNS[v]} {v}": int(said.get(v, 0)) for v in claims.VERDICTS},
            "answers too little in": ", ".join(dict.fromkeys(poor.chapter)) or "-",
            "failed": "; ".join(f"{row.chapter} ({row.note})" for row in own[own.claim.isna()].itertuples()) or "-",
        })  # fmt: skip
    return pd.DataFrame(rows)


def said(verdicts: pd.DataFrame, causes: pd.Series, pairs: pd.DataFrame) -> str:
    """What the page found, in sentences."""
    [*_, total] = counts(verdicts, causes).to_dict("records")
    asked, same = total["asked of two models or more"], total["the same for all"]
    seed, single = total["depends on seed"], total["differs, one seed asked"]
    shares = zip(pairs["the models differ in"], pairs["differ"], strict=True)
    return (
        f"- Of {asked} verdicts (a claim in one reading) that {verdicts.shape[1]} models were asked for, **{same} "
        f"({same / asked:.0%}) are the same for all**. In {total['both decided']} two models reach different definite "
        f"verdicts; in the other {asked - same - total['both decided']} that differ, the items of some are too few. "
        f"{total['turn over']} turn over: *reproduced* for one model, *not reproduced* for another.\n"
        f"- {seed} differ between models that differ in their seed alone, so that nothing is said of what else they "
        f"depend on; {asked - same - seed - single} are the same for every seed and differ for a model of another kind"
        + (f"; {single} differ from the one seed that was asked.\n" if single else ".\n")
        + f"- Share of verdicts in which two models differ (mean over pairs, and range), by what tells the models "
        f"apart: {'; '.join(f'{cause}: {share}' for cause, share in shares)}. Only what lies above the share of "
        "seeds can be due to the kind of model, and only where the least of the pairs lies above it, too."
    )


def dependent(verdicts: pd.DataFrame, causes: pd.Series) -> list[dict[str, str]]:
    """A row for each claim whose verdict is not the same for all: what it depends on, those that differ between seeds
    last, and every model's verdict."""
    stated = {(chapter, claim["id"]): claim["statement"] for chapter in causes.index.unique(0)
              for claim in claims.load_claims(chapter)["claims"]}  # fmt: skip
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
    """How often the rules of the claims about several models err, of each the reading in which it errs more."""
    tried = judged[judged.can_hold.ne("")].astype(dict.fromkeys(RATES, float))
    worst = tried.groupby("claim", sort=False).agg(dict(zip(RATES, ("max", "max", "min", "min"), strict=True)))
    said = {1.0: "yes", 0.0: "no"}
    return [
        {"claim": row.Index, "wrongly reproduced": f"{row.wrongly_reproduced:.0%}",
         "wrongly not reproduced": f"{row.wrongly_not_reproduced:.0%}",
         "can hold": said[row.can_hold], "can fail": said[row.can_fail]}
        for row in worst.itertuples()
    ]  # fmt: skip


def drawn(file: Path = TABLE) -> Figure:
    """A panel per chapter: models down, claims in their readings across, those with equal verdicts first."""
    verdicts = wide(pd.read_csv(file))
    groups = list(verdicts.groupby(level=0, sort=False))
    down = verdicts.shape[1]
    with plt.rc_context(figure.STYLE | {"axes.grid": False}):
        size = (figure.WIDTH, 0.9 + 0.17 * (down + 2) * len(groups))
        shown, grid = plt.subplots(len(groups), 1, figsize=size, squeeze=False)
        for axes, (chapter, part) in zip(grid[:, 0], groups, strict=True):
            differ = part.nunique(axis=1).sub(1).clip(0)
            part = part.loc[differ.sort_values(kind="stable").index]
            numbers = {verdict: number for number, verdict in enumerate(claims.VERDICTS)}
            codes = part.fillna(NOT_TESTABLE).replace(numbers).to_numpy(float).T
            axes.pcolormesh(codes, cmap=ListedColormap(COLOURS), vmin=-0.5, vmax=4.5, edgecolors="white", lw=0.3)
            axes.axvline(int((differ == 0).sum()), color="black", lw=1)
            axes.set_yticks(np.arange(down) + 0.5, list(part), fontsize=6.5)
            axes.set(xticks=[], ylim=(down, 0), xlim=(0, codes.shape[1]))
            axes.set_title(f"{chapter}: {len(part)} verdicts", fontsize=8, loc="left")
        legend = [Patch(fc=c, ec="grey", label=v) for c, v in zip(COLOURS, claims.VERDICTS, strict=True)]
        below = dict(loc="upper center", bbox_to_anchor=(0.5, -0.08))
        grid[-1, 0].legend(handles=legend, ncols=5, fontsize=7, frameon=False, **below)
    return figure.done(shown)


def page(table: Path = TABLE, judged: Path = JUDGED) -> dict[str, list[dict[str, object]] | str]:
    """The page's parts by name: sentences, and tables as rows."""
    frame = pd.read_csv(table)
    verdicts, of = wide(frame), kinds()
    causes, own = verdicts.apply(depends_on, axis=1, of=of), claims.read(judged)
    pairs = apart(verdicts, of)
    days, profiles = (sorted(frame[name].dropna().unique()) for name in ("date", "profile"))
    when = f"Run from {days[0]} to {days[-1]}" if days[0] != days[-1] else f"Run on {days[0]}"
    left = [name for name in of if name not in set(frame.model)]
    when += f"; not run yet: {', '.join(left)}" if left else ""
    return {
        "found": said(verdicts, causes, pairs), "runs": f"Profile {', '.join(profiles)}. {when}.",
        "models": members(frame, of).to_dict("records"), "pairs": pairs.to_dict("records"),
        "counts": counts(verdicts, causes).to_dict("records"), "dependent": dependent(verdicts, causes),
        "judged": wording.beside(own, *own.topic.unique(), page="claims.html"), "rates": rates(own),
    }  # fmt: skip
