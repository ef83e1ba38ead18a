"""The page *What should I use?*: every condition of the synthesis, with what other chapters know of its scorer."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

import pandas as pd

from kvrepro.chapters.synthesis import frontier, stored, study
from kvrepro.engine.policy import REPEATED, find
from kvrepro.errors import InputError
from kvrepro.experiment import figure, stats
from kvrepro.paths import ROOT
from kvrepro.tools import filterable
from kvrepro.tools.edition import figure_data, results_of
from kvrepro.tools.filterable import TableCell
from kvrepro.tools.rows import words

WORDS = words("decide")
# Scorer and aggregator of the grid -> the published method that scores alike, whose cost and leaks are known.
ALIKE: dict[tuple[str, str | None], str] = {(scorer, among): method for scorer, among, method in WORDS["alike"]}
HEADS, WHEN, GUARDS, AGGREGATORS = (WORDS[name] for name in ("heads", "when", "guards", "aggregators"))
LONG = 32768  # tokens of the prompts whose first token is timed
MISSING, NOTHING = "not measured", "none measurable"
DEAF = "not while it follows"  # where nothing is told because nothing of the prompt is followed any longer


def parts(root: Path = ROOT) -> dict[str, str]:
    """The page's computed parts by name: `advice`, sentences; `short` and `all`, tables in HTML."""
    try:
        rows = stored.rows_of_main_model(stored.rows(results_of("synthesis", root)))
    except InputError:
        text = "The chapter on synthesis has no results yet, so there is nothing to advise from."
        return dict.fromkeys(("advice", "short", "all"), text)
    best, table = frontier.advice(rows), conditions(rows, root)
    middle = sorted(best.kept.unique())[len(best.kept.unique()) // 2]
    best = best[best.kept == middle]
    return {
        "advice": advice(rows, best, table, rows.model.iloc[0]),
        "short": f"With {middle:.0%} kept:\n\n{filterable.table(short(best, table))}",
        "all": _all(table.drop(columns=["name", "value", "of"])),
    }  # fmt: skip


def conditions(rows: pd.DataFrame, root: Path = ROOT) -> pd.DataFrame:
    """A row for each condition, in the words of the page, the best first. The columns `name`, `value` and `of` (the
    published method that scores alike) are for sentences and not shown."""
    table = frontier.conditions(rows).query("kind != 'full'").sort_values("value", ascending=False)
    losses, safe, first = _losses(rows), leak_safe_from(root), _first_token()
    page_rows = []
    for row in table.to_dict("records"):
        grid = row["kind"] == "grid"
        method = ALIKE.get((row["scorer"], row["aggregator"] or None), "") if grid else row["method"]
        page_rows.append({
            "scores by": _scorer(row) if grid else _published(method), "kept": f"{row['kept']:.0%}",
            "guards": (GUARDS[row["guard"]] if grid else "its own") + (", quotas" if row["quota"] == "parts" else ""),
            "tokens leave": WHEN[row["regime"] if grid else "question seen"],
            "heads": HEADS.get(row["split"], HEADS["one set"]) if grid else f"its own ({find(method).budget})",
            "quality": f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            "blocks returned": f"{1 - row['unfreed']:.0%}", "leak-safe from": safe.get(method, MISSING),
            "first token": first.get(method, MISSING), "on kernels": _kernel(method, row["scorer"]),
            "loses most at": losses[row["name"]], "name": row["name"], "value": row["value"], "of": method,
        })  # fmt: skip
    return pd.DataFrame(page_rows)


def _scorer(row: Mapping) -> str:
    pooled = f", {row['pooling']} over neighbours" if row["aggregator"] and row["pooling"] != "none" else ""
    return _score(row["scorer"], row["aggregator"]) + pooled


def _score(scorer: str, aggregator: str | None) -> str:
    return f"{scorer}, {AGGREGATORS.get(aggregator, aggregator)} over queries" if aggregator else scorer


def _published(policy: str) -> str:
    """A published method, with the score of the grid that it shares, so that a search for either finds both."""
    score = next((_score(*parts) for parts, method in ALIKE.items() if method == policy), "")
    return figure.look(policy).name + (f" (as published): {score}" if score else " (as published)")


def _losses(rows: pd.DataFrame) -> dict[str, str]:
    """By a condition's name: the task at which it loses most against the full cache, and how much."""
    full = rows[rows.kind == "full"].set_index("item").score
    lost = rows.assign(name=frontier.names(rows), lost=rows["item"].map(full) - rows.score)
    by_task = lost.pivot_table("lost", "name", "task")
    return {str(name): study.loses_most(row.idxmax(), row.max()) for name, row in by_task.iterrows()}


def leak_safe_from(root: Path = ROOT) -> dict[str, str]:
    """By policy: the smallest share of a system prompt at which it leaks no more than the upper limit of the full
    cache's leakage and still follows half of what the full cache follows. Of the two orders of defense and directive
    the larger share counts. Read from a figure's data of the chapter on leakage."""
    table = figure_data("leakage", "safe-budgets", root)
    if table is None:
        return {}
    uncured = table[(table.variant == "default") & table.order.isin(["defense first", "directive first"])]
    return {
        str(policy): "never" if (rows.value >= 1).any() else DEAF if rows.usable.isna().any()
        else f"{rows.usable.max():.0%} kept"
        for policy, rows in uncured.groupby("policy", sort=False)
    }  # fmt: skip


def _first_token() -> dict[str, str]:
    """By policy: what compression adds to the time to the first token at `LONG` tokens, on the slowest timed model."""
    table = frontier.first_token()
    table = table[(table.tokens == LONG) & table.method.str.contains(", as ")]
    name = table.method.str.partition(", ")
    table = table.assign(policy=name[0], text=name[2] == "as described")
    added = {}
    for policy, group in table.groupby("policy"):
        chosen = group[group.text] if group.text.any() else group
        extra = chosen.ratio_to_kept.max() - 1
        added[str(policy)] = f"+{extra:.1%}" if extra >= 0.0005 else NOTHING
        added[str(policy)] += "" if group.text.any() else " (authors' code)"
    return added


def _kernel(policy: str, scorer: str | None) -> str:
    """Can its prompts and sums be left to Triton kernels? policy: the published method that scores alike, if any."""
    if scorer == "random":
        return "none needed"
    needs = set(find(policy).needs) if policy else set()  # a window of queries needs no sums
    return "yes" if needs - REPEATED <= {"mass"} else "no"


def short(best: pd.DataFrame, table: pd.DataFrame) -> list[dict[str, str]]:
    """The best condition for each regime: of all, and of those that give back at least half of the blocks."""
    returns, use_of = {"any": "no", "blocks": "yes"}, _uses(table)
    return [
        {"tokens leave": WHEN[row.regime], "memory must come back": returns[row.memory], "use": use_of[row.use],
         "held-out quality": f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]", "blocks returned": f"{row.freed:.0%}",
         "loses most at": study.loses_most(row.fails_at, row.loss),
         "chosen": f"from {row.of} conditions"}
        for row in best.itertuples()
    ]  # fmt: skip


def _uses(table: pd.DataFrame) -> pd.Series:
    """By a condition's name in code: the words that the table of all conditions has for it."""
    guards = table.guards.map(lambda guards: "" if guards == "none" else f"; guards: {guards}")
    parts = (guards + "; heads: " + table.heads).mask(table.guards == "its own", "")
    return (table["scores by"] + parts).set_axis(table.name)


def advice(rows: pd.DataFrame, best: pd.DataFrame, table: pd.DataFrame, model: str) -> str:
    """The page's first sentences. best: the choices at one share kept."""
    kept, values = best.kept.iloc[0], table.set_index("name").value
    published = pd.Series([f"{figure.look(method).name} as published" for method in table.of], table.name)
    uses = published.where(list(table.guards == "its own"), "*" + _uses(table) + "*")
    items = rows["item"].nunique()
    lines = [f"The full cache scores {rows[rows.kind == 'full'].score.mean():.2f} on the {items} items of this page.\n"]
    for row in best[best.memory == "any"].itertuples():
        lines.append(
            f"- **When tokens leave {WHEN[row.regime]}**, with {kept:.0%} of them kept, choose {uses[row.use]}. It "
            f"scores {values[row.use]:.2f} on the items on which it was chosen. On an item that the choice has not "
            f"seen, a condition chosen in this way scores {row.value:.2f}."
        )
    freed = rows[(rows.kind == "grid") & (rows.kept == kept)].groupby("split").freed.mean()
    apart = freed.drop("one set", errors="ignore")
    if "one set" in freed and len(apart):
        returned = stats.percents(apart)
        lines.append(
            f"- **When memory must come back without copying**, let all heads share one set of tokens: with {kept:.0%} "
            f"kept, that returns {freed['one set']:.0%} of the blocks on average over all scorers, including random "
            f"choice and quotas; heads that choose for themselves return "
            f"{returned}{', depending on how they share the budget' * (' to ' in returned)}."
        )
    lines.append(
        "- **When a system prompt must stay secret**, do not compress below the share in the column *leak-safe from*, "
        "or keep it on a whitelist ({doc}`executed/leakage`)."
    )
    lines.append(
        f"\nThis is what {items} items on {model} say; intervals are wide, and a larger model may decide otherwise. "
        "The same notebook on your model gives your table: {doc}`your-model`."
    )
    return "\n".join(lines)


def _all(table: pd.DataFrame) -> str:
    """The table that readers filter, sorted by quality."""
    filters = ("kept", "guards", "tokens leave", "heads", "on kernels")
    rows = table.to_dict("records")
    for row in rows:  # "none measurable" sorts as 0
        first = str(row["first token"])
        row["first token"] = TableCell(escape(first, quote=False), 0 if first.startswith(NOTHING) else None)
    return filterable.interactive(rows, "conditions", "All conditions", filters, wide=("scores by",))
