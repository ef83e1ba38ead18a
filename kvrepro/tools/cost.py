"""What the chapters cost on a real model: hours and memory of both profiles, from the measured `data/gpu/chapters.csv`.

A chapter takes seconds before its first item, for start-up and figures, and seconds an item. Where a table holds one
size of a chapter, the seconds in its studies count as the items'; compiling kernels is among them: an upper bound.
"""

from collections.abc import Mapping
from pathlib import Path

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
    "reclamation": {profile: size["arising"] for profile, size in RECLAMATION.items()},
}


def hours(measured: pd.DataFrame, chapter: str, profile: str) -> float:
    """Hours of a chapter, from rows of it with columns `n_items`, `seconds` and `in_studies`: the line through the
    smallest and the largest size measured; where there is one size, or where more items took less, what the largest
    spent outside of its studies, and the seconds in them as many times as there are items."""
    rows = measured.sort_values("n_items")
    few, many = rows.iloc[0], rows.iloc[-1]
    begin, slope = many.seconds - many.in_studies, many.in_studies / many.n_items
    if few.n_items < many.n_items and few.seconds < many.seconds:
        slope = (many.seconds - few.seconds) / (many.n_items - few.n_items)
        begin = max(0.0, few.seconds - slope * few.n_items)
    return float(begin + slope * ITEMS[chapter][profile]) / 3600


def table(path: Path = GPU / "chapters.csv") -> pd.DataFrame:
    """Columns model, GPU, chapter, quick and full (hours), GiB, how, of every chapter measured without an error."""
    frame = pd.read_csv(path).assign(note=lambda rows: rows.get("note", "-"))
    done = frame[frame.error.isna() & (frame.failed == 0) & (frame.device != "CPU")]
    rows = [
        {"model's shape": shape, "GPU": device, "chapter": chapter, "items measured": int(mine.n_items.max()),
         "quick, hours": round(hours(mine, chapter, "quick"), 2), "full, hours": round(hours(mine, chapter, "full"), 1),
         "peak GiB": mine.peak_gib.max(), "how": str(mine.sort_values("n_items").note.iloc[-1])}
        for (shape, device, chapter), mine in done.groupby(["shape", "device", "chapter"], sort=False)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def targets(path: Path = GPU / "real.csv") -> pd.DataFrame:
    """What was to be reached on a real model's shape, what was, and the floor, where the bytes give one; as text."""
    frame = pd.read_csv(path)
    names = ["what", "shape", "before", "now", "target", "floor"]
    shown = frame[names].map(lambda x: x if isinstance(x, str) else f"{x:g}")
    reached = (frame.now <= frame.target).map({True: "yes", False: "no"}).where(frame.target.notna(), "no target")
    told = frame.device + ", " + frame.date + ". " + frame.note
    return shown.replace("nan", "-").assign(unit=frame.unit, reached=reached, how=told)


def bars(path: Path = GPU / "real.csv") -> Figure:
    """Each measurement over its target, before and now, beside the floor: at most 1 is wanted."""
    frame = pd.read_csv(path).dropna(subset="target")
    names = ("before", "now", "floor")
    long = frame.melt(["what", "target"], names, "measured", "value").dropna(subset="value")
    long["ratio"] = long.value / long.target
    with figure.style():
        picture = Figure(figsize=(7, 0.9 * len(frame) + 1), layout="constrained")
        axes = picture.subplots()
        sns.barplot(long, x="ratio", y="what", hue="measured", hue_order=names, ax=axes)
        axes.axvline(1, color="0.3", linewidth=1)
        axes.set(xscale="log", xlim=(0.1, None), xlabel="time over the target", ylabel="")
    return picture
