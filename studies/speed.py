"""Speed at the true shapes of public models, with random weights in bfloat16, on a GPU. Speed does not depend on what
weights are.

    python -m studies.speed policies     # data/gpu/first_token.csv: what each policy adds to the first token
    python -m studies.speed defaults     # data/gpu/defaults.csv: a first token and a step as people call them

The rows of regimes in first_token.csv, and data/gpu/models.csv, come from version 0.1.0.
"""

import gc
import itertools
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import kvrepro as kv
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.paths import GPU
from studies import trial
from studies.table import versions

SHAPES = ("Llama-3.1-8B", "Qwen2.5-3B", "Mistral-7B", "Qwen2.5-7B")
POLICIES = """snapkv ada_kv dropkv andpro h2o key_diff tova cake critical_kv defensive_kv layer_defensive_kv""".split()
SHARE = 0.2
STEPS = 64
Repeats = Annotated[int, typer.Option(min=2)]
app = typer.Typer(add_completion=False, help=__doc__)


def build(name: str) -> PreTrainedModel:
    """The model, its weights drawn on the GPU, for prompts of up to 131,072 tokens."""
    config = AutoConfig.for_model(**trial.SHAPES[name.lower()] | {"max_position_embeddings": 131584})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.eval().requires_grad_(False)


def facts() -> dict[str, str]:
    """Where and when something is measured."""
    return {"device": torch.cuda.get_device_name(), **versions("torch", "triton", "transformers")}


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Of each call, in order of size, after two calls to warm up."""
    taken = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return sorted(taken[2:])


def methods(tokens: int) -> dict[str, kv.Condition | None]:
    """By name, what is timed for prompts of a length; None: Hugging Face's own cache."""
    readings = [(name, reading) for name in POLICIES for reading in CATALOGUE[name].readings]
    if tokens > 8192:
        readings.remove(("key_diff", "as_described"))  # block after block: minutes
    return {PLAIN: None, KEPT: kv.Condition()} | {
        f"{name}, {reading.replace('_', ' ')}": kv.Condition(name, SHARE, kv.Prefill(), reading=reading)
        for name, reading in readings
    }


@app.command()
@torch.inference_mode()
def policies(
    model: Annotated[list[str], typer.Option(help=f"of {', '.join(SHAPES)}")] = [*SHAPES],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="prompt lengths")] = [2048, 32768],  # noqa: B006
    repeats: Repeats = 9,
) -> None:
    """Time the first token of each policy in both readings, with 20% kept, beside Hugging Face's full cache and ours,
    and add the rows to the table as each model and length ends."""
    out = GPU / "first_token.csv"
    for name, length in itertools.product(model, tokens):
        network, rows = build(name), []
        ids = torch.randint(0, network.config.vocab_size, (1, length), device="cuda")

        def plain(network=network, ids=ids):
            cache = DynamicCache(config=network.config)
            network(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

        for method, condition in methods(length).items():
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            if condition is None:
                taken = seconds(plain, repeats)
            else:
                given, more = [ids[0].tolist()], {"max_new_tokens": 1, "stop_ids": (), "backend": "triton"}
                answers = [kv.generate(network, given, [condition], **more)[0][0] for _ in range(repeats + 2)]
                taken = sorted(answer.prefill_seconds for answer in answers[2:])
            row = {"part": "first", "model": name, "method": method, "tokens": length, "batch": 1, "steps": 0}
            row |= {"seconds": median(taken), "low": taken[0], "high": taken[-1], "unit": "s", "runs": repeats}
            row |= {"share": 1.0 if method in (PLAIN, KEPT) else SHARE, "backend": "triton" if condition else "-"}
            rows.append(row | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30})
        table = pd.DataFrame(rows).assign(**facts()).round(5)
        table["ratio_to_plain"] = table.seconds / table.seconds[0]
        pd.concat([pd.read_csv(out), table]).to_csv(out, index=False)
        print(table[["model", "tokens", "method", "seconds", "ratio_to_plain"]].to_string(), flush=True)


@app.command()
def defaults(
    tokens: Annotated[list[int], typer.Option(help="prompt lengths")] = [2048, 8192, 32768],  # noqa: B006
    repeats: Repeats = 5,
) -> None:
    """Time 1 and 65 new tokens of Qwen2.5-3B's shape; a step is a 64th of the difference of medians."""
    model, rows = build("Qwen2.5-3B"), []
    condition = kv.Condition("snapkv", SHARE, kv.Prefill())
    for n in tokens:
        ids = torch.randint(0, 150000, (1, n), device="cuda")
        mask, given = torch.ones_like(ids), ids[0].tolist()

        def hugging(new: int, ids=ids, mask=mask):
            model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

        def inside(new: int, hugging=hugging, **more):
            with kv.evicting(model, condition, **more):
                hugging(new)

        def engine(new: int, given=given, **more):
            kv.generate(model, [given], [condition], max_new_tokens=new, stop_ids=(), **more)

        calls = {("Hugging Face's generate, full cache", "-"): hugging}
        for method, call in {"evicting, snapkv at 20%": inside, "kv.generate, snapkv at 20%": engine}.items():
            calls |= {(method, "default"): call, (method, "torch"): partial(call, backend="torch")}
        for (method, backend), call in calls.items():
            first, whole = (seconds(partial(call, new), repeats) for new in (1, 1 + STEPS))
            row = {"tokens": n, "method": method, "backend": backend, "first_ms": 1e3 * median(first)}
            row |= {"first_low": 1e3 * first[0], "first_high": 1e3 * first[-1], "runs": repeats}
            rows.append(row | {"step_ms": 1e3 * (median(whole) - median(first)) / STEPS})
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows).assign(shape="Qwen2.5-3B, random weights, bfloat16", **facts())
    table.to_csv(GPU / "defaults.csv", index=False, float_format="%.4g")


if __name__ == "__main__":
    app()
