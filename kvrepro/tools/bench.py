"""Benchmarks. `python -m kvrepro.tools.bench harness` times batched conditions against the same ones one after another;
`scratch` shows that no scorer's memory grows with the square of the tokens, `memory` what a prefill allocates.
"""

import time
from collections.abc import Collection, Sequence
from typing import Annotated

import pandas as pd
import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrepro.chapters.protection.grid import PROTECTION_SEVEN
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Generation
from kvrepro.engine.generate import generate
from kvrepro.engine.memory import Peak
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import SUMS, call
from kvrepro.engine.regime import Prefill, SharedCap
from kvrepro.errors import InputError, one_line_errors, program
from kvrepro.experiment import data, models
from kvrepro.tools import command
from kvrepro.tools.training.train import model_config

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def random_model(seed: int = 0) -> PreTrainedModel:
    """Random weights in tiny-gqa's shape: 8 layers, width 384, 6 query and 2 KV heads of 64."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(model_config()).eval()


def random_prompts(model: PreTrainedModel, n: int, tokens: int) -> list[list[int]]:
    return torch.randint(0, model.config.vocab_size, (n, tokens), generator=torch.Generator().manual_seed(0)).tolist()


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    print(title, pd.DataFrame(rows, columns=columns).to_string(index=False), sep="\n")


def protection_conditions(reading: str = "as_run") -> list[Condition]:
    """The protection paper's 43: seven policies, unprotected and 10% + 10%, three capacities; and the full cache."""
    return [Condition()] + [
        Condition(policy, capacity, SharedCap(), prefix=guarded, suffix=guarded, reading=reading)
        for capacity in (128, 256, 512)
        for guarded in (0.0, 0.1)
        for policy in PROTECTION_SEVEN
    ]


@app.command()
@command.checked
@one_line_errors()
def harness(
    model: Annotated[str, typer.Option(help='as of `models.load`, or "random": weights and tokens')] = "small-gqa",
    items: Annotated[int, typer.Option(help="prompts")] = 8,
    conditions: Annotated[int, typer.Option(help="of the 43, spread evenly")] = 43,
    tokens: Annotated[int, typer.Option(help="prompt length")] = 1900,
    new_tokens: Annotated[int, typer.Option(help="per row at most; random tokens never stop earlier")] = 128,
    batch_rows: Annotated[int, typer.Option(help="rows that decode together")] = 64,
    reading: Annotated[str, typer.Option(help="as_run or as_described")] = "as_run",
    threads: Annotated[int, typer.Option(help="0: torch's default")] = 0,
) -> None:
    """Batched: one prefill per item serves all its conditions, which decode together. One by one: each condition of
    each item has its own prefill and decodes alone, with the same code. Prints what was run and nothing else."""
    if threads:
        torch.set_num_threads(threads)
    if items < 1 or conditions < 1:
        raise InputError(f"{items} items x {conditions} conditions: give at least one of each")
    everything = protection_conditions(reading)
    chosen = [everything[i * len(everything) // conditions] for i in range(min(conditions, len(everything)))]
    network, stop_ids, prompts = _workload(model, items, tokens)

    def run(prompts: list, conditions: list, rows: int) -> list[list[Generation]]:
        return generate(network, prompts, conditions, max_new_tokens=new_tokens, stop_ids=stop_ids, batch_rows=rows)

    run(prompts[:1], chosen[:1], 1)  # warm up allocator and thread pool
    began = time.perf_counter()
    together = run(prompts, chosen, batch_rows)
    batched = time.perf_counter() - began
    began = time.perf_counter()
    alone = [[run([p], [c], 1)[0][0] for c in chosen] for p in prompts]
    one_by_one = time.perf_counter() - began

    rows = []
    for name, seconds, generations in (("one by one", one_by_one, alone), ("batched", batched, together)):
        flat = [g for per_item in generations for g in per_item]
        parts = sum(g.prefill_seconds for g in flat), sum(g.decode_seconds for g in flat)
        numbers = *(f"{x:.1f}" for x in (seconds, *parts)), f"{len(flat) / seconds:.2f}", f"{one_by_one / seconds:.1f}"
        rows.append([name, *numbers])
    title = (
        f"{len(chosen)} conditions x {items} items, {tokens} prompt + up to {new_tokens} new tokens, {reading}, "
        f"model {model}, {network.device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    show(title, ("harness", "seconds", "prefill", "decode", "rows/s", "ratio"), rows)
    same = [a.tokens == b.tokens for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True)]
    typer.echo(f"identical tokens: {sum(same)} of {len(same)} rows")


def _workload(model: str, items: int, tokens: int) -> tuple[PreTrainedModel, Collection[int], list[list[int]]]:
    """The network, its stop tokens and the prompts."""
    if model == "random":
        network = random_model()
        return network, (), random_prompts(network, items, tokens)
    loaded = models.load(model)
    asked = data.load_items("tinyworld:domains,needle_multiquery,list_all", items, tokens=tokens)
    prompts = [data.build_prompt(item, loaded.tokenizer, tokens).ids for item in asked]
    return loaded.model, models.stop_ids(loaded), prompts


@app.command()
@command.checked
@one_line_errors()
def scratch(
    tokens: Annotated[int, typer.Option(help="the larger of two sizes; the smaller is half of it")] = 16384,
    policies: Annotated[str, typer.Option(help="names, with commas; default: all of the catalogue")] = "",
) -> None:
    """Peak memory of each policy's scorer on random keys and queries at two sizes; a ratio of 2 is linear growth.

    A policy that reads a file made for the embedded model is shown no output projection, by which it would refuse
    random weights; scorers that return what they are given allocate nothing.
    """
    if tokens < 256:
        raise InputError(f"tokens {tokens}: at least 256, half of which holds every policy's window")
    freeing = [name for name, policy in CATALOGUE.items() if policy.frees and not policy.shared]
    asked = [name.strip() for name in policies.split(",")] if policies else freeing
    if unknown := [name for name in asked if name not in freeing]:
        raise InputError(f"no scorer of an evicting policy called {unknown[0]!r}: choose from {', '.join(freeing)}")
    square, rows = tokens * tokens * 4 / 2**20, []
    for name in asked:
        policy, peaks = CATALOGUE[name], []
        parameters: dict = policy.reading("as_described")
        parameters |= {file: str(parameters[file]).replace("*", "tiny-gqa") for file in policy.files}
        for n in (tokens // 2, tokens):
            o = _observation(n, parameters.get("window", 0), projected=not policy.files)
            with Peak(torch.device("cpu")) as peak:
                call(policy.score, o, parameters=parameters)
            peaks.append((peak.bytes or 0) / 2**20)
        ratio = f"{peaks[1] / peaks[0]:.2f}" if peaks[0] else "-"
        rows.append([name, f"{peaks[0]:.1f}", f"{peaks[1]:.1f}", ratio, f"{square:.0f}"])
    columns = ("policy", "MiB", "MiB at twice the tokens", "ratio", "MiB of tokens x tokens, one head")
    show(f"scorers at {tokens // 2} and {tokens} tokens, heads of the embedded model, float32, CPU", columns, rows)


def _observation(n: int, window: int, projected: bool) -> Observation:
    """What a policy sees of `n` random tokens in a layer of the embedded shape."""
    torch.manual_seed(n)
    shape = model_config()
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    dim = shape.hidden_size // heads
    return Observation(
        layer=1, layers=shape.num_hidden_layers, keys=torch.randn(1, kv_heads, n, dim),
        values=torch.randn(1, kv_heads, n, dim), positions=torch.arange(n).expand(1, kv_heads, n),
        queries=torch.randn(1, heads, window, dim), query_positions=torch.arange(n - window, n)[None],
        seen=torch.tensor([n]), scaling=dim**-0.5,
        output=torch.randn(heads, dim, shape.hidden_size) if projected else None,
        sums={s: torch.rand(1, heads if s == "reconstruction_per_norm" else kv_heads, n) for s in SUMS},
        inverse_frequencies=10_000 ** -(torch.arange(0, dim, 2) / dim),
    )  # fmt: skip


@app.command()
@command.checked
@one_line_errors()
def memory(
    tokens: Annotated[int, typer.Option(help="prompt length")] = 3000,
    share: Annotated[float, typer.Option(help="of the tokens that stay")] = 0.1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Peak memory of the prefill above the weights, and bytes held after it, measured: everything kept; each layer
    reduced as it is computed; layers that wait for each other."""
    network = random_model().to(models.device_of(device))
    [prompt] = random_prompts(network, 1, tokens)
    conditions = [Condition()] + [
        Condition(name, share, Prefill(), reading="as_described")
        for name in ("streaming_llm", "snapkv", "ada_kv", "layer_defensive_kv")
    ]
    [found] = generate(network, [prompt], conditions, max_new_tokens=1, stop_ids=(), measure_peak=True)
    rows = []
    for c, answer in zip(conditions, found, strict=True):
        peak, held, full = (b / 2**20 for b in (answer.peak_bytes, answer.bytes_held, answer.bytes_full))
        theory = sum(answer.kept) / len(answer.kept) / tokens * full
        rows.append([c.policy, f"{peak:.1f}", f"{held:.2f}", f"{theory:.2f}", f"{held / theory:.3f}"])
    title = f"{tokens} tokens, {share:.0%} kept, random weights of the embedded shape, {device}"
    show(title, ("policy", "peak MiB", "held MiB", "theory MiB", "held / theory"), rows)


if __name__ == "__main__":
    program(app)
