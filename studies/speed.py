"""Whole-model timings at the true shapes of public models, random weights: speed does not depend on what they are.

`python -m studies.speed --out data/gpu/models.csv`, on a GPU; every policy in both readings with `--part first --out
data/gpu/first_token.csv`. Rows carry device, versions and date. Those of the parts *decode*, *captured*, *answer*
and *regimes* come from version 0.1.0; `studies.defaults` times steps as readers take them.
"""

import datetime
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median_high
from typing import Annotated

import pandas as pd
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvrepro.engine.allowed import ensure
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition
from kvrepro.engine.generate import generate
from kvrepro.engine.regime import Prefill
from kvrepro.errors import InputError
from kvrepro.experiment.claims import PLAIN
from studies import trial

SHAPES = {  # of public models, for long prompts
    name: AutoConfig.for_model(**trial.SHAPES[name.lower()] | {"max_position_embeddings": 131584})
    for name in ("Llama-3.1-8B", "Qwen2.5-3B", "Mistral-7B", "Qwen2.5-7B")
}
PARTS = ("prefill", "first")
COLUMNS = ("part", "model", "method", "share", "tokens", "batch", "steps", "seconds", "low", "high", "unit",
           "ratio_to_plain", "peak_gib", "backend", "runs", "device", "torch", "triton", "transformers",
           "date")  # fmt: skip
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
FIRST = ("snapkv", "ada_kv", "dropkv", "andpro", "h2o", "key_diff", "tova", "cake", "critical_kv", "defensive_kv",
         "layer_defensive_kv")  # fmt: skip


def build(name: str, device: str = "cuda") -> PreTrainedModel:
    """The model in bfloat16 on `device`, its weights drawn there."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def condition(method: str) -> Condition:
    """The row of METHODS, or "policy, reading", as a condition of the regime prefill."""
    if method not in METHODS:
        name, reading = method.split(", ")
        return Condition(name, 0.2, Prefill(), reading=reading.replace(" ", "_"))
    policy, share, switches, _ = METHODS[method]
    if policy == "full":
        return Condition()
    return Condition(policy, share, Prefill(), reading="as_described", switches=switches)


def freed() -> None:
    """Give the memory of what is no longer used back to the device, and count its peak from here."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds of one call, until all that it started on the device is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def prefill(model: PreTrainedModel, tokens: int, methods: list[str], repeats: int) -> Iterator[dict]:
    """Rows of the time to the first token's logits, batch 1, after one run to warm up; peak memory with the weights."""
    prompt = torch.randint(0, model.config.vocab_size, (tokens,)).tolist()
    ids = torch.tensor([prompt], device=model.device)

    def plain() -> float:
        cache = DynamicCache(config=model.config)
        return seconds_of(lambda: model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1))

    def evicting(method: str, backend: str) -> float:
        [[answer]] = generate(model, [prompt], [condition(method)], max_new_tokens=1, stop_ids=(), backend=backend)
        return answer.prefill_seconds

    base = None
    for method in [PLAIN, *methods]:
        share, backend = (1.0, "-") if method == PLAIN else METHODS.get(method, ("", 0.2, (), "triton"))[1::2]
        seconds = []
        freed()
        for _ in range(repeats + 1):
            seconds.append(plain() if method == PLAIN else evicting(method, backend))
        seconds = sorted(seconds[1:])
        middle = median_high(seconds)
        base = base or middle
        peak = torch.cuda.max_memory_allocated() / 2**30
        more = {"peak": peak, "backend": backend, "runs": repeats}
        yield row("prefill", method, share, tokens, seconds, "s", middle / base, **more)


def first(model: PreTrainedModel, tokens: int, chosen: list[str], repeats: int) -> Iterator[dict]:
    """`prefill` of the policies FIRST in each of their readings by kernels, 20% kept, beside everything kept."""
    readings = [f"{name}, {r.replace('_', ' ')}" for name in FIRST for r in CATALOGUE[name].readings]
    if tokens > 8192:
        readings.remove("key_diff, as described")  # block after block: minutes
    for timing in prefill(model, tokens, chosen or ["everything kept", *readings], repeats):
        yield timing | {"part": "first"}


def row(
    part: str, method: str, share: float, tokens: int, seconds: list[float], unit: str, ratio: float, batch: int = 1,
    steps: int = 0, peak: float = 0.0, backend: str = "-", runs: int = 1,
) -> dict:  # fmt: skip
    """A row of the table, without the model. seconds: sorted; runs: the number of runs that were timed (the steps of
    one run are one)."""
    measurement = dict(
        part=part, method=method, share=share, tokens=tokens, batch=batch, steps=steps,
        seconds=round(median_high(seconds), 5), low=round(seconds[0], 5), high=round(seconds[-1], 5), unit=unit,
        ratio_to_plain=round(ratio, 4), peak_gib=round(peak, 2), backend=backend, runs=runs,
    )  # fmt: skip
    print(measurement, flush=True)
    return measurement


def main(
    out: Annotated[Path, typer.Option(help="table to write")] = Path("data/gpu/models.csv"),
    part: Annotated[list[str], typer.Option(help=", ".join(PARTS))] = ["prefill"],  # noqa: B006
    model: Annotated[list[str], typer.Option(help="of SHAPES; default: all")] = [],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="prompt lengths")] = [32768],  # noqa: B006
    method: Annotated[list[str], typer.Option(help="of METHODS; default: all")] = [],  # noqa: B006
    repeats: Annotated[int, typer.Option()] = 3,
) -> None:
    """Measure, and append to the table as each part ends."""
    for name in model:
        ensure(tuple(SHAPES), model=name)
    for name in part:
        ensure(PARTS, part=name)
    if not torch.cuda.is_available():
        raise InputError("no CUDA device: these timings are of a GPU")
    versions = {name: version(name) for name in ("torch", "triton", "transformers")}
    common = {"device": torch.cuda.get_device_name(), **versions, "date": datetime.date.today().isoformat()}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in model or SHAPES:
        network = build(name)
        for length, name_of_part in itertools.product(tokens, part):
            generators = {  # only the one that is chosen begins to measure
                "prefill": prefill(network, length, method or list(METHODS), repeats),
                "first": first(network, length, method, repeats),
            }
            rows = pd.DataFrame(generators[name_of_part]).assign(model=name, **common)[list(COLUMNS)]
            rows.to_csv(out, mode="a", header=not out.exists(), index=False)
        network = None  # before the next one is built
        freed()


if __name__ == "__main__":
    typer.run(main)
