"""Which prompts and conditions share a forward pass, and which rows decode together, as memory allows."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from kvrepro.engine.condition import Chunked, Offline, SharedCap
from kvrepro.engine.policy import budget_of
from kvrepro.engine.prefill import boundary
from kvrepro.engine.rows import Call, Rows

CPU_ROOM = 2.0**31  # bytes of caches that wait to decode
GPU_ROOM = 0.4  # the same, as a share of the free memory; the rows of a pass and the computation come on top
USUAL_ROWS, MOST_ROWS = 128, 2048  # rows that decode together, on a CPU and on a GPU
MOST_PROMPTS, PASS_TOKENS = 64, 2**16  # prompts and tokens that pass through the model together on a GPU


# ---- passes


def passes(
    call: Call, wanted: Sequence[Sequence[int]], prompt_rows: int | None = None, room: float = math.inf
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompts, conditions) of each forward pass. wanted: the conditions of each prompt.

    Conditions that compress the same part of a prompt share a pass, as far as their rows take about `room` bytes.
    Neighbouring prompts of the same conditions pass together, up to `prompt_rows`; where they come in chunks, or are
    repeated, only those of one length. Offline, all prompts that begin with the same prefix have one pass.
    """
    together = prompt_rows or (1 if call.device.type == "cpu" else MOST_PROMPTS)
    usual = next((c.spans for c in call.conditions if c.fair is not None), ())  # a pass has spans of one choice
    members_by_kind: dict[tuple[Any, ...], list[int]] = {}
    for i, text in enumerate(call.texts):
        columns_by_kind: dict[tuple[Any, ...], list[int]] = {}
        for j in wanted[i]:
            c, rule = call.conditions[j], call.rules[j]
            repeats = together > 1 and rule is not None and bool(rule.policy.repeated)
            watched = call.backend == "triton" and isinstance(c.regime, SharedCap)  # plain PyTorch runs this pass
            chunked = c.regime if isinstance(c.regime, Chunked) else None
            of_pass = chunked, repeats, watched, usual if c.fair is None else c.spans
            columns_by_kind.setdefault((boundary(text, c), isinstance(c.regime, Offline), *of_pass), []).append(j)
        for (end, offline, chunked, repeats, *_), columns in columns_by_kind.items():
            begins = None
            if offline:
                marked = ((name, *(at for at in where if at < end)) for name, where in text.spans.items())
                begins = tuple(text.ids[:end]), *marked
            length = end if chunked or repeats else None
            members_by_kind.setdefault((tuple(columns), begins, length), []).append(i)
    for (columns, begins, _), members in members_by_kind.items():
        blocks: list[list[int]] = [[]]
        for i in members:
            block = [*blocks[-1], i]
            tokens = len(block) * max(len(call.texts[member].ids) for member in block)
            if begins or len(block) == 1 or (len(block) <= together and tokens <= PASS_TOKENS):
                blocks[-1] = block
            else:
                blocks.append([i])
        for block in blocks:
            lengths = [len(call.texts[i].ids) for i in (block[:1] if begins else block)]
            held = sum(min(n, budget_of(call.conditions[j], n)) for n in lengths for j in columns)
            most = -(-len(columns) // max(1, math.ceil(call.token_bytes * held / room)))
            for first in range(0, len(columns), most):
                yield block, list(columns[first : first + most])


# ---- batches


def batches(call: Call, rows: Iterable[Rows], most: int, room: float = math.inf) -> Iterator[list[Rows]]:
    """Batches of rows of equal kind, up to `most` rows, in the order they come. When `room` bytes are full, on a GPU
    with those that the answers add until an eviction, all that wait are handed out."""
    waiting: dict[tuple[Any, ...], list[Rows]] = {}
    held: dict[tuple[Any, ...], float] = {}  # bytes of those that wait
    for block in rows:
        new = [min(call.new_tokens[row.tag[0]], row.job.condition.every or math.inf) for row in block.rows]
        size = block.cache.bytes + (call.token_bytes * sum(new) if call.device.type == "cuda" else 0)
        if size + sum(held.values()) > room:
            for kind in list(waiting):
                yield waiting.pop(kind)
            held.clear()
        kinds = batch_kinds(block, call.backend)
        for kind in dict.fromkeys(kinds):
            numbers = [number for number, its_kind in enumerate(kinds) if its_kind == kind]
            while numbers:
                free = most - sum(map(len, waiting.get(kind, ())))
                part = block if len(numbers) == len(block) <= free else block.take(numbers[:free])
                numbers = numbers[free:]
                waiting.setdefault(kind, []).append(part)
                held[kind] = held.get(kind, 0.0) + size * len(part) / len(block)
                if len(part) == free:
                    del held[kind]
                    yield waiting.pop(kind)
        del block, part  # the next pass needs the room
    for kind in list(waiting):
        yield waiting.pop(kind)


def batch_kinds(rows: Rows, backend: str) -> list[tuple[Any, ...]]:
    """The kind of each row. Rows of equal kind may decode in one batch.

    Plain PyTorch pads heads to the longest, so rows of one kind have lengths within a factor of two, on a GPU within
    eight, since there padding costs less than further batches. Kernels need no padding, except with one set of tokens
    for all layers and in sliding layers.
    """
    slides = any(getattr(layer, "is_sliding", False) for layer in rows.cache.layers)
    longest = torch.stack([layer.held().amax(1).to(rows.seen) for layer in rows.cache.ragged.values()]).amax(0).tolist()
    kinds = []
    for row, seen, size in zip(rows.rows, rows.seen.tolist(), longest, strict=True):
        job, unread = row.job, len(row.text.ids) - seen
        padding = unread if rows.cache.recurrent else None  # it would pass through recurrent states
        alone = row.tag if job.condition.bits is not None else None
        wide = job.budgets[0] if backend == "torch" else None
        shared = None if job.reduction is None else (job.reduction, job.first_step, wide)
        doublings = max(1, size + unread - 1).bit_length() - 1
        if backend == "triton" and shared is None and not slides:
            doublings = 0
        elif backend == "triton" or rows.logits.is_cuda:
            doublings //= 3
        kinds.append((job.condition.every, job.pages, doublings, padding, alone, shared))
    return kinds
