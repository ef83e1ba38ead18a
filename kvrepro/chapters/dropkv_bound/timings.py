"""Timings of data/gpu/ beside the paper's: scoring kernel, time to the first token, whole answers, throughput.

A contrast gives what was measured by the member's label. Intervals are those of the timings: p20 to p80 for the kernel,
least to greatest for whole models, and least to median step for decoding, where a single slow step may allocate memory.
"""

from collections.abc import Callable
from functools import partial

import pandas as pd

from kvrepro.experiment import claims
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.experiment.judge import Measured
from kvrepro.paths import GPU

KERNELS, MODELS = GPU / "kernels.csv", GPU / "models.csv"
SCORING = "perturbation, two passes, three kernels"  # all of DropKV's scoring, as the references compute it
REFERENCES = {"plain torch, grouped, lse given": "torch, grouped", "plain torch, repeated heads": "torch, repeated"}
QUERY_HEADS, KV_HEADS, DIM = 32, 8, 128  # of Llama-3.1-8B and Mistral-7B
TORCH = "DropKV, plain PyTorch"
Measurements = dict[str, Measured]


def kernels() -> pd.DataFrame:
    """Timings of scoring at the shape of the paper's models."""
    f = pd.read_csv(KERNELS)
    shape = f"{QUERY_HEADS}/{KV_HEADS}/{DIM}"
    return f[(f.kernel == "window_scores") & (f["shape"] == shape) & (f.batch == 1)]


def speedup(tokens: int = 131072, kernel: str = SCORING) -> Measurements:
    """Speedup of the scoring kernels, or of the row `kernel`, over each way to write the reference."""
    f = kernels().query("tokens == @tokens").set_index("variant")
    ours, rows = f.loc[kernel], {name: f.loc[name] for name in REFERENCES}
    return {
        name: Measured(row.p50_us / ours.p50_us, row.p20_us / ours.p80_us, row.p80_us / ours.p20_us)
        for name, row in rows.items()
    }


def scratch(tokens: int = 131072, kernel: str = SCORING) -> Measurements:
    """Memory that the scoring kernels allocate beside their inputs and scores, MB; counted, so without an interval."""
    megabytes = kernels().query("tokens == @tokens and variant == @kernel").scratch_mib.item() * 2**20 / 1e6
    return {"all": Measured(megabytes, megabytes, megabytes)}


def scratch_share(tokens: int = 131072, kernel: str = SCORING, held: bool = False) -> Measurements:
    """Memory that the scoring kernels allocate over what each reference allocates. held: add a layer's keys and values,
    in bfloat16, on both sides, which gives the call's peak."""
    f = kernels().query("tokens == @tokens").set_index("variant").scratch_mib
    more = 2 * tokens * KV_HEADS * DIM * 2 / 2**20 if held else 0.0
    shares = {name: (f[kernel] + more) / (f[name] + more) for name in REFERENCES}
    return {name: Measured(share, share, share) for name, share in shares.items()}


def models(part: str, device: str = "") -> pd.DataFrame:
    """Rows of a part of the measured table, on one device if it is named. Of a cell that was measured twice, those of
    more runs are taken, or the first."""
    f = pd.read_csv(MODELS).sort_values("runs", ascending=False, kind="stable")
    f = f[(f.part == part) & f.device.str.contains(device, regex=False)]
    where = ["model", "method", "tokens", "batch"]
    return f.drop_duplicates(where).set_index(where)


def latency() -> Measurements:
    """Seconds of a whole answer, DropKV's minus SnapKV's, per batch.

    Both were timed once and decode equally many tokens. They differ by their prefills, one per row of the batch, whose
    least and greatest times give the interval.
    """
    f, differences = models("answer"), {}
    for (model, tokens, batch), row in f.xs("DropKV", level="method").iterrows():
        prefills = models("prefill", row.device)
        a, b = (prefills.loc[(model, name, tokens, 1)] for name in ("DropKV", "SnapKV"))
        middle = row.seconds - f.seconds[model, "SnapKV", tokens, batch]
        low, high = min(middle, batch * (a.low - b.high)), max(middle, batch * (a.high - b.low))
        differences[f"batch {batch}"] = Measured(middle, low, high, row.runs)
    return differences


def first_token() -> Measurements:
    """Time to the first token with DropKV over that with the plain cache, at the paper's model and length."""
    f = models("prefill")
    ours, plain = (f.loc["Mistral-7B", method, 32768, 1] for method in ("DropKV", PLAIN))
    return {"Mistral-7B, 32768": Measured(*claims.over(ours, plain))}


def prefill_gain() -> Measurements:
    """By what share a prefill is slower when DropKV scores in plain PyTorch instead of with the fused kernel."""
    f, gains = models("prefill"), {}
    for (model, tokens, batch), row in f.xs(TORCH, level="method").iterrows():
        value, low, high, n = claims.over(row, f.loc[model, "DropKV", tokens, batch])
        gains[f"{model}, {tokens}"] = Measured(value - 1, low - 1, high - 1, n)
    return gains


def throughput(slowest: bool = False) -> Measurements:
    """Tokens per second with 5% kept over those with a full cache, each at its largest batch, per model and length.

    The full cache is plain, and in the engine that decodes the 5%: a gain due to eviction shows in both. The interval
    goes from the fastest to the median step of each side; slowest: to the slowest, over the plain cache alone.
    """
    f, gains = models("decode").reset_index(), {}
    best = f.loc[f.groupby(["model", "method", "tokens"], sort=False).batch.idxmax()].set_index("method")
    for against, name in [(PLAIN, "plain cache"), (KEPT, "everything kept")][: 1 if slowest else 2]:
        for (model, tokens), cell in best.groupby(["model", "tokens"], sort=False):
            gain = claims.over(cell.loc[against], cell.loc["5% kept"], "high" if slowest else "seconds")
            gains[f"{model}, {tokens}, over {name}"] = Measured(*gain)
    return gains


# by contrast of a claim: the function that gives its members, and what the interval is
CONTRASTS: dict[str, tuple[Callable[..., Measurements], str]] = {
    "gpu_speedup": (speedup, "p20 to p80 of timings"),
    "gpu_scratch": (scratch, "counted"),
    "gpu_scratch_share": (scratch_share, "counted"),
    "gpu_peak_share": (partial(scratch_share, held=True), "counted"),
    "gpu_latency": (latency, "least to greatest timing"),
    "gpu_first_token": (first_token, "least to greatest timing"),
    "gpu_prefill_gain": (prefill_gain, "least to greatest timing"),
    "gpu_throughput": (throughput, "least to median step"),
    "gpu_throughput_of_steps": (partial(throughput, slowest=True), "least to greatest step"),
}
