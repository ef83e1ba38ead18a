"""What the chapters cost on a real model: hours and memory of both profiles, from the measured `data/gpu/chapters.csv`.

A chapter takes seconds before its first item, for start-up and figures, and seconds an item; where a table holds one
size of a chapter, all of its seconds count as the items', and what follows is an upper bound.
"""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from kvrepro.chapters.dropkv_bound.settings import PROFILES as DROPKV
from kvrepro.chapters.fragility.study import SIZES as FRAGILITY
from kvrepro.chapters.leakage.plan import PROFILES as LEAKAGE
from kvrepro.chapters.protection.grid import SIZES as PROTECTION
from kvrepro.chapters.reclamation.study import SIZES as RECLAMATION
from kvrepro.paths import GPU

ITEMS: Mapping[str, Mapping[str, int]] = {  # of each chapter's main study
    "protection": {profile: size.items for profile, size in PROTECTION.items()},
    "fragility": {profile: size[0] for profile, size in FRAGILITY.items()},
    "dropkv_bound": {profile: size[0] for profile, size in DROPKV.items()},
    "leakage": {profile: size.systems for profile, size in LEAKAGE.items()},
    "reclamation": {profile: size["arising"] for profile, size in RECLAMATION.items()},
}


def hours(measured: pd.DataFrame, chapter: str, profile: str) -> float:
    """Hours of a chapter, from rows of it with columns `n_items` and `seconds`: the line through the smallest and the
    largest size measured, or through nothing and the only one."""
    rows = measured.sort_values("n_items")
    few, many = rows.iloc[0], rows.iloc[-1]
    begin, slope = 0.0, many.seconds / many.n_items
    if few.n_items < many.n_items:
        slope = max(0.0, (many.seconds - few.seconds) / (many.n_items - few.n_items))
        begin = max(0.0, few.seconds - slope * few.n_items)
    return float(begin + slope * ITEMS[chapter][profile]) / 3600


def table(path: Path = GPU / "chapters.csv") -> pd.DataFrame:
    """Columns model, GPU, chapter, quick and full (hours), GiB, of every chapter that was measured without an error."""
    frame = pd.read_csv(path)
    done = frame[frame.error.isna() & (frame.failed == 0) & (frame.device != "CPU")]
    rows = [
        {"model's shape": shape, "GPU": device, "chapter": chapter, "items measured": int(mine.n_items.max()),
         "quick, hours": round(hours(mine, chapter, "quick"), 2), "full, hours": round(hours(mine, chapter, "full"), 1),
         "peak GiB": mine.peak_gib.max()}
        for (shape, device, chapter), mine in done.groupby(["shape", "device", "chapter"], sort=False)
    ]  # fmt: skip
    return pd.DataFrame(rows)
