"""The rows that the claims about DefensiveKV choose from (`kvrepro.experiment.members`), and what these compute: of a
run, of the theorems of appendix C, and of timings on a GPU that are stored with the project."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
    stored timings, and `theory`, every case of what appendix C proves. In `quality` past queries are a column `window`
    and no change; the full cache has no condition, and policies other than the defensive ones no reading."""
    run = {"gpu": timings(), "theory": theorems()}
    if "retained" in tables:
        summary = tables["retained"]
        six = summary.task.isin([*STAND_INS, *DATASETS])
        run["retained"] = summary.assign(six=six | ~six.any(), token=summary.setting.str.startswith(TOKEN))
    if "quality" in tables:
        rows, full = tables["quality"], tables["quality"].policy == "full"
        windows = rows.change.str.extract(r"^window (\d+)$")[0].astype(float)
        change = rows.change.mask(windows.notna(), "none").mask(full)
        reading = rows.reading.where(rows.policy.isin(DEFENSIVE))
        choices = {"change": change, "window": windows.fillna(WINDOW).mask(full), "reading": reading}
        run["quality"] = rows.assign(**choices, experts=has_experts(loaded.model))
    return run


# ---------------------------------------------------------------- what a claim needs


def check_answers(case: Case) -> None:
    full = case.table.fitting({"policy": "full", "part": case.claim["filter"].get("part")})
    judge.answers_enough(full.score, full.get("error"))


def check_experts(case: Case) -> None:
    if not case.table.rows.experts.all():
        raise NotTestable("not a mixture of experts")


def check_window(case: Case) -> None:
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
    """Definition 2 with uniform parts: with probability `eps` importance lies in [spike, risk], else in [0, low], where
    0 < eps < 1 and 0 < low <= spike < risk. `risk` is the true risk R, the largest importance that the future can bring
    (definition 1)."""

    eps: float = 0.02
    low: float = 0.1
    spike: float = 0.6
    risk: float = 1.0


def bias_of_mean(x: Mixture) -> float:
    """R - E[mean] = R - (1 - eps) mu_low - eps mu_high, whatever the window. Source: theorem 1."""
    return x.risk - (1 - x.eps) * x.low / 2 - x.eps * (x.spike + x.risk) / 2


def bias_of_max(x: Mixture, window: int) -> float:
    """R - E[max], exactly: the integral of F^m over [0, R], with F the mixture's distribution function."""
    stay = (1 - x.eps) ** window  # chance that no past query shows the spike (proof 2)
    rise = (x.risk - x.spike) * (1 - stay * (1 - x.eps)) / (x.eps * (window + 1))
    return stay * (x.low / (window + 1) + x.spike - x.low) + rise


def theorems() -> pd.DataFrame:
    """What appendix C proves, for each case of a grid of mixtures: columns theorem, case, value, which must be above 0.

    theorem_1: growth of the mean's bias when spikes are half as frequent. theorem_2: the mean's bias minus that of the
    largest, for 2 to 128 past queries. limit: R - mu_low, the mean's as spikes vanish, which the text calls negative.
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


def timings() -> pd.DataFrame:
    """The ratios of timings that claims are about: columns measure, label, value, low, high, runs."""
    columns = ["measure", "label", "value", "low", "high", "runs"]
    return pd.DataFrame([*scoring(), *first_tokens(), *costs()], columns=columns)


def scoring() -> Iterator[tuple]:
    """Scoring time, largest over mean, of one kernel at the longest context that has both; 20th, 80th percentiles."""
    table = pd.read_csv(GPU / "kernels.csv").query("kernel == 'window_scores'").groupby(["variant", "tokens"])
    table = table[["p20_us", "p50_us", "p80_us"]].mean().set_axis(["low", "seconds", "high"], axis=1)
    mean, largest = table.loc[SCORING_MEAN], table.loc[SCORING_MAX]
    tokens = mean.index.intersection(largest.index).max()
    yield "scoring_ratio", f"{tokens} tokens", *claims.over(largest.loc[tokens], mean.loc[tokens])


def first_tokens() -> Iterator[tuple]:
    """Time to the first token, DefensiveKV over CriticalKV in one engine and backend, at each model, context and
    reading that has both."""
    f = pd.read_csv(GPU / "first_token.csv").query("part == 'first'")
    f = f[np.isclose(f["share"], FIFTH)].set_index(["model", "tokens", "backend", "method"])
    for at in f.index:
        other = (*at[:3], at[3].replace("defensive", "critical"))
        if at[3].startswith("defensive_kv,") and other in f.index:
            reading = claims.LABELS[at[3].partition(", ")[2].replace(" ", "_")]
            yield "first_token_ratio", f"{at[0]}, {at[1]} tokens, {reading}", *claims.over(f.loc[at], f.loc[other])


def costs() -> Iterator[tuple]:
    """At the longest context, a fifth of the cache against either full cache: time of a token at the smallest batch,
    throughput at the largest, and peak memory of one request. The interval goes from the fastest to the median step of
    each side; "of steps" to the slowest, a single step in fifty that may allocate memory."""
    f = pd.read_csv(GPU / "models.csv").query("model == @MODEL").sort_values("batch", kind="stable")
    fifth, whole = f[np.isclose(f["share"], FIFTH)], f[f["share"] == 1]
    for what, part, method in (("decoding", "decode", "20% kept"), ("prefill", "prefill", DEFENSIVE_PLAIN)):
        ours = fifth[(fifth.part == part) & (fifth.method == method)]
        ours = ours[ours.tokens == ours.tokens.max()]
        for label, name in FULL.items():
            full = whole[(whole.part == part) & (whole.method == name) & (whole.tokens == ours.tokens.max())]
            for measure, batch in (("decode_ratio", 0), ("throughput_ratio", -1)) if part == "decode" else ():
                pair = full.iloc[batch], ours.iloc[batch]
                yield measure, label, *claims.over(*pair, "seconds")
                yield f"{measure}_of_steps", label, *claims.over(*pair, "high")
            value = float(ours.iloc[0].peak_gib / full.iloc[0].peak_gib)
            yield "peak_ratio", f"{what}, over {label}", value, value, value, None
