"""What a score costs: the frontier of score against bytes and blocks, and a table of what to use when."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvrepro.chapters.synthesis import grid
from kvrepro.experiment import figure, stats
from kvrepro.experiment.claims import KEPT
from kvrepro.paths import GPU

COSTS = {"held": "keys and values held", "unfreed": "blocks not freed"}  # shares; less is better
OFTEN = 0.5  # blocks that are freed as they stand, from which on memory counts as given back


def conditions(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """A row per model and condition: its `name`, factors, mean score with its interval, and the means of what it costs
    (`held`, `unfreed`: shares of bytes and of blocks) and of the evidence that it keeps."""
    told = ["model", "kind", "method", *grid.factors(())]
    frame = rows.assign(name=names(rows), unfreed=1 - rows.freed)
    found = stats.means(frame, ["model", "name"], score)
    costs = ["held", "bytes_kept", "unfreed", "freed_compacted", "evidence_coverage", "evidence_heads", "evidence_best"]
    means = frame.groupby(["model", "name"], sort=False)[[c for c in costs if c in frame]].mean().reset_index()
    first = frame.drop_duplicates(["model", "name"])[[*told, "name"]]
    return found.merge(means, on=["model", "name"]).merge(first, on=["model", "name"])


def names(rows: pd.DataFrame) -> pd.Series:
    """What a condition is called: a published method with its share, or the levels of a cell."""
    cell = [_cell(row) for row in rows[list(grid.FACTORS)].to_dict("records")]
    method = rows.method.map(lambda name: figure.look(name).name, na_action="ignore")
    cell = pd.Series(cell, index=rows.index).mask(rows.kind == "published", method)
    share = rows.kept.map(lambda kept: f", {kept:.0%}", na_action="ignore").fillna("")
    return (cell + share).mask(rows.kind == "full", "full cache")


def _cell(levels: Mapping[str, object]) -> str:
    """The levels of a cell as words, those left out that say nothing."""
    of_window = f" ({levels['aggregator']}, pooled: {levels['pooling']})" if levels["aggregator"] else ""
    guard = f"guard: {levels['guard']}" if levels["guard"] != "none" else ""
    quota = "quota" if levels["quota"] == "parts" else ""
    words = (f"{levels['scorer']}{of_window}", guard, levels["split"], quota, levels["regime"])
    return ", ".join(str(word) for word in words if word)


def frontier(table: pd.DataFrame, cost: str) -> pd.DataFrame:
    """The rows that no other row beats: none costs as little or less and scores more, or costs less and scores as much.
    In the order of their cost."""
    ordered = table.sort_values([cost, "value"], ascending=[True, False], kind="stable")
    return ordered[ordered.value > ordered.value.cummax().shift(fill_value=-np.inf)]


# ---- what to use when


def advice(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """The best condition, of the grid or published, for each regime, share kept and demand on memory: any, or that half
    of the blocks at least come free without compaction. Published methods evict after the prompt, the question seen.

    use: the best by its mean over all items. value, low, high: what a choice made on the other items scores on each
    item, so that the luck of the best of many is not counted. fails_at: the task at which `use` loses most against the
    full cache, and that loss. Columns freed and evidence_heads are those of `use`.
    """
    evicting = rows[rows.kind != "full"]
    regime = evicting.regime.mask(evicting.kind == "published", "question seen")
    evicting = evicting.assign(name=names(evicting), regime=regime)
    full = rows[rows.kind == "full"].set_index("item")[score]
    found = []
    for (regime, kept), part in evicting.groupby(["regime", "kept"]):
        freed = part.groupby("name").freed.mean()
        for memory, able in (("any", freed.index), ("blocks", freed.index[freed >= OFTEN])):
            table = part[part["name"].isin(able)].pivot_table(score, "item", "name", aggfunc="first").dropna(axis=1)
            if table.empty or len(table) < 2:
                continue
            best = part[part["name"] == table.mean().idxmax()]
            loss = (full.reindex(best["item"]).to_numpy() - best[score]).groupby(best.task).mean()
            held_out = [table.loc[item, table.drop(index=item).mean().idxmax()] for item in table.index]
            estimate = stats.interval(held_out, bounds=stats.UNIT)
            told = {"regime": regime, "kept": kept, "memory": memory, "use": best["name"].iloc[0], "of": table.shape[1]}
            told |= dict(zip(("value", "low", "high"), estimate.triple, strict=True)) | {"n": estimate.n}
            found.append(told | {"freed": best.freed.mean(), "fails_at": loss.idxmax(), "loss": loss.max()})
    columns = "regime kept memory use value low high n freed fails_at loss of".split()
    return pd.DataFrame(found, columns=columns)


def first_token() -> pd.DataFrame:
    """Stored timings of another machine (`data/gpu/first_token.csv`): the time to the first token over that with
    everything kept in the same engine, and over Hugging Face's full cache, a row per method and model, 20% kept, with
    the device's name."""
    table = pd.read_csv(GPU / "first_token.csv")
    table = table[(table.part == "first") & table.ratio_to_plain.notna()]
    kept = table[table.method == KEPT].set_index(["model", "tokens"]).seconds.rename("kept")
    mine = table[table["share"] == 0.2].join(kept, ["model", "tokens"])
    mine = mine.assign(ratio_to_kept=mine.seconds / mine.kept)
    named = ["model", "tokens", "method", "ratio_to_kept", "ratio_to_plain", "seconds", "low", "high", "device", "date"]
    return mine[named]
