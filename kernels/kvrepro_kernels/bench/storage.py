"""Times of decoding from ragged storage, and of moving kept tokens."""

from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvrepro_kernels.bench.harness import LLAMA, UNEQUAL, Bench, each, random, sets_of
from kvrepro_kernels.compaction import compact
from kvrepro_kernels.fill_holes import fill_holes, fill_pairs, find_holes
from kvrepro_kernels.ragged_decode import ragged_decode
from kvrepro_kernels.repack import repack


def lists(mean: int, batch: int, equal: bool, tail: int) -> list[tuple]:
    """Input sets of `ragged_decode`: lengths equal, or uniform between 0.2 and 1.8 of the mean."""
    heads, kv_heads, dim = LLAMA
    input_sets = []
    for _ in sets_of(batch * kv_heads * mean * 4 * dim):
        lengths = torch.full((batch * kv_heads,), mean)
        if not equal:
            share = 0.2 + 1.6 * torch.rand(batch * kv_heads)
            lengths = (share / share.mean() * mean).long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).cuda()
        flat = [random(int(lengths.sum()), dim) for _ in range(2)]
        dense = [random(batch, kv_heads, 128, dim) for _ in range(2)]
        input_sets.append((random(batch, heads, 1, dim), *flat, offsets, *dense, tail))
    return input_sets


def bench_ragged_decode(b: Bench) -> None:
    heads, kv_heads, dim = LLAMA
    sizes = ((32768, 8), (6553, 8), (32768, 1), (2048, 1))
    for equal, (mean, batch) in product((False, True), sizes):
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


def add_copy(b: Bench, variant: str, where: tuple[str, int, int], moved: float) -> None:
    """Time torch's own copy of as many bytes, since short moves cannot reach the rate of long ones."""
    inputs = [[random(round(moved) // 4) for _ in range(2)] for _ in sets_of(moved)]
    b.add("compaction", f"torch copy of as many bytes as {variant}", *where, each(Tensor.copy_, inputs), moved=moved)


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
        add_copy(b, f"gather, keep {share:.0%}", (shape, tokens, 1), moved)

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
        for method, these in (("repack", moved), ("hole filling", fewer)):
            add_copy(b, f"{method}, keep 50%", where, these)
