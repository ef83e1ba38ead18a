"""What eviction adds to the first token, at the true shapes of public models: `python -m studies.speed`, on a GPU.

Weights are random: speed does not depend on what they are. Each policy is timed in both readings, with 20% kept, beside
Hugging Face's full cache and ours; rows are added to data/gpu/first_token.csv. Its rows of regimes, and those of
data/gpu/models.csv, come from version 0.1.0; `studies.defaults` times steps as readers take them.
"""

import datetime
import gc
import itertools
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median_high
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition
from kvrepro.engine.generate import generate
from kvrepro.engine.regime import Prefill
from kvrepro.errors import InputError, ensure_known
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.paths import GPU
from studies import trial

SHAPES = ("Llama-3.1-8B", "Qwen2.5-3B", "Mistral-7B", "Qwen2.5-7B")
POLICIES = """snapkv ada_kv dropkv andpro h2o key_diff tova cake critical_kv defensive_kv layer_defensive_kv""".split()
SHARE = 0.2


def build(name: str) -> PreTrainedModel:
    """The model in bfloat16 on the GPU, its weights drawn there, for prompts of up to 131,072 tokens."""
    config = AutoConfig.for_model(**trial.SHAPES[name.lower()] | {"max_position_embeddings": 131584})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def methods(tokens: int) -> dict[str, Condition | None]:
    """By name, what is timed for prompts of a length; None: Hugging Face's own cache."""
    readings = [(name, reading) for name in POLICIES for reading in CATALOGUE[name].readings]
    if tokens > 8192:
        readings.remove(("key_diff", "as_described"))  # block after block: minutes
    return {PLAIN: None, KEPT: Condition()} | {
        f"{name}, {reading.replace('_', ' ')}": Condition(name, SHARE, Prefill(), reading=reading)
        for name, reading in readings
    }


def plain_seconds(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Seconds until the logits of the first token, with Hugging Face's cache."""
    cache = DynamicCache(config=model.config)
    torch.cuda.synchronize()
    began = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def first(model: PreTrainedModel, tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each method: the time to the first token's logits, batch 1, after one run to warm up."""
    prompt = torch.randint(0, model.config.vocab_size, (tokens,)).tolist()
    base = None
    for method, condition in methods(tokens).items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(repeats + 1):
            if condition is None:
                seconds.append(plain_seconds(model, torch.tensor([prompt], device=model.device)))
            else:
                [[answer]] = generate(model, [prompt], [condition], max_new_tokens=1, stop_ids=(), backend="triton")
                seconds.append(answer.prefill_seconds)
        low, *_, high = timed = sorted(seconds[1:])
        base = base or median_high(timed)
        yield {
            "part": "first", "method": method, "share": 1.0 if method in (PLAIN, KEPT) else SHARE, "tokens": tokens,
            "batch": 1, "steps": 0, "seconds": median_high(timed), "low": low, "high": high, "unit": "s",
            "ratio_to_plain": median_high(timed) / base, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "backend": "-" if condition is None else "triton", "runs": repeats,
        }  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="the table that gets the rows")] = GPU / "first_token.csv",
    model: Annotated[list[str], typer.Option(help=f"of {', '.join(SHAPES)}; otherwise all")] = [],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="prompt lengths")] = [2048, 32768],  # noqa: B006
    repeats: Annotated[int, typer.Option(min=2)] = 9,
) -> None:
    """Measure, and add to the table as each model and length ends."""
    ensure_known("model", model, SHAPES)
    if not torch.cuda.is_available():
        raise InputError("no CUDA device: these timings are of a GPU")
    facts = {"device": torch.cuda.get_device_name(), "date": f"{datetime.date.today()}"}
    facts |= {name: version(name) for name in ("torch", "triton", "transformers")}
    for name, length in itertools.product(model or SHAPES, tokens):
        rows = pd.DataFrame(first(build(name), length, repeats)).assign(model=name, **facts)
        rows = pd.concat([pd.read_csv(out), rows.round(5)]) if out.is_file() else rows.round(5)
        rows.to_csv(out, index=False)
        print(rows.tail(len(methods(length)))[["model", "tokens", "method", "seconds", "ratio_to_plain"]].to_string())


if __name__ == "__main__":
    typer.run(main)
