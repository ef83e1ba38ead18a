"""The backend of a condition: Triton kernels, or plain PyTorch, the reference that kernels are compared with.

With backend "triton", kernels compute attention, sums, and the window scores that `windowed` knows by name. On a GPU
they also compute norms and rotations where they give exactly the numbers of the model's class (`kvrepro.engine.fused`).
Everything else that a policy computes stays as it is. Whole prompts attend by torch's fastest function that keeps the
log-sum-exp, and decode steps are captured. Plain PyTorch still reads a question after the compressed prompt, prompts
that `SharedCap` watches, and sliding layers once a text exceeds their window.

"torch" and "triton" are used as given. "auto" gives a condition to the kernels if they support it and if, on the
beginning of a prompt, they agree with plain PyTorch on this model: attention by its norm, sums and scores by the tokens
that they would keep. Otherwise plain PyTorch computes the condition, and the reason is reported.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvrepro.engine.attention import attend, attend_prompt, read_once
from kvrepro.engine.condition import Condition
from kvrepro.engine.evict import EvictionJob, Prompts, score_and_protect
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import REPEATED, call, find
from kvrepro.engine.prefill import SUMS_BY_KERNELS, attend_by_kernels, mass_by_kernels
from kvrepro.engine.select import select
from kvrepro.engine.shapes import KeyValue, Mask, PreTrainedModel, Query, Scores
from kvrepro.errors import error_line

BACKENDS = ("torch", "triton", "auto")
PROBE = 512  # tokens of a prompt on which "auto" compares the two backends
AGREE = 0.99  # share of the best half of each layer's tokens that must be the same
CLOSE = {torch.float32: 1e-3}  # largest ||difference|| / ||plain|| of attention; 2e-2 in 16 bits
Method = tuple[str, str, tuple[tuple[str, object], ...]]  # policy, reading, switches
_probed: WeakKeyDictionary[PreTrainedModel, dict[Method, str | None]] = WeakKeyDictionary()


def obstacle(model: PreTrainedModel, c: Condition, facts: ModelFacts | None = None) -> str | None:
    """Why kernels cannot run a condition, as far as that is known without running it; None: they can. facts: those of
    this model, if the caller has them."""
    if model.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "kernels need a GPU, this model is on the cpu"
    facts = facts or ModelFacts.of(model)
    if facts.own_softmax:
        return "kernels have no softmax with a cap or sinks"
    policy = find(c.policy) if c.policy != "full" else None
    if c.execution == "masked" or c.bits is not None or (policy is not None and not policy.frees):
        return "kernels do not hide, pack or page tokens"
    if policy is None:
        return None
    if policy.shared:  # its prompts are read by plain PyTorch, its steps are captured
        return None
    sums = replace(_job(c), conditions=[c]).sums - REPEATED
    if missing := sums - SUMS_BY_KERNELS:
        return f"kernels do not sum {sorted(missing)[0]!r}, which {c.policy} needs"
    looks = sums or policy.parameters.get("window")
    return "kernels score no layer that slides" if looks and facts.sliding.keys() & set(facts.evictable) else None


def obstacles(model: PreTrainedModel, ids: Sequence[int], conditions: Sequence[Condition]) -> list[str | None]:
    """Why "auto" leaves each condition to plain PyTorch; None where kernels take it. It asks `obstacle` first, then
    compares the backends on the first tokens `ids` of a prompt; that result is remembered while the model lives."""
    if model.device.type == "cpu":
        return ["kernels need a GPU, this model is on the cpu"] * len(conditions)
    facts = ModelFacts.of(model)
    reasons = [obstacle(model, c, facts) for c in conditions]
    disagreements = _probed.setdefault(model, {})
    undecided = {_method(c): c for c, why in zip(conditions, reasons, strict=True) if why is None}
    if fresh := [c for method, c in undecided.items() if method not in disagreements]:
        disagreements |= compared(model, ids[:PROBE], fresh)
    return [disagreements[_method(c)] if why is None else why for c, why in zip(conditions, reasons, strict=True)]


@torch.inference_mode()
def compared(model: PreTrainedModel, ids: Sequence[int], conditions: Sequence[Condition]) -> dict[Method, str | None]:
    """How kernels disagree with plain PyTorch on a prompt, or fail, by method; None: they agree in every layer."""
    probe = Probe(model, len(ids))
    read_once(model, ids, probe)
    disagreements: dict[Method, str | None] = {}
    for c in conditions:
        policy = None if c.policy == "full" else find(c.policy)
        scored = policy is not None and not policy.shared and not policy.repeated  # do kernels compute its scores?
        disagreements[_method(c)] = probe.failed or (probe.disagreement(_job(c, probe.at)) if scored else None)
    return disagreements


class Probe:
    """Plain attention of a prompt that also computes every layer's attention by kernels. Afterwards `disagreement`
    compares scores, for all layers of one shape at once."""

    def __init__(self, model: PreTrainedModel, tokens: int):
        self.at = torch.arange(tokens, device=model.device)[None]
        self.facts = {name: ModelFacts.of(model).by(name) for name in ("torch", "triton")}
        self.layers: dict[int, tuple[Query, KeyValue, KeyValue, float]] = {}  # queries, keys, values, scaling
        self.by_kernels: dict[int, tuple[Tensor, Tensor, Scores]] = {}  # log-sum-exp, outputs, mass
        self.failed: str | None = None  # why kernels cannot compute attention, which every condition needs

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        if sliding is not None and query.shape[2] > sliding:  # no kernel computes such layers
            part = (key, value, self.at[:, None])
            return attend(query, self.at, [part], scaling, sliding, prompt=True)
        plain = attend_prompt(query, key, value, scaling)
        if self.failed is not None:
            return plain
        try:
            out, log_sums = attend_by_kernels(query, key, value, scaling)
            mass = mass_by_kernels(query, key, log_sums, scaling)
            decoded = _decoded(query, key, value, scaling)
            errors = torch.tensor([_distance(out, plain), _distance(decoded, plain[:, -1:])])
            error = float(errors.amax())  # NaN if either is, unlike Python's max
            if not error < CLOSE.get(query.dtype, 2e-2):
                self.failed = f"attention by kernels is {error:.1e} off in layer {layer}"
        except Exception as raised:  # whatever a compiler raises on a device of its own
            self.failed = error_line(raised)
        if self.failed is None and layer in self.facts["torch"].evictable:
            self.layers[layer] = query, key, value, scaling
            self.by_kernels[layer] = log_sums, out, mass
        return plain

    def disagreement(self, job: EvictionJob) -> str | None:
        """How the best half of the tokens by kernels differs from plain PyTorch's, in any layer; None: it does not."""
        if not (job.window or job.sums) or not self.layers:
            return None
        layers_by_kind: dict[Any, list[int]] = {}
        for n, (query, key, _, scaling) in self.layers.items():
            kind = key.device, query.shape, key.shape, scaling, self.facts["torch"].sliding.get(n)
            layers_by_kind.setdefault(kind if job.together else n, []).append(n)
        try:
            share = float(torch.tensor([self._agreement(job, layers) for layers in layers_by_kind.values()]).amin())
        except Exception as raised:  # a scorer may be a reader's own
            return error_line(raised)
        return None if share >= AGREE else f"kernels and plain PyTorch agree on {share:.1%} < {AGREE:.0%} of a probe"

    def _agreement(self, job: EvictionJob, layers: Sequence[int]) -> float:
        """The share of the best half by plain scores that is also in the best half by kernels, in the worst of these
        layers. A policy with a window is compared twice: with the window's outputs from the prompt's pass, and without.
        """
        first = max(0, self.at.shape[1] - job.window)
        plain, with_ends, without = [], [], []
        for n in layers:
            query, key, value, scaling = self.layers[n]
            log_sums, out, mass = self.by_kernels[n]
            at = self.at.to(key.device)
            seen = dict(values=value, positions=at[:, None].expand(key.shape[:3]), queries=query[:, :, first:],
                        query_positions=at[:, first:], seen=at[:, -1] + 1, scaling=scaling)  # fmt: skip
            ends = dict(log_sums=log_sums[:, :, first:], window_outputs=out[:, first:].transpose(1, 2))
            sums = {}
            if job.sums:
                every = seen | dict(queries=query, query_positions=at)
                sums = {"mass": self.facts["torch"].observe(n, key, [0], **every).attention.mean(2).sum(2)}
            plain.append(self.facts["torch"].observe(n, key, [0], **seen, sums=sums))
            without.append(self.facts["triton"].observe(n, key, [0], **seen, sums={"mass": mass}))
            with_ends.append(replace(without[-1], **ends))
        wanted = _best_half(job, Observation.together(plain))
        shares = []
        for observations in (with_ends, without) if job.window else (with_ends,):
            in_both = _best_half(job, Observation.together(observations)) & wanted
            shares.append(in_both.flatten(1).sum(1) / wanted.flatten(1).sum(1))
        return float(torch.stack(shares).amin())


def _best_half(job: EvictionJob, o: Observation) -> Mask:
    """Half of each head's tokens, by the policy's scores alone."""
    scores, none = score_and_protect(job, o)[0], o.places.nothing
    counts = o.alive.sum(-1) // 2
    if job.policy.refine is None:
        return select(scores, none, counts)
    refined, more = call(job.policy.refine, o, scores, counts, parameters={**job.parameters, "protected": none})
    return select(refined, more, counts)


def _decoded(query: Query, key: KeyValue, value: KeyValue, scaling: float) -> Tensor:
    """The last query's attention by the kernel of decode steps, [batch, 1, heads, dim]."""
    from kvrepro_kernels import ragged_decode

    batch, kv_heads, tokens, _ = key.shape
    keys, values = (x.reshape(-1, x.shape[-1]) for x in (key, value))
    offsets = torch.arange(0, batch * kv_heads * tokens + 1, tokens, device=key.device)
    return ragged_decode(query[:, :, -1:], keys, values, offsets, kv_heads=kv_heads, scale=scaling).output.transpose(
        1, 2
    )


def _distance(ours: Tensor, plain: Tensor) -> float:
    return float((ours.float() - plain.float()).norm() / plain.float().norm())


def _method(c: Condition) -> Method:
    return c.policy, c.reading, c.switches


def _job(c: Condition, positions: Tensor | None = None) -> EvictionJob:
    """The eviction of a condition without its guards, with a budget of half the tokens."""
    policy = find(c.policy)
    at = torch.zeros(1, 2, dtype=torch.long) if positions is None else positions
    bare = Condition(c.policy, 0.5, None, reading=c.reading, switches=c.switches)
    return EvictionJob([bare], policy, policy.reading(c.reading, c.switches), [at.shape[1] // 2], Prompts(at, [{}]))
