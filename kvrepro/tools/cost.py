"""What the chapters cost on a real model: hours and memory of both profiles, from the measured `data/gpu/chapters.csv`.

A chapter takes seconds before its first item, for start-up and figures, and seconds an item. Where a table holds one
size of a chapter, the seconds in its studies count as the items'; compiling kernels is among them: an upper bound.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvrepro.chapters.dropkv_bound.settings import PROFILES as DROPKV
from kvrepro.chapters.fragility.study import SIZES as FRAGILITY
from kvrepro.chapters.leakage.plan import PROFILES as LEAKAGE
from kvrepro.chapters.protection.grid import SIZES as PROTECTION
from kvrepro.chapters.reclamation.study import SIZES as RECLAMATION
from kvrepro.experiment import figure
from kvrepro.paths import GPU

ITEMS: Mapping[str, Mapping[str, int]] = {  # of each chapter's main study
    "protection": {profile: size.items for profile, size in PROTECTION.items()},
    "fragility": {profile: size[0] for profile, size in FRAGILITY.items()},
    "dropkv_bound": {profile: size[0] for profile, size in DROPKV.items()},
    "leakage": {profile: size.systems for profile, size in LEAKAGE.items()},
    "reclamation": {profile: size["identity"] for profile, size in RECLAMATION.items()},  # in which its time goes
}


def hours(measured: pd.DataFrame, chapter: str, profile: str) -> float:
    """Hours of a chapter in a profile, from its rows with columns `n_items`, `seconds` and `in_studies`.

    They lie on the line through the smallest and the largest size measured. Where there is one size, or more items took
    less time, the seconds in studies of the largest size are scaled to the number of items, and the others added.
    """
    rows = measured.sort_values("n_items")
    few, many = rows.iloc[0], rows.iloc[-1]
    begin, slope = many.seconds - many.in_studies, many.in_studies / many.n_items
    if few.n_items < many.n_items and few.seconds < many.seconds:
        slope = (many.seconds - few.seconds) / (many.n_items - few.n_items)
        begin = max(0.0, few.seconds - slope * few.n_items)
    return float(begin + slope * ITEMS[chapter][profile]) / 3600


def table(path: Path = GPU / "chapters.csv") -> pd.DataFrame:
    """A row for every chapter measured without an error: model, GPU, chapter, items measured, sizes (how many numbers
    of items were measured), hours in the quick and in the full profile; of the largest one its rows, the failed ones,
    seconds per item, and which shares of its seconds are prefill and decoding; peak GiB, date, and how."""
    frame = pd.read_csv(path)
    done = frame[frame.error.isna() & (frame.failed == 0) & (frame.device != "CPU")]
    rows = [
        {"model's shape": shape, "GPU": device.removeprefix("NVIDIA ").removesuffix(" HBM3"), "chapter": chapter,
         "items measured": int(largest.n_items), "sizes": int(rows_of_chapter.n_items.nunique()),
         "quick, hours": round(hours(rows_of_chapter, chapter, "quick"), 2),
         "full, hours": round(hours(rows_of_chapter, chapter, "full"), 1),
         "rows": int(largest.results), "failed": int(largest.failed),
         "s an item": round(largest.seconds / largest.n_items, 1),
         **{part: "-" if pd.isna(largest[part]) else f"{largest[part] / largest.seconds:.0%}"
            for part in ("prefill", "decode")},
         "peak GiB": rows_of_chapter.peak_gib.max(), "date": rows_of_chapter.date.min(),
         "how": str(largest.note)}
        for (shape, device, chapter), rows_of_chapter in done.groupby(["shape", "device", "chapter"], sort=False)
        for largest in [rows_of_chapter.sort_values("n_items").iloc[-1]]
    ]  # fmt: skip
    return pd.DataFrame(rows)


def overview(path: Path = GPU / "chapters.csv") -> pd.DataFrame:
    """A row for each GPU and model's shape, a column for each chapter: its hours in the quick and in the full profile,
    with "≤" where they are an upper bound, measured at one size; the most memory that a chapter took, GiB; and since
    when its rows are measured."""
    chapters, kind = table(path), ["GPU", "model's shape"]
    hours = chapters[["quick, hours", "full, hours"]].map("{:.2g}".format)
    bound = chapters["sizes"].map(lambda sizes: "≤ " if sizes == 1 else "")
    chapters["told"] = bound + hours["quick, hours"] + " / " + hours["full, hours"]
    wide = chapters.pivot_table("told", kind, "chapter", "first").reindex(columns=list(ITEMS)).fillna("-")
    more = chapters.groupby(kind).agg(**{"peak GiB": ("peak GiB", "max"), "measured from": ("date", "min")})
    return wide.join(more.assign(**{"peak GiB": more["peak GiB"].round().astype(int)})).reset_index()


def failures(path: Path = GPU / "chapters.csv") -> str:
    """A line for every measurement that failed, of chapters that were not measured on that GPU without an error."""
    frame = pd.read_csv(path)
    place = ["shape", "device", "chapter"]
    wrong = frame.error.notna() | (frame.failed > 0)
    done = frame[~wrong].set_index(place).index
    lines = [
        f"- {row.chapter}, shape of {row.shape}, {row.device}, {row.date}: {row.error} ({row.note})"
        for row in frame[wrong].itertuples() if (row.shape, row.device, row.chapter) not in done
    ]  # fmt: skip
    return "\n".join(lines) or "None."


def targets(path: Path = GPU / "real.csv") -> pd.DataFrame:
    """Targets on a real model's shape, what was reached, and the floor where the bytes to move give one; as text."""
    frame = pd.read_csv(path)
    names = ["what", "shape", "before", "now", "target", "floor"]
    shown = frame[names].map(lambda x: x if isinstance(x, str) else f"{x:g}")
    reached = (frame.now <= frame.target).map({True: "yes", False: "no"}).where(frame.target.notna(), "no target")
    explanation = frame.device + ", " + frame.date + ". " + frame.note
    return shown.replace("nan", "-").assign(unit=frame.unit, reached=reached, how=explanation)


def bars(path: Path = GPU / "real.csv") -> Figure:
    """The figure of each measurement over its target, before and now, beside the floor. At most 1 is wanted."""
    frame = pd.read_csv(path).dropna(subset="target")
    names = ("before", "now", "floor")
    long = frame.melt(["what", "target"], names, "measured", "value").dropna(subset="value")
    long["ratio"] = long.value / long.target
    with figure.style():
        picture = Figure(figsize=(7, 0.9 * len(frame) + 1), layout="constrained")
        axes = picture.subplots()
        sns.barplot(long, x="ratio", y="what", order=frame.what.unique(), hue="measured", hue_order=names, ax=axes)
        axes.axvline(1, color="0.3", linewidth=1)
        axes.set(xscale="log", xlim=(0.1, None), xlabel="time over the target", ylabel="")
        axes.xaxis.set_major_formatter("{x:g}")
    return picture


OURS, THEIRS = "this project's kernels", "plain torch, or separate passes"


def floors(path: Path = GPU / "kernels.csv") -> Figure:
    """The figure of how near each kernel comes to its floor: a dot per variant and shape, at the longest input of each
    in the largest batch; our kernels beside what torch offers for the same work."""
    last = longest(path).rename(columns={"fraction_of_floor": "value"}).assign(low=np.nan, high=np.nan)
    labels = {"value": "share of the floor that is reached", "kernel": ""}
    picture = figure.estimates(last, "value", "kernel", colour="by", percent=True, labels=labels)
    picture.axes[0].axvline(1, color="0.3", linewidth=1)
    return picture


def kernels(path: Path) -> pd.DataFrame:
    """The measured rows of this project's kernels, and of torch in their place. Column `by` says whose a row is."""
    frame = pd.read_csv(path)
    frame = frame[~frame.kernel.isin(["ceiling", "prefill_attention"])]
    theirs = frame.variant.str.contains(r"\btorch\b|three kernels")
    return frame.assign(by=theirs.map({True: THEIRS, False: OURS}))


def longest(path: Path) -> pd.DataFrame:
    """Of `kernels`, the row of each variant and shape at its longest input, in the largest batch of that length."""
    rows = kernels(path).sort_values(["tokens", "batch"], kind="stable")
    return rows.groupby(["kernel", "variant", "shape"], sort=False).tail(1)


def floors_sentence(path: Path = GPU / "kernels.csv") -> str:
    """The result of the figure of `floors` in a sentence, for inputs of at least 32,768 tokens."""
    ours = kernels(path).query("tokens >= 32768 and by == @OURS")
    best, device = ours.groupby("kernel").fraction_of_floor.max().sort_values(), ", ".join(ours.device.unique())
    return (
        f"At 32,768 tokens and more the best variant of each kernel reaches from {best.iloc[0]:.0%} "
        f"(`{best.index[0]}`) to {best.iloc[-1]:.0%} (`{best.index[-1]}`) of its floor ({device})."
    )
