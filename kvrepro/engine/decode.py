"""The decode loop: rows of many prompts and conditions pick tokens together and, every few steps, give up old ones."""

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvrepro.engine.cache import Extend
from kvrepro.engine.capture import CapturedStep, can_capture
from kvrepro.engine.condition import Generation
from kvrepro.engine.passes import Call
from kvrepro.engine.rows import Rows, Tag, evict_rows, evict_rows_shared, keep_held
from kvrepro.engine.score.cumulative import pages_read
from kvrepro.engine.shared import StepSignals

T = TypeVar("T")


def batch_kinds(rows: Rows, backend: str = "torch") -> list[tuple[Any, ...]]:
    """The kind of each row; rows of equal kind may decode in one batch.

    Plain PyTorch pads heads to the longest, so rows of one kind have lengths within a factor of two, on a GPU within
    eight, since there padding costs less than further batches. Kernels need no padding, except with one set of tokens
    for all layers and in sliding layers.
    """
    recurrent = any(hasattr(layer, "recurrent_states") for layer in rows.cache.layers)
    slides = any(getattr(layer, "is_sliding", False) for layer in rows.cache.layers)
    layers = list(rows.cache.ragged.values())[: 1 if backend == "triton" else None]
    held = [layer.held().amax(1).cpu() for layer in layers]
    longest = torch.stack(held).amax(0).tolist() if held else [0] * len(rows)
    kinds = []
    for job, text, seen, size, tag in zip(rows.jobs, rows.texts, rows.seen.tolist(), longest, rows.tags, strict=True):
        c, unread = job.condition, len(text.ids) - seen
        size = max(1, size + unread - 1).bit_length()
        padding = unread if recurrent else None  # it would pass through recurrent states
        alone = tag if c.bits is not None else None
        shared: tuple[Any, ...] | None = None if job.reduction is None else (job.reduction, job.first_step)
        if backend == "triton" and shared is None and not slides:
            size = 0
        elif backend == "triton" or rows.logits.is_cuda:
            size = (size - 1) // 3
        if backend == "torch" and shared is not None:
            shared = (*shared, job.budgets[0])
        kinds.append((c.every, job.pages, size, padding, alone, shared))
    return kinds


def evicts_again(kind: tuple[Any, ...]) -> bool:
    """Whether rows of this kind (`batch_kinds`) give up tokens as they decode."""
    return kind[0] is not None


def decode(call: Call, rows: Rows, stop_ids: Collection[int]) -> Iterator[tuple[Tag, Generation]]:
    """Greedy answers of rows of one kind (`batch_kinds`), yielded as they end. Each step picks a token, stops if it is
    one of `stop_ids`, runs the model on it and evicts if an eviction is due. `SharedCap` evicts before the model runs,
    with the new token among the candidates. A row that fails leaves, and its error is noted in `call.failed`."""
    now = Steps.of(call, rows)
    del rows  # so that caches are freed as rows end
    stops = torch.tensor(sorted(stop_ids) or [-1], device=call.device)
    seconds, began = 0.0, time.perf_counter()
    for step in itertools.count(1):
        stopped, broken = now.pick(stops)
        if True in torch.stack([stopped.any(), broken.any()]).tolist():
            so_far = seconds + (time.perf_counter() - began) / now.going
            call.fail({now.rows.tags[row]: ArithmeticError(f"{now.rows.conditions[row].label}: NaN at new token {step}")
                       for row in broken.nonzero()[:, 0].tolist()})  # fmt: skip
            yield from _finished(call, now.rows, (stopped & ~broken).nonzero()[:, 0].tolist(), now.picked, so_far)
            if not now.end(stopped | broken):
                return
        if not now.enter(step):
            return
        time_now = time.perf_counter()
        seconds, began = seconds + (time_now - began) / now.going, time_now
        if full := now.full(step):
            yield from _finished(call, now.rows, full, now.picked, seconds)
            gone = torch.zeros_like(now.ended)
            gone[full] = True
            if not now.end(gone):
                return
        if not now.advance(step):
            return


class Steps:
    """Rows as they decode, the tokens that they picked, and the captured step if there is one.

    Rows that end stay until they are an eighth of all, since the others are copied when they leave; in a captured step
    until they are half. Whoever watches the rows sees none that ended.
    """

    def __init__(self, call: Call, rows: Rows, window: int):
        """window: queries that an eviction needs."""
        self.call, self.rows, self.window = call, rows, window
        self.most = max(call.new_tokens[i] for i, _ in rows.tags)  # tokens of the longest answer
        self.every = rows.conditions[0].every
        self.first = rows.jobs[0].first_step if rows.signals is not None else 1  # no eviction before this step
        # tokens until an eviction is due
        self.room = max(1, -(-self.first // self.every)) * self.every if self.every else self.most
        self.picked: list[Tensor] = []
        self.ended = torch.zeros(len(rows), dtype=torch.bool, device=rows.logits.device)
        self.going = len(rows)  # rows that have not ended
        self.captured: CapturedStep | None = None

    @classmethod
    def of(cls, call: Call, rows: Rows) -> "Steps":
        """Steps of rows of one kind (`batch_kinds`), which first read the uncompressed rest of their prompts."""
        window = max(job.window for job in rows.jobs) if rows.conditions[0].every else 0
        _read_rest(call, rows, window)
        return cls(call, rows, window)

    def due(self, step: int) -> bool:
        """Is an eviction due at this step?"""
        return self.every is not None and step % self.every == 0 and step >= self.first

    def enter(self, step: int) -> bool:
        """`SharedCap`: make the picked tokens candidates, and evict if it is due. Returns whether any row goes on."""
        if self.rows.signals is None:
            return True
        self.rows.signals = self.rows.signals.enter(step)
        return not self.due(step) or self.evict(step)

    def advance(self, step: int) -> bool:
        """Run the model on the picked tokens; in other regimes evict if it is due. Returns whether any row goes on."""
        self.forward(step, self.due(step))
        if self.due(step) and self.rows.signals is None and not self.evict(step):
            return False
        if self.rows.conditions[0].bits is not None:
            self.rows.cache.quantise()
        return True

    def pick(self, stops: Tensor) -> tuple[Tensor, Tensor]:
        """Pick each row's next token. Returns (rows that stop with it, rows whose logits are NaN), bool [batch]."""
        logits = self.rows.logits
        self.picked.append(logits.argmax(-1))
        if self.call.watch is not None:
            self.call.watch(self.rows, self.picked[-1])
        return torch.isin(self.picked[-1], stops) & ~self.ended, logits.isnan().any(1) & ~self.ended

    def at_work(self) -> list[int]:
        """Numbers of the rows that have not ended."""
        return [row for row, ended in enumerate(self.ended.tolist()) if not ended]

    def full(self, step: int) -> list[int]:
        """Numbers of the rows at work whose answers reach their largest length with the token of this step."""
        reached = {row for row, (i, _) in enumerate(self.rows.tags) if self.call.new_tokens[i] == step}
        return [row for row in self.at_work() if row in reached] if reached else []

    def end(self, gone: Tensor, at_once: bool = False) -> bool:
        """End the rows that `gone`, bool [batch], marks. Returns whether any row goes on."""
        self.ended = self.ended | gone
        alive = self.at_work()
        self.going = len(alive)
        share = 1 if self.call.watch is not None else 7 / 8 if self.captured is None else 1 / 2
        if alive and (at_once or len(alive) <= share * len(self.rows)):
            self.release()
            self.picked = list(torch.stack(self.picked, 1)[alive].unbind(1))
            self.rows, self.ended = self.rows.take(alive, spend=True), self.ended[alive]
        return bool(alive)

    def release(self) -> None:
        """Give up the captured step, so that the cache can change shape."""
        if self.captured is not None:
            self.captured.loosen(self.rows, last=True)
            self.captured = None

    def change(self, evict: Callable[[], T]) -> T:
        """Run an eviction. A captured step lends its cache meanwhile, and is given up if what is left does not fit."""
        if self.captured is None:
            return evict()
        self.captured.loosen(self.rows)
        result = evict()
        if not self.captured.take_back(self.rows):
            self.captured = None
        return result

    def evict(self, step: int) -> bool:
        """Evict from the rows; a row whose policy raises leaves. Returns whether any row goes on."""
        rows = self.rows
        if rows.signals is None:
            lost = self.change(lambda: evict_rows(self.call.facts, rows, rows.budgets))
        else:
            lost = evict_rows_shared(rows, step)
            if self.captured is not None or bool(lost.any()):  # a captured step has room until an eviction is due
                self.change(lambda: keep_held(rows))
        rows.calls = rows.calls + (lost & ~self.ended)
        self.call.fail({rows.tags[row]: error for row, error in rows.failed.items() if not self.ended[row]})
        if not rows.failed:
            return True
        gone = torch.tensor([row in rows.failed for row in range(len(rows))], device=self.ended.device)
        return self.end(gone, at_once=True)

    def forward(self, step: int, due: bool) -> None:
        """Run the model on the token that each row picked. due: whether an eviction is due."""
        call, rows = self.call, self.rows
        newest_held, seen = True, None
        if rows.signals is not None:
            newest = (rows.signals.lengths + step - 1)[:, None]
            newest_held = not due or bool(rows.signals.held.any(1).gather(1, newest).all())
        if self.captured is None and can_capture(call, rows):
            again = rows.conditions[0].every is not None
            room = self.room if again else self.most - step
            self.captured = CapturedStep(call, rows, self.window, room, again)
        if self.captured is not None:
            rows.logits = self.captured.run(rows, self.picked[-1])
            seen = self.captured.seen
        else:
            positions = rows.seen[:, None]
            if rows.signals is not None:
                seen = StepSignals(rows.signals, len(call.facts.attention), newest_held)
            attention = Extend(
                rows.cache, positions, self.window, rows.jobs[0].pages, call.backend, seen, bool(call.facts.sliding)
            )
            rows.logits = call.forward(self.picked[-1][:, None], positions, rows.cache, attention)
        rows.seen = rows.seen + 1
        if seen is not None:
            rows.signals = rows.shared.attended(step, *seen.tables())
            if not newest_held:  # a token that was evicted before it was stored
                self.change(lambda: keep_held(rows))


def _read_rest(call: Call, rows: Rows, window: int) -> None:
    """All rows read the uncompressed rest of their prompts, a question for instance, in one pass."""
    rest = [text.ids[seen:] for text, seen in zip(rows.texts, rows.seen.tolist(), strict=True)]
    if not any(rest):
        return
    began = time.perf_counter()
    ids, positions = call.padded(rest, rows.seen.tolist())
    logits = call.forward(
        ids, positions, rows.cache, Extend(rows.cache, positions, window, slides=bool(call.facts.sliding))
    )
    has_rest = torch.tensor([bool(r) for r in rest], device=call.device)
    rows.logits = torch.where(has_rest[:, None], logits, rows.logits)
    rows.seen = rows.seen + torch.tensor([len(r) for r in rest], device=call.device)
    if bool((positions < 0).any()):
        for layer in rows.cache.ragged.values():  # drops the padding, which takes memory
            layer.settle()
    seconds = (time.perf_counter() - began) / len(rows)
    for tag in rows.tags:
        call.notes[tag] = call.notes[tag] | {"prefill_seconds": call.notes[tag]["prefill_seconds"] + seconds}


def _finished(
    call: Call, rows: Rows, done: list[int], picked: list[Tensor], seconds: float
) -> Iterator[tuple[Tag, Generation]]:
    """The generations of the rows `done`. picked: the tokens of each step [batch]; seconds: of decoding, per row."""
    if not done:
        return
    facts, tokens = call.facts, torch.stack(picked, 1)
    rows.slide(facts)
    layers = [rows.cache.ragged[n] for n in facts.attention]
    held = torch.stack([layer.held().sum(1).to(call.device) for layer in layers]).cpu()  # [layers, batch]
    state = sum(layer.state_bytes for layer in layers) + (rows.signals.bytes * len(rows) if rows.signals else 0)
    allocated = sum(layer.bytes + layer.overhead_bytes for layer in layers) + state
    size = held.new_tensor([2 * layer.keys.shape[1] * layer.keys.dtype.itemsize for layer in layers])
    heads = held.new_tensor([layer.shape[1] for layer in layers])
    kept = torch.stack([layer.held().float().mean(1).to(call.device) for layer in layers]).cpu()
    evicting = [facts.attention.index(n) for n in facts.evictable]
    for row in done:
        tag, seen = rows.tags[row], int(rows.seen[row])
        full = held.new_tensor([min(seen, facts.sliding.get(n, seen + 1) - 1) for n in facts.attention])
        kept_of_row, evicted = kept[:, row], round(float((full - kept[:, row])[evicting].mean()))
        if rows.signals is not None:  # counts the last token too, which no layer has stored
            alive = rows.signals.held[row]
            evicted = int(rows.signals.evicted[row])
            kept_of_row = alive.sum(-1).float().mean().cpu().expand(len(layers))
            full = torch.full_like(full, int(alive.any(0).sum()) + evicted)
        of_batch = float((held.sum(1) * size).sum())
        share = float((held[:, row] * size).sum()) / of_batch if of_batch else 1 / len(rows)
        pages = rows.jobs[row].pages
        answer = Generation(
            tokens=tokens[row].tolist(),
            kept=kept_of_row.round().int().tolist(),
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
