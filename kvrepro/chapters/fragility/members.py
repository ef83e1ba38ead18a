"""The rows that the claims about DefensiveKV choose from (`kvrepro.experiment.members`), and what these compute.

The theorems of appendix C are about an entry of the cache that is unimportant except for rare spikes; no row of a run
enters them, nor what DefensiveKV costs on a GPU: ratios of timings stored with the project, each with its range.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility.retention import TOKEN
from kvrepro.chapters.fragility.study import DATASETS, DEFENSIVE, STAND_INS, has_window
from kvrepro.engine.policy import is_own
from kvrepro.experiment import claims, judge
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.experiment.judge import NotTestable, Sample
from kvrepro.experiment.members import Case
from kvrepro.paths import GPU

WINDOW = 32  # past queries, where a row does not say otherwise


def has_experts(model: Any) -> bool:
    """Whether the model is a mixture of experts."""
    config = model.config.get_text_config()
    return any((getattr(config, f"num_{kind}experts", 0) or 0) > 1 for kind in ("", "local_", "routed_"))


def tidied(tables: Mapping[str, pd.DataFrame], loaded: Any, settings: Any) -> dict[str, pd.DataFrame]:
    """The tables that claims choose from: `retained` (its summary) and `quality` as far as they were run; `gpu`, the
    stored timings, and `theory`, every case of what appendix C proves."""
    run = {"gpu": timings(), "theory": theorems()}
    if "retained" in tables:
        summary = tables["retained"]
        six = summary.task.isin([*STAND_INS, *DATASETS])
        run["retained"] = summary.assign(six=six | ~six.any(), token=summary.setting.str.startswith(TOKEN))
    if "quality" in tables:
        run["quality"] = _of_quality(tables["quality"]).assign(experts=has_experts(loaded.model))
    return run


def _of_quality(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `window`, no change of the window among the changes. The full cache has no condition, and
    policies other than the defensive ones no reading."""
    windows = rows.change.str.extract(r"^window (\d+)$")[0]
    change = rows.change.mask(windows.notna(), "none").mask(rows.policy == "full")
    reading = rows.reading.where(rows.policy.isin(DEFENSIVE))
    window = windows.fillna(WINDOW).astype(float).mask(rows.policy == "full")
    return rows.assign(change=change, window=window, reading=reading)


# ---------------------------------------------------------------- what a claim needs


def check_answers(case: Case) -> None:
    """The model answers with its full cache, over all tasks."""
    full = case.table.fitting({"policy": "full", "part": case.claim["filter"].get("part")})
    judge.answers_enough(full.score, full.get("error"))


def check_experts(case: Case) -> None:
    """The model is a mixture of experts."""
    if not case.table.rows.experts.all():
        raise NotTestable("not a mixture of experts")


def check_window(case: Case) -> None:
    """A policy of the reader's own looks at a window of past queries."""
    policy = case.claim["filter"].get("policy", "")
    if is_own(policy) and not has_window(policy):
        raise NotTestable("it looks at no window of past queries")


REQUIRES = {"answers": check_answers, "experts": check_experts, "window": check_window}


# ---------------------------------------------------------------- what a claim computes


def wins(case: Case) -> Sample:
    """A row per task: 1 where a's mean score is above b's, 0 where it is below, a half where they tie."""
    task = case.table.rows.drop_duplicates("item").set_index("item").task
    frame = case.frame()
    gain = (frame.a - frame.b).dropna().groupby(task).mean().round(9)
    return case.sample("mean", pd.DataFrame({"a": (1 + np.sign(gain)) / 2}))


CONTRASTS = {"wins": wins}


# ---------------------------------------------------------------- the theorems of appendix C


@dataclass(frozen=True)
class Mixture:
    """Definition 2 with uniform parts: with probability `eps` importance lies in [spike, risk], else in [0, low].

    `risk` is the true risk R, the largest importance that the future can bring (definition 1). 0 < eps < 1 and
    0 < low <= spike < risk.
    """

    eps: float = 0.02
    low: float = 0.1
    spike: float = 0.6
    risk: float = 1.0


def bias_of_mean(x: Mixture) -> float:
    """R - E[mean] = R - (1 - eps) mu_low - eps mu_high, whatever the window; it tends to R - mu_low as eps to 0.

    The paper calls that limit a large negative value; R - mu_low is positive. Source: theorem 1.
    """
    return x.risk - (1 - x.eps) * x.low / 2 - x.eps * (x.spike + x.risk) / 2


def bias_of_max(x: Mixture, window: int) -> float:
    """R - E[max], exactly: the integral of F^m over [0, R], with F the mixture's distribution function."""
    stay = (1 - x.eps) ** window  # chance that no past query shows the spike (proof 2)
    rise = (x.risk - x.spike) * (1 - stay * (1 - x.eps)) / (x.eps * (window + 1))
    return stay * (x.low / (window + 1) + x.spike - x.low) + rise


def theorems() -> pd.DataFrame:
    """What appendix C proves, for each case of a grid of mixtures: columns theorem, case, value, which must be above 0.

    theorem_1: growth of the mean's bias when spikes are half as frequent. theorem_2: the mean's bias minus that of the
    largest, for 2 to 128 past queries. limit: the mean's bias as spikes vanish, which the text calls negative.
    """
    axes = (0.001, 0.01, 0.1, 0.4), (0.05, 0.3), (0.3, 0.8), (0.9, 3.0)  # eps, low, spike, risk
    rows: list[tuple[str, str, float]] = []
    for x in itertools.starmap(Mixture, itertools.product(*axes)):
        mean = bias_of_mean(x)
        rows.append(("theorem_1", str(x), bias_of_mean(replace(x, eps=x.eps / 2)) - mean))
        rows += [("theorem_2", f"{x}, {m} queries", mean - bias_of_max(x, m)) for m in (2, 8, 32, 128)]
        rows.append(("limit", str(x), x.risk - x.low / 2))
    return pd.DataFrame(rows, columns=["theorem", "case", "value"])


# ---------------------------------------------------------------- timings

MODEL, FIFTH = "Llama-3.1-8B", 0.2
DEFENSIVE_PLAIN = "DefensiveKV, plain PyTorch"
FULL = {"transformers' full cache": PLAIN, "this engine's full cache": KEPT}
SCORING_MEAN, SCORING_MAX = "attention mean mean", "attention max max"  # timings of the fused scoring kernel
Ratio: TypeAlias = tuple[str, str, float, float, float, float | None]  # measure, label, value, low, high, runs


def timings() -> pd.DataFrame:
    """The ratios of timings that claims are about: columns measure, label, value, low, high, runs."""
    ratios = [*scoring(), *first_tokens(), *decoding(), *peaks()]
    return pd.DataFrame(ratios, columns=["measure", "label", "value", "low", "high", "runs"])


def scoring() -> Iterator[Ratio]:
    """Scoring time, largest over mean, of one kernel at the longest context that has both; 20th, 80th percentiles."""
    table = pd.read_csv(GPU / "kernels.csv").query("kernel == 'window_scores'")
    table = table.rename(columns={"p20_us": "low", "p50_us": "seconds", "p80_us": "high"})
    table = table.groupby(["variant", "tokens"])[["low", "seconds", "high"]].mean()
    mean, largest = table.loc[SCORING_MEAN], table.loc[SCORING_MAX]
    tokens = mean.index.intersection(largest.index).max()
    yield "scoring_ratio", f"{tokens} tokens", *claims.over(largest.loc[tokens], mean.loc[tokens])


def first_tokens() -> Iterator[Ratio]:
    """Time to the first token, DefensiveKV over CriticalKV in one engine and backend, at each model, context and
    reading that has both."""
    f = pd.read_csv(GPU / "first_token.csv")
    f = f[(f.part == "first") & np.isclose(f["share"], FIFTH)].set_index(["model", "tokens", "backend", "method"])
    for model, tokens, backend, method in f.index[f.index.get_level_values("method").str.startswith("defensive_kv,")]:
        ours, other = (
            (model, tokens, backend, method),
            (model, tokens, backend, method.replace("defensive", "critical")),
        )
        if other in f.index:
            reading = claims.LABELS[method.partition(", ")[2].replace(" ", "_")]
            yield "first_token_ratio", f"{model}, {tokens} tokens, {reading}", *claims.over(f.loc[ours], f.loc[other])


def _measured(part: str, method: str, share: float, tokens: int | None = None) -> pd.DataFrame:
    """One method's timings of `MODEL` at `tokens`, or else at the longest context; smallest batch first."""
    f = pd.read_csv(GPU / "models.csv")
    f = f[(f.part == part) & (f.model == MODEL) & (f.method == method) & np.isclose(f["share"], share)]
    return f[f.tokens == (f.tokens.max() if tokens is None else tokens)].sort_values("batch")


def decoding() -> Iterator[Ratio]:
    """Time of a token at the longest context, full cache over a fifth of it, at the smallest batch; throughput at the
    largest, a fifth over the full cache.

    The interval goes from the fastest to the median step of each side; "of steps" to the slowest, a single step in
    fifty that may allocate memory.
    """
    for measure, batch in (("decode_ratio", 0), ("throughput_ratio", -1)):
        ours = _measured("decode", "20% kept", FIFTH).iloc[batch]
        for label, name in FULL.items():
            full = _measured("decode", name, 1.0, ours.tokens).iloc[batch]
            yield measure, label, *claims.over(full, ours, "seconds")
            yield f"{measure}_of_steps", label, *claims.over(full, ours, "high")


def peaks() -> Iterator[Ratio]:
    """Peak memory at the longest context, one request: a fifth over either full cache."""
    for label, part, method in (("prefill", "prefill", DEFENSIVE_PLAIN), ("decoding", "decode", "20% kept")):
        ours = _measured(part, method, FIFTH).iloc[0]
        for against, name in FULL.items():
            value = float(ours.peak_gib / _measured(part, name, 1.0, ours.tokens).iloc[0].peak_gib)
            yield "peak_ratio", f"{label}, over {against}", value, value, value, None
