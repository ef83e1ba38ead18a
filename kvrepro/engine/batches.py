"""Which prompts and conditions share a forward pass, and which rows decode together, as memory allows."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from kvrepro.engine.condition import Chunked, Offline, SharedCap
from kvrepro.engine.policy import budget_of
from kvrepro.engine.prefill import boundary
from kvrepro.engine.rows import Call, Rows

CPU_ROOM = float(2**31)  # bytes of caches that wait to decode
USUAL_ROWS, MOST_ROWS = 128, 2048  # rows that decode together, on a CPU and on a GPU
MOST_PROMPTS, PASS_TOKENS = 64, 2**16  # prompts and tokens that pass through the model together on a GPU
Pass = tuple[list[int], list[int]]  # prompts and conditions


def room_of(device: torch.device) -> float:
    """Bytes for the caches of rows that wait to decode. On a GPU two fifths of the free memory, since the rows of a
    pass and the computation itself come on top; on a CPU a constant, so that batches do not depend on the machine."""
    if device.type != "cuda":
        return CPU_ROOM
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch's allocator
    return 0.4 * float(torch.cuda.mem_get_info(device)[0] + cached)


# ---- passes


def passes(call: Call, wanted: Sequence[Sequence[int]], prompt_rows: int | None, room: float) -> Iterator[Pass]:
    """The passes of all prompts, each under those conditions that it is `wanted` under. Neighbouring prompts pass
    together; what does not fit `room` bytes is spread over several passes."""
    together = prompt_rows or (1 if call.device.type == "cpu" else MOST_PROMPTS)
    for block in blocks([len(text.ids) for text in call.texts], together, PASS_TOKENS):
        yield from planned(call, block, wanted, room)


def blocks(lengths: Sequence[int], together: int, tokens: float) -> list[list[int]]:
    """Neighbouring prompts, at most `together` and, padded to the longest, `tokens` tokens unless there is one."""
    parts: list[list[int]] = []
    longest = 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if not parts or len(parts[-1]) == together or (len(parts[-1]) + 1) * longest > tokens:
            parts.append([])
            longest = length
        parts[-1].append(i)
    return parts


def planned(call: Call, block: Sequence[int], wanted: Sequence[Sequence[int]], room: float) -> list[Pass]:
    """The forward passes over a block of prompts: each of conditions that the same prompts have, with equal boundaries
    and, of `Chunked`, equal chunks, as far as their rows take at most `room` bytes."""
    columns_by_kind: dict[tuple[Any, ...], list[int]] = {}
    for j in dict.fromkeys(j for i in block for j in wanted[i]):
        c, rule = call.conditions[j], call.rules[j]
        ends = {i: boundary(call.texts[i], c) for i in block if j in wanted[i]}
        chunk = c.regime.chunk if isinstance(c.regime, Chunked) else None
        watched = call.backend == "triton" and isinstance(c.regime, SharedCap)  # plain PyTorch runs this pass
        padded = chunk is None and not (rule and rule.policy.repeated)  # neither a chunk nor a repetition is
        for end in [0] if padded else dict.fromkeys(ends.values()):
            members = [i for i in ends if padded or ends[i] == end]
            kind = tuple(members), tuple(ends[i] for i in members), isinstance(c.regime, Offline), chunk, watched
            columns_by_kind.setdefault(kind, []).append(j)
    return [part for kind, columns in columns_by_kind.items() for part in fitting(call, list(kind[0]), columns, room)]


def fitting(call: Call, members: list[int], columns: list[int], room: float) -> list[Pass]:
    """Prompts and conditions of passes whose rows take at most `room` bytes: first the prompts are halved, then the
    conditions of a single prompt; a single row may take more."""
    tokens = sum(_row_tokens(call, i, j) for i in members for j in columns)
    if len(members) == len(columns) == 1 or call.token_bytes * tokens <= room:
        return [(members, columns)]
    if len(members) > 1:
        halves = [(members[: len(members) // 2], columns), (members[len(members) // 2 :], columns)]
    else:
        halves = [(members, columns[: len(columns) // 2]), (members, columns[len(columns) // 2 :])]
    return [part for half in halves for part in fitting(call, *half, room)]


def _row_tokens(call: Call, i: int, j: int) -> int:
    """The most tokens that a layer holds of prompt `i` and its answer under condition `j`."""
    c, text, rule = call.conditions[j], call.texts[i], call.rules[j]
    end = boundary(text, c)
    evicts = rule is not None and rule.policy.frees
    if rule is not None and isinstance(c.regime, SharedCap):
        evicts &= rule.policy.first_step(rule.parameters) == 0
    kept = min(end, budget_of(c, end)) if evicts else end
    return kept + len(text.ids) - end + call.new_tokens[i]


# ---- batches


def batches(call: Call, rows: Iterable[Rows], most: int, room: float = math.inf) -> Iterator[list[Rows]]:
    """Batches of rows of equal kind, up to `most` rows, in the order they come. When `room` bytes are full, all that
    wait are handed out; rows that evict again decode last, since an eviction copies their caches, and by then the
    others have left. Rows in few bits are quantised here, and each is a batch of its own."""
    waiting: dict[tuple[Any, ...], list[Rows]] = {}

    def evicts_again(kind: tuple[Any, ...]) -> bool:
        return kind[0] is not None

    for block in rows:
        held = sum(room_taken(call, r) for r in [block, *(r for parts in waiting.values() for r in parts)])
        for kind in sorted(waiting, key=evicts_again) if held > room else ():
            yield waiting.pop(kind)
        numbers_by_kind: dict[tuple[Any, ...], list[int]] = {}
        for number, kind in enumerate(batch_kinds(block, call.backend)):
            numbers_by_kind.setdefault(kind, []).append(number)
        for kind, numbers in numbers_by_kind.items():
            packed = block.rows[numbers[0]].job.condition.bits is not None
            while numbers:
                free = (1 if packed else most) - sum(map(len, waiting.get(kind, ())))
                part = block if len(numbers) == len(block) <= free else block.take(numbers[:free])
                numbers = numbers[free:]
                if packed:
                    part.cache.quantise()
                waiting.setdefault(kind, []).append(part)
                if len(part) == free:
                    yield waiting.pop(kind)
        del block, part  # the next pass needs the room
    for kind in sorted(waiting, key=evicts_again):
        yield waiting.pop(kind)


def room_taken(call: Call, rows: Rows) -> int:
    """Bytes of keys and values that rows hold, on a GPU with those that their answers add until the next eviction; on a
    CPU these have room beside `CPU_ROOM`."""
    if call.device.type == "cpu":
        return rows.cache.bytes
    more = [min(new, row.job.condition.every or new) for row in rows.rows for new in [call.new_tokens[row.tag[0]]]]
    return rows.cache.bytes + call.token_bytes * sum(more)


def batch_kinds(rows: Rows, backend: str) -> list[tuple[Any, ...]]:
    """The kind of each row: first, after how many tokens it evicts again. Rows of equal kind may decode in one batch.

    Plain PyTorch pads heads to the longest, so rows of one kind have lengths within a factor of two, on a GPU within
    eight, since there padding costs less than further batches. Kernels need no padding, except with one set of tokens
    for all layers and in sliding layers.
    """
    slides = any(getattr(layer, "is_sliding", False) for layer in rows.cache.layers)
    layers = list(rows.cache.ragged.values())[: 1 if backend == "triton" else None]
    held = [layer.held().amax(1).cpu() for layer in layers]
    longest = torch.stack(held).amax(0).tolist() if held else [0] * len(rows)
    kinds = []
    for row, seen, size in zip(rows.rows, rows.seen.tolist(), longest, strict=True):
        job, unread = row.job, len(row.text.ids) - seen
        size = max(1, size + unread - 1).bit_length()
        padding = unread if rows.cache.recurrent else None  # it would pass through recurrent states
        alone = row.tag if job.condition.bits is not None else None
        shared: tuple[Any, ...] | None = None if job.reduction is None else (job.reduction, job.first_step)
        if backend == "triton" and shared is None and not slides:
            size = 0
        elif backend == "triton" or rows.logits.is_cuda:
            size = (size - 1) // 3
        if backend == "torch" and shared is not None:
            shared = (*shared, job.budgets[0])
        kinds.append((job.condition.every, job.pages, size, padding, alone, shared))
    return kinds
