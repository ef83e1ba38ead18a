"""Errors of every kernel against float64."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvrepro_kernels.bench.harness import LLAMA, RULE, Row, exact, random
from kvrepro_kernels.column_mass import column_mass, column_mass_reference
from kvrepro_kernels.prefill_attention import prefill_attention
from kvrepro_kernels.ragged_decode import ragged_decode, ragged_decode_reference
from kvrepro_kernels.window_attention import window_attention, window_attention_reference
from kvrepro_kernels.window_rules import window_scores_reference
from kvrepro_kernels.window_scores import window_scores


def checks(date: str, tokens: int = 8192) -> Iterator[Row]:
    """Errors against float64 on fresh random inputs, ||ours - truth|| / ||truth||, and kept sets against the truth's.

    `differ` counts kept tokens that the truth drops, of `kept`; `not_ties` those of them whose true score is below the
    last kept one by more than 1e-5 of it. The function is long because it writes out each kernel's inputs and truth.
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
        last = torch.arange(tokens - 8, tokens, device="cuda")[None, None]
        starts = torch.zeros(1, kv_heads, device="cuda")
        outputs, lse = window_attention_reference(q, k, v, dim**-0.5, last, starts)
        outputs_and_lse = window_attention(query, keys, values)
        yield row("window_attention", "outputs", dtype, outputs_and_lse[0], outputs)
        yield row("window_attention", "lse", dtype, outputs_and_lse[1], lse)
        for sharp in (1, 4):  # 4: most of a row's attention on a few keys, where 1 / (1 - p) magnifies rounding
            q = (query * sharp).double()
            outputs, lse = window_attention_reference(q, k, v, dim**-0.5, last, starts)
            given, lse = outputs.to(dtype), lse.float()
            log_sum, a = exact(lse, given)
            rules = [("perturbation", "sum", "mean"), ("attention", "mean", "mean"), ("value", "max", "max")]
            for rule in (*rules, ("anchor", "sum", "mean"), ("attention", "variance", "mean")):
                named: dict[str, Any] = dict(zip(RULE, rule, strict=True))
                ours = window_scores(query * sharp, keys, values, lse, given, **named).double()
                truth = window_scores_reference(q, k, v, log_sum, a, *rule, dim**-0.5, last, starts)
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
            last_queries = torch.arange(tokens - 64, tokens, device="cuda")  # the last 64 queries, in float64
            truth, log_sum = window_attention_reference(
                query[:, :, last_queries].double(), k, v, dim**-0.5, last_queries[None, None], starts
            )
            yield row("prefill_attention", "cudnn, outputs", dtype, ours.output[:, :, last_queries], truth)
            yield row("prefill_attention", "cudnn, lse", dtype, ours.lse[:, :, last_queries], log_sum)
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
