"""Contrasts that no row of this run enters: the theorems of appendix C, and what DefensiveKV costs on a GPU.

The theorems are about an entry of the cache that is unimportant except for rare spikes. The costs are ratios of timings
that are stored with the project, each with its range.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pandas as pd

from kvrepro.experiment import claims
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.paths import GPU


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
