"""The decode loop: rows of many prompts and conditions pick tokens together and, every few steps, give up old ones."""

import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.condition import Generation
from kvrepro.engine.extend import Extend
from kvrepro.engine.passes import Call
from kvrepro.engine.rows import Rows, Tag, evict_rows, evict_rows_shared, keep_held
from kvrepro.engine.score.cumulative import pages_read
from kvrepro.engine.signals import StepSignals

Answers = Iterator[tuple[Tag, Generation]]


def batch_kind(row: Rows) -> tuple[Any, ...]:
    """Of one row: rows of equal kind may decode in one batch."""
    [job] = row.jobs
    c, unread = job.condition, len(row.texts[0].ids) - int(row.seen)
    size = max(int(layer.held().max()) for layer in row.cache.ragged.values())
    size = max(1, size + unread - 1).bit_length()
    recurrent = any(hasattr(layer, "recurrent_states") for layer in row.cache.layers)
    padding = unread if recurrent else None  # it would pass through recurrent states
    alone = row.tags[0] if c.bits is not None else None
    shared = None if job.reduction is None else (job.reduction, job.first_step, job.budgets[0])
    return c.every, job.pages, c.execution, size, padding, alone, shared


def decode(call: Call, rows: Rows, stop_ids: Collection[int]) -> Answers:
    """Greedy answers of rows of one `batch_kind`, as they end: pick a token, stop if it is one of `stop_ids`, run the
    model on it, evict if due. `SharedCap` evicts before the model runs, the new token among the candidates. What fails
    is noted in `call.failed`, and leaves."""
    c, pages = rows.conditions[0], rows.jobs[0].pages
    every = c.every
    window = max(job.window for job in rows.jobs) if every else 0
    first = rows.jobs[0].first_step if rows.signals is not None else 1
    _read_rest(call, rows, window)
    picked: list[Tensor] = []
    stops = torch.tensor(sorted(stop_ids) or [-1], device=call.device)
    seconds, began = 0.0, time.perf_counter()
    for step in range(1, call.max_new_tokens + 1):
        picked.append(rows.logits.argmax(-1))
        if call.watch is not None:
            call.watch(rows, picked[-1])
        stopped, broken = torch.isin(picked[-1], stops), rows.logits.isnan().any(1)
        if True in torch.stack([stopped.any(), broken.any()]).tolist():
            so_far = seconds + (time.perf_counter() - began) / len(rows)
            _note_broken(call, rows, broken, step)
            yield from _finished(call, rows, (stopped & ~broken).nonzero()[:, 0].tolist(), picked, so_far)
            rows, picked = _without(rows, stopped | broken, picked)
            if rows is None:
                return
        due = every is not None and step % every == 0 and step >= first
        if rows.signals is not None:
            rows.signals = rows.signals.enter(step)
            if due:
                rows, picked = _after(call, rows, evict_rows_shared(rows, step, call.isolate), picked)
            if rows is None:
                return
        now = time.perf_counter()
        seconds, began = seconds + (now - began) / len(rows), now
        if step == call.max_new_tokens:
            yield from _finished(call, rows, list(range(len(rows))), picked, seconds)
            return
        _forward(call, rows, picked[-1], step, window, pages, due)
        if due and rows.signals is None:
            lost = evict_rows(call.facts, rows, rows.budgets, call.scalings, call.isolate)
            rows, picked = _after(call, rows, lost, picked)
            if rows is None:
                return
        if c.bits is not None:
            rows.cache.quantise(c.bits)


def _forward(
    call: Call, rows: Rows, token: Tensor, step: int, window: int, pages: tuple[int, int, int] | None, due: bool
) -> None:
    """Run the model on one token per row."""
    positions = rows.seen[:, None]
    seen = None
    if rows.signals is not None:
        newest = (rows.signals.lengths + step - 1)[:, None]
        newest_held = not due or bool(rows.signals.held.any(1).gather(1, newest).all())
        seen = StepSignals(rows.signals, len(call.facts.attention), newest_held)
    attention = Extend(rows.cache, positions, window, pages, call.backend, seen)
    rows.logits = call.forward(token[:, None], positions, rows.cache, attention)
    rows.seen = rows.seen + 1
    if seen is not None:
        rows.signals = rows.signals.attended(step, *seen.tables())
        if not newest_held:  # a token that was evicted before it was stored
            keep_held(rows)


def _read_rest(call: Call, rows: Rows, window: int) -> None:
    """The rows read what their conditions leave uncompressed, a question for instance, together."""
    rest = [text.ids[seen:] for text, seen in zip(rows.texts, rows.seen.tolist(), strict=True)]
    if not any(rest):
        return
    began = time.perf_counter()
    ids, positions = call.padded(rest, rows.seen.tolist())
    logits = call.forward(ids, positions, rows.cache, Extend(rows.cache, positions, window))
    there = torch.tensor([bool(r) for r in rest], device=call.device)
    rows.logits = torch.where(there[:, None], logits, rows.logits)
    rows.seen = rows.seen + torch.tensor([len(r) for r in rest], device=call.device)
    if bool((positions < 0).any()):
        for layer in rows.cache.ragged.values():  # padding takes memory
            layer.settle()
    seconds = (time.perf_counter() - began) / len(rows)
    for tag in rows.tags:
        call.notes[tag] = call.notes[tag] | {"prefill_seconds": call.notes[tag]["prefill_seconds"] + seconds}


def _after(call: Call, rows: Rows, lost: Tensor, picked: list[Tensor]) -> tuple[Rows | None, list[Tensor]]:
    """The rows whose policy raised nothing at an eviction, in which rows `lost` tokens, and what they picked."""
    rows.calls = rows.calls + lost
    call.failed |= {rows.tags[row]: error for row, error in rows.failed.items()}
    if not rows.failed:
        return rows, picked
    gone = torch.tensor([row in rows.failed for row in range(len(rows))], device=rows.logits.device)
    return _without(rows, gone, picked)


def _without(rows: Rows, gone: Tensor, picked: list[Tensor]) -> tuple[Rows | None, list[Tensor]]:
    """The other rows and their tokens; None if there are none."""
    alive = (~gone).nonzero()[:, 0].tolist()
    if not alive:
        return None, []
    return rows.take(alive), list(torch.stack(picked, 1)[~gone].unbind(1))


def _note_broken(call: Call, rows: Rows, broken: Tensor, step: int) -> None:
    """Rows whose logits are not numbers: the largest of them is no answer."""
    for row in broken.nonzero()[:, 0].tolist():
        error = ArithmeticError(f"{rows.conditions[row].label}: NaN at new token {step}")
        if not call.isolate:
            raise error
        call.failed[rows.tags[row]] = error


def _finished(call: Call, rows: Rows, done: list[int], picked: list[Tensor], seconds: float) -> Answers:
    """What is known of rows at their end."""
    if not done:
        return
    facts, tokens = call.facts, torch.stack(picked, 1)
    for n, window in facts.sliding.items():
        rows.cache.ragged[n].slide(rows.seen - window + 1)
    layers = [rows.cache.ragged[n] for n in facts.attention]
    held = torch.stack([layer.held().sum(1).cpu() for layer in layers])  # [layers, batch]
    state = sum(layer.state_bytes for layer in layers) + (rows.signals.bytes * len(rows) if rows.signals else 0)
    allocated = sum(layer.bytes + layer.overhead_bytes for layer in layers) + state
    size = held.new_tensor([2 * layer.keys.shape[1] * layer.keys.dtype.itemsize for layer in layers])
    heads = held.new_tensor([layer.shape[1] for layer in layers])
    kept = torch.stack([layer.seen().float().mean(1).cpu() for layer in layers])
    evicting = [facts.attention.index(n) for n in facts.evictable]
    for row in done:
        tag, seen = rows.tags[row], int(rows.seen[row])
        full = held.new_tensor([min(seen, facts.sliding.get(n, seen + 1) - 1) for n in facts.attention])
        mine, evicted = kept[:, row], round(float((full - kept[:, row])[evicting].mean()))
        if rows.signals is not None:  # the last token counts, which no layer has stored
            alive = rows.signals.held[row]
            evicted = int(rows.signals.evicted[row])
            mine = alive.sum(-1).float().mean().cpu().expand(len(layers))
            full = torch.full_like(full, int(alive.any(0).sum()) + evicted)
        share = float((held[:, row] * size).sum() / (held.sum(1) * size).sum())
        pages = rows.jobs[row].pages
        answer = Generation(
            tokens=tokens[row].tolist(),
            kept=mine.round().int().tolist(),
            evicted=evicted,
            policy_calls=int(rows.calls[row]),
            bytes_held=round(allocated * share),
            bytes_state=round(state * share),
            bytes_full=int((full * heads * size).sum()),
            decode_seconds=seconds,
            backend=call.backend,
            pages=None if pages is None else int(pages_read(torch.tensor(pages[2]), pages[0])),
            **call.notes[tag],
        )
        yield tag, answer
