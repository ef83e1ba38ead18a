"""The page *What should I use?*: every condition of the synthesis, with what other chapters know of its scorer."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

import pandas as pd

from kvrepro.chapters.leakage import drawings
from kvrepro.chapters.synthesis import frontier, stored, study
from kvrepro.engine.policy import REPEATED, find
from kvrepro.errors import InputError
from kvrepro.experiment import figure, stats
from kvrepro.paths import ROOT
from kvrepro.tools import filterable
from kvrepro.tools.edition import figure_data, results_of
from kvrepro.tools.filterable import TableCell

ALIKE = {  # scorer and aggregator of the grid -> the published method that scores alike, whose cost and leaks are known
    ("position", None): "streaming_llm", ("key norm", None): "k_norm", ("key difference", None): "key_diff",
    ("attention of all", None): "h2o", ("attention", "mean"): "snapkv", ("attention", "mean_var"): "cake",
    ("attention x value", "mean"): "critical_kv", ("attention x value", "defensive"): "defensive_kv",
    ("perturbation", "mean"): "dropkv",
}  # fmt: skip
HEADS = {  # how a budget is shared out, in words
    "uniform": "per head, even budgets", "per head": "per head, uneven in a layer", "joint": "per head, uneven overall",
    "one set": "shared by all heads",
}  # fmt: skip
WHEN = {
    "question seen": "after the prompt, question in it", "question unseen": "before the question",
    "decode cap": "while the answer grows",
}  # fmt: skip
GUARDS = {"none": "none", "sinks": "the first four tokens", "ends": "both ends"}
AGGREGATORS = {"mean_var": "mean and variance"}
LONG = 32768  # tokens of the prompts whose first token is timed
MISSING, NOTHING = "not measured", "none measurable"
DEAF = "not while it follows"  # where nothing is told because nothing of the prompt is followed any longer


def parts(root: Path = ROOT) -> dict[str, str]:
    """The page's computed parts by name: `advice`, sentences; `short` and `all`, tables in HTML."""
    try:
        rows = stored.of_one_model(stored.rows(results_of("synthesis", root)))
    except InputError:
        text = "The chapter on synthesis has no results yet, so there is nothing to advise from."
        return dict.fromkeys(("advice", "short", "all"), text)
    best, known = frontier.advice(rows), conditions(rows, root)
    middle = sorted(best.kept.unique())[len(best.kept.unique()) // 2]
    best = best[best.kept == middle]
    return {
        "advice": advice(rows, best, known, rows.model.iloc[0]),
        "short": f"With {middle:.0%} kept:\n\n{filterable.table(short(best, known))}\n\n{_by_luck(best)}".rstrip(),
        "all": _all(known.drop(columns=["name", "value", "of"])),
    }  # fmt: skip


def conditions(rows: pd.DataFrame, root: Path = ROOT) -> pd.DataFrame:
    """A row for each condition, in the words of the page, the best first; `name`, `value` and `of` are for
    sentences."""
    table = frontier.conditions(rows).query("kind != 'full'").sort_values("value", ascending=False)
    losses, safe, first = _losses(rows), leak_safe_from(root), _first_token()
    found = []
    for row in table.to_dict("records"):
        grid = row["kind"] == "grid"
        of = ALIKE.get((row["scorer"], row["aggregator"] or None), "") if grid else row["method"]
        found.append({
            "scores by": _scorer(row) if grid else _published(of), "kept": f"{row['kept']:.0%}",
            "guards": (GUARDS[row["guard"]] if grid else "its own") + (", quotas" if row["quota"] == "parts" else ""),
            "tokens leave": WHEN[row["regime"] if grid else "question seen"],
            "heads": HEADS.get(row["split"], HEADS["one set"]) if grid else f"its own ({find(of).budget})",
            "quality": f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
            "blocks returned": f"{1 - row['unfreed']:.0%}", "leak-safe from": safe.get(of, MISSING),
            "first token": first.get(of, MISSING), "on kernels": _kernel(of, row["scorer"]),
            "loses most at": losses[row["name"]], "name": row["name"], "value": row["value"], "of": of,
        })  # fmt: skip
    return pd.DataFrame(found)


def _scorer(row: Mapping) -> str:
    pooled = f", {row['pooling']} over neighbours" if row["aggregator"] and row["pooling"] != "none" else ""
    return _score(row["scorer"], row["aggregator"]) + pooled


def _score(scorer: str, aggregator: str | None) -> str:
    return f"{scorer}, {AGGREGATORS.get(aggregator, aggregator)} over queries" if aggregator else scorer


def _published(policy: str) -> str:
    """A published method, with the score of the grid that it shares: a search for either finds both."""
    score = next((_score(*parts) for parts, method in ALIKE.items() if method == policy), "")
    return figure.look(policy).name + (f" (as published): {score}" if score else " (as published)")


def _losses(rows: pd.DataFrame) -> dict[str, str]:
    """Of each condition by its name: the task at which it loses most against the full cache, and how much."""
    full = rows[rows.kind == "full"].set_index("item").score
    lost = rows.assign(name=frontier.names(rows), lost=rows["item"].map(full) - rows.score)
    by_task = lost.pivot_table("lost", "name", "task")
    return {str(name): study.loses_most(row.idxmax(), row.max()) for name, row in by_task.iterrows()}


def leak_safe_from(root: Path = ROOT) -> dict[str, str]:
    """The smallest share of a system prompt from which on a policy tells no more of its secrets than the full cache
    does, and still follows at least half of what is followed then, the defense first; as the chapter on leakage has
    computed it."""
    table = figure_data("leakage", "safe-budgets", root)
    if table is None:
        return {}
    safe = drawings.uncured(table)
    return {
        row.policy: "never" if row.value >= 1 else DEAF if pd.isna(row.usable) else f"{row.usable:.0%} kept"
        for row in safe.itertuples()
    }


def _first_token() -> dict[str, str]:
    """What compression adds to the time to the first token at `LONG` tokens, the worse of the timed models."""
    table = frontier.first_token()
    table = table[(table.tokens == LONG) & table.method.str.contains(", as ")]
    name = table.method.str.partition(", ")
    table = table.assign(policy=name[0], text=name[2] == "as described")
    told = {}
    for policy, group in table.groupby("policy"):
        read = group[group.text] if group.text.any() else group
        more = read.ratio_to_kept.max() - 1
        told[str(policy)] = f"+{more:.1%}" if more >= 0.0005 else NOTHING
        told[str(policy)] += "" if group.text.any() else " (authors' code)"
    return told


def _kernel(policy: str, scorer: str | None) -> str:
    """Can its prompts and sums be left to Triton kernels? policy: the published method that scores alike, if any."""
    if scorer == "random":
        return "none needed"
    needs = set(find(policy).needs) if policy else set()  # a window of queries needs no sums
    return "yes" if needs - REPEATED <= {"mass"} else "no"


def short(best: pd.DataFrame, known: pd.DataFrame) -> list[dict[str, str]]:
    """The best condition for each regime: any, and one that gives back half of the blocks at least."""
    need, uses = {"any": "no", "blocks": "yes"}, _uses(known)
    return [
        {"tokens leave": WHEN[row.regime], "memory must come back": need[row.memory], "use": uses[row.use],
         "held-out quality": f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]", "blocks returned": f"{row.freed:.0%}",
         "loses most at": study.loses_most(row.fails_at, row.loss),
         "chosen": f"from {row.of} conditions"}
        for row in best.itertuples()
    ]  # fmt: skip


def _uses(known: pd.DataFrame) -> pd.Series:
    """Each condition by its name in code, in the words that its row in the table of all has."""
    guards = known.guards.map(lambda guards: "" if guards == "none" else f"; guards: {guards}")
    parts = (guards + "; heads: " + known.heads).mask(known.guards == "its own", "")
    return (known["scores by"] + parts).set_axis(known.name)


def _by_luck(best: pd.DataFrame) -> str:
    """Where a choice among fewer conditions scores higher than one among all of them."""
    value = best.pivot_table("value", "regime", "memory")
    if not {"any", "blocks"} <= set(value) or not (lucky := value.index[value.blocks > value["any"]].tolist()):
        return ""
    when = " and ".join(f"*{WHEN[regime]}*" for regime in lucky)
    return (
        f"The conditions that give memory back are among those of the row above, so a choice from them should score "
        f"less. With only {best.n.max()} items it happens to score more {when}."
    )


def advice(rows: pd.DataFrame, best: pd.DataFrame, known: pd.DataFrame, model: str) -> str:
    """The page's first sentences. best: the choices at one share kept."""
    kept, values = best.kept.iloc[0], known.set_index("name").value
    published = pd.Series([f"{figure.look(of).name} as published" for of in known.of], known.name)
    uses = published.where(list(known.guards == "its own"), "*" + _uses(known) + "*")
    items = rows["item"].nunique()
    lines = [f"The full cache scores {rows[rows.kind == 'full'].score.mean():.2f} on the {items} items of this page.\n"]
    for row in best[best.memory == "any"].itertuples():
        lines.append(
            f"- **When tokens leave {WHEN[row.regime]}**, with {kept:.0%} of them kept, choose {uses[row.use]}. Chosen "
            f"without seeing an item, such a condition scores {row.value:.2f} on it; this one scores "
            f"{values[row.use]:.2f} on all items, those it was chosen on among them."
        )
    freed = rows[(rows.kind == "grid") & (rows.kept == kept)].groupby("split").freed.mean()
    apart = freed.drop("one set", errors="ignore")
    if "one set" in freed and len(apart):
        returned = stats.percents(apart)
        lines.append(
            f"- **When memory must come back without copying**, let all heads share one set of tokens: with {kept:.0%} "
            f"kept, that returns {freed['one set']:.0%} of the blocks on average over all scorers, random choice and "
            f"quotas among them; heads that choose for themselves return "
            f"{returned}{', depending on how they share the budget' * (' to ' in returned)}."
        )
    lines.append(f"- **When a system prompt must stay secret**, {_secret(known)}")
    lines.append(
        f"\nThis is what {items} items on {model} say; intervals are wide, and a larger model may choose otherwise. "
        "The same notebook on your model gives your table: {doc}`your-model`."
    )
    return "\n".join(lines)


def _secret(known: pd.DataFrame) -> str:
    safe = known[~known["leak-safe from"].isin([MISSING, "never", DEAF])].drop_duplicates("of")
    if safe.empty:
        return "this run has no policy that is known to keep it; see {doc}`executed/leakage`."
    shares = safe["leak-safe from"].str.extract(r"(\d+)")[0].astype(int)
    first, last = (
        ", ".join(figure.look(name).name for name in safe.of[shares == share]) for share in (shares.min(), shares.max())
    )
    return (
        f"do not compress below the leak-safe share of your policy: {shares.min()}% for {first}, {shares.max()}% for "
        f"{last}; or keep its prohibition on a whitelist ({{doc}}`executed/leakage`)."
    )


def _all(table: pd.DataFrame) -> str:
    """The table that readers filter, sorted by quality."""
    filters = ("kept", "guards", "tokens leave", "heads", "on kernels")
    minor = ("blocks returned", "leak-safe from", "first token", "on kernels", "loses most at")
    rows = table.to_dict("records")
    for row in rows:  # sorted as what it is: the least
        first = str(row["first token"])
        row["first token"] = TableCell(escape(first, quote=False), 0 if first.startswith(NOTHING) else None)
    return filterable.interactive(rows, "conditions", "All conditions", filters, minor, ("scores by",))
