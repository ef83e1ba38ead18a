"""Benchmarks. `python -m kvrepro.tools.bench harness` times batched conditions against the same ones one after another;
`scratch` shows that no scorer's memory grows with the square of the tokens, `memory` what a prefill allocates.
"""

import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from kvrepro.chapters.protection.policy import PROTECTION_SEVEN
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Generation
from kvrepro.engine.generate import generate
from kvrepro.engine.memory import Peak
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import SUMS, call
from kvrepro.errors import InputError
from kvrepro.experiment import data, models

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.callback()
def _commands() -> None:
    """Keeps `harness` a subcommand, so that others can join it."""


def random_model(seed: int = 0) -> PreTrainedModel:
    """Random weights in the embedded model's shape: 8 layers, width 384, 6 query and 2 KV heads of 64."""
    torch.manual_seed(seed)
    shape = Qwen2Config(
        vocab_size=2260,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(shape).eval()


def protection_conditions(reading: str = "as_run") -> list[Condition]:
    """The protection paper's 43: seven policies, unprotected and 10% + 10%, three capacities; and the full cache."""
    return [Condition()] + [
        Condition(policy, capacity, guarded, guarded, reading=reading)
        for capacity in (128, 256, 512)
        for guarded in (0.0, 0.1)
        for policy in PROTECTION_SEVEN
    ]


@app.command()
def harness(
    model: Annotated[
        str, typer.Option(help='a checkpoint as `models.load` takes it, or "random": random weights and tokens')
    ] = "tiny-gqa",
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
        typer.echo(f"{items} items x {conditions} conditions: give at least one of each", err=True)
        raise typer.Exit(2)
    everything = protection_conditions(reading)
    chosen = [everything[i * len(everything) // conditions] for i in range(min(conditions, len(everything)))]
    try:
        if model == "random":
            network, stop_ids = random_model(), frozenset()
            generator = torch.Generator().manual_seed(0)
            prompts = torch.randint(0, network.config.vocab_size, (items, tokens), generator=generator).tolist()
        else:
            loaded = models.load(model)
            network, stop_ids = loaded.model, models.stop_ids(loaded)
            asked = data.load_items("tinyworld:domains,needle_multiquery,list_all", items, tokens=tokens)
            prompts = [data.build_prompt(item, loaded.tokenizer, tokens).ids for item in asked]

        def run(prompts: list, conditions: list, rows: int) -> list[list[Generation]]:
            return generate(network, prompts, conditions, max_new_tokens=new_tokens, stop_ids=stop_ids, batch_rows=rows)

        run(prompts[:1], chosen[:1], 1)  # warm up allocator and thread pool
        began = time.perf_counter()
        together = run(prompts, chosen, batch_rows)
        batched = time.perf_counter() - began
        began = time.perf_counter()
        alone = [[run([p], [c], 1)[0][0] for c in chosen] for p in prompts]
        one_by_one = time.perf_counter() - began
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None

    title = (
        f"{len(chosen)} conditions x {items} items, {tokens} prompt + up to {new_tokens} new tokens, {reading}, "
        f"model {model}, {network.device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    table = Table(title=title)
    for column in ("harness", "seconds", "prefill", "decode", "rows/s", "ratio"):
        table.add_column(column, justify="left" if column == "harness" else "right")
    for name, seconds, generations in (("one by one", one_by_one, alone), ("batched", batched, together)):
        flat = [g for per_item in generations for g in per_item]
        prefill, decode = sum(g.prefill_seconds for g in flat), sum(g.decode_seconds for g in flat)
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{prefill:.1f}",
            f"{decode:.1f}",
            f"{len(flat) / seconds:.2f}",
            f"{one_by_one / seconds:.1f}",
        )
    Console(width=120).print(table)
    same = [a.tokens == b.tokens for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True)]
    typer.echo(f"identical tokens: {sum(same)} of {len(same)} rows")


@app.command()
def scratch(
    tokens: Annotated[int, typer.Option(help="the larger of two sizes; the smaller is half of it")] = 16384,
    policies: Annotated[str, typer.Option(help="names, with commas; default: all of the catalogue")] = "",
) -> None:
    """Peak memory of each policy's scorer on random keys and queries at two sizes; a ratio of 2 is linear growth.

    A policy that reads a file made for the embedded model is shown no output projection, by which it would refuse
    random weights; scorers that return what they are given allocate nothing.
    """
    if tokens < 256:
        typer.echo(f"tokens {tokens}: at least 256, half of which holds every policy's window", err=True)
        raise typer.Exit(2)
    shape = random_model().config
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    dim = shape.hidden_size // heads
    table = Table(
        title=f"scorers at {tokens // 2} and {tokens} tokens, {heads}/{kv_heads} heads of {dim}, float32, CPU"
    )
    for column in ("policy", "MiB", "MiB at twice the tokens", "ratio", "MiB of tokens x tokens, one head"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    freeing = [name for name, policy in CATALOGUE.items() if policy.frees]
    asked = [name.strip() for name in policies.split(",")] if policies else freeing
    if unknown := [name for name in asked if name not in freeing]:
        typer.echo(f"no scorer of an evicting policy called {unknown[0]!r}: choose from {', '.join(freeing)}", err=True)
        raise typer.Exit(2)
    for name in asked:
        policy, peaks = CATALOGUE[name], []
        parameters: dict = policy.reading("as_described")
        for n in (tokens // 2, tokens):
            torch.manual_seed(n)
            window = parameters.get("window", 0)
            o = Observation(
                layer=1, layers=shape.num_hidden_layers, keys=torch.randn(1, kv_heads, n, dim),
                values=torch.randn(1, kv_heads, n, dim), positions=torch.arange(n).expand(1, kv_heads, n),
                queries=torch.randn(1, heads, window, dim), query_positions=torch.arange(n - window, n)[None],
                seen=torch.tensor([n]), scaling=dim**-0.5,
                output=None if policy.files else torch.randn(heads, dim, shape.hidden_size),
                sums={s: torch.rand(1, heads if s == "reconstruction_per_norm" else kv_heads, n) for s in SUMS},
                inverse_frequencies=10_000 ** -(torch.arange(0, dim, 2) / dim),
            )  # fmt: skip
            with Peak(torch.device("cpu")) as peak:
                call(policy.score, o, parameters=parameters)
            peaks.append(peak.bytes / 2**20)
        square = tokens * tokens * 4 / 2**20
        ratio = f"{peaks[1] / peaks[0]:.2f}" if peaks[0] else "-"
        table.add_row(name, f"{peaks[0]:.1f}", f"{peaks[1]:.1f}", ratio, f"{square:.0f}")
    Console(width=120).print(table)


@app.command()
def memory(
    tokens: Annotated[int, typer.Option(help="prompt length")] = 3000,
    share: Annotated[float, typer.Option(help="of the tokens that stay")] = 0.1,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
) -> None:
    """Peak memory of the prefill above the weights, and bytes held after it, measured: everything kept; each layer
    reduced as it is computed; layers that wait for each other."""
    try:
        network = random_model().to(models._device(device))
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, network.config.vocab_size, (tokens,), generator=generator).tolist()
    conditions = [Condition(regime="prefill")] + [
        Condition(name, share=share, regime="prefill", reading="as_described")
        for name in ("streaming_llm", "snapkv", "ada_kv", "layer_defensive_kv")
    ]
    try:
        [found] = generate(network, [prompt], conditions, max_new_tokens=1, stop_ids=(), measure_peak=True)
    except InputError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    table = Table(title=f"{tokens} tokens, {share:.0%} kept, random weights of the embedded shape, {device}")
    for column in ("policy", "peak MiB", "held MiB", "theory MiB", "held / theory"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for c, answer in zip(conditions, found, strict=True):
        theory = sum(answer.kept) / len(answer.kept) / tokens * answer.bytes_full / 2**20
        held = answer.bytes_held / 2**20
        table.add_row(
            c.policy, f"{answer.peak_bytes / 2**20:.1f}", f"{held:.2f}", f"{theory:.2f}", f"{held / theory:.3f}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    app()
