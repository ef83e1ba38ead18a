"""Times every kernel against its floor, checks it against float64: `python -m kvrepro_kernels.bench`.

Writes data/gpu/kernels.csv (times), targets.csv (what was wanted beside what was reached), checks.csv (errors) and
kernels.md, which the book shows. The floor is the time of the bytes that must move at the measured copy bandwidth, or
of the floating-point operations at the measured matrix rate, whichever is longer. Times are microseconds of one call,
of graph replays over rotating inputs; where a call takes milliseconds, of plain calls.
"""

import argparse
import csv
import datetime
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvrepro_kernels.column_mass import column_mass, column_mass_reference
from kvrepro_kernels.compaction import compact
from kvrepro_kernels.paging import fill_holes, fill_pairs, find_holes, repack
from kvrepro_kernels.prefill_attention import prefill_attention
from kvrepro_kernels.ragged_decode import ragged_decode, ragged_decode_reference
from kvrepro_kernels.timing import copy_bandwidth, matmul_rate, quantiles, scratch_mib
from kvrepro_kernels.window_attention import window_attention, window_attention_reference
from kvrepro_kernels.window_scores import window_scores, window_scores_reference

COLUMNS = (
    "kernel variant shape tokens batch dtype device p20_us p50_us p80_us floor_us fraction_of_floor reference_p50_us "
    "speedup scratch_mib torch triton date"
).split()
FOLDER = Path(__file__).resolve().parents[2] / "data" / "gpu"
Row = dict[str, Any]

LLAMA = (32, 8, 128)  # query heads, KV heads, dims: Llama-3.1-8B and Mistral-7B
QWEN = (28, 4, 128)  # Qwen2.5-7B
BF16 = torch.bfloat16
RULE = ("indicator", "aggregate", "reduction")
TWO_PASSES = "perturbation, two passes, three kernels"
UNEQUAL = "unequal lengths, tail 64"


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64."""
    return tuple(x.double() for x in tensors)


def plain_perturbation(query: Tensor, keys: Tensor, values: Tensor, eps: float = 1e-6) -> Tensor:
    """DropKV's score as public PyTorch code computes it: keys and values repeated to the query heads, float32."""
    window, tokens, group = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (keys, values))
    logits = query.float() @ k.mT * query.shape[-1] ** -0.5
    future = torch.ones(window, tokens, dtype=torch.bool, device=query.device).triu(tokens - window + 1)
    p = logits.masked_fill(future, -torch.inf).softmax(-1)
    a = p @ v
    distance = a.square().sum(-1, keepdim=True) + v.square().sum(-1)[:, :, None] - 2 * a @ v.mT
    score = ((p / (1 - p + eps)).square() * distance.clamp(min=0)).sum(2)
    return score.unflatten(1, (keys.shape[1], group)).mean(2)


def each(call: Callable[..., object], inputs: Iterable[Sequence[Any]], **settings: Any) -> list[Callable[[], object]]:
    """The call on every input set."""
    return [partial(call, *x, **settings) for x in inputs]


def sets_of(bytes_each: float) -> range:
    """So many input sets that together they are several times the second-level cache."""
    return range(max(1, min(24, round(6e8 / bytes_each))))


class Bench:
    """Collects rows; knows the two ceilings, measured first."""

    def __init__(self, date: str) -> None:
        self.bandwidth, self.rate = copy_bandwidth(), matmul_rate()
        self.rows: list[Row] = []
        self.common = dict(
            dtype="bfloat16", device=torch.cuda.get_device_name(), torch=torch.__version__, triton=version("triton"),
            date=date,
        )  # fmt: skip

    def add(
        self, kernel: str, variant: str, shape: str, tokens: int, batch: int, calls: Sequence[Callable[[], object]], *,
        moved: float = 0.0, operations: float = 0.0, reference: float | None = None, graph: bool = True,
        replays: int = 40,
    ) -> float:  # fmt: skip
        """Time `calls` (one per input set), keep a row, return the median."""
        low, middle, high = quantiles(calls, replays, graph)
        floor = max(moved / self.bandwidth, operations / self.rate) * 1e6
        speedup = reference / middle if reference else None
        row = dict(
            kernel=kernel, variant=variant, shape=shape, tokens=tokens, batch=batch,
            p20_us=low, p50_us=middle, p80_us=high, floor_us=floor, fraction_of_floor=floor / middle,
            reference_p50_us=reference, speedup=speedup, scratch_mib=scratch_mib(calls[0]), **self.common,
        )  # fmt: skip
        self.rows.append(row)
        line = (
            f"{kernel:18}{variant:40}{shape:10}{tokens:>7} x{batch:<3}{middle:>10.1f} us {floor / middle:5.2f} of floor"
        )
        print(line + (f" {speedup:6.2f}x" if speedup else ""), flush=True)
        return middle

    def find(self, kernel: str, variant: str, tokens: int, batch: int = 1, shape: str = "32/8/128") -> Row:
        wanted = (kernel, variant, tokens, batch, shape)
        return next(r for r in self.rows if (r["kernel"], r["variant"], r["tokens"], r["batch"], r["shape"]) == wanted)


def bench_ceilings(b: Bench) -> None:
    source, square = torch.randn(2**29, device="cuda"), random(8192, 8192)
    copy, product = partial(torch.empty_like(source).copy_, source), partial(torch.matmul, square, square.mT)
    b.add("ceiling", "copy of 2 GiB", "-", 0, 1, [copy], moved=2 * source.nbytes, graph=False)
    b.add("ceiling", "matrix product of 8192 cubed", "-", 0, 1, [product], operations=2 * 8192**3, graph=False)


def grouped_perturbation(query: Tensor, keys: Tensor, values: Tensor, lse: Tensor, outputs: Tensor) -> Tensor:
    """The kernel's own reference in float32, which neither repeats heads nor computes a softmax."""
    batch, kv_heads, tokens, dim = keys.shape
    first = torch.full((batch,), tokens - query.shape[2], device="cuda")
    starts = torch.zeros(batch, kv_heads, dtype=torch.int64, device="cuda")
    q, k, v, log_sum, a = (x.float() for x in (query, keys, values, lse, outputs))
    return window_scores_reference(q, k, v, log_sum, a, "perturbation", "sum", "mean", dim**-0.5, first, starts)


def bench_window_scores(b: Bench) -> None:
    for (heads, kv_heads, dim), tokens, batch, window in (
        (LLAMA, 4096, 1, 8), (LLAMA, 32768, 1, 8), (LLAMA, 131072, 1, 8), (LLAMA, 32768, 8, 8), (QWEN, 32768, 1, 8),
        (QWEN, 131072, 1, 8), (LLAMA, 32768, 1, 32), (LLAMA, 32768, 1, 64),
    ):  # fmt: skip
        where = (f"{heads}/{kv_heads}/{dim}", tokens, batch)
        pages = batch * kv_heads * tokens * dim * 2  # bytes of the keys
        inputs = []
        for _ in sets_of(2 * pages):
            query = random(batch, heads, window, dim)
            keys, values = (random(batch, kv_heads, tokens, dim) for _ in range(2))
            outputs, lse = window_attention(query, keys, values)
            inputs.append((query, keys, values, lse, outputs))
        bare = [x[:3] for x in inputs]
        if window > 8:
            product = 2 * heads * window * tokens * dim  # operations of one matrix product
            variant = f"attention mean mean, window {window}"
            calls = each(window_scores, inputs, indicator="attention", aggregate="mean")
            b.add("window_scores", variant, *where, calls, moved=pages, operations=product)
            variant = f"perturbation sum mean, window {window}"
            calls = each(window_scores, inputs)
            b.add("window_scores", variant, *where, calls, moved=2 * pages, operations=2 * product)
            continue
        plain = None
        known = batch == 1 and heads == 32
        if known:
            calls = each(plain_perturbation, bare[:2])
            plain = b.add("window_scores", "plain torch, repeated heads", *where, calls, moved=2 * pages, replays=8)
            calls = each(grouped_perturbation, inputs[:2])
            b.add(
                "window_scores", "plain torch, grouped, lse given", *where, calls, moved=2 * pages, reference=plain,
                replays=8,
            )  # fmt: skip
        calls = each(window_scores, inputs)
        b.add("window_scores", "perturbation sum mean", *where, calls, moved=2 * pages, reference=plain)
        calls = each(window_scores, bare)
        b.add("window_scores", TWO_PASSES, *where, calls, moved=2 * pages, reference=plain)
        if known and tokens > 4096:
            calls = each(window_attention, bare)
            b.add("window_attention", "outputs and lse", *where, calls, moved=2 * pages)
            for rule in (
                ("attention", "mean", "mean"), ("attention", "max", "max"), ("attention", "variance", "mean"),
                ("value", "max", "max"), ("anchor", "sum", "mean"), ("perturbation", "max", "max"),
            ):  # fmt: skip
                calls = each(window_scores, inputs, **dict(zip(RULE, rule, strict=True)))
                moved = pages * (1 if rule[0] == "attention" else 2)
                b.add("window_scores", " ".join(rule), *where, calls, moved=moved)


def bench_prefill(b: Bench) -> None:
    for (heads, kv_heads, dim), tokens in ((LLAMA, 4096), (LLAMA, 32768), (LLAMA, 131072), (QWEN, 32768)):
        where = (f"{heads}/{kv_heads}/{dim}", tokens, 1)
        inputs = [random(1, h, tokens, dim) for h in (heads, kv_heads, kv_heads)]
        work = heads * tokens * tokens / 2 * dim * 2  # operations of one matrix product over the causal half
        times = {}
        for backend in ("flash", "efficient", "cudnn"):
            if backend == "efficient" and tokens > 32768:
                continue
            calls = each(prefill_attention, [inputs], backend=backend)
            times[backend] = b.add(
                "prefill_attention", backend, *where, calls, operations=2 * work, reference=times.get("flash"),
                graph=False, replays=10,
            )  # fmt: skip
        lse = prefill_attention(*inputs).lse
        spans = (torch.arange(tokens, device="cuda") // 1000)[None]
        for variant, span in (("causal", None), ("causal, same span", spans)):
            calls = each(column_mass, [(*inputs[:2], lse)], spans=span)
            b.add(
                "column_mass", variant, *where, calls, operations=work, reference=min(times.values()), graph=False,
                replays=10,
            )  # fmt: skip


def lists(mean: int, batch: int, equal: bool, tail: int) -> list[tuple]:
    """Input sets of `ragged_decode`: lengths equal, or uniform between 0.2 and 1.8 of the mean."""
    heads, kv_heads, dim = LLAMA
    made = []
    for _ in sets_of(batch * kv_heads * mean * 4 * dim):
        lengths = torch.full((batch * kv_heads,), mean)
        if not equal:
            share = 0.2 + 1.6 * torch.rand(batch * kv_heads)
            lengths = (share / share.mean() * mean).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda()
        flat = [random(int(lengths.sum()), dim) for _ in range(2)]
        dense = [random(batch, kv_heads, 128, dim) for _ in range(2)]
        made.append((random(batch, heads, 1, dim), *flat, offsets, *dense, tail))
    return made


def bench_ragged_decode(b: Bench) -> None:
    heads, kv_heads, dim = LLAMA
    for mean, batch, equal in (
        (32768, 8, False), (6553, 8, False), (32768, 1, False), (2048, 1, False),
        (32768, 8, True), (6553, 8, True), (32768, 1, True), (2048, 1, True),
    ):  # fmt: skip
        where = (f"{heads}/{kv_heads}/{dim}", mean, batch)
        tail = 0 if equal else 64
        inputs = lists(mean, batch, equal, tail)
        moved = sum(x[1].nbytes + x[2].nbytes + batch * kv_heads * tail * dim * 4 for x in inputs) / len(inputs)
        if not equal:
            b.add("ragged_decode", UNEQUAL, *where, each(ragged_decode, inputs), moved=moved)
            calls = each(ragged_decode, inputs, emit=("mean",))
            b.add("ragged_decode", f"{UNEQUAL}, emits mean", *where, calls, moved=moved)
            continue
        dense = [(x[0], *(y.view(batch, kv_heads, mean, dim) for y in x[1:3])) for x in inputs]
        times = []
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                calls = each(scaled_dot_product_attention, dense, enable_gqa=True)
                times.append(b.add("ragged_decode", f"torch {name}, equal lengths", *where, calls, moved=moved))
        calls = each(ragged_decode, inputs)
        b.add("ragged_decode", "equal lengths", *where, calls, moved=moved, reference=min(times))


def torch_gather(keys: Tensor, values: Tensor, rows: Tensor, out: tuple[Tensor, Tensor]) -> None:
    index = rows[..., None].expand(*rows.shape, keys.shape[-1])
    for source, target in zip((keys, values), out, strict=True):
        torch.gather(source, 2, index, out=target)


def torch_repack(keys: Tensor, values: Tensor, source: Tensor, target: Tensor) -> None:
    for pool in (keys, values):
        flat = pool.flatten(0, 1)
        flat[target] = flat[source]


def bench_compaction(b: Bench) -> None:
    kv_heads, dim = LLAMA[1:]
    shape = f"{kv_heads}/{dim}"
    for tokens, share in ((32768, 0.2), (32768, 0.5), (131072, 0.2), (131072, 0.5)):
        kept = int(tokens * share)
        inputs = []
        for _ in sets_of(2 * kv_heads * tokens * dim * 2):
            rows = torch.rand(1, kv_heads, tokens, device="cuda").topk(kept).indices.sort(-1).values
            out = tuple(random(1, kv_heads, kept, dim) for _ in range(2))
            inputs.append((random(1, kv_heads, tokens, dim), random(1, kv_heads, tokens, dim), rows, out))
        moved = 4 * kv_heads * kept * dim * 2  # keys and values, read and written
        calls = each(torch_gather, inputs)
        plain = b.add("compaction", f"torch gather, keep {share:.0%}", shape, tokens, 1, calls, moved=moved)
        calls = each(compact, inputs, check_rows=False)
        b.add("compaction", f"gather, keep {share:.0%}", shape, tokens, 1, calls, moved=moved, reference=plain)

    for tokens, requests in ((32768, 8), (32768, 1), (8192, 32)):
        block, kept, where = 16, tokens // 2, (shape, tokens, requests)
        pools = [random(requests * tokens // block, block, kv_heads, dim) for _ in range(2)]
        table = torch.randperm(len(pools[0]), device="cuda").int().view(requests, -1)
        slots = torch.rand(requests, tokens, device="cuda").topk(kept).indices.sort(-1).values.int()
        pairs = find_holes(slots, tokens)[1:]
        front = torch.arange(kept, device="cuda").expand(requests, -1)
        source, target = ((table.gather(1, x.long() // block) * block + x % block).flatten() for x in (slots, front))
        row = 4 * kv_heads * dim * 2
        moved, fewer = row * int((slots != front).sum()), row * int((pairs[0] >= 0).sum())
        calls = each(torch_repack, [(*pools, source, target)])
        plain = b.add("compaction", "torch repack, keep 50%", *where, calls, moved=moved)
        calls = each(repack, [(*pools, table, slots)], check_slots=False)
        b.add("compaction", "repack, keep 50%", *where, calls, moved=moved, reference=plain)
        calls = each(fill_pairs, [(*pools, table, pairs)])
        b.add("compaction", "hole filling, keep 50%", *where, calls, moved=fewer, reference=plain)
        calls = each(fill_holes, [(*pools, table, slots)], check_slots=False)
        b.add("compaction", "hole filling and search, keep 50%", *where, calls, moved=fewer, reference=plain)


def targets(b: Bench) -> Iterator[Row]:
    """What was to be reached, and what was."""

    def row(target: str, wanted: str, outcome: float, met: bool) -> Row:
        return dict(target=target, wanted=wanted, outcome=f"{outcome:.3f}", met="yes" if met else "no")

    for tokens, least in ((131072, 0.85), (32768, 0.65)):
        x = b.find("window_scores", "perturbation sum mean", tokens)["fraction_of_floor"]
        yield row(f"window_scores, fraction of the floor, {tokens} tokens", f">= {least}", x, x >= least)
    long = b.find("window_scores", "perturbation sum mean", 131072)
    yield row("window_scores, speedup over plain torch, 131072 tokens", ">= 75", long["speedup"], long["speedup"] >= 75)
    yield row("window_scores, scratch in MiB, 131072 tokens", "<= 2", long["scratch_mib"], long["scratch_mib"] <= 2)
    x = b.find("window_scores", TWO_PASSES, 131072)["p50_us"] / long["p50_us"]
    yield row("window_scores, speedup over two passes in three kernels, 131072 tokens", "> 1", x, x > 1)
    x = 1 / b.find("column_mass", "causal", 32768)["speedup"]
    yield row("column_mass, share of the fastest attention forward, 32768 tokens", "<= 0.6", x, x <= 0.6)
    for tokens in (32768, 6553):
        one, emits = (b.find("ragged_decode", v, tokens, 8) for v in (UNEQUAL, UNEQUAL + ", emits mean"))
        x = one["fraction_of_floor"]
        yield row(f"ragged_decode, fraction of copy bandwidth, {tokens} tokens kept, batch 8", ">= 0.80", x, x >= 0.8)
        x = emits["p50_us"] / one["p50_us"] - 1
        yield row(f"ragged_decode, cost of emitting attention, {tokens} tokens kept, batch 8", "<= 0.15", x, x <= 0.15)
    for tokens, batch in ((32768, 8), (6553, 8), (32768, 1), (2048, 1)):
        ours = b.find("ragged_decode", "equal lengths", tokens, batch)["p50_us"]
        for name in ("flash", "cudnn"):
            x = ours / b.find("ragged_decode", f"torch {name}, equal lengths", tokens, batch)["p50_us"]
            what = f"ragged_decode, time over torch's {name} decoding, {tokens} tokens, batch {batch}"
            yield row(what, "<= 1.10", x, x <= 1.1)
    for tokens, share in ((32768, "20%"), (32768, "50%"), (131072, "20%"), (131072, "50%")):
        x = b.find("compaction", f"gather, keep {share}", tokens, shape="8/128")["fraction_of_floor"]
        yield row(
            f"compaction, gather, fraction of copy bandwidth, {tokens} tokens, keep {share}", ">= 0.80", x, x >= 0.8
        )
    for tokens, requests in ((32768, 8), (32768, 1), (8192, 32)):
        for way in ("repack", "hole filling"):
            x = b.find("compaction", f"{way}, keep 50%", tokens, requests, "8/128")["fraction_of_floor"]
            yield row(f"compaction, {way}, fraction of copy bandwidth, {requests} x {tokens}", ">= 0.80", x, x >= 0.8)


def checks(date: str, tokens: int = 8192) -> Iterator[Row]:
    """Errors against float64 on fresh random inputs, ||ours - truth|| / ||truth||, and kept sets against the truth's.

    `differ` counts kept tokens that the truth drops, of `kept`; `not_ties` those of them whose true score lies more
    than 1e-5 of it below the last kept one.
    """
    heads, kv_heads, dim = LLAMA

    def row(kernel: str, variant: str, dtype: torch.dtype, ours: Tensor, truth: Tensor, **sets: int) -> Row:
        error = float((ours.double() - truth).norm() / truth.norm())
        name = str(dtype).removeprefix("torch.")
        return dict(kernel=kernel, variant=variant, dtype=name, tokens=tokens, error=f"{error:.1e}", **sets, date=date)

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        query, keys, values = (
            random(1, h, n, dim, dtype=dtype) for h, n in ((heads, 8), (kv_heads, tokens), (kv_heads, tokens))
        )
        q, k, v = exact(query, keys, values)
        first, starts = torch.tensor([tokens - 8], device="cuda"), torch.zeros(1, kv_heads, device="cuda")
        outputs, lse = window_attention_reference(q, k, v, dim**-0.5, first, starts)
        mine = window_attention(query, keys, values)
        yield row("window_attention", "outputs", dtype, mine[0], outputs)
        yield row("window_attention", "lse", dtype, mine[1], lse)
        for sharp in (1, 4):  # 4: most of a row's attention on a few keys, where 1 / (1 - p) magnifies rounding
            q = (query * sharp).double()
            outputs, lse = window_attention_reference(q, k, v, dim**-0.5, first, starts)
            given, lse = outputs.to(dtype), lse.float()
            log_sum, a = exact(lse, given)
            for rule in (
                ("perturbation", "sum", "mean"), ("attention", "mean", "mean"), ("value", "max", "max"),
                ("anchor", "sum", "mean"), ("attention", "variance", "mean"),
            ):  # fmt: skip
                named: dict[str, Any] = dict(zip(RULE, rule, strict=True))
                ours = window_scores(query * sharp, keys, values, lse, given, **named).double()
                truth = window_scores_reference(q, k, v, log_sum, a, *rule, dim**-0.5, first, starts)
                kept = tokens // 5
                edge = truth.topk(kept).values[..., -1:]
                chosen = torch.zeros_like(truth, dtype=torch.bool).scatter(-1, ours.topk(kept).indices, True)
                wrong = chosen & (truth < edge)
                far = wrong & (edge - truth > 1e-5 * edge.abs())
                counts = dict(kept=kept * kv_heads, differ=int(wrong.sum()), not_ties=int(far.sum()))
                variant = " ".join(rule) + (", sharp" if sharp > 1 else "")
                yield row("window_scores", variant, dtype, ours, truth, **counts)
        if dtype != torch.float32:
            query = random(1, heads, tokens, dim, dtype=dtype)
            ours = prefill_attention(query, keys, values, backend="cudnn")
            some = torch.arange(tokens - 64, tokens, device="cuda")  # the last 64 queries, in float64
            first = torch.tensor([tokens - 64], device="cuda")
            truth, log_sum = window_attention_reference(query[:, :, some].double(), k, v, dim**-0.5, first, starts)
            yield row("prefill_attention", "cudnn, outputs", dtype, ours.output[:, :, some], truth)
            yield row("prefill_attention", "cudnn, lse", dtype, ours.lse[:, :, some], log_sum)
            last = slice(tokens - 1024, tokens)  # as many queries as the reference has memory for
            mass = column_mass(query[:, :, last], keys, ours.lse[:, :, last])
            q, log_sum = exact(query[:, :, last], ours.lse[:, :, last])
            truth = column_mass_reference(q, k, log_sum, dim**-0.5, starts.long())
            yield row("column_mass", "last 1024 queries", dtype, mass, truth)
        flat = [random(4 * tokens, dim, dtype=dtype) for _ in range(2)]
        cuts = torch.tensor([0.0, *torch.rand(kv_heads - 1).sort().values.tolist(), 1.0], device="cuda")
        cuts = (cuts * 4 * tokens).long()
        tail = [random(1, kv_heads, 16, dim, dtype=dtype) for _ in range(2)]
        query = random(1, heads, 1, dim, dtype=dtype)
        decoded = ragged_decode(query, *flat, cuts, *tail, 9, emit=("mean",))
        (q, k, v), (tail_k, tail_v) = exact(query, *flat), exact(*tail)
        truth = ragged_decode_reference(q, k, v, cuts, tail_k, tail_v, 9, dim**-0.5, ("mean",))
        yield row("ragged_decode", "outputs", dtype, decoded.output, truth.output)
        yield row("ragged_decode", "attention", dtype, decoded.attention["mean"][0], truth.attention["mean"][0])


def write(path: Path, rows: list[Row], columns: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def page(folder: Path) -> str:
    """The tables of `folder` as the book shows them: targets, times by kernel, errors. Markdown."""

    def table(header: str, rows: Iterable[Sequence[str]]) -> str:
        names = header.split(" | ")
        return "\n".join("| " + " | ".join(x) + " |" for x in (names, ["---"] * len(names), *rows)) + "\n"

    times, targets_, errors = (
        list(csv.DictReader((folder / f"{name}.csv").open())) for name in ("kernels", "targets", "checks")
    )

    def show(text: str, places: int = 2) -> str:
        return f"{float(text):.{places}f}" if text else ""

    parts = ["## Targets\n", table("target | wanted | reached | met", [list(x.values()) for x in targets_])]
    for kernel in dict.fromkeys(x["kernel"] for x in times):
        parts.append(f"## {kernel}\n")
        rows = [
            [
                x["variant"], x["shape"], x["tokens"] if x["tokens"] != "0" else "", x["batch"], show(x["p50_us"], 1),
                show(x["floor_us"], 1), show(x["fraction_of_floor"]), show(x["speedup"]), show(x["scratch_mib"], 1),
            ]
            for x in times
            if x["kernel"] == kernel
        ]  # fmt: skip
        names = "variant | heads/KV heads/dims | tokens | batch | median, µs | floor, µs | of the floor | speedup"
        parts.append(table(names + " | scratch, MiB", rows))
    names = "kernel | variant | type | error | kept | differ | not ties"
    rows = [[x[y] for y in "kernel variant dtype error kept differ not_ties".split()] for x in errors]
    parts += ["## Errors against float64\n", table(names, rows)]
    one = times[0]
    parts.append(f"{one['device']}, torch {one['torch']}, triton {one['triton']}, {one['date']}.\n")
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvrepro_kernels.bench", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the three tables")
    parser.add_argument("--date", default=str(datetime.date.today()), help="written into the tables")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("the kernels are timed on a GPU, and torch sees none", file=sys.stderr)
        return 2
    checked = list(checks(options.date))
    write(options.out / "checks.csv", checked, "kernel variant dtype tokens error kept differ not_ties date".split())
    b = Bench(options.date)
    for part in (bench_ceilings, bench_window_scores, bench_prefill, bench_ragged_decode, bench_compaction):
        part(b)
        torch.cuda.empty_cache()
        write(options.out / "kernels.csv", b.rows, COLUMNS)
    reached = list(targets(b))
    write(options.out / "targets.csv", reached, "target wanted outcome met".split())
    (options.out / "kernels.md").write_text(page(options.out))
    for row in reached:
        print(f"{row['met']:4}{row['outcome']:>10} {row['wanted']:8} {row['target']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
