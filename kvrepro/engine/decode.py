"""The decode loop: rows of many prompts and conditions pick tokens together and, every few steps, give up old ones.

On a GPU a step is captured once and replayed: a CUDA graph, so that the GPU need not wait for Python. Between two
evictions the cache's tensors stay in place (`RaggedLayer.fix`), and a step neither waits for the device nor changes a
shape. On the CPU the same step runs uncaptured, so that tests can compare it with the plain one.
"""

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvrepro.engine.condition import Generation
from kvrepro.engine.facts import sliding_window
from kvrepro.engine.rows import Call, Extend, Rows, Tag, evict_rows, evict_rows_shared, keep_held
from kvrepro.engine.score.cumulative import pages_read
from kvrepro.engine.shared import StepSignals
from kvrepro.errors import error_line


def decode(call: Call, rows: Rows, stop_ids: Collection[int]) -> Iterator[tuple[Tag, Generation]]:
    """Greedy answers of rows of one kind (`batch_kinds`), yielded as they end. Each step picks a token, stops if it is
    one of `stop_ids`, runs the model on it and evicts if an eviction is due. `SharedCap` evicts before the model runs,
    with the new token among the candidates. A row that fails leaves, and its error is noted in `call.failed`."""
    now = Steps(call, rows)
    del rows  # so that caches are freed as rows end
    stops = torch.tensor(sorted(stop_ids) or [-1], device=call.device)
    for step in itertools.count(1):
        logits = now.rows.logits
        now.picked.append(logits.argmax(-1))
        if call.watch is not None:
            call.watch(now.rows, now.picked[-1])
        stops_now, nan = torch.stack([torch.isin(now.picked[-1], stops), logits.isnan().any(1)]).tolist()
        broken = [number for number in now.alive if nan[number]]
        for row in [now.rows.rows[number] for number in broken]:
            call.fail({row.tag: ArithmeticError(f"{row.job.condition.label}: NaN at new token {step}")})
        yield from now.finish([row for row in now.alive if stops_now[row] and not nan[row]], broken)
        if now.alive:
            now.enter(step)
        yield from now.finish([row for row in now.alive if now.limits[row] == step])
        if now.alive:
            now.advance(step)
        if not now.alive:
            return


class Steps:
    """Rows of one kind as they decode, after they have read the uncompressed rest of their prompts.

    Rows that end stay until they are an eighth of all, since the others are copied when they leave; in a captured step
    until they are half.
    """

    def __init__(self, call: Call, rows: Rows):
        self.call, self.rows, job = call, rows, rows.job
        self.every, self.packed = job.condition.every, job.condition.bits is not None
        self.window = max(row.job.window for row in rows.rows) if self.every else 0  # queries that an eviction needs
        self.limits = [call.new_tokens[i] for i, _ in rows.tags]  # tokens of each answer, at most
        self.first_step = job.first_step  # no eviction before it
        # tokens until an eviction is due
        self.room = max(1, -(-self.first_step // self.every)) * self.every if self.every else max(self.limits)
        self.picked: list[Tensor] = []
        self.alive = list(range(len(rows)))  # numbers of the rows that have not ended
        self.captured: CapturedStep | None = None
        if self.packed:
            rows.cache.quantise()
        _read_rest(call, rows, self.window)
        self.seconds, self.began = 0.0, time.perf_counter()  # of decoding, per row

    def due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0 and step >= self.first_step

    def enter(self, step: int) -> None:
        """`SharedCap`: make the picked tokens candidates, and evict if it is due."""
        if self.rows.signals is not None:
            self.rows.signals = self.rows.signals.enter(step)
            if self.due(step):
                self.evict(step)

    def advance(self, step: int) -> None:
        """Run the model on the picked tokens; in other regimes evict if it is due."""
        self.forward(step)
        if self.due(step) and self.rows.signals is None:
            self.evict(step)
        if self.packed:
            self.rows.cache.quantise()

    def finish(self, done: list[int], failed: Sequence[int] = ()) -> Iterator[tuple[Tag, Generation]]:
        """The generations of the rows `done`, which end, like those that `failed`."""
        if done:
            now = time.perf_counter()
            self.seconds, self.began = self.seconds + (now - self.began) / len(self.alive), now
            yield from _finished(self.call, self.rows, done, self.picked, self.seconds)
        self.end({*done, *failed}, share=7 / 8 if self.captured is None else 1 / 2)

    def end(self, gone: Collection[int], share: float) -> None:
        """End the rows `gone`. The others move together where at most this share of the rows is left."""
        self.alive = [row for row in self.alive if row not in gone]
        if gone and 0 < len(self.alive) <= share * len(self.rows):
            self.captured = None
            self.picked = list(torch.stack(self.picked, 1)[self.alive].unbind(1))
            self.rows, self.limits = self.rows.take(self.alive, spend=True), [self.limits[row] for row in self.alive]
            self.alive = list(range(len(self.alive)))

    def evict(self, step: int) -> None:
        """Evict from the rows; a row whose policy raises leaves."""
        rows = self.rows
        if rows.signals is None:
            lost = evict_rows(self.call.facts, rows)
        else:
            lost = evict_rows_shared(rows, step)
            if self.captured is not None or bool(lost.any()):  # a captured step has no more room
                keep_held(rows)
        self.captured = self.captured and self.captured.resume()
        rows.evictions = rows.evictions + lost
        self.call.fail({rows.tags[row]: error for row, error in rows.failed.items() if row in self.alive})
        self.end(rows.failed, share=1)

    def forward(self, step: int) -> None:
        """Run the model on the token that each row picked."""
        call, rows = self.call, self.rows
        newest_held, of_step = True, None
        if rows.signals is not None:
            newest = (rows.signals.lengths + step - 1)[:, None]
            newest_held = not self.due(step) or bool(rows.signals.held.any(1).gather(1, newest).all())
        if self.captured is None and can_capture(call, rows):
            room = max(self.limits) - step if self.every is None else self.room
            self.captured = CapturedStep(call, rows, self.window, room)
        if self.captured is not None:
            rows.logits = self.captured.run(rows, self.picked[-1])
            of_step = self.captured.of_step
        else:
            at = rows.seen[:, None]
            if rows.signals is not None:
                of_step = StepSignals(rows.signals, len(call.facts.attention), newest_held)
            attention = Extend(call, rows.cache, at, self.window, rows.job.pages, of_step, decodes=True)
            rows.logits = call.forward(self.picked[-1][:, None], at, rows.cache, attention)
        rows.seen = rows.seen + 1
        if of_step is not None:
            rows.signals = rows.signals.attended(step, *of_step.tables())
            if not newest_held:  # a token that was evicted before it was stored
                keep_held(rows)
                self.captured = self.captured and self.captured.resume()


def _read_rest(call: Call, rows: Rows, window: int) -> None:
    """All rows read the uncompressed rest of their prompts, a question for instance, in one pass."""
    seen = rows.seen.tolist()
    rest = [row.text.ids[n:] for row, n in zip(rows.rows, seen, strict=True)]
    if not any(rest):
        return
    began = time.perf_counter()
    ids, positions = call.padded(rest, seen)
    logits = call.forward(ids, positions, rows.cache, Extend(call, rows.cache, positions, window))
    more = torch.tensor([len(r) for r in rest], device=call.device)
    rows.logits = torch.where(more[:, None] > 0, logits, rows.logits)
    rows.seen = rows.seen + more
    if bool((positions < 0).any()):
        for layer in rows.cache.ragged.values():  # drops the padding, which takes memory
            layer.settle()
    seconds = (time.perf_counter() - began) / len(rows)
    for row in rows.rows:
        row.notes = row.notes | {"prefill_seconds": row.notes["prefill_seconds"] + seconds}


def _finished(
    call: Call, rows: Rows, done: list[int], picked: list[Tensor], seconds: float
) -> Iterator[tuple[Tag, Generation]]:
    """The generations of the rows `done`. picked: the tokens of each step [batch]; seconds: of decoding, per row."""
    facts, tokens = call.facts, torch.stack(picked, 1)
    rows.slide(facts)
    layers = [rows.cache.ragged[n] for n in facts.attention]
    held = torch.stack([layer.held().sum(1).to(call.device) for layer in layers]).cpu()  # [layers, batch]
    signals = () if rows.signals is None else (rows.signals.held, *rows.signals.tables.values())
    allocated = sum(layer.bytes + layer.other_bytes for layer in layers) + sum(t.nbytes for t in signals)
    size = held.new_tensor([2 * layer.keys.shape[1] * layer.keys.dtype.itemsize for layer in layers])
    heads = held.new_tensor([layer.shape[1] for layer in layers])
    evicting = [facts.attention.index(n) for n in facts.evictable]
    of_batch = float((held.sum(1) * size).sum())
    for row in done:
        own, seen = rows.rows[row], int(rows.seen[row])
        full = held.new_tensor([min(seen, facts.sliding.get(n, seen + 1) - 1) for n in facts.attention])
        kept = held[:, row] / heads
        evicted = round(float((full - kept)[evicting].mean()))
        if rows.signals is not None:  # counts the last token too, which no layer has stored
            alive = rows.signals.held[row]
            evicted = int(rows.signals.evicted[row])
            kept = alive.sum(-1).float().mean().cpu().expand(len(layers))
            full = torch.full_like(full, int(alive.any(0).sum()) + evicted)
        share = float((held[:, row] * size).sum()) / of_batch if of_batch else 1 / len(rows)
        pages = own.job.pages
        answer = Generation(
            tokens=tokens[row].tolist(),
            kept=kept.round().int().tolist(),
            evicted=evicted,
            policy_calls=int(rows.evictions[row]),
            bytes_held=round(allocated * share),
            bytes_full=int((full * heads * size).sum()),
            decode_seconds=seconds,
            backend=call.backend,
            pages=None if pages is None else int(pages_read(torch.tensor(pages[2]), pages[0])),
            **own.notes,
        )
        yield own.tag, answer


# ---- captured steps


def can_capture(call: Call, rows: Rows) -> bool:
    """Whether these rows' steps can run without waiting for the device, all tensors staying in place."""
    if call.backend != "triton" or call.captures < 1 or call.watch is not None:
        return False
    if rows.job.condition.bits is not None or rows.job.pages is not None or rows.cache.recurrent:
        return False
    return all(layer.offsets.device == call.device for layer in rows.cache.ragged.values())


class CapturedStep:
    """The model's pass over one token per row of `rows`, whose cache stays in place until `resume` says otherwise."""

    def __init__(self, call: Call, rows: Rows, window: int, room: int):
        """window: queries that an eviction needs. room: tokens until the next eviction, or of the answers."""
        self.call, self.window, self.cache = call, window, rows.cache
        self.slot = torch.arange(2, device=call.device)  # the next token's place in all tails, and their length with it
        again = rows.job.condition.every is not None
        budget = max(row.job.budgets[0] for row in rows.rows if row.job.evictor is not None) if again else 0
        rows.slide(call.facts)
        for n, layer in rows.cache.ragged.items():
            wide, most = rows.signals is not None or sliding_window(call.model.config, n) is not None, budget
            if again and n not in call.facts.evictable:  # a sliding layer, which grows until its window is full
                most = min(call.facts.sliding[n] - 1, int(layer.held().max()) + call.max_new_tokens)
            layer.fix(self.slot, room, most, wide, window)
        self.token = torch.zeros(len(rows), 1, dtype=torch.long, device=call.device)
        self.positions = rows.seen[:, None].clone()
        self.signals = rows.signals and replace(rows.signals, held=rows.signals.held.clone())
        self.of_step: StepSignals | None = None
        self.logits: Tensor
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False

    def run(self, rows: Rows, token: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after `token` [batch]; they stay valid until the next call."""
        self.token.copy_(token[:, None])
        if self.signals is not None:
            self.signals.held.copy_(rows.signals.held)
        if self.graph is None and self.warm and self.call.device.type == "cuda":
            self._capture()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        for layer in self.cache.ragged.values():
            layer.tail += 1
        self.warm = True
        return self.logits

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
            self.graph = graph
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that waits for the device: its steps run uncaptured
            self.call.captures -= 1
            print(f"a decode step was not captured ({error_line(error)})")

    def _step(self) -> None:
        if self.signals is not None:
            self.of_step = StepSignals(self.signals, len(self.call.facts.attention), newest_held=False)
        attention = Extend(self.call, self.cache, self.positions, self.window, of_step=self.of_step, decodes=True)
        self.logits = self.call.forward(self.token, self.positions, self.cache, attention, padded=False)
        self.positions.add_(1)
        self.slot.add_(1)

    def resume(self) -> "CapturedStep | None":
        """This step after an eviction; None if a layer does not fit in its place, and then none stays there."""
        layers = self.cache.ragged.values()
        for layer in layers:
            layer.settle()
        if all(layer.slot is not None for layer in layers):
            torch.arange(2, out=self.slot)
            return self
        for layer in layers:
            layer.settle(loosen=True)
        return None
