"""Timings of data/gpu/ beside the paper's: scoring kernel, time to the first token, whole answers, throughput.

Members of a claim have columns member, value, low, high and n, the number of separate runs (NaN: counted, or replays of
a kernel). The interval is that of the timings: p20 to p80 for the kernel, least to greatest for whole models, and least
to median step for decoding, where a single slow step may allocate memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from kvrepro.experiment import claims
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.paths import GPU

KERNELS, MODELS = GPU / "kernels.csv", GPU / "models.csv"
SCORING = "perturbation, two passes, three kernels"  # all of DropKV's scoring, as the references compute it
REFERENCES = {"plain torch, grouped, lse given": "torch, grouped", "plain torch, repeated heads": "torch, repeated"}
SHAPE = "32/8/128"  # query heads, KV heads, dimensions: Llama-3.1-8B, Mistral-7B
TORCH = "DropKV, plain PyTorch"


def _frame(rows: Sequence[tuple]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["member", "value", "low", "high", "n"]).astype({"n": float})


def kernels(file: Path = KERNELS) -> pd.DataFrame:
    """Timings of scoring at the shape of the paper's models."""
    f = pd.read_csv(file)
    return f[(f.kernel == "window_scores") & (f["shape"] == SHAPE) & (f.batch == 1)]


def speedup(file: Path = KERNELS, tokens: int = 131072, kernel: str = SCORING) -> pd.DataFrame:
    """Speedup of the scoring kernels, or of the row `kernel`, over each way to write the reference."""
    f = kernels(file)
    f = f[f.tokens == tokens].set_index("variant")
    ours = f.loc[kernel]
    low, middle, high = f.p20_us / ours.p80_us, f.p50_us / ours.p50_us, f.p80_us / ours.p20_us
    return _frame([(name, middle[name], low[name], high[name], None) for name in REFERENCES])


def scratch(file: Path = KERNELS, tokens: int = 131072, kernel: str = SCORING) -> pd.DataFrame:
    """Memory that the scoring kernels allocate beside their inputs and scores, MB; counted, so without an interval."""
    f = kernels(file)
    megabytes = f[(f.tokens == tokens) & (f.variant == kernel)].scratch_mib.item() * 2**20 / 1e6
    return _frame([("all", megabytes, megabytes, megabytes, None)])


def scratch_share(
    file: Path = KERNELS, tokens: int = 131072, kernel: str = SCORING, held: bool = False
) -> pd.DataFrame:
    """Memory that the scoring kernels allocate over what each reference allocates. held: add a layer's keys and values,
    in bfloat16, on both sides, which gives the call's peak."""
    f = kernels(file)
    f = f[f.tokens == tokens].set_index("variant").scratch_mib
    _, kv_heads, dim = map(int, SHAPE.split("/"))
    more = 2 * tokens * kv_heads * dim * 2 / 2**20 if held else 0.0
    shares = {name: (f[kernel] + more) / (f[name] + more) for name in REFERENCES}
    return _frame([(name, value, value, value, None) for name, value in shares.items()])


def models(part: str, file: Path = MODELS, device: str = "") -> pd.DataFrame:
    """Rows of a part of the measured table, on one device if it is named. Of a cell that was measured twice, those of
    more runs are taken, or the first."""
    f = pd.read_csv(file).sort_values("runs", ascending=False, kind="stable")
    f = f[(f.part == part) & f.device.str.contains(device, regex=False)]
    where = ["model", "method", "tokens", "batch"]
    return f.drop_duplicates(where).set_index(where)


def latency(file: Path = MODELS) -> pd.DataFrame:
    """Seconds of a whole answer, DropKV's minus SnapKV's, per batch.

    Both were timed once and decode equally many tokens. They differ by their prefills, one per row of the batch, whose
    least and greatest times give the interval.
    """
    f = models("answer", file)
    rows = []
    for (model, tokens, batch), row in f.xs("DropKV", level="method").iterrows():
        first = models("prefill", file, row.device)
        a, b = (first.loc[(model, name, tokens, 1)] for name in ("DropKV", "SnapKV"))
        middle = row.seconds - f.seconds[model, "SnapKV", tokens, batch]
        spread = batch * (a.low - b.high), batch * (a.high - b.low)
        rows.append((f"batch {batch}", middle, min(middle, spread[0]), max(middle, spread[1]), row.runs))
    return _frame(rows)


def first_token(file: Path = MODELS, model: str = "Mistral-7B", tokens: int = 32768) -> pd.DataFrame:
    """Time to the first token with DropKV over that with the plain cache, at the paper's model and length."""
    f = models("prefill", file)
    ratio = claims.over(f.loc[model, "DropKV", tokens, 1], f.loc[model, PLAIN, tokens, 1])
    return _frame([(f"{model}, {tokens}", *ratio)])


def prefill_gain(file: Path = MODELS) -> pd.DataFrame:
    """By what share a prefill is slower when DropKV scores in plain PyTorch instead of with the fused kernel."""
    f = models("prefill", file)
    rows = []
    for (model, tokens, batch), row in f.xs(TORCH, level="method").iterrows():
        *interval, n = claims.over(row, f.loc[model, "DropKV", tokens, batch])
        rows.append((f"{model}, {tokens}", *(value - 1 for value in interval), n))
    return _frame(rows)


def throughput(file: Path = MODELS, against: str = PLAIN, slowest: bool = False) -> pd.DataFrame:
    """Tokens per second with 5% kept over those with a full cache, each at its largest batch, per model and length.

    against: `PLAIN`, or `KEPT`, a full cache in the engine that decodes the 5%. The interval goes from the fastest to
    the median step of each side; slowest: to the slowest.
    """
    f = models("decode", file).reset_index()
    best = f.loc[f.groupby(["model", "method", "tokens"], sort=False).batch.idxmax()]
    rows = []
    for (model, tokens), cell in best.groupby(["model", "tokens"], sort=False):
        ours, full = (cell[cell.method == name].iloc[0] for name in ("5% kept", against))
        rows.append((f"{model}, {tokens}", *claims.over(full, ours, "high" if slowest else "seconds")))
    return _frame(rows)


def throughputs(file: Path = MODELS) -> pd.DataFrame:
    """`throughput` over the plain cache, and over everything kept in the same engine: a gain due to eviction shows in
    both."""
    names = {PLAIN: "plain cache", KEPT: "everything kept"}
    parts = [throughput(file, full).assign(against=name) for full, name in names.items()]
    table = pd.concat(parts, ignore_index=True)
    return table.assign(member=table.member + ", over " + table.against).drop(columns="against")


# by contrast of a claim: the function that gives its members, the file it reads, and what the interval is
CONTRASTS: dict[str, tuple[Callable[..., pd.DataFrame], Path, str]] = {
    "gpu_speedup": (speedup, KERNELS, "p20 to p80 of timings"),
    "gpu_scratch": (scratch, KERNELS, "counted"),
    "gpu_latency": (latency, MODELS, "least to greatest timing"),
    "gpu_first_token": (first_token, MODELS, "least to greatest timing"),
    "gpu_prefill_gain": (prefill_gain, MODELS, "least to greatest timing"),
    "gpu_throughput": (throughputs, MODELS, "least to median step"),
    "gpu_throughput_of_steps": (partial(throughput, slowest=True), MODELS, "least to greatest step"),
    "gpu_scratch_share": (scratch_share, KERNELS, "counted"),
    "gpu_peak_share": (partial(scratch_share, held=True), KERNELS, "counted"),
}
