"""What DefensiveKV costs, from timings on a GPU that are stored with the project: ratios, each with its range."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from kvrepro.experiment import claims
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.experiment.judge import Measured
from kvrepro.paths import GPU

MODEL, FIFTH = "Llama-3.1-8B", 0.2
DEFENSIVE_PLAIN = "DefensiveKV, plain PyTorch"
FULL = {"transformers' full cache": PLAIN, "this engine's full cache": KEPT}
SCORING_MEAN, SCORING_MAX = "attention mean mean", "attention max max"  # timings of the fused scoring kernel


def _measured(part: str, method: str, share: float, tokens: int | None = None) -> pd.DataFrame:
    """One method's timings of `MODEL` at `tokens`, or else at the longest context; smallest batch first."""
    f = pd.read_csv(GPU / "models.csv")
    f = f[(f.part == part) & (f.model == MODEL) & (f.method == method) & np.isclose(f["share"], share)]
    return f[f.tokens == (f.tokens.max() if tokens is None else tokens)].sort_values("batch")


def scoring_ratio() -> dict[str, Measured]:
    """Scoring time, largest over mean, of one kernel at the longest context that has both; 20th, 80th percentiles."""
    table = pd.read_csv(GPU / "kernels.csv").query("kernel == 'window_scores'")
    table = table.rename(columns={"p20_us": "low", "p50_us": "seconds", "p80_us": "high"})
    table = table.groupby(["variant", "tokens"])[["low", "seconds", "high"]].mean()
    mean, largest = table.loc[SCORING_MEAN], table.loc[SCORING_MAX]
    tokens = mean.index.intersection(largest.index).max()
    return {f"{tokens} tokens": Measured(*claims.over(largest.loc[tokens], mean.loc[tokens]))}


def first_token_ratio() -> dict[str, Measured]:
    """Time to the first token, DefensiveKV over CriticalKV in one engine and backend, at each model, context and
    reading that has both."""
    f = pd.read_csv(GPU / "first_token.csv")
    f = f[(f.part == "first") & np.isclose(f["share"], FIFTH)].set_index(["model", "tokens", "backend", "method"])
    timed = {}
    for model, tokens, backend, method in f.index[f.index.get_level_values("method").str.startswith("defensive_kv,")]:
        other = (model, tokens, backend, method.replace("defensive_kv", "critical_kv"))
        if other in f.index:
            reading = claims.LABELS[method.partition(", ")[2].replace(" ", "_")]
            top, bottom = f.loc[(model, tokens, backend, method)], f.loc[other]
            timed[f"{model}, {tokens} tokens, {reading}"] = Measured(*claims.over(top, bottom))
    return timed


def decode_ratio(batch: int = 0, slowest: bool = False) -> dict[str, Measured]:
    """Time of a token at the longest context, full cache over a fifth of it, at the smallest batch (-1: largest).

    The interval goes from the fastest to the median step of each side. slowest: to the slowest, a single step in fifty
    that may allocate memory.
    """
    ours = _measured("decode", "20% kept", FIFTH).iloc[batch]
    theirs = {label: _measured("decode", name, 1.0, ours.tokens).iloc[batch] for label, name in FULL.items()}
    upper = "high" if slowest else "seconds"
    return {label: Measured(*claims.over(full, ours, upper)) for label, full in theirs.items()}


def peak_ratio() -> dict[str, Measured]:
    """Peak memory at the longest context, one request: a fifth over either full cache."""
    ratios = {}
    for label, part, method in (("prefill", "prefill", DEFENSIVE_PLAIN), ("decoding", "decode", "20% kept")):
        ours = _measured(part, method, FIFTH).iloc[0]
        for against, name in FULL.items():
            value = float(ours.peak_gib / _measured(part, name, 1.0, ours.tokens).iloc[0].peak_gib)
            ratios[f"{label}, over {against}"] = Measured(value, value, value)
    return ratios


CONTRASTS: dict[str, Callable[[], dict[str, Measured]]] = {  # what claims are about: each gives its members
    "scoring_ratio": scoring_ratio,
    "first_token_ratio": first_token_ratio,
    "decode_ratio": decode_ratio,
    "throughput_ratio": partial(decode_ratio, -1),  # tokens per second, a fifth over the full cache
    "peak_ratio": peak_ratio,
    "decode_ratio_of_steps": partial(decode_ratio, slowest=True),
    "throughput_ratio_of_steps": partial(decode_ratio, -1, slowest=True),
}
