"""Where the protection paper's text and its public results disagree: the book's table, each number computed from the
scores or read from what was printed."""

import pandas as pd

from kvrepro.chapters.reanalysis import comparisons, printed, words
from kvrepro.experiment import artifact, claims

TEXT = "protection_text_claims.csv"


def table() -> list[dict[str, str]]:
    """Rows of two cells: what the paper says, and what its artifact does."""
    scores = artifact.scores()
    rows = comparisons.panels(scores)
    cells = [
        ("evicted entries leave memory", "an additive mask hides them; keys and values stay (here: `execution`)"),
        ("attention mass, averaged over layers and accumulated",
         "maxima over layers, heads and queries (`score_reduce`)"),
        *(compare(scores) for compare in (_references, _repetition, _cut, _domains, _needles, _sampling, _public)),
        *(compare(rows) for compare in (_never_reduced, _alike, _spread, _equivalence, _signs, _gate, _begun)),
    ]  # fmt: skip
    return [{"the paper": paper, "the artifact": artifact_does} for paper, artifact_does in cells]


def _printed(metric: str, **where: object) -> float:
    """A number that the paper's text prints."""
    return float(claims.cells(TEXT, {"metric": metric, **where}).value.iloc[0])


def _run(scores: pd.DataFrame, name: str) -> pd.DataFrame:
    return scores[scores["name"] == name]


def _references(scores: pd.DataFrame) -> tuple[str, str]:
    full = _run(scores, "confound/q25-c2048-fullcache")
    return (
        "F1 is the maximum over references, as LongBench defines it",
        f"one reference per item, and articles are not removed: on Qwen2.5-3B's full cache {full.token_f1.mean():.3f} "
        f"instead of {full.token_f1_longbench.mean():.3f}",
    )


def _repetition(scores: pd.DataFrame) -> tuple[str, str]:
    new, old = _run(scores, "ablation/q25-c256-lru"), _run(scores, "sweep-20260309-202648/q25-c256-lru")
    changed = (old.set_index("item").prompt_tokens != new.set_index("item").prompt_tokens).mean()
    f1 = new.token_f1.mean()
    return (
        f"unprotected output repeats {_printed('rep4', note_starts='older'):.1f}% of its 4-grams, beside F1 {f1:.3f}",
        f"the two numbers belong to two runs: the one with F1 {f1:.3f} repeats {new.repetition_4gram.mean():.1%}; the "
        f"other, on prompts of another length in {changed:.0%} of items, has F1 {old.token_f1.mean():.3f}",
    )


def _cut(scores: pd.DataFrame) -> tuple[str, str]:
    length = scores[scores["name"].str.startswith("longctx/")].prompt_tokens.max()
    return "runs at 11K tokens", f"prompts are cut at {length:,} tokens"


def _domains(scores: pd.DataFrame) -> tuple[str, str]:
    runs = (_run(scores, f"longctx/q3b-longctx-{run}") for run in ("c1024-prot", "fullcache"))
    kept, full = (rows.groupby("task").token_f1.mean() for rows in runs)
    share = kept / full
    printed_share = _printed("pct_of_ceiling[hotpotqa] (paper label)")
    return (
        f"HotPotQA at {printed_share:.0f}% of the full cache",
        f"NarrativeQA is at {share['narrativeqa']:.1%}, HotPotQA at {share['hotpotqa']:.1%}",
    )


def _needles(scores: pd.DataFrame) -> tuple[str, str]:
    full = _run(scores, "niah/phi35-niah-fullcache")
    place = full.groupby("task").token_f1.mean()
    lengths = full.groupby(pd.qcut(full.prompt_tokens, 3)).agg(
        least=("prompt_tokens", "min"), most=("prompt_tokens", "max"), f1=("token_f1", "mean")
    )  # fmt: skip
    by_length = ", ".join(f"{row.f1:.3f} at {row.least:,.0f} to {row.most:,.0f} tokens" for row in lengths.itertuples())
    return (
        "on short needle prompts the middle and the end fail even with the full cache",
        f"F1 is {place['early']:.3f} early, {place['middle']:.3f} in the middle, {place['late']:.3f} late; but "
        f"{by_length}: failure follows the prompt's length",
    )


def _sampling(scores: pd.DataFrame) -> tuple[str, str]:
    alone, by_item = comparisons.of_seeds(scores)
    low, high = (_printed(f"lift t0.7 ci95_{side}") for side in ("low", "high"))
    return (
        f"an interval of {low:.3f} to {high:.3f} at temperature 0.7",
        f"{alone.n} pairs count as independent ({alone.low:.3f} to {alone.high:.3f} by our rule); if an item's "
        f"seeds count once, it is {by_item.low:.3f} to {by_item.high:.3f}",
    )


def _public(scores: pd.DataFrame) -> tuple[str, str]:
    cells = printed.beside_public_scores()
    means = cells[cells.metric.str.startswith("token_f1")]
    return (
        "all outputs are published per item",
        f"{int(means.same.notna().sum())} of the {len(means)} mean scores in tables "
        f"{', '.join(table for table in printed.TABLES if table != 'A')} have their rows in public; the side ablation "
        "and several models have not",
    )


def _never_reduced(rows: pd.DataFrame) -> tuple[str, str]:
    ada = rows[(rows.policy == "ada_kv_faithful") & (rows["items"] == "longbench-pool")]
    never = (ada.evicted == 0).groupby(ada.model_name).sum().sort_values(ascending=False)
    return (
        "per-head Ada-KV and QUEST retain the capacity on every item",
        f"their first reduction waits for the eighth generated token: of {ada['item'].nunique()} items, "
        "Ada-KV never reduces " + ", ".join(f"{n} on {name}" for name, n in never.items()),
    )  # fmt: skip


def _alike(rows: pd.DataFrame) -> tuple[str, str]:
    same = comparisons.identical(rows[(rows["items"] == "longbench-pool") & (rows.capacity == 256)])
    bare = same[~same.protected].iloc[0]
    listed = [f"{row.value:.1%} ({row.model_name}, {row.kv_heads})" for row in same[same.protected].itertuples()]
    return (
        "H2O and SnapKV agree because two KV heads differ little",
        "at the first reduction their ranks are the same by construction, whatever the number of heads. Equal outputs "
        f"(model, KV heads): {', '.join(listed)}; unprotected {bare.value:.1%} ({bare.model_name})",
    )


def _spread(rows: pd.DataFrame) -> tuple[str, str]:
    spread = claims.cells(printed.TABLES["11"], {"metric": "spread"}).set_index("model").value.astype(float)
    return (
        f"spread with Ada-KV {spread['Mistral-7B-Instruct-v0.3']:.3f}",
        f"{spread.max():.3f} in the same table, on {spread.idxmax()}",
    )


def _equivalence(rows: pd.DataFrame) -> tuple[str, str]:
    phi = rows[(rows["items"] == "longbench-balanced") & (rows.model_name == "Phi-3.5-mini-instruct")]
    larger_p = comparisons.compare(phi).query("family == 'policies'").groupby("capacity").tost.max()
    return (
        "on Phi-3.5, policies are equivalent to LRU at two capacities",
        "the larger p of H2O's and SnapKV's equivalence tests (margin 0.02) is "
        + ", ".join(f"{p:.3f} at {capacity:.0f}" for capacity, p in larger_p.items()),
    )


def _signs(rows: pd.DataFrame) -> tuple[str, str]:
    pool = rows[(rows["items"] == "longbench-pool") & (rows.capacity == 256)]
    tested = comparisons.compare(pool).query("what == 'h2o_simple - lru, protected'").sort_values("value")
    extremes = [tested.iloc[i] for i in (0, -1)]
    listed = [f"{row.value:+.4f} on {row.model_name} (p = {row.wilcoxon_holm:.3f})" for row in extremes]
    return (
        "the simplified policies converge under protection",
        f"with all {int(extremes[0].n)} items H2O minus LRU is {' and '.join(listed)}, Wilcoxon with Holm's correction",
    )


def _gate(rows: pd.DataFrame) -> tuple[str, str]:
    credit = rows[(rows.policy == "online_credit") & rows["name"].str.startswith("credit-v2/")]
    calls = credit.groupby("capacity")[["gate_open", "policy_calls"]].sum()
    shares = (calls.gate_open / calls.policy_calls).items()
    return (
        "the blend factor of learned credit",
        "the share of calls in which credit has a say, "
        + ", ".join(f"{share:.0%} at {capacity:.0f}" for capacity, share in shares) + "; its weight is 0.4 at most",
    )  # fmt: skip


def _begun(rows: pd.DataFrame) -> tuple[str, str]:
    pool = words.begun_alike(rows[rows["items"] == "longbench-pool"])
    panel = words.begun_alike(rows[rows["name"].str.startswith(("confound", "ablation/"))]).set_index("name").value
    return (
        "runs with and without protection differ in nothing else",
        "a token that is drawn before any eviction opens every output, so all should begin like the full cache's. In "
        "tables 3 and 4, on the same prompts, "
        f"{panel['ablation/q25-c256-lru']:.1%} of the unprotected outputs and "
        f"{panel['confound-fix/q25-c256-lru-protected']:.1%} of the protected ones begin with its first "
        f"character; in the {len(pool)} runs on {pool.n.iloc[0]} items "
        + ("all do" if pool.value.min() == 1 else f"{pool.value.min():.0%} do or more"),
    )
