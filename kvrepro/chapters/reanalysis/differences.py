"""Where the protection paper's text and its public results disagree: the numbers in the book's table, whose texts are
in data/words/differences.yml. Each is computed from the scores or read from what was printed."""

from typing import Any

import pandas as pd
import yaml

from kvrepro.chapters.reanalysis import comparisons, printed, words
from kvrepro.experiment import artifact, claims
from kvrepro.paths import DATA


def table() -> list[dict[str, str]]:
    """Rows of two cells: what the paper says, and what its artifact does."""
    scores = artifact.scores()
    rows = comparisons.panels(scores)
    numbers = _of_runs(scores) | _of_samples(scores) | _of_policies(rows) | _of_tests(rows)
    entries = yaml.load((DATA / "words" / "differences.yml").read_text(encoding="utf-8"), Loader=claims.LOADER)
    cells = {"the paper": "paper", "the artifact": "artifact"}
    return [{head: entry[name].format(**numbers) for head, name in cells.items()} for entry in entries]


def _printed(metric: str, **where: object) -> float:
    """A number that the paper's text prints."""
    return float(claims.cells("protection_text_claims.csv", {"metric": metric, **where}).value.iloc[0])


def _of_runs(scores: pd.DataFrame) -> dict[str, Any]:
    """Numbers of single runs, which the artifact names: references, repetition, lengths, domains, needles."""

    def run(name: str) -> pd.DataFrame:
        return scores[scores["name"] == name]

    new, old = run("ablation/q25-c256-lru"), run("sweep-20260309-202648/q25-c256-lru")
    kept, full = (
        run(f"longctx/q3b-longctx-{name}").groupby("task").token_f1.mean() for name in ("c1024-prot", "fullcache")
    )
    needles = run("niah/phi35-niah-fullcache")
    lengths = needles.groupby(pd.qcut(needles.prompt_tokens, 3)).agg(
        least=("prompt_tokens", "min"), most=("prompt_tokens", "max"), f1=("token_f1", "mean")
    )  # fmt: skip
    by_length = [f"{row.f1:.3f} at {row.least:,.0f} to {row.most:,.0f} tokens" for row in lengths.itertuples()]
    return {
        "full": run("confound/q25-c2048-fullcache")[["token_f1", "token_f1_longbench"]].mean(),
        "new": new[["token_f1", "repetition_4gram"]].mean(),
        "old": old[["token_f1"]].mean(),
        "changed": (old.set_index("item").prompt_tokens != new.set_index("item").prompt_tokens).mean(),
        "rep4": _printed("rep4", note_starts="older"),
        "longest": scores[scores["name"].str.startswith("longctx/")].prompt_tokens.max(),
        "share": kept / full,
        "hotpotqa": _printed("pct_of_ceiling[hotpotqa] (paper label)"),
        "place": needles.groupby("task").token_f1.mean(),
        "by_length": ", ".join(by_length),
    }


def _of_samples(scores: pd.DataFrame) -> dict[str, Any]:
    """Numbers of sampled answers, and how many printed means have their rows in public."""
    by_seed, by_item = comparisons.of_seeds(scores)
    cells = printed.beside_public_scores()
    means = cells[cells.metric.str.startswith("token_f1")]
    return {
        "by_seed": by_seed, "by_item": by_item,
        "low": _printed("lift t0.7 ci95_low"), "high": _printed("lift t0.7 ci95_high"),
        "public": means.same.notna().sum(), "means": len(means),
        "tables": ", ".join(table for table in printed.TABLES if table != "A"),
    }  # fmt: skip


def _of_policies(rows: pd.DataFrame) -> dict[str, Any]:
    """Numbers of what policies do: which items they never reduce, and which outputs are the same."""
    pool = rows[rows["items"] == "longbench-pool"]
    ada = pool[pool.policy == "ada_kv_faithful"]
    never = (ada.evicted == 0).groupby(ada.model_name).sum().sort_values(ascending=False)
    same = comparisons.identical(pool[pool.capacity == 256])
    alike = [f"{row.value:.1%} ({row.model_name}, {row.kv_heads})" for row in same[same.protected].itertuples()]
    credit = rows[(rows.policy == "online_credit") & rows["name"].str.startswith("credit-v2/")]
    calls = credit.groupby("capacity")[["gate_open", "policy_calls"]].sum()
    shares = calls.gate_open / calls.policy_calls
    begun = words.begun_alike(pool)
    panel = words.begun_alike(rows[rows["name"].str.startswith(("confound", "ablation/"))]).set_index("name").value
    return {
        "items": ada["item"].nunique(),
        "never": ", ".join(f"{n} on {name}" for name, n in never.items()),
        "alike": ", ".join(alike),
        "bare": same[~same.protected].iloc[0],
        "gate": ", ".join(f"{share:.0%} at {capacity:.0f}" for capacity, share in shares.items()),
        "unprotected": panel["ablation/q25-c256-lru"],
        "protected": panel["confound-fix/q25-c256-lru-protected"],
        "runs": len(begun),
        "run_items": begun.n.iloc[0],
        "begun": "all do" if begun.value.min() == 1 else f"{begun.value.min():.0%} do or more",
    }


def _of_tests(rows: pd.DataFrame) -> dict[str, Any]:
    """Numbers of the paper's tests: spreads, equivalence, signs."""
    spread = claims.cells(printed.TABLES["11"], {"metric": "spread"}).set_index("model").value.astype(float)
    phi = rows[(rows["items"] == "longbench-balanced") & (rows.model_name == "Phi-3.5-mini-instruct")]
    larger_p = comparisons.compare(phi).query("family == 'policies'").groupby("capacity").tost.max()
    pool = rows[(rows["items"] == "longbench-pool") & (rows.capacity == 256)]
    tested = comparisons.compare(pool).query("what == 'h2o_simple - lru, protected'").sort_values("value")
    signs = [
        f"{row.value:+.4f} on {row.model_name} (p = {row.wilcoxon_holm:.3f})"
        for row in tested.iloc[[0, -1]].itertuples()
    ]
    return {
        "mistral": spread["Mistral-7B-Instruct-v0.3"], "spread": spread.max(), "widest": spread.idxmax(),
        "larger_p": ", ".join(f"{p:.3f} at {capacity:.0f}" for capacity, p in larger_p.items()),
        "n": tested.n.iloc[0], "signs": " and ".join(signs),
    }  # fmt: skip
