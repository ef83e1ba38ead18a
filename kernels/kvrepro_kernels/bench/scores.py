"""Times of scoring: window scores, window attention, a prompt's attention, column mass."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvrepro_kernels.bench.harness import LLAMA, QWEN, RULE, TWO_PASSES, Bench, each, random, sets_of
from kvrepro_kernels.column_mass import column_mass
from kvrepro_kernels.prefill_attention import prefill_attention
from kvrepro_kernels.window_attention import window_attention
from kvrepro_kernels.window_rules import window_scores_reference
from kvrepro_kernels.window_scores import window_scores


def bench_ceilings(b: Bench) -> None:
    source, square = torch.randn(2**29, device="cuda"), random(8192, 8192)
    copy, product = partial(torch.empty_like(source).copy_, source), partial(torch.matmul, square, square.mT)
    b.add("ceiling", "copy of 2 GiB", "-", 0, 1, [copy], moved=2 * source.nbytes, graph=False)
    b.add("ceiling", "matrix product of 8192 cubed", "-", 0, 1, [product], operations=2 * 8192**3, graph=False)


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


def grouped_perturbation(query: Tensor, keys: Tensor, values: Tensor, lse: Tensor, outputs: Tensor) -> Tensor:
    """The kernel's own reference in float32, which neither repeats heads nor computes a softmax."""
    batch, kv_heads, tokens, dim = keys.shape
    last = torch.arange(tokens - query.shape[2], tokens, device="cuda")[None, None]
    starts = torch.zeros(batch, kv_heads, dtype=torch.int64, device="cuda")
    q, k, v, log_sum, a = (x.float() for x in (query, keys, values, lse, outputs))
    return window_scores_reference(q, k, v, log_sum, a, "perturbation", "sum", "mean", dim**-0.5, last, starts)


def bench_window_scores(b: Bench) -> None:
    cases = [(LLAMA, 4096, 1, 8), (LLAMA, 32768, 1, 8), (LLAMA, 131072, 1, 8), (LLAMA, 32768, 8, 8)]
    cases += [(QWEN, 32768, 1, 8), (QWEN, 131072, 1, 8), (LLAMA, 32768, 1, 32), (LLAMA, 32768, 1, 64)]
    for (heads, kv_heads, dim), tokens, batch, window in cases:
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
        compared = batch == 1 and heads == 32
        if compared:
            calls = each(plain_perturbation, bare[:2])
            plain = b.add("window_scores", "plain torch, repeated heads", *where, calls, moved=2 * pages, replays=8)
            calls = each(grouped_perturbation, inputs[:2])
            given: dict[str, Any] = {"moved": 2 * pages, "reference": plain, "replays": 8}
            b.add("window_scores", "plain torch, grouped, lse given", *where, calls, **given)
        calls = each(window_scores, inputs)
        b.add("window_scores", "perturbation sum mean", *where, calls, moved=2 * pages, reference=plain)
        calls = each(window_scores, bare)
        b.add("window_scores", TWO_PASSES, *where, calls, moved=2 * pages, reference=plain)
        if compared and tokens > 4096:
            calls = each(window_attention, bare)
            b.add("window_attention", "outputs and lse", *where, calls, moved=2 * pages)
            rules = [("attention", "mean", "mean"), ("attention", "max", "max"), ("attention", "variance", "mean")]
            rules += [("value", "max", "max"), ("anchor", "sum", "mean"), ("perturbation", "max", "max")]
            for rule in rules:
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
            given: dict[str, Any] = {
                "operations": 2 * work,
                "reference": times.get("flash"),
                "graph": False,
                "replays": 10,
            }
            times[backend] = b.add("prefill_attention", backend, *where, calls, **given)
        lse = prefill_attention(*inputs).lse
        spans = (torch.arange(tokens, device="cuda") // 1000)[None]
        for variant, span in (("causal", None), ("causal, same span", spans)):
            calls = each(column_mass, [(*inputs[:2], lse)], spans=span)
            given = {"operations": work, "reference": min(times.values()), "graph": False, "replays": 10}
            b.add("column_mass", variant, *where, calls, **given)
