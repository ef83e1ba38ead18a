"""Whole-model timings at the true shapes of public models, random weights: speed does not depend on what they are.

`python -m kvrepro.tools.speed --part prefill --part decode --part answer --out data/gpu/models.csv`, on a GPU. Rows
carry device, versions and date. `--table` writes them beside the published numbers, data/published, as
data/gpu/models.md.
"""

import csv
import datetime
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import transformers
import typer
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)

from kvrepro.engine.attention import installed
from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.condition import Condition
from kvrepro.engine.extend import Extend
from kvrepro.engine.generate import generate
from kvrepro.engine.regime import Prefill
from kvrepro.paths import ROOT
from kvrepro.tools.pages import table

# The public configurations, typed in: layers, widths, heads and vocabulary decide the time.
SHAPES = {
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131584, rms_norm_eps=1e-5, tie_word_embeddings=False,
    ),
    "Mistral-7B": MistralConfig(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131584, sliding_window=None,
    ),
    "Qwen2.5-7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=131584, tie_word_embeddings=False,
    ),
}  # fmt: skip
PLAIN = "Hugging Face, sdpa, DynamicCache"
PUBLISHED = ("dropkv_t02_e2e_latency", "dropkv_t09_throughput", "dropkv_t10_ttft")
COLUMNS = ("part", "model", "method", "share", "tokens", "batch", "steps", "seconds", "low", "high", "unit",
           "ratio_to_plain", "peak_gib", "backend", "device", "torch", "triton", "transformers", "date")  # fmt: skip
MERGED = (("group", "mean"), ("pool_at", "kv_head"))  # SnapKV's reductions in the order that the kernel has
METHODS = {  # name: (policy, share, switches, backend)
    "everything kept": ("full", 1.0, (), "triton"),
    "StreamingLLM": ("streaming_llm", 0.05, (), "triton"),
    "SnapKV": ("snapkv", 0.05, (("window", 8), *MERGED), "triton"),
    "DropKV": ("dropkv", 0.05, (), "triton"),
    "DropKV, plain PyTorch": ("dropkv", 0.05, (), "torch"),
    "Ada-KV": ("ada_kv", 0.2, (), "triton"),
    "DefensiveKV, plain PyTorch": ("defensive_kv", 0.2, (), "torch"),
}


def build(name: str, device: str = "cuda") -> PreTrainedModel:
    """The model in bfloat16 on `device`, its weights drawn there."""
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return (
                AutoModelForCausalLM.from_config(SHAPES[name], attn_implementation="sdpa").eval().requires_grad_(False)
            )
        finally:
            torch.set_default_dtype(before)


def condition(method: str) -> Condition:
    """The row of METHODS as a condition of the regime prefill."""
    policy, share, switches, _ = METHODS[method]
    if policy == "full":
        return Condition()
    return Condition(policy, share, Prefill(), reading="as_described", switches=switches)


def timed(function, repeats: int) -> tuple[list[float], float]:
    """(seconds of each of `repeats` calls after one to warm up, sorted; peak GiB of the last, weights included)."""
    function()
    found = []
    for _ in range(repeats):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return sorted(found), torch.cuda.max_memory_allocated() / 2**30


@torch.inference_mode()
def prefill(model: PreTrainedModel, name: str, tokens: int, methods: list[str], repeats: int) -> list[dict]:
    """Time to the first token's logits, batch 1; peak memory with the weights."""
    prompt = torch.randint(0, model.config.vocab_size, (tokens,)).tolist()
    ids = torch.tensor([prompt], device=model.device)

    def plain():
        model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)

    rows, base = [], None
    for method in [PLAIN, *methods]:
        backend = "-" if method == PLAIN else METHODS[method][3]
        notes: list[float] = []

        def evicting(method=method, backend=backend, notes=notes):
            [[answer]] = generate(model, [prompt], [condition(method)], max_new_tokens=1, stop_ids=(), backend=backend)
            notes.append(answer.prefill_seconds)

        seconds, peak = timed(plain if method == PLAIN else evicting, repeats)
        seconds = sorted(notes[1:]) if notes else seconds
        middle = seconds[len(seconds) // 2]
        base = base or middle
        share = 1.0 if method == PLAIN else METHODS[method][1]
        rows.append(_row("prefill", name, method, share, tokens, 1, 0, seconds, "s", middle / base, peak, backend))
    return rows


def filled(model: PreTrainedModel, batch: int, kept: int, seen: int) -> EngineCache:
    """A cache of `kept` random tokens per head and row, as eviction leaves it after `seen` tokens."""
    cache, config = EngineCache(model.config), model.config
    kv_heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    total = batch * kv_heads * kept
    offsets = torch.arange(0, total + 1, kept, device=model.device)
    positions = torch.linspace(0, seen - 1, kept, device=model.device).int().repeat(batch * kv_heads)
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(total, dim, device=model.device, dtype=model.dtype)
        cache.ragged[layer] = RaggedLayer(keys, keys.clone(), positions, offsets, (batch, kv_heads), {})
    return cache


def decode_ours(model: PreTrainedModel, batch: int, kept: int, seen: int, steps: int) -> list[float]:
    """Seconds of each step but the first five, from a cache of `kept` tokens."""
    cache = filled(model, batch, kept, seen)
    with installed(model):
        return _steps(model, batch, seen, steps, cache, lambda at: {"kvrepro": Extend(cache, at, backend="triton")})


@torch.inference_mode()
def decode_plain(model: PreTrainedModel, batch: int, tokens: int, steps: int) -> list[float]:
    """The same with Hugging Face's attention and growing cache."""
    cache = DynamicCache(config=model.config)
    kv_heads, dim = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    for layer in range(model.config.num_hidden_layers):
        keys = torch.randn(batch, kv_heads, tokens, dim, device=model.device, dtype=model.dtype)
        cache.update(keys, keys.clone(), layer)
        del keys
    return _steps(model, batch, tokens, steps, cache, lambda at: {})


@torch.inference_mode()
def _steps(
    model: PreTrainedModel, batch: int, seen: int, steps: int, cache: Cache, more: Callable[[torch.Tensor], dict]
) -> list[float]:
    """Seconds of each of `steps` greedy steps after five that warm up, sorted. more: arguments by position."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    found = []
    for step in range(steps + 5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        at = torch.full((batch, 1), seen + step, device=model.device)
        logits = model(
            input_ids=token, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1, **more(at)
        ).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return sorted(found[5:])


def largest(model: PreTrainedModel, kept: int, slack_gib: float = 12.0) -> int:
    """Rows whose caches of `kept` tokens fit beside the weights, with `slack_gib` to work in; at most 512."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    row = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * dim * kept
    free = torch.cuda.mem_get_info()[0] - slack_gib * 2**30
    return max(1, min(512, int(free // row)))


def decode(model: PreTrainedModel, name: str, tokens: int, steps: int) -> list[dict]:
    """Decoding at batch 1 and at each method's largest batch; ratios are of tokens/s, to plain at 1 or its largest."""
    rows: list[dict] = []
    best: dict[bool, float] = {}  # tokens/s of plain, at batch 1 and at its largest
    for method, share in ((PLAIN, 1.0), ("everything kept", 1.0), ("20% kept", 0.2), ("5% kept", 0.05)):
        kept = max(1, int(tokens * share))
        gc.collect()
        torch.cuda.empty_cache()
        for batch in sorted({1, largest(model, kept)}):
            seconds = None
            while seconds is None:
                try:
                    torch.cuda.reset_peak_memory_stats()
                    run = decode_plain if method == PLAIN else decode_ours
                    arguments = (batch, tokens, steps) if method == PLAIN else (batch, kept, tokens, steps)
                    seconds = run(model, *arguments)
                except torch.OutOfMemoryError:
                    batch = batch * 3 // 4
                finally:
                    gc.collect()
                    torch.cuda.empty_cache()
            middle = seconds[len(seconds) // 2]
            speed = batch / middle
            if method == PLAIN:
                best[batch == 1] = speed
            ratio = speed / best.get(batch == 1, best[True])
            peak = torch.cuda.max_memory_allocated() / 2**30
            backend = "-" if method == PLAIN else "triton"
            rows.append(
                _row("decode", name, method, share, tokens, batch, steps, seconds, "s/step", ratio, peak, backend)
            )
    return rows


def answer(model: PreTrainedModel, name: str, tokens: int, steps: int, batches: list[int]) -> list[dict]:
    """A batch of prompts from first to last token: prefill of each, then `steps` decoding steps together."""
    methods = ["SnapKV", "DropKV"]
    shares = {PLAIN: 1.0} | {method: METHODS[method][1] for method in methods}
    firsts = prefill(model, name, tokens, methods, 1)
    rows = []
    for batch in batches:
        base = None
        decoding: dict[float, float] = {}  # by share: steps over equally many tokens take equally long
        for first in firsts:
            method, share = first["method"], shares[first["method"]]
            try:
                if method == PLAIN:
                    decoding[share] = sum(decode_plain(model, batch, tokens, steps))
                elif share not in decoding:
                    decoding[share] = sum(decode_ours(model, batch, int(tokens * share), tokens, steps))
            except torch.OutOfMemoryError:
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            total = batch * first["seconds"] + decoding[share]
            base = total if method == PLAIN else base
            ratio = total / base if base else float("nan")
            backend = first["backend"]
            rows.append(_row("answer", name, method, share, tokens, batch, steps, [total], "s", ratio, 0.0, backend))
    return rows


def _row(part, model, method, share, tokens, batch, steps, seconds, unit, ratio, peak, backend) -> dict:
    import triton

    values = (part, model, method, share, tokens, batch, steps, round(seconds[len(seconds) // 2], 5),
              round(seconds[0], 5), round(seconds[-1], 5), unit, round(ratio, 4), round(peak, 2), backend,
              torch.cuda.get_device_name(), torch.__version__, triton.__version__, transformers.__version__,
              datetime.date.today().isoformat())  # fmt: skip
    row = dict(zip(COLUMNS, values, strict=True))
    print({k: row[k] for k in COLUMNS[:14]}, flush=True)
    return row


def page(root: Path = ROOT) -> str:
    """The tables of data/gpu/models.csv beside the published ones, as markdown."""
    ours = pd.read_csv(root / "data/gpu/models.csv")
    theirs = {name: pd.read_csv(root / f"data/published/{name}.csv", dtype=str) for name in PUBLISHED}
    rest = ["device", "torch", "triton", "transformers", "date"]
    devices = " and ".join("{}, torch {}, triton {}, transformers {}, {}".format(*r) for r in _distinct(ours, rest))
    prefills = ours[ours.part == "prefill"].drop_duplicates(["model", "tokens", "method"])
    decodes, answers = ours[ours.part == "decode"], ours[ours.part == "answer"]
    parts = [
        f"Ours: {devices}. Theirs: A100-80GB, as printed. Weights are random, and shapes those of the public models; "
        "the papers' Mistral and Qwen are long-context versions of equal shape.",
        "### Time to the first token, batch 1",
        table([_first(r, theirs["dropkv_t10_ttft"]) for r in prefills.itertuples()]),
        "### Decoding at the largest batch",
        table([_step(r, theirs["dropkv_t09_throughput"]) for r in decodes[decodes.batch > 1].itertuples()]),
        "### Decoding one row of 131072 tokens",
        table([_single(r) for r in decodes[(decodes.batch == 1) & (decodes.tokens == 131072)].itertuples()]),
        "### 500 tokens after a prompt of 32768",
        table([_whole(r, theirs["dropkv_t02_e2e_latency"]) for r in answers.itertuples()]),
    ]
    return "\n\n".join(parts) + "\n"


def _distinct(frame: pd.DataFrame, columns: list[str]) -> list[tuple]:
    return list(frame[columns].drop_duplicates().itertuples(index=False, name=None))


def _printed(frame: pd.DataFrame, r, method: str, task: str) -> str:
    """The number in print for row `r`, "-" where there is none; 32K and 32k are one length, as are Mistral's names."""
    found = frame[
        frame.model.str.startswith(r.model) & (frame.method == method) & (frame.task == task)
        & (frame.context.str.lower() == f"{r.tokens // 1024}k")
    ]  # fmt: skip
    return "-" if found.empty else str(found.value.fillna("out of memory").iloc[0])


def _first(r, frame: pd.DataFrame) -> dict:
    printed = {PLAIN: "61.5 GB", "DefensiveKV, plain PyTorch": "36 GB"}
    peak = printed.get(r.method, "-") if (r.model, r.tokens) == ("Llama-3.1-8B", 131072) else "-"
    method = "Dynamic" if r.method == PLAIN else r.method
    return {
        "model": r.model, "prompt": r.tokens, "method": r.method, "kept": f"{r.share:.0%}", "s": f"{r.seconds:.3f}",
        "over plain": f"{r.ratio_to_plain:.3f}", "peak GiB": f"{r.peak_gib:.1f}",
        "printed s (DropKV, Table 10)": _printed(frame, r, method, "batch 1"),
        "printed peak (DefensiveKV, Figure 11)": peak,
    }  # fmt: skip


def _step(r, frame: pd.DataFrame) -> dict:
    method = {PLAIN: "Dynamic", "5% kept": "DropKV-Triton"}.get(r.method, "")
    return {
        "model": r.model, "prompt": r.tokens, "method": r.method, "batch": r.batch, "ms/step": f"{r.seconds * 1e3:.1f}",
        "tokens/s": round(r.batch / r.seconds), "over plain": f"{r.ratio_to_plain:.1f}",
        "printed batch (DropKV, Table 9)": _printed(frame, r, method, "max batch"),
        "printed tokens/s": _printed(frame, r, method, "decode throughput at max batch"),
        "printed over plain": _printed(frame, r, method, "ratio to dynamic"),
    }  # fmt: skip


def _single(r) -> dict:
    printed = {PLAIN: "81", "20% kept": "28"}.get(r.method, "-") if r.model.startswith("Llama") else "-"
    return {
        "model": r.model, "method": r.method, "ms/token": f"{r.seconds * 1e3:.1f}", "peak GiB": f"{r.peak_gib:.1f}",
        "faster than plain": f"{r.ratio_to_plain:.2f}", "printed ms/token (DefensiveKV, 4.5)": printed,
    }  # fmt: skip


def _whole(r, frame: pd.DataFrame) -> dict:
    method = "Dynamic" if r.method == PLAIN else r.method
    return {
        "model": r.model, "batch": r.batch, "method": r.method, "s": f"{r.seconds:.1f}",
        "over plain": f"{r.ratio_to_plain:.3f}",
        "printed s (DropKV, Table 2)": _printed(frame, r, method, f"batch {r.batch}"),
    }  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="table to write")] = Path("data/gpu/models.csv"),
    part: Annotated[list[str], typer.Option(help="prefill, decode, answer")] = ["prefill", "decode"],  # noqa: B006
    model: Annotated[list[str], typer.Option(help="of SHAPES; default: all")] = [],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="prompt lengths")] = [32768],  # noqa: B006
    method: Annotated[list[str], typer.Option(help="of METHODS; default: all")] = [],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="for answer")] = [1, 4],  # noqa: B006
    repeats: Annotated[int, typer.Option()] = 3,
    steps: Annotated[int, typer.Option()] = 50,
    show: Annotated[
        bool, typer.Option("--table", help="write data/gpu/models.md from the table; measure nothing")
    ] = False,
) -> None:
    """Measure, and append to the table as each part ends."""
    if show:
        (ROOT / "data/gpu/models.md").write_text(page(), encoding="utf-8")
        return
    if not torch.cuda.is_available():
        typer.echo("no CUDA device: these timings are of a GPU", err=True)
        raise typer.Exit(2)
    for name in model or SHAPES:
        network = build(name)
        for length in tokens:
            for one in part:
                if one == "prefill":
                    found = prefill(network, name, length, method or list(METHODS), repeats)
                elif one == "decode":
                    found = decode(network, name, length, steps)
                else:
                    found = answer(network, name, length, steps, batch)
                fresh = not out.exists()
                out.parent.mkdir(parents=True, exist_ok=True)
                with out.open("a", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS)
                    if fresh:
                        writer.writeheader()
                    writer.writerows(found)
        network = None  # before the next one is built
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
