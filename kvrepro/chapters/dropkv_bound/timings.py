"""Timings of data/gpu/ beside the paper's: scoring kernel, time to the first token, whole answers, throughput.

Members of a claim: columns member, value, low, high, n, p. The interval is that of the timings: p20 to p80 for the
kernel, least to greatest for whole models.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from kvrepro.experiment import claims
from kvrepro.paths import DATA

KERNELS, MODELS = DATA / "gpu" / "kernels.csv", DATA / "gpu" / "models.csv"
SCORING = "perturbation sum mean"  # DropKV's row of the scoring kernel
REFERENCES = {"plain torch, grouped, lse given": "torch, grouped", "plain torch, repeated heads": "torch, repeated"}
SHAPE = "32/8/128"  # query heads, KV heads, dimensions: Llama-3.1-8B, Mistral-7B
PLAIN, TORCH = "Hugging Face, sdpa, DynamicCache", "DropKV, plain PyTorch"
COLUMNS = ["member", "value", "low", "high", "n", "p"]


def _frame(rows: Sequence[tuple]) -> pd.DataFrame:
    found = pd.DataFrame(rows, columns=COLUMNS[:4])
    return found.assign(n=1, p=np.nan)


def _kernels(file: Path, batch: int = 1) -> pd.DataFrame:
    f = pd.read_csv(file)
    return f[(f.kernel == "window_scores") & (f["shape"] == SHAPE) & (f.batch == batch)]


def speedup(file: Path = KERNELS, tokens: int = 131072) -> pd.DataFrame:
    """Of the scoring kernel over each way to write the reference."""
    f = _kernels(file)
    f = f[f.tokens == tokens].set_index("variant")
    ours = f.loc[SCORING]
    return _frame(
        [
            (name, f.p50_us[name] / ours.p50_us, f.p20_us[name] / ours.p80_us, f.p80_us[name] / ours.p20_us)
            for name in REFERENCES
        ]
    )


def scratch(file: Path = KERNELS, tokens: int = 131072) -> pd.DataFrame:
    """What the scoring kernel allocates beside its inputs and scores, MB; counted, so without an interval."""
    f = _kernels(file)
    found = f[(f.tokens == tokens) & (f.variant == SCORING)].scratch_mib.item() * 2**20 / 1e6
    return _frame([("all", found, found, found)])


def _models(file: Path, part: str) -> pd.DataFrame:
    """Rows of a part of the measured table; of a cell measured twice the first."""
    f = pd.read_csv(file)
    f = f[f.part == part]
    where = ["model", "method", "tokens", "batch"]
    return f.drop_duplicates(where).set_index(where)


def latency(file: Path = MODELS) -> pd.DataFrame:
    """Seconds of a whole answer, DropKV's minus SnapKV's, per batch.

    Both decode equally many tokens, timed once: they differ by their prefills, one per row of the batch, whose least
    and greatest times make the interval.
    """
    f, first = _models(file, "answer"), _models(file, "prefill")
    rows = []
    for (model, method, tokens, batch), row in f.iterrows():
        if method == "DropKV":
            other = f.loc[(model, "SnapKV", tokens, batch)]
            a, b = (first.loc[(model, name, tokens, 1)] for name in ("DropKV", "SnapKV"))
            middle = row.seconds - other.seconds
            spread = batch * (a.low - b.high), batch * (a.high - b.low)
            rows.append((f"batch {batch}", middle, min(middle, spread[0]), max(middle, spread[1])))
    return _frame(rows)


def first_token(file: Path = MODELS, model: str = "Mistral-7B", tokens: int = 32768) -> pd.DataFrame:
    """Time to the first token with DropKV over that with the plain cache, at the paper's model and length."""
    f = _models(file, "prefill")
    return _frame([(f"{model}, {tokens}", *_ratio(f, (model, "DropKV", tokens, 1), (model, PLAIN, tokens, 1)))])


def prefill_gain(file: Path = MODELS) -> pd.DataFrame:
    """By what share a prefill is slower when DropKV scores in plain PyTorch than with the fused kernel."""
    f = _models(file, "prefill")
    rows = []
    for model, method, tokens, batch in f.index:
        if method == TORCH:
            found = _ratio(f, (model, TORCH, tokens, batch), (model, "DropKV", tokens, batch))
            rows.append((f"{model}, {tokens}", *(value - 1 for value in found)))
    return _frame(rows)


def throughput(file: Path = MODELS) -> pd.DataFrame:
    """Tokens per second at the largest batch that fits, 5% kept, over the plain cache's, per model and length."""
    f = _models(file, "decode").reset_index()
    best = f.loc[f.groupby(["model", "method", "tokens"], sort=False).batch.idxmax()]
    rows = []
    for (model, tokens), cell in best.groupby(["model", "tokens"], sort=False):
        ours, plain = (cell[cell.method == name].iloc[0] for name in ("5% kept", PLAIN))
        more = ours.batch / plain.batch
        rows.append((f"{model}, {tokens}", *(more * part for part in _over(plain, ours))))
    return _frame(rows)


def _ratio(f: pd.DataFrame, top: tuple, bottom: tuple) -> tuple[float, float, float]:
    return _over(f.loc[top], f.loc[bottom])


def _over(top: pd.Series, bottom: pd.Series) -> tuple[float, float, float]:
    return top.seconds / bottom.seconds, top.low / bottom.high, top.high / bottom.low


# contrast of a claim -> its members from a file, the file, and what the interval is
CONTRASTS: dict[str, tuple[Callable[..., pd.DataFrame], Path, str]] = {
    "gpu_speedup": (speedup, KERNELS, "p20 to p80 of timings"),
    "gpu_scratch": (scratch, KERNELS, "counted"),
    "gpu_latency": (latency, MODELS, "least to greatest timing"),
    "gpu_first_token": (first_token, MODELS, "least to greatest timing"),
    "gpu_prefill_gain": (prefill_gain, MODELS, "least to greatest timing"),
    "gpu_throughput": (throughput, MODELS, "least to greatest timing"),
}


# ---------------------------------------------------------------- tables


def _missing(file: Path) -> pd.DataFrame:
    return pd.DataFrame({"note": [f"no timings: {file.name} is missing in data/gpu"]})


def kernel_table(file: Path = KERNELS) -> pd.DataFrame:
    """DropKV's score by prompt length (columns): times, scratch and speed-ups here, and what the paper prints."""
    if not file.is_file():
        return _missing(file)
    f = _kernels(file)
    names = {SCORING: "fused kernel", **REFERENCES}
    f = f[f.variant.isin(list(names))].assign(name=f.variant.map(names))
    time, memory = (
        f.pivot_table(index="tokens", columns="name", values=column, aggfunc="first")[list(names.values())]
        for column in ("p50_us", "scratch_mib")
    )
    parts = {"time (ms)": time / 1000, "scratch (MB)": memory * 2**20 / 1e6}
    parts["speed-up over"] = pd.DataFrame({name: time[name] / time["fused kernel"] for name in REFERENCES.values()})
    speed, needed = (
        claims.cells("dropkv_text_numbers.csv", {"task": f"scoring {name}"}).iloc[0]
        for name in ("kernel speedup", "scratch")
    )
    short, plain = speed.note.split("x")[0], needed.note.partition("~")[2].split()[0]  # "1.8x at 4K", "vs ~9 GB ..."
    printed = {
        "speed-up": {4096: float(short), 131072: float(speed.value)},
        "scratch, fused (MB)": {131072: float(needed.value)},
        "scratch, torch (MB)": {131072: 1000 * float(plain)},
    }
    parts["paper, A100"] = pd.DataFrame(printed).reindex(time.index)
    return pd.concat(parts, axis=1).T.rename_axis(index=[f.device.iloc[0], f.dtype.iloc[0]], columns="tokens")


def answer_table(file: Path = MODELS) -> pd.DataFrame:
    """Seconds of a whole answer (500 tokens after 32K, Mistral-7B's shape) by batch, here and as printed."""
    if not file.is_file():
        return _missing(file)
    f = _models(file, "answer").reset_index()
    here = f.assign(method=f.method.replace(PLAIN, "plain cache")).pivot_table(
        index="batch", columns="method", values="seconds", aggfunc="first"
    )
    order = ["plain cache", "SnapKV", "DropKV"]
    printed = claims.published("dropkv_t02_e2e_latency.csv")
    printed = printed.assign(
        batch=printed.task.str.removeprefix("batch ").astype(int),
        method=printed.method.replace("Dynamic", "plain cache"),
        value=pd.to_numeric(printed.value, errors="coerce"),
    ).pivot_table(index="batch", columns="method", values="value", aggfunc="first")
    ours = f"here, {f.device.iloc[0].removeprefix('NVIDIA ')} (s)"
    return pd.concat({ours: here[order], "paper, A100 (s)": printed.reindex(here.index)[order]}, axis=1)


def speed_table(file: Path = MODELS) -> pd.DataFrame:
    """Per shape and prompt length: time to the first token, what plain PyTorch scoring adds to it, and tokens per
    second at the largest batch, DropKV at 5% over the plain cache, here and as printed."""
    if not file.is_file():
        return _missing(file)
    first = _models(file, "prefill")
    gain, more = (part(file).set_index("member").value for part in (prefill_gain, throughput))
    printed = claims.cells("dropkv_t09_throughput.csv", {"task": "ratio to dynamic"})
    printed = {
        (model, tokens): float(value)
        for model, tokens, value in zip(printed.model, printed.context, printed.value, strict=True)
    }
    rows = {}
    for name in more.index:
        model, tokens = name.split(", ")
        of = {method: (model, method, int(tokens), 1) for method in ("DropKV", PLAIN)}
        ours, plain = (first.seconds.get(key, np.nan) for key in of.values())
        paper = next(
            (v for (m, t), v in printed.items() if m.startswith(model) and t == f"{int(tokens) // 1024}k"), np.nan
        )
        rows[model, int(tokens)] = {
            ("first token (s)", "plain cache"): plain,
            ("first token (s)", "DropKV"): ours,
            ("first token (s)", "ratio"): ours / plain,
            ("torch scoring", "adds (%)"): 100 * gain.get(name, np.nan),
            ("tokens/s over plain", "here"): more[name],
            ("tokens/s over plain", "paper"): paper,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index=["shape", "tokens"])
