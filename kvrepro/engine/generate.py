"""One call for every regime: prompts x conditions -> generations.

One forward pass of a prompt serves all its conditions; what each keeps decodes together, as rows of one batch.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrepro.chapters.protection import harness
from kvrepro.chapters.protection.harness import boundary_attention
from kvrepro.engine.attention import installed
from kvrepro.engine.cache import EngineCache, RaggedLayer, together
from kvrepro.engine.compress import DECODING, REPEATED, Extend, Facts, Job, Prefill, Prompt, reduce, sums_of
from kvrepro.engine.condition import Condition, Generation
from kvrepro.engine.condition import Prompt as Text
from kvrepro.engine.memory import Peak
from kvrepro.engine.policy import capacity_of, check, find
from kvrepro.engine.repeat import reconstruct
from kvrepro.engine.score.cumulative import pages_read
from kvrepro.errors import InputError

__all__ = ["boundary_attention", "generate"]
BACKENDS = ("torch", "triton")


@dataclass
class Rows:
    """Rows that hold caches of their own: one per (prompt, condition)."""

    tags: list[tuple[int, int]]
    jobs: list[Job]
    cache: EngineCache
    logits: Tensor  # [batch, vocabulary], of the next token
    seen: Tensor  # int64 [batch], tokens so far
    budgets: Tensor  # int64 [batch]
    calls: Tensor  # int64 [batch], evictions so far

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def conditions(self) -> list[Condition]:
        return [job.condition for job in self.jobs]

    def take(self, rows: list[int]) -> "Rows":
        """These rows alone."""
        index = torch.tensor(rows, device=self.logits.device)
        return Rows(
            [self.tags[i] for i in rows], [self.jobs[i] for i in rows], self.cache.rows(index), self.logits[index],
            self.seen[index], self.budgets[index], self.calls[index],
        )  # fmt: skip


def _joined(blocks: list[Rows]) -> Rows:
    cat = torch.cat
    return Rows(
        [t for b in blocks for t in b.tags], [j for b in blocks for j in b.jobs], together([b.cache for b in blocks]),
        cat([b.logits for b in blocks]), cat([b.seen for b in blocks]), cat([b.budgets for b in blocks]),
        cat([b.calls for b in blocks]),
    )  # fmt: skip


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int] | Text],
    conditions: Sequence[Condition],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = 64,
    prompt_rows: int = 1,
    backend: str = "torch",
    repeat: Sequence[int] = (),
    measure_peak: bool = False,
    kept_sets: bool = False,
    seed: int = 0,
) -> list[list[Generation]]:
    """Greedy generations `[prompt][condition]` of at most `max_new_tokens`.

    prompts: token ids, or `kvrepro.experiment.data.Prompt` where a condition names spans. Rows of any prompt and
    condition decode
    in batches of up to `batch_rows`; `prompt_rows` prompts pass through the model together, padded on the left.
    backend: "torch", or "triton" on a GPU: whole prompts by torch's fastest attention that keeps the log-sum-exp,
    window scores and cumulative attention by one-pass kernels, single tokens by the ragged decode kernel; a question
    after the compressed prompt is read by plain torch. What it cannot do, it refuses.
    repeat: token ids of KVzip's request to repeat the context. measure_peak: measure what the prefill allocates, one
    condition at a time. kept_sets: return who stayed. seed: of policies that draw, whose draws differ
    between prompts. Raises InputError, before anything is computed for what can be known by then.
    """
    if batch_rows < 1 or max_new_tokens < 1 or prompt_rows < 1:
        sizes = f"batch_rows {batch_rows}, max_new_tokens {max_new_tokens}, prompt_rows {prompt_rows}"
        raise InputError(f"{sizes}: all must be at least 1")
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}: choose {' or '.join(BACKENDS)}")
    if any(isinstance(p, int) for p in prompts):
        raise InputError(f"prompts {list(prompts)[:3]}: give a list of prompts, each a list of token ids")
    texts = [p if isinstance(p, Text) else Text(list(p), {}) for p in prompts]
    old = [j for j, c in enumerate(conditions) if c.regime == "harness"]
    new = [j for j, c in enumerate(conditions) if c.regime != "harness"]
    for text in texts:
        _check_prompt(model, text.ids, max_new_tokens)
    for j in old:
        check(conditions[j])
    check_conditions(model, texts, [conditions[j] for j in new])
    for c in (conditions[j] for j in new):
        if c.policy != "full" and REPEATED.intersection(find(c.policy).needs) and not repeat:
            raise InputError(f"{c.policy} repeats the context: give `repeat`, token ids of the request to do so")
    known: dict[tuple[int, int], Generation] = {}
    if old:
        answers = harness.generate(
            model, [t.ids for t in texts], [conditions[j] for j in old], max_new_tokens=max_new_tokens,
            stop_ids=stop_ids, batch_rows=batch_rows,
        )  # fmt: skip
        known |= {(i, j): a for i, row in enumerate(answers) for j, a in zip(old, row, strict=True)}
    if new:
        if backend == "triton":
            _check_kernels(model, [conditions[j] for j in new])
        engine = _Engine(
            model, texts, conditions, max_new_tokens, stop_ids, batch_rows, repeat, measure_peak, kept_sets, backend,
            seed,
        )  # fmt: skip
        with installed(model):
            known |= engine.run(new, prompt_rows)
    return [[known[i, j] for j in range(len(conditions))] for i in range(len(prompts))]


def check_conditions(model: PreTrainedModel, texts: Sequence[Text], conditions: Sequence[Condition]) -> None:
    """Raise InputError for a condition outside the harness that one of the prompts cannot meet."""
    facts = Facts.of(model)
    for text in texts:
        for c in conditions:
            end = boundary(text, c)
            check(c, facts.held(end), [at - end for at in whitelisted(text, c) if at < end])


def _check_prompt(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise InputError if the model cannot continue `prompt`."""
    config, n = model.config.get_text_config(), len(prompt)
    if n < 2:
        raise InputError(f"prompt of {n} tokens < 2: give a text to continue")
    if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
        strange = min(prompt) if min(prompt) < 0 else max(prompt)
        raise InputError(f"token id {strange} outside the model's vocabulary of {config.vocab_size}: other tokenizer?")
    if n + max_new_tokens > config.max_position_embeddings:
        asked = f"{n} prompt + {max_new_tokens} new tokens"
        raise InputError(f"{asked} > the model's {config.max_position_embeddings} positions: shorten one")


def _check_kernels(model: PreTrainedModel, conditions: Sequence[Condition]) -> None:
    """Raise InputError for what the Triton backend does not do: it never falls back."""
    if model.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError("backend triton needs a GPU, this model is on the cpu: use backend torch, or device cuda")
    if Facts.of(model).sliding:
        raise InputError("backend triton has no sliding windows: use backend torch for this model")
    for c in conditions:
        policy = find(c.policy) if c.policy != "full" else None
        if c.execution == "masked" or c.bits is not None or (policy is not None and not policy.frees):
            raise InputError(f"backend triton does not hide, pack or page tokens ({c.label}): use backend torch")
        if policy is not None and policy.parameters.get("window") and not policy.kernel:
            raise InputError(f"backend triton has no scorer for {c.policy}: use backend torch")
        if c.fair is not None or c.regime in ("chunked", *DECODING):
            raise InputError(f"backend triton evicts at the end of a whole prompt, not {c.label} in {c.regime}")


def boundary(text: Text, c: Condition) -> int:
    """Tokens of the prompt that `c` compresses; what follows them is read afterwards, through what is left.

    Raises InputError for a span that the prompt does not have.
    """
    n = len(text.ids)
    for name in {*c.whitelist, *c.spans, *({c.until} - {"", *text.turns})}:
        if not text.spans.get(name):
            raise InputError(f"the prompt has no span {name!r}: it has {', '.join(text.spans) or 'none'}")
    end = n
    if c.until:
        end = text.turns[c.until] if c.until in text.turns else min(text.spans[c.until])
    if end < 1:
        raise InputError(f"{c.until!r} begins at token {end}: nothing stands before it to compress")
    if c.fair is not None and not any(min(text.spans[name]) < end for name in c.spans or text.spans):
        raise InputError(f"fair {c.fair:g} with 0 spans among the {end} tokens to compress: mark some, or drop fair")
    return end


def whitelisted(text: Text, c: Condition) -> set[int]:
    """Positions that `c` protects by name."""
    return {at for name in c.whitelist for at in text.spans[name]}


class _Engine:
    """One call's state: what waits to decode, and what is known."""

    def __init__(
        self, model, texts, conditions, max_new_tokens, stop_ids, batch_rows, repeat, measure_peak, kept_sets, backend,
        seed,
    ):  # fmt: skip
        self.model, self.texts, self.conditions = model, texts, conditions
        self.max_new_tokens, self.stop_ids, self.batch_rows = max_new_tokens, stop_ids, batch_rows
        self.repeat, self.measure_peak, self.kept_sets = list(repeat), measure_peak, kept_sets
        self.backend, self.seed = backend, seed
        self.facts = Facts.of(model)
        self.device = model.device
        self.scalings: dict[int, float] = {}
        self.notes: dict[tuple[int, int], dict] = {}
        self.answers: dict[tuple[int, int], Generation] = {}
        self.waiting: dict[tuple, list[Rows]] = {}
        self.prefixes: dict[tuple, tuple[tuple, Rows]] = {}  # offline: what is left of the last prefix, by conditions
        self.recurrent = any(hasattr(layer, "recurrent_states") for layer in EngineCache(model.config).layers)

    def run(self, columns: list[int], prompt_rows: int) -> dict[tuple[int, int], Generation]:
        """Generations of the conditions `columns`, by (prompt, condition)."""
        for first in range(0, len(self.texts), prompt_rows):
            members = list(range(first, min(first + prompt_rows, len(self.texts))))
            for group in self._groups(members, columns):
                for rows in self._compressed(members, group):
                    for part in self._quantised(rows):
                        self._wait(part)
        for key in list(self.waiting):
            while self.waiting[key]:
                self._decode(key)
        return self.answers

    def _quantised(self, rows: Rows) -> list[Rows]:
        """Rows whose conditions ask for it in few bits, each by itself from then on; the others together."""
        plain = [row for row, c in enumerate(rows.conditions) if c.bits is None]
        found = [rows if len(plain) == len(rows) else rows.take(plain)] if plain else []
        for row, c in enumerate(rows.conditions):
            if c.bits is not None:
                found.append(rows.take([row]))
                for layer in found[-1].cache.ragged.values():
                    layer.quantise(c.bits)
        return found

    def _groups(self, members: list[int], columns: list[int]) -> list[list[int]]:
        """Conditions that one forward pass serves: equal boundaries; chunks pass through caches of their own."""
        groups: dict[tuple, list[int]] = {}
        for j in columns:
            c = self.conditions[j]
            ends = tuple(boundary(self.texts[i], c) for i in members)
            chunk = (c.chunk, c.execution) if c.regime == "chunked" else None
            spans = c.spans if c.fair is not None else None  # attention inside spans is summed for one set of them
            alone = j if self.measure_peak else None
            groups.setdefault((ends, c.regime == "offline", chunk, spans, alone), []).append(j)
        return list(groups.values())

    def _compressed(self, members: list[int], columns: list[int]) -> list[Rows]:
        """Rows of these prompts and conditions after the eviction at the end of what they compress."""
        c = self.conditions[columns[0]]
        ends = [boundary(self.texts[i], c) for i in members]
        if c.regime == "offline":
            return [row for i, end in zip(members, ends, strict=True) for row in self._reused(i, end, columns)]
        repeats = any(job.repeated for job in self._jobs([], [], columns))
        if c.regime == "chunked" or repeats:  # rows of equal length: no chunk, no repetition is padded
            alike = {end: [i for i, e in zip(members, ends, strict=True) if e == end] for end in ends}
            return [row for end, some in alike.items() for row in self._pass(some, [end] * len(some), columns)]
        return self._pass(members, ends, columns)

    def _reused(self, i: int, end: int, columns: list[int]) -> list[Rows]:
        """A prefix is compressed once; each request gets a copy of what is left."""
        text = self.texts[i]
        marked = tuple((name, tuple(at for at in where if at < end)) for name, where in text.spans.items())
        key = (tuple(text.ids[:end]), marked)
        if self.prefixes.get(tuple(columns), ((), None))[0] != key:
            self.prefixes[tuple(columns)] = (key, _joined(self._pass([i], [end], columns)))
        found = self.prefixes[tuple(columns)][1]
        first = found.tags[0][0]
        rows = found.take(list(range(len(found))))
        rows.tags = [(i, j) for _, j in found.tags]
        for j in columns:
            self.notes[i, j] = self.notes[first, j] | ({} if i == first else {"prefill_seconds": 0.0})
        return [rows]

    def _pass(self, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
        began = time.perf_counter()
        with Peak(self.device, self.measure_peak) as peak:
            if self.conditions[columns[0]].regime == "chunked":
                found = [self._chunked(members, ends, columns)]
            else:
                found = self._prefill(members, ends, columns)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / (len(members) * len(columns))
        for rows in found:
            for row, tag in enumerate(rows.tags):
                kept = self._kept(rows.cache, row, ends[members.index(tag[0])])
                self.notes[tag] = kept | {"prefill_seconds": seconds, "peak_bytes": peak.bytes}
        return found

    def _seeds(self, members: list[int], ends: list[int]) -> list[int]:
        """A prompt's draws depend on what is compressed of it, not on its place in a batch."""
        digests = (zlib.crc32(str(self.texts[i].ids[:end]).encode()) for i, end in zip(members, ends, strict=True))
        return [digest + (self.seed << 32) for digest in digests]

    def _jobs(self, members: list[int], ends: list[int], columns: list[int]) -> list[Job]:
        jobs = []
        for j in columns:
            c = self.conditions[j]
            policy = find(c.policy) if c.policy != "full" else None
            sizes = [capacity_of(c, self.facts.held(end)) for end in ends]
            parameters = policy.reading(c.reading, c.switches) if policy else {}
            jobs.append(Job(c, policy, parameters, sizes, self.device))
            if policy is not None and not policy.frees:
                jobs[-1].policy = None
        return jobs

    def _prefill(self, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
        """One forward pass for all of `columns`; a layer's keys and values are gone when the next one is computed."""
        ids, positions = self._padded([self.texts[i].ids[:end] for i, end in zip(members, ends, strict=True)])
        prompt = Prompt(positions, [self.texts[i].spans for i in members], self._seeds(members, ends))
        jobs = self._jobs(members, ends, columns)
        attention = _Scaled(Prefill(self.facts, prompt, jobs, backend=self.backend), self.scalings)
        cache = EngineCache(self.model.config)
        logits = self._forward(ids, positions, cache, attention)
        if any(job.repeated for job in jobs):
            reconstruct(self.model, attention.inner, self.repeat, ids, positions, cache)
        attention.inner.finish()
        found = []
        for job, j in zip(jobs, columns, strict=True):
            mine = cache.rows(torch.arange(len(members), device=self.device))
            mine.ragged = {n: job.layers[n] for n in sorted(job.layers)}
            single = [
                replace(job, layers={}, sizes=job.sizes[b : b + 1], text=self.texts[i], seed=prompt.seeds[b])
                for b, i in enumerate(members)
            ]
            held = torch.tensor([self.facts.held(end) for end in ends], device=self.device)[:, None]
            layers = [mine.ragged[n].seen().to(held.device) for n in self.facts.evictable]
            calls = (torch.cat(layers, 1) < held).any(1).long()
            tags = [(i, j) for i in members]
            rows = Rows(tags, single, mine, logits, prompt.lengths.clone(), job.budget, calls)
            job.layers = {}
            found.append(rows)
        return found

    def _forward(self, ids: Tensor, positions: Tensor, cache: EngineCache, attention) -> Tensor:
        """Logits of the token after the last, [batch, vocabulary]."""
        padding = {"attention_mask": (positions >= 0).long()} if bool((positions < 0).any()) else {}
        return self.model(
            input_ids=ids, position_ids=positions.clamp(min=0), past_key_values=cache, use_cache=True, logits_to_keep=1,
            kvrepro=attention, **padding,
        ).logits[:, -1]  # fmt: skip

    def _padded(self, texts: Sequence[Sequence[int]], start: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """(ids, positions) `[batch, longest]`, padded on the left; position -1 marks padding."""
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.long, device=self.device)
        positions = torch.full_like(ids, -1)
        for row, text in enumerate(texts):
            first = start[row] if start is not None else 0
            ids[row, longest - len(text) :] = torch.tensor(list(text), device=self.device)
            positions[row, longest - len(text) :] = torch.arange(first, first + len(text), device=self.device)
        return ids, positions

    def _kept(self, cache: EngineCache, row: int, end: int) -> dict:
        """Positions that a row kept, of all heads together and hashed per layer and head."""
        digest, sets = hashlib.sha256(), []
        union = torch.zeros(end, dtype=torch.bool, device="cpu")
        for n in self.facts.evictable:
            layer = cache.ragged[n]
            heads = layer.shape[1]
            a, b = (int(layer.offsets[segment]) for segment in (row * heads, (row + 1) * heads))
            lengths = layer.offsets[row * heads : (row + 1) * heads + 1].diff()
            head = torch.repeat_interleave(torch.arange(heads, device=lengths.device), lengths)
            at = layer.positions[a:b]
            if layer.hidden is not None:
                head, at = head[~layer.hidden[a:b]], at[~layer.hidden[a:b]]
            head, at = head.cpu(), at.cpu()
            digest.update(head.bincount(minlength=heads).numpy().tobytes() + at.numpy().tobytes())
            union[at.long()] = True
            if self.kept_sets:
                mask = torch.zeros(heads, end, dtype=torch.bool, device="cpu")
                mask[head, at.long()] = True
                sets.append(mask.numpy())
        note = {"kept_positions": union.nonzero()[:, 0].tolist(), "kept_positions_hash": digest.hexdigest()[:16]}
        return note | ({"kept_sets": sets} if self.kept_sets else {})

    def _chunked(self, members: list[int], ends: list[int], columns: list[int]) -> Rows:
        """The prompt in chunks, each attending to what is left of the earlier ones and to itself."""
        jobs = self._jobs(members, ends, columns)
        texts = [self.texts[i].ids[:end] for _ in jobs for i, end in zip(members, ends, strict=True)]
        seeds = self._seeds(members, ends)
        each = [
            replace(job, sizes=job.sizes[b : b + 1], text=self.texts[i], seed=seeds[b])
            for job in jobs
            for b, i in enumerate(members)
        ]
        window = max(job.window for job in jobs)
        chunk = jobs[0].condition.chunk
        cache = EngineCache(self.model.config)
        self._open(cache, len(texts), {n for job in jobs if job.policy for n in sums_of(job)})
        seen = torch.zeros(len(texts), dtype=torch.long, device=self.device)
        lengths = torch.tensor([len(t) for t in texts], device=self.device)
        calls = torch.zeros_like(seen)
        logits = None
        for a in range(0, int(lengths.max()), chunk):
            ids, positions = self._padded([t[a : a + chunk] for t in texts], [a] * len(texts))
            attention = _Scaled(Extend(cache, positions, window), self.scalings)
            logits = self._forward(ids, positions, cache, attention)
            seen = torch.minimum(lengths, seen + chunk)
            last = a + chunk >= int(lengths.max())
            budgets = torch.stack(
                [_chunk_budget(job, self.facts, int(s), last) for job, s in zip(each, seen, strict=True)]
            )
            calls += reduce(self.facts, cache, [job.condition for job in each], each, seen, budgets, self.scalings)
        for layer in cache.ragged.values():  # what served the next eviction: there is none
            layer.sums, layer.queries, layer.query_positions = {}, None, None
        tags = [(i, j) for j in columns for i in members]
        budgets = torch.cat([job.budget for job in each])
        return Rows(tags, each, cache, logits, seen, budgets, calls)

    def _open(self, cache: EngineCache, batch: int, sums: set[str]) -> None:
        """Empty layers for `batch` rows."""
        config = self.model.config.get_text_config()
        kv_heads = config.num_key_value_heads
        for n in self.facts.attention:
            dim = self.facts.outputs[n].shape[1]
            empty = torch.zeros(0, dim, dtype=self.model.dtype, device=self.facts.outputs[n].device)
            offsets = torch.zeros(batch * kv_heads + 1, dtype=torch.long, device=empty.device)
            cache.ragged[n] = RaggedLayer(
                empty, empty.clone(), offsets[:0].int(), offsets, (batch, kv_heads),
                {name: empty[:, 0].float() for name in sums if n in self.facts.evictable},
            )  # fmt: skip

    def _unread(self, rows: Rows) -> list[Sequence[int]]:
        """What each row's condition leaves uncompressed, a question for instance, and nobody has read yet."""
        return [self.texts[i].ids[seen:] for (i, _), seen in zip(rows.tags, rows.seen.tolist(), strict=True)]

    def _read(self, rows: Rows, window: int) -> None:
        """The rows read the rest of their prompts, together."""
        rest = self._unread(rows)
        if not any(rest):
            return
        began = time.perf_counter()
        ids, positions = self._padded(rest, rows.seen.tolist())
        attention = _Scaled(Extend(rows.cache, positions, window), self.scalings)
        logits = self._forward(ids, positions, rows.cache, attention)
        there = torch.tensor([bool(r) for r in rest], device=self.device)
        rows.logits = torch.where(there[:, None], logits, rows.logits)
        rows.seen = rows.seen + torch.tensor([len(r) for r in rest], device=self.device)
        if bool((positions < 0).any()):
            for layer in rows.cache.ragged.values():  # padding takes memory
                layer.settle()
        seconds = (time.perf_counter() - began) / len(rows)
        for tag in rows.tags:
            self.notes[tag] = self.notes[tag] | {"prefill_seconds": self.notes[tag]["prefill_seconds"] + seconds}

    def _wait(self, rows: Rows) -> None:
        """Rows that may share a batch wait for one another."""
        rest = [len(unread) for unread in self._unread(rows)]
        for row, c in enumerate(rows.conditions):
            policy = find(c.policy) if c.policy != "full" else None
            pages = None
            if policy is not None and not policy.frees:
                p = rows.jobs[row].parameters
                pages = (p.get("page", 16), p.get("dense_layers", 2), int(rows.budgets[row]))
            every = (
                (1 if c.regime == "per step" else c.interval) if c.regime in DECODING and c.policy != "full" else None
            )
            size = max(int(layer.held()[row].max()) for layer in rows.cache.ragged.values())
            alone = rows.tags[row] if c.bits is not None else None
            recurrent = rest[row] if self.recurrent else None  # padding would pass through recurrent states
            key = (every, pages, c.execution, max(1, size + rest[row] - 1).bit_length(), recurrent, alone)
            self.waiting.setdefault(key, []).append(rows.take([row]))
            if alone or len(self.waiting[key]) >= self.batch_rows:
                self._decode(key)

    def _decode(self, key: tuple) -> None:
        """Generate greedily for the rows that wait under `key`, up to `batch_rows` of them."""
        rows = _joined(self.waiting[key][: self.batch_rows])
        self.waiting[key] = self.waiting[key][self.batch_rows :]
        every, pages, *_ = key
        window = max(job.window for job in rows.jobs) if every else 0
        self._read(rows, window)
        picked: list[Tensor] = []
        stops = torch.tensor(sorted(self.stop_ids) or [-1], device=self.device)
        seconds, began = 0.0, time.perf_counter()
        for step in range(1, self.max_new_tokens + 1):
            token = rows.logits.argmax(-1)
            picked.append(token)
            done = torch.isin(token, stops) | (step == self.max_new_tokens)
            broken = rows.logits.isnan().any(1)
            ended, failed = torch.stack([done.any(), broken.any()]).tolist()
            if failed:  # the largest of them is no answer
                raise ArithmeticError(f"{rows.conditions[int(broken.int().argmax())].label}: NaN at new token {step}")
            if ended:
                tokens = torch.stack(picked, 1)
                self._finish(
                    rows, done.nonzero()[:, 0].tolist(), tokens, seconds + (time.perf_counter() - began) / len(rows)
                )
                alive = (~done).nonzero()[:, 0].tolist()
                if not alive:
                    return
                rows = rows.take(alive)
                picked = list(tokens[~done].unbind(1))
            now = time.perf_counter()
            seconds, began = seconds + (now - began) / len(rows), now
            positions = rows.seen[:, None]
            attention = _Scaled(Extend(rows.cache, positions, window, pages, self.backend), self.scalings)
            rows.logits = self._forward(picked[-1][:, None], positions, rows.cache, attention)
            rows.seen = rows.seen + 1
            if every and step % every == 0:
                rows.calls = rows.calls + reduce(
                    self.facts, rows.cache, rows.conditions, rows.jobs, rows.seen, rows.budgets, self.scalings
                )
            if rows.conditions[0].bits is not None:
                for layer in rows.cache.ragged.values():
                    layer.quantise(rows.conditions[0].bits)

    @staticmethod
    def _pages(rows: Rows, row: int) -> int | None:
        """Pages that each query head of a row reads at a step, where its policy selects some and evicts nothing."""
        c = rows.conditions[row]
        if c.policy == "full" or find(c.policy).frees:
            return None
        return int(pages_read(rows.budgets[row], rows.jobs[row].parameters["page"]))

    def _finish(self, rows: Rows, done: list[int], tokens: Tensor, seconds: float) -> None:
        """Note what is known of rows at their end."""
        for n, window in self.facts.sliding.items():
            rows.cache.ragged[n].slide(rows.seen - window + 1)
        layers = [rows.cache.ragged[n] for n in self.facts.attention]
        kept = torch.stack([layer.seen().float().mean(1).cpu() for layer in layers])  # [layers, batch]
        held = torch.stack([layer.held().sum(1).cpu() for layer in layers])
        state = sum(layer.state_bytes for layer in layers)
        allocated = sum(layer.bytes + layer.overhead_bytes for layer in layers) + state
        size = held.new_tensor([2 * layer.keys.shape[1] * layer.keys.dtype.itemsize for layer in layers])
        evicting = [self.facts.attention.index(n) for n in self.facts.evictable]
        for row in done:
            tag, seen = rows.tags[row], int(rows.seen[row])
            full = held.new_tensor([min(seen, self.facts.sliding.get(n, seen + 1) - 1) for n in self.facts.attention])
            heads = held.new_tensor([layer.shape[1] for layer in layers])
            share = float((held[:, row] * size).sum() / (held.sum(1) * size).sum())
            self.answers[tag] = Generation(
                tokens=tokens[row].tolist(),
                kept=kept[:, row].round().int().tolist(),
                evicted=round(float((full - kept[:, row])[evicting].mean())),
                policy_calls=int(rows.calls[row]),
                bytes_held=round(allocated * share),
                bytes_state=round(state * share),
                bytes_full=int((full * heads * size).sum()),
                decode_seconds=seconds,
                backend=self.backend,
                pages=self._pages(rows, row),
                **self.notes[tag],
            )


def _chunk_budget(job: Job, facts: Facts, seen: int, last: bool) -> Tensor:
    """Tokens to keep after a chunk, given tokens seen; DropKV's standalone cache.

    last_chunk: everything stays until the end. every_chunk: the share of what was seen, or the capacity. budget: the
    capacity once it is exceeded.
    """
    c = job.condition
    if last:
        return job.budget[0]
    if c.chunk_mode == "last_chunk":
        return job.budget.new_tensor(seen)
    if c.chunk_mode == "every_chunk":
        return job.budget.new_tensor(capacity_of(c, facts.held(seen)))
    return job.budget[0]


class _Scaled:
    """Passes attention on, and remembers each layer's scaling."""

    def __init__(self, inner, scalings: dict[int, float]):
        self.inner, self.scalings = inner, scalings

    def attend(self, layer, query, key, value, scaling, sliding=None):
        self.scalings[layer] = scaling
        return self.inner.attend(layer, query, key, value, scaling, sliding)
