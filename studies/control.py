"""data/control.csv: the protection claims' rules on the authors' own rows, from which their numbers were printed.

Where a claim is not reproduced there, its rule is bad, or the paper says more than its data, or these items cannot
decide it. The claim says which (`control` in data/claims/protection.yml); without such a line, an open verdict means
too few items. `python -m studies.control` writes the table.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from kvrepro.chapters.protection import members as protection
from kvrepro.chapters.protection.study import Settings
from kvrepro.experiment import artifact, claims, members
from kvrepro.paths import DATA, write_table

TABLE = DATA / "control.csv"
ITEMS = {
    "longbench-balanced": "LongBench, 162",
    "longbench-pool": "LongBench, 481",
    "longbench-longctx": "LongBench at 8K, 48",
    "longbench-32k": "NarrativeQA at 32K, 58",
    "niah-benchmark": "needles, 63",
    "niah-64k": "needles at 64K, 60",
}
MAIN = (128, 256, 512)  # capacities of the main grid; the credit was run at others too
SHORT = ("longbench-balanced", "longbench-pool")
EIGHTHS = {"longbench-balanced": 256, "longbench-longctx": 1024, "longbench-32k": 4096}  # of the cache, by length
EARLIER = "sweep-20260309-202648/q25-c256-lru"  # an unprotected run, older than the one whose F1 was printed
TWICE = ("n481/qwen25-3b/q25-c256-lru-prot10", EARLIER)  # files that hold a condition for the second time
COLUMNS = "panel claim ours low high unit p n rule verdict members decided_by".split()


class Panel(NamedTuple):
    """Rows of one model on one set of items, and the study of the chapter whose claims they test."""

    name: str
    study: str
    rows: pd.DataFrame
    kv_heads: int
    topics: tuple[str, ...] = ()  # of the claims that they test; (): all


def panels(rows: pd.DataFrame) -> Iterator[Panel]:
    """The authors' rows (`artifact.scores`) as panels: main grid, lengths, the credit, needles at 64K, sampling."""
    rows = rows.assign(items=rows["item"].str.rsplit("-", n=1).str[0])
    rows = rows[rows["items"].isin(ITEMS)]
    once = rows[(rows.temperature == 0) & ~rows["name"].isin(TWICE)]
    for (model, items), part in once.groupby(["model", "items"], sort=True):
        short, heads = artifact.CHECKPOINTS[model]
        name, ours = f"{short}, {ITEMS[items]}", part.policy != "online_credit"
        sized = part.capacity.isna() | part.capacity.isin(MAIN) | (items not in SHORT)
        yield Panel(name, "main", part[ours & sized], heads)
        if items == "niah-64k":
            yield Panel(name, "needle", part, heads)
        if not ours.all():
            yield Panel(name, "credit", part[~ours | part.policy.isin(["full", "lru"])], heads)
    sized = once.capacity.isna() | (once.capacity == once["items"].map(EIGHTHS))
    eighths = once[(once.policy != "online_credit") & once["items"].isin(EIGHTHS) & sized]
    for model, part in eighths.groupby("model", sort=True):
        if part["items"].nunique() == len(EIGHTHS):  # the model was run at 1.9K, 8K and 32K tokens
            part = part.assign(length=part.groupby("items").prompt_tokens.transform("median").astype(int))
            short, heads = artifact.CHECKPOINTS[model]
            yield Panel(f"{short}, three lengths", "scaling", part, heads)
    for (model, items), part in rows[rows["name"].str.contains("-rob-")].groupby(["model", "items"]):
        short, heads = artifact.CHECKPOINTS[model]
        yield Panel(f"{short}, {ITEMS[items]}, sampled", "sampling", part, heads)
    beside = once[(once["items"] == SHORT[0]) & ((once.policy == "full") | (once.policy == "lru") & (once.prefix > 0))]
    earlier = rows[rows["name"] == EARLIER]
    same = beside.model.isin(earlier.model) & (beside.capacity.isna() | (beside.capacity == 256))
    both = pd.concat([earlier, beside[same]])
    for model, part in both.groupby("model"):
        short, heads = artifact.CHECKPOINTS[model]
        yield Panel(f"{short}, {ITEMS[SHORT[0]]}, earlier run", "main", part, heads, ("repetition", "items"))


def panel_verdicts(panel: Panel, book: Mapping[str, Any]) -> pd.DataFrame:
    """Verdicts of the claims about a panel's study, in `COLUMNS`; those that it cannot test are among them."""
    about_study = [c for c in book["claims"] if c.get("rows", "main") == panel.study]
    # Each rule by itself: most panels lack the full cache, and with it what claims presume.
    tested = [c | {"presumes": None} for c in about_study if not panel.topics or c["topic"] in panel.topics]
    settings = Settings(max_new_tokens=int(panel.rows.n_generated.max()))
    tables = {"main": panel.rows, panel.study: panel.rows}
    tidied = protection.tidied(tables, None, settings, panel.kv_heads)
    [model] = panel.rows.model.unique()
    table = members.verdicts({**book, "claims": tested}, tidied, protection, model=model, profile=settings.profile)
    return table.assign(panel=panel.name)


def evaluate(rows: pd.DataFrame) -> pd.DataFrame:
    """Every rule on every panel that can test it."""
    book = claims.load_claims("protection")
    table = pd.concat([panel_verdicts(panel, book) for panel in panels(rows)], ignore_index=True)
    table = table.loc[table.verdict != claims.NOT_TESTABLE, COLUMNS]
    order = pd.Categorical(table.claim, [claim["id"] for claim in book["claims"]], ordered=True)
    return table.assign(claim=order).sort_values(["claim", "panel"], ignore_index=True).astype({"claim": str})


if __name__ == "__main__":
    write_table(TABLE, evaluate(artifact.scores()), "%.6g")
