"""What a score costs: the frontier of score against bytes and blocks, and a table of what to use when."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvrepro.chapters.synthesis import grid
from kvrepro.experiment import figure, stats
from kvrepro.experiment.claims import KEPT
from kvrepro.paths import GPU

COSTS = {"held": "keys and values held", "unfreed": "blocks not freed"}  # shares; less is better
OFTEN = 0.5  # share of blocks freed without compaction, from which on memory counts as given back


def conditions(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """A row per model and condition: its `name`, factors, mean score with its interval, and means of its costs (`held`,
    `unfreed`: shares of bytes and of blocks) and of the evidence that it keeps."""
    keys = ["model", "name"]
    frame = rows.assign(name=names(rows), unfreed=1 - rows.freed)
    costs = ["held", "bytes_kept", "unfreed", "freed_compacted", "evidence_coverage", "evidence_heads", "evidence_best"]
    means = frame.groupby(keys, sort=False)[[c for c in costs if c in frame]].mean().reset_index()
    first = frame.drop_duplicates(keys)[["model", "kind", "method", *grid.factors(()), "name"]]
    return stats.means(frame, keys, score).merge(means, on=keys).merge(first, on=keys)


def names(rows: pd.DataFrame) -> pd.Series:
    """Each row's condition as text: a published method with its share, or the levels of a cell."""
    cell = [_cell(row) for row in rows[list(grid.FACTORS)].to_dict("records")]
    method = rows.method.map(lambda name: figure.look(name).name, na_action="ignore")
    cell = pd.Series(cell, index=rows.index).mask(rows.kind == "published", method)
    share = rows.kept.map(lambda kept: f", {kept:.0%}", na_action="ignore").fillna("")
    return (cell + share).mask(rows.kind == "full", "full cache")


def _cell(levels: Mapping[str, object]) -> str:
    """The levels of a cell as words, without those that mean "none"."""
    of_window = f" ({levels['aggregator']}, pooled: {levels['pooling']})" if levels["aggregator"] else ""
    guard = f"guard: {levels['guard']}" if levels["guard"] != "none" else ""
    quota = "quota" if levels["quota"] == "parts" else ""
    words = (f"{levels['scorer']}{of_window}", guard, levels["split"], quota, levels["regime"])
    return ", ".join(str(word) for word in words if word)


def frontier(table: pd.DataFrame, cost: str) -> pd.DataFrame:
    """The rows that no other row beats, by cost: no other is at least as good in score and cost and better in one."""
    ordered = table.sort_values([cost, "value"], ascending=[True, False], kind="stable")
    return ordered[ordered.value > ordered.value.cummax().shift(fill_value=-np.inf)]


# ---- what to use when


def advice(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """The best condition, of the grid or published, for each regime, share kept and memory: "any", or "blocks", where
    at least half of the blocks become free without compaction. Published methods evict after the prompt, with the
    question seen.

    use: the best by its mean over all items. value, low, high: the score of an item under the condition that is best on
    the other items, so that the luck of the best of many does not count. fails_at, loss: the task at which `use` loses
    most against the full cache, and how much. freed: of `use`. of: conditions to choose from.
    """
    evicting = rows[rows.kind != "full"]
    regime = evicting.regime.mask(evicting.kind == "published", "question seen")
    evicting = evicting.assign(name=names(evicting), regime=regime)
    full = rows[rows.kind == "full"].set_index("item")[score]
    choices = []
    for (regime, kept), part in evicting.groupby(["regime", "kept"]):
        freed = part.groupby("name").freed.mean()
        for memory, candidates in (("any", freed.index), ("blocks", freed.index[freed >= OFTEN])):
            rows_of_these = part[part["name"].isin(candidates)]
            table = rows_of_these.pivot_table(score, "item", "name", aggfunc="first").dropna(axis=1)
            if table.empty or len(table) < 2:
                continue
            best = part[part["name"] == table.mean().idxmax()]
            loss = (full.reindex(best["item"]).to_numpy() - best[score]).groupby(best.task).mean()
            held_out = [table.loc[item, table.drop(index=item).mean().idxmax()] for item in table.index]
            e = stats.interval(held_out, bounds=stats.UNIT)
            choices.append((regime, kept, memory, best["name"].iloc[0], *e.triple, e.n, best.freed.mean(),
                            loss.idxmax(), loss.max(), table.shape[1]))  # fmt: skip
    columns = "regime kept memory use value low high n freed fails_at loss of".split()
    return pd.DataFrame(choices, columns=columns)


def first_token() -> pd.DataFrame:
    """Stored timings of another machine (`data/gpu/first_token.csv`), a row per method and model, 20% kept: the time to
    the first token over that with everything kept in the same engine (`ratio_to_kept`), and over that of Hugging Face's
    full cache (`ratio_to_plain`)."""
    table = pd.read_csv(GPU / "first_token.csv")
    table = table[(table.part == "first") & table.ratio_to_plain.notna()]
    kept = table[table.method == KEPT].set_index(["model", "tokens"]).seconds.rename("kept")
    methods = table[table["share"] == 0.2].join(kept, ["model", "tokens"])
    methods = methods.assign(ratio_to_kept=methods.seconds / methods.kept)
    return methods["model tokens method ratio_to_kept ratio_to_plain seconds low high device date".split()]
