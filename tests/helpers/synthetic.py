"""Results tables with known effects, so that claims and figures can be tested without a model."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from kvrepro.chapters.protection import members as protection
from kvrepro.chapters.protection.study import Settings
from kvrepro.experiment import members

SEVEN = ("lru", "h2o_simple", "snapkv_simple", "slw", "ada_kv_simple", "quest_simple", "random_sample")
FEW = ("full", "lru", "h2o_simple", "random_sample")
FAITHFUL = ("h2o_faithful", "snapkv_faithful", "ada_kv_faithful", "quest_faithful")


def cells(capacities=(128, 256, 512), frac: float = 0.10) -> list[dict]:
    """Every condition of the protection chapter as plain dictionaries, the full cache first."""
    main = [(policy, size, side, side) for policy in SEVEN for size in capacities for side in (0.0, frac)]
    middle = capacities[len(capacities) // 2]
    sweep = [("lru", middle, side * frac, side * frac) for side in (0.5, 1.5, 2.0)]
    sides = [("lru", middle, a * frac, b * frac) for a, b in ((1, 0), (0, 1), (2, 0), (0, 2))]
    faithful = [(policy, middle, frac, frac) for policy in FAITHFUL]
    conditions = [{"policy": "full", "capacity": None, "prefix": 0.0, "suffix": 0.0}]
    conditions += [
        dict(zip(("policy", "capacity", "prefix", "suffix"), values, strict=True))
        for values in main + sweep + sides + faithful
    ]
    pinned = {"capacity": middle, "prefix": frac, "suffix": frac, "suffix_mode": "static"}
    return conditions + [{"policy": policy} | pinned for policy in ("lru", "ada_kv_faithful")]


def paper_like(cell: dict) -> float:
    """Mean F1 of a condition in a world where the paper is right, ceiling 0.9."""
    if cell["policy"] == "full":
        return 0.9
    both, either = min(cell["prefix"], cell["suffix"]), max(cell["prefix"], cell["suffix"])
    if cell["policy"] == "slw" and both:
        return 0.5
    if cell["policy"] in ("ada_kv_faithful", "quest_faithful") and both:
        return 0.88
    return 0.8 if both >= 0.1 else 0.7 if both else 0.5 if either else 0.02


def results(
    f1: Callable[[dict], float] = paper_like,
    *,
    readings=("as_run", "as_described"),
    n_items: int = 40,
    noise: float = 0.02,
    seed: int = 0,
    capacities=(128, 256, 512),
    **columns: Callable[[dict], object],
) -> pd.DataFrame:
    """One row per item, condition and reading. `f1` sees the cell and its reading; `columns` override columns."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, noise, n_items)  # what makes an item easy, the same in all conditions
    rows: list[dict] = []
    for reading in readings:
        for cell in cells(capacities):
            if cell["policy"] == "full" and reading != readings[0]:
                continue
            cell = {"suffix_mode": "dynamic", "reading": reading} | cell
            good = f1(cell)
            same = cell | {
                "answer": "the red door",
                "model": "synthetic",
                "repetition_4gram": 0.9 * (1 - good),
                "n_generated": 128 if good < 0.1 else 20,
                "policy_calls": 17 if good < 0.1 else 3,
                "evicted": 0 if cell["policy"] == "full" else 1700,
                "kept_hash": f"{cell['policy']}-{cell['capacity']}",
                "prompt_tokens": 1900,
                "error": None,
            }
            scores = np.clip(good + shared + rng.normal(0, noise / 4, n_items), 0, 1)
            for i, score in enumerate(scores):
                rows.append(same | {"item": f"item-{i:03d}", "token_f1": score, "task": f"domain-{i % 6}"})
    table = pd.DataFrame(rows).astype({"capacity": float})
    predictions = np.where(table.token_f1 > 0.5, "the red door", "the blue wall wall")
    table = table.assign(rouge_l=table.token_f1 * 0.98, prediction=predictions)
    return table.assign(**{name: [make(row) for row in table.to_dict("records")] for name, make in columns.items()})


def attention(sink: float = 0.3, items: int = 8, layers: int = 4, heads: int = 2) -> pd.DataFrame:
    """Boundary attention with a given mass on position 0; prefix 0.02, suffix 0.1, middle the rest."""
    tokens = {"sink": 1, "prefix": 24, "middle": 1850, "suffix": 25}
    masses = {"sink": sink, "prefix": 0.02, "middle": 0.88 - sink, "suffix": 0.1}
    names = {"item": range(items), "layer": range(layers), "head": range(heads), "region": tokens}
    table = pd.MultiIndex.from_product(names.values(), names=names.keys()).to_frame(index=False)
    noise = np.random.default_rng(0).normal(0, 0.01, len(table))
    return table.assign(uniform=table.region.map(tokens) / 1900, mass=table.region.map(masses) * (1 + noise))


def scaling(
    f1: Callable[[dict], float] = paper_like,
    lengths=(500, 1000, 1900, 3800),
    readings=("as_run", "as_described"),
    n_items: int = 20,
) -> pd.DataFrame:
    """Results at several prompt lengths, one capacity of an eighth each."""
    parts = []
    for seed, length in enumerate(lengths):
        part = results(f1, seed=seed, n_items=n_items, readings=readings, capacities=(length // 8,))
        main = part[np.isclose(part.prefix, part.suffix) & (part.suffix_mode == "dynamic") & part.policy.isin(FEW)]
        main = main[np.isclose(main.prefix, 0) | np.isclose(main.prefix, 0.1)]
        parts.append(main.assign(length=length, prompt_tokens=length))
    return pd.concat(parts, ignore_index=True)


def verdicts(book: dict, settings: Settings | None = None, **tables) -> pd.DataFrame:
    """Verdicts of claims of the protection chapter on such tables."""
    tidied = protection.tidied(tables, None, settings or Settings())
    return members.verdicts(book, tidied, protection, model="synthetic", profile="quick")
