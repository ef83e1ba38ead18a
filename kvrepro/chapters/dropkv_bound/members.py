"""What the claims about DropKV's bound are tested on (`experiment.members`): tables by triple, by item, and of timings.

Whole prompts are resampled, since the triples of one prompt are not independent. Timings are those of data/gpu/, beside
the paper's. Their intervals: p20 to p80 for the kernel; least to greatest for whole models; least to median step for
decoding, where a single slow step may allocate memory.
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
import pandas as pd
import torch

from kvrepro.chapters.dropkv_bound import bound, study
from kvrepro.chapters.dropkv_bound.study import WHERE, Settings
from kvrepro.chapters.dropkv_bound.triples import STRATA
from kvrepro.experiment import claims, judge, prompt
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.members import Case
from kvrepro.experiment.models import Loaded
from kvrepro.paths import GPU
from kvrepro.world import ruler

K = 200  # in theorem 1's factor
HARD_K = 10  # in the claims about pairs of rules
ITEMS: dict[str, Iterable[str]] = {"longbench": prompt.LONGBENCH, "ruler": ruler.TASKS}
KEYS = ["item", *WHERE, "stratum", "k", "objective"]
KERNELS, MODELS = GPU / "kernels.csv", GPU / "models.csv"
SCORING = "perturbation, two passes, three kernels"  # all of DropKV's scoring, as the references compute it
REFERENCES = {"plain torch, grouped, lse given": "torch, grouped", "plain torch, repeated heads": "torch, repeated"}
KV_HEADS, DIM, SHAPE = 8, 128, "32/8/128"  # of Llama-3.1-8B and Mistral-7B
TORCH = "DropKV, plain PyTorch"


# ---------------------------------------------------------------- triples


def with_factor(assumptions: pd.DataFrame) -> pd.DataFrame:
    """The triples with columns `holds`, whether they have a cone, and `factor`, theorem 1's constant for sets of `K`
    keys; infinite if an assumption fails."""
    c, eps = (torch.tensor(assumptions[name].to_list(), dtype=torch.float64) for name in ("c_low", "eps"))
    return assumptions.assign(holds=assumptions.c_low > bound.ORIGIN, factor=bound.factor(c, eps, K).numpy())


def selected(records: pd.DataFrame) -> pd.DataFrame:
    """Records of DropKV's rule for one query, on the paper's four strata."""
    return records[records.stratum.isin(STRATA)].query("rule == 'dropkv' and queries == 1 and objective == 'query'")


def beside(rows: pd.DataFrame, records: pd.DataFrame, rule: str, queries: int) -> pd.DataFrame:
    """Rows with `ratio_<rule>`, the ratio of another rule that chooses among the same keys."""
    other = records.query("rule == @rule and queries == @queries")
    return rows.merge(other[[*KEYS, "ratio"]].rename(columns={"ratio": f"ratio_{rule}"}), "left", on=KEYS)


def disagreement(alignment: pd.DataFrame) -> pd.DataFrame:
    """A row per triple and stratum, about the 20 keys of its pool whose values are nearest to the output, or most
    aligned with it. kept: share of the ten keys that DropKV evicts and AnDPro keeps; distance: the largest
    ||a - v_j|| / ||a||."""
    of_triple = ["item", *WHERE, "stratum"]
    by = alignment.groupby(of_triple)
    rank, half = by[["andpro", "dropkv"]].rank(method="first"), by.distance.transform("size") / 2
    rows = alignment.assign(kept=(rank.andpro > half).astype(float).where(rank.dropkv <= half))
    return rows.groupby(of_triple, as_index=False).agg(kept=("kept", "mean"), distance=("distance", "max"))


def of_triples(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """pools: a row per triple and pool. layers: per item, pool and kind of layer. records: DropKV's for one query.
    slack: a record and a pool. rules: another rule's record, both observing the window. near: a triple and one of the
    strata near and aligned. weights, ways: a triple, stratum and k, with one way to weigh a key or with all."""
    pools = with_factor(tables["assumptions"]).eval("even = eps * tokens")
    pools = pools.assign(finite=np.isfinite(pools.factor), first=pools.layer == 0)
    layers = pools.groupby(["item", "pool", "first"], as_index=False).agg(holds=("holds", "mean"), n=("holds", "size"))
    layers["n"] = layers.n.where(layers["first"])
    every, window = tables["records"], tables["records"].queries.max()
    records = beside(beside(selected(every), every, "attention", 1), every, "random", 1)
    records = records.assign(finite=np.isfinite(records.bound), hard=records.stratum == "threshold")
    records = records.assign(of_bound=(records.ratio / records.bound).where(records.finite))
    records = records.eval("slack = bound / ratio")
    slack = records.drop(columns="k").merge(pools[pools.finite][["item", *WHERE, "pool", "factor"]])
    others = every[every.stratum.isin(STRATA)].query("queries == @window and rule != 'dropkv'")
    rules = beside(others, every, "dropkv", window).rename(columns={"rule": "policy"})
    one = beside(every.query("rule == 'dropkv' and queries == 1 and k == @HARD_K"), every, "andpro", 1)
    one = one.eval("log = log(ratio_andpro) - log(ratio)")[["item", *WHERE, "stratum", "log"]]
    wide = tables["weights"].query("k == @HARD_K")
    wide = wide.pivot_table(index=["item", *WHERE, "stratum"], columns="way", values=["window", "projected"])
    log = np.log(wide.clip(lower=1e-300))
    ways = {
        "linear": log["window", "linear"] - log["window", "squared"],
        "before": log["projected", "squared"] - log["projected", "projected"],
    }
    return {
        "pools": pools,
        "layers": layers,
        "records": records,
        "slack": slack.eval("slack = factor / ratio"),
        "rules": rules.eval("log = log(ratio) - log(ratio_dropkv)"),
        "near": disagreement(tables["alignment"]).merge(one, "left"),
        "weights": tables["weights"].astype({"same_alone": float}),
        "ways": pd.DataFrame(ways).reset_index(),
    }


# ---------------------------------------------------------------- answers


def of_answers(answers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """answers: at the length at which all methods were run. lengths: at the longest and the shortest."""
    rows = answers.assign(
        policy=answers.method,
        points=100 * answers.score,
        share=answers["share"].where(answers.method != "full"),
        longest=answers.length == answers.length.max(),
    )
    shortest, longest = rows.length.min(), rows.length.max()
    return {"answers": study.main(rows), "lengths": rows[rows.length.isin([shortest, longest]) & (shortest < longest)]}


def answered(case: Case) -> None:
    """Raise NotTestable unless the answers are to the items of the claim, as long as it wants, and mostly right."""
    rows, claim = case.table.rows, case.claim
    if "items" in claim and not set(rows.task) <= set(ITEMS[claim["items"]]):
        raise NotTestable(f"{claim['why']} Give -p items {claim['items']} with a model of the hub.")
    if rows.prompt_tokens.mean() < claim.get("prompt_tokens", 0):
        lengths = f"{claim['prompt_tokens']} tokens wanted, {rows.prompt_tokens.mean():.0f} run"
        raise NotTestable(f"{claim['why']} Prompts of {lengths}: give such a file with -p items, and -p tokens.")
    full = rows[rows.policy == "full"]
    judge.answers_enough(full.score, full.get("error"))


# ---------------------------------------------------------------- timings


def kernels() -> pd.DataFrame:
    """Timings of scoring at the shape of the paper's models."""
    return pd.read_csv(KERNELS).query("kernel == 'window_scores' and shape == @SHAPE and batch == 1")


def speedups() -> pd.DataFrame:
    """By kernel, prompt length and way to write the reference: how much faster the kernel is, and what share of memory
    it allocates, alone (`scratch`) and with the keys and values of a layer in bfloat16 (`peak`)."""
    f, ours = kernels(), ~kernels().variant.isin(REFERENCES)
    f = f[ours].merge(f[~ours], on=["tokens", "device", "dtype"], suffixes=("", "_reference"))
    held = 2 * f.tokens * KV_HEADS * DIM * 2 / 2**20
    return f.assign(
        value=f.p50_us_reference / f.p50_us,
        low=f.p20_us_reference / f.p80_us,
        high=f.p80_us_reference / f.p20_us,
        runs=math.nan,
        scratch=f.scratch_mib / f.scratch_mib_reference,
        peak=(f.scratch_mib + held) / (f.scratch_mib_reference + held),
    )


def models(part: str, device: str = "") -> pd.DataFrame:
    """Rows of a part of the measured table, on one device if it is named. Of a cell that was measured twice, those of
    more runs are taken, or the first."""
    where = ["model", "method", "tokens", "batch"]
    f = pd.read_csv(MODELS).query("part == @part and device.str.contains(@device, regex=False)")
    return f.sort_values("runs", ascending=False, kind="stable").drop_duplicates(where).set_index(where)


def of_models() -> pd.DataFrame:
    """By what was timed, and in which cell of the measured table: how DropKV compares, with its range and runs.
    first_token: its time over the plain cache's. prefill_gain: by what share a prefill is slower that scores in plain
    PyTorch. latency: seconds of a whole answer, minus SnapKV's. Both were timed once and decode equally many tokens;
    the least and greatest times of their prefills, one per row of the batch, give the range. throughput: tokens per
    second with 5% kept over those with a full cache, plain or in the same engine, each at its largest batch, from the
    fastest to the median step of each side; throughput_of_steps: to the slowest."""
    prefills, answers, rows = models("prefill"), models("answer"), []
    paper = (prefills.loc["Mistral-7B", method, 32768, 1] for method in ("DropKV", PLAIN))
    rows.append(("first_token", "Mistral-7B, 32768", *claims.over(*paper)))
    for (model, tokens, batch), row in prefills.xs(TORCH, level="method").iterrows():
        value, low, high, n = claims.over(row, prefills.loc[model, "DropKV", tokens, batch])
        rows.append(("prefill_gain", f"{model}, {tokens}", value - 1, low - 1, high - 1, n))
    for (model, tokens, batch), row in answers.xs("DropKV", level="method").iterrows():
        of_device = models("prefill", row.device)
        a, b = (of_device.loc[model, name, tokens, 1] for name in ("DropKV", "SnapKV"))
        middle = row.seconds - answers.seconds[model, "SnapKV", tokens, batch]
        low, high = min(middle, batch * (a.low - b.high)), max(middle, batch * (a.high - b.low))
        rows.append(("latency", f"batch {batch}", middle, low, high, row.runs))
    steps = models("decode").reset_index()
    best = steps.loc[steps.groupby(["model", "method", "tokens"], sort=False).batch.idxmax()].set_index("method")
    for against, name in ((PLAIN, "plain cache"), (KEPT, "everything kept")):
        for (model, tokens), cell in best.groupby(["model", "tokens"], sort=False):
            for what, upper in (("throughput", "seconds"), ("throughput_of_steps", "high")):
                gain = claims.over(cell.loc[against], cell.loc["5% kept"], upper)
                rows.append((what, f"{model}, {tokens}, over {name}", *gain))
    return pd.DataFrame(rows, columns=["what", "cell", "value", "low", "high", "runs"])


# ---------------------------------------------------------------- contrasts


def median_gap(values: np.ndarray) -> float:
    """Median of the first column where the second is true, minus that where it is false; nan if one side is empty."""
    held = values[:, 1] > 0
    return float(np.median(values[held, 0]) - np.median(values[~held, 0])) if 0 < held.mean() < 1 else np.nan


STATISTICS = {
    "median": lambda values: float(np.median(values[:, 0])),
    "p95": lambda values: float(np.quantile(values[:, 0], 0.95)),
    "p95_over_median": lambda values: float(np.quantile(values[:, 0], 0.95)) / float(np.median(values[:, 0])),
    "median_difference": lambda values: float(np.median(values[:, 0]) - np.median(values[:, 1])),
    "median_gap": median_gap,
}
CONTRASTS = {name: partial(Case.sample, contrast=statistic) for name, statistic in STATISTICS.items()}
REQUIRES = {"answered": answered}


def tidied(tables: Mapping[str, pd.DataFrame], loaded: Loaded, settings: Settings) -> dict[str, pd.DataFrame]:
    """The tables that claims read: those of the run's triples and answers, and of the stored timings."""
    megabytes = kernels().eval("megabytes = scratch_mib * 2**20 / 1e6")
    tidy = {"kernels": megabytes, "speedups": speedups(), "timings": of_models()}
    tidy |= of_triples(tables) if "records" in tables else {}
    return tidy | (of_answers(tables["answers"]) if "answers" in tables else {})
