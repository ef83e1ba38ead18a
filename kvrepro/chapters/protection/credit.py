"""The online credit estimator, version 2: a linear guess of how much a token will be missed, learned while decoding.

`run` answers prompts one after the other, since what one answer teaches serves the next; what was learned is a small
file. `python -m kvrepro.chapters.protection.credit` writes the embedded model's and compares its answers with
protected LRU's.

Source: protection paper, section 8 and appendix D; artifact 496739f (estimator.py, interfaces.py:54-77,
online_credit_generator.py). What they leave open is decided here: the bias learns like a weight whose feature is 1; an
event's tokens teach in the order of their cache slots; means and variances of features follow the event's mean; equal
credits rank by LRU; an answer that ends earlier is judged by the log-probabilities there are, and not at all if there
are none.
"""

import json
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvrepro.chapters.protection import observe
from kvrepro.chapters.protection.attention import DecodeAttention, PromptAttention
from kvrepro.chapters.protection.decode import regrouped
from kvrepro.chapters.protection.observe import Observation, after_prompt
from kvrepro.chapters.protection.policy import POLICIES, Limits, check, reduce
from kvrepro.chapters.protection.selection import eviction_rank, tie_key
from kvrepro.chapters.protection.slots import from_prompt
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition
from kvrepro.engine.shapes import RowInts, Scores, TokenFloats, TokenInts
from kvrepro.errors import InputError
from kvrepro.experiment import models
from kvrepro.paths import ROOT

EMBEDDED = "data/models/tiny-gqa-credit.json"  # relative to the project's folder
BEFORE, AFTER = 8, 6  # log-probabilities averaged on either side of an eviction
NOISE = 0.003  # smaller changes of their mean teach nothing
WARM, RAMP, MOST = 8, 24, 0.40  # updates before the first blend, until the full one, and its weight
DOUBT = 0.70  # mean uncertainty above which LRU decides alone
OPEN = 0.01  # blend from which the gate counts as open


@dataclass(frozen=True)
class Estimator:
    """credit = bias + weights . features; it lasts from one prompt to the next."""

    weights: tuple[float, ...] = (-0.5, -0.1, 0.3, 0.5)
    bias: float = 0.0
    updates: int = 0  # u, evictions learned from
    error: float = 1.0  # v, running mean of squared errors
    mean: tuple[float, ...] = (0.5,) * 4  # of features, running
    variance: tuple[float, ...] = (0.25,) * 4


def features(o: Observation, uses: TokenInts, capacity: RowInts) -> Float[Tensor, "batch tokens 4"]:
    """Idle time log(1 + t - L) / d, age log(1 + t - I) / d, uses N / (N + 4), attention a; each at most 1. float64.

    d = log(1 + 4 C). uses: N, 1 when a token enters and 1 more each time that attention marks it as accessed.
    """
    d = (1 + 4 * capacity.double()).log()[:, None]
    idle, age = ((1 + (o.step - when).double()).log() / d for when in (o.last_access, o.inserted))
    return torch.stack([idle, age, uses / (uses.double() + 4), o.current.double()], -1).clamp(max=1)


def credit(e: Estimator, f: Float[Tensor, "batch tokens 4"]) -> TokenFloats:
    """What the estimator expects to be lost with each token, in mean log-probability."""
    return e.bias + f @ torch.tensor(e.weights, dtype=f.dtype, device=f.device)


def uncertainty(e: Estimator, f: Float[Tensor, "batch tokens 4"]) -> TokenFloats:
    """sqrt(v) (1 + mean((f - mean)^2 / (variance + 1e-4)) / 2); 1 before 8 updates."""
    if e.updates < WARM:
        return torch.ones_like(f[..., 0])
    mean, variance = (torch.tensor(x, dtype=f.dtype, device=f.device) for x in (e.mean, e.variance))
    return math.sqrt(e.error) * (1 + 0.5 * ((f - mean).square() / (variance + 1e-4)).mean(-1))


def blend(e: Estimator, doubt: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Weight of the estimator beside LRU: 0.40 min(1, (u - 8) / 24), 0 where the mean uncertainty exceeds 0.70."""
    full = MOST * min(1.0, max(0, e.updates - WARM) / RAMP)
    return torch.where(doubt > DOUBT, 0.0, full)


def mixed(e: Estimator, o: Observation, uses: TokenInts, capacity: RowInts) -> tuple[Scores, Float[Tensor, " batch"]]:
    """(keep scores, blend beta): beta rank_credit + (1 - beta) rank_LRU among the evictable tokens, ranks in [0, 1].

    Credit ranks by credit - 0.2 uncertainty + 0.25 [N <= 1 and max(a, M) >= 0.70].
    """
    f = features(o, uses, capacity)
    unsure = uncertainty(e, f)
    strong = (uses <= 1) & (torch.maximum(o.current, o.peak) >= 0.70)
    value = credit(e, f) - 0.2 * unsure + 0.25 * strong
    counted = o.evictable.sum(1)
    doubt = (unsure * o.evictable).sum(1) / counted.clamp(min=1)
    last_use = tie_key(o, ("last_access", "inserted"))
    ranks = [eviction_rank(o.evictable, keys).double() for keys in ((value, last_use), (last_use,))]
    beta = blend(e, doubt)[:, None]
    return ((beta * ranks[0] + (1 - beta) * ranks[1]) / (counted - 1).clamp(min=1)[:, None])[:, None], beta[:, 0]


def targets(attention: Float[Tensor, " tokens"], before: Sequence[float], after: Sequence[float]) -> Tensor | None:
    """What each evicted token is blamed for: the fall of the mean log-probability, in proportion to its attention when
    it left (evenly if all is 0). None if the change is noise or one side is missing."""
    if not before or not after:
        return None
    change = sum(before) / len(before) - sum(after) / len(after)
    if abs(change) < NOISE:
        return None
    total = float(attention.sum())
    share = attention.double() / total if total > 0 else torch.full_like(attention, 1 / len(attention)).double()
    return change * share


def update(e: Estimator, f: Float[Tensor, "tokens 4"], target: Float[Tensor, " tokens"]) -> Estimator:
    """One eviction's lesson: a step for each token, by its error clipped to 1 and the rate 0.08 / sqrt(u + 1); then the
    running averages of squared errors (0.92) and of the features' mean and variance (0.95)."""
    weights, bias, rate, errors = list(e.weights), e.bias, 0.08 / math.sqrt(e.updates + 1), []
    rows = f.tolist()
    for row, wanted in zip(rows, target.tolist(), strict=True):
        guess = bias + sum(w * x for w, x in zip(weights, row, strict=True))
        error = max(-1.0, min(1.0, wanted - guess))
        weights = [w + rate * error * x for w, x in zip(weights, row, strict=True)]
        bias += rate * error
        errors.append(error)
    mean, variance = [], []
    for column, old_mean, old_variance in zip(zip(*rows, strict=True), e.mean, e.variance, strict=True):
        mean.append(0.95 * old_mean + 0.05 * sum(column) / len(column))
        variance.append(0.95 * old_variance + 0.05 * sum((x - mean[-1]) ** 2 for x in column) / len(column))
    squared = sum(error**2 for error in errors) / len(errors)
    return Estimator(tuple(weights), bias, e.updates + 1, 0.92 * e.error + 0.08 * squared, tuple(mean), tuple(variance))


def load(path: str | Path = EMBEDDED) -> Estimator:
    """An estimator from its file; relative paths start at the project's folder. Raises InputError."""
    file = ROOT / path
    try:
        read = json.loads(file.read_text())["estimator"]
        lists: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in read.items()}
        return Estimator(**lists)
    except FileNotFoundError:
        raise InputError(f"no estimator at {file}: run python -m kvrepro.chapters.protection.credit") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} holds no estimator ({error}): learn it anew") from None


# ---- decoding


@dataclass
class Answer:
    """One generated answer and what the gate did; counts are named as in the artifact's rows."""

    tokens: list[int] = field(default_factory=list)  # the stop token included
    eviction_count: int = 0
    policy_call_count: int = 0
    gate_open_count: int = 0
    gate_fallback_count: int = 0


@dataclass
class _Event:
    """An eviction that waits for the log-probabilities after it."""

    features: Tensor
    attention: Tensor
    before: list[float]
    at: int  # log-probabilities known when it happened


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    condition: Condition,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    estimator: Estimator | None = None,
) -> tuple[list[Answer], Estimator]:
    """Greedy answers in the order of `prompts`, and the estimator after them; without one it begins untaught.

    condition: a harness condition of policy lru (the credit blends with it), for capacity, guards, interval, reading.
    Evicted tokens are hidden, not freed. Raises InputError before any computation.
    """
    if condition.policy != "lru":
        raise InputError(f"the credit blends with lru, got {condition.policy!r}: give a condition of policy lru")
    for prompt in prompts:
        check(condition, len(prompt))
    answers, e = [], estimator or Estimator()
    with installed(model):
        for prompt in prompts:
            answer, e = _answer(model, prompt, condition, max_new_tokens, stop_ids, e)
            answers.append(answer)
    return answers, e


def _answer(model, prompt, condition, max_new_tokens, stop_ids, e) -> tuple[Answer, Estimator]:
    reading, width = condition.resolved(), len(prompt) + max_new_tokens
    seen, past = PromptAttention(sums=reading.score_reduce == "mean"), DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt)], device=model.device)
    logits = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1, kvrepro=seen).logits[0, -1]
    o = after_prompt(seen, reading, past.layers[0].keys.shape[1], per_head=False, rows=1)
    cache, slots = from_prompt(past, o.positions, width), o.positions
    o = o.map_slots(lambda v: regrouped(v, slots, width))
    uses = torch.ones_like(o.positions)
    limits = Limits.of([condition], model.device)
    answer, events, known = Answer(), [], []

    def evict(o: Observation) -> Observation:
        made: list[Tensor] = []

        def score(o: Observation) -> Scores:
            scores, beta = mixed(e, o, uses, limits.capacity)
            made.append(beta)
            return scores

        kept = reduce(replace(POLICIES["lru"], score=score), o, limits)[:, 0]
        gone = o.alive & ~kept
        if bool(gone.any()):
            answer.eviction_count += int(gone.sum())
            answer.policy_call_count += 1
            is_open = float(made[0]) >= OPEN
            answer.gate_open_count += is_open
            answer.gate_fallback_count += not is_open
            events.append(
                _Event(features(o, uses, limits.capacity)[gone], o.current[gone], known[-BEFORE:], len(known))
            )
        return replace(o, alive=kept)

    if reading.first_reduction == 0:
        o = evict(o)
    for t in range(1, max_new_tokens + 1):
        picked = logits.argmax()
        if bool(logits.isnan().any()):
            raise ArithmeticError(f"{condition.label}: NaN at new token {t}")
        known.append(float(logits.float().log_softmax(-1)[picked]))
        answer.tokens.append(int(picked))
        while events and len(known) - events[0].at >= AFTER:
            e = _learned(e, events.pop(0), known)
        if int(picked) in stop_ids:
            break
        o = observe.append(replace(o, step=t), cache.slot, torch.ones_like(o.alive[:, 0]))
        uses[:, cache.slot] = 1
        if t >= reading.first_reduction and t % condition.interval == 0:
            o = evict(o)
        if t == max_new_tokens:
            break
        step = DecodeAttention(o.alive[:, None], model.dtype, len(cache.keys), reading.score_reduce)
        logits = model(
            input_ids=picked.view(1, 1), position_ids=(o.prompt_tokens + t - 1)[:, None], past_key_values=cache,
            use_cache=True, kvrepro=step,
        ).logits[0, -1]  # fmt: skip
        o = observe.attend(o, step.attention)
        uses = uses + (o.alive & (step.attention > 0.05 * step.attention.amax(1, keepdim=True)))
        cache.slot += 1
    for event in events:
        e = _learned(e, event, known)
    return answer, e


def _learned(e: Estimator, event: _Event, known: list[float]) -> Estimator:
    target = targets(event.attention, event.before, known[event.at : event.at + AFTER])
    return e if target is None else update(e, event.features, target)


def main(
    items: str = "tinyworld:list_all,summary,ledger,minutes,story,dialogue",
    n: Annotated[int, typer.Option(help="prompts, in order")] = 24,
    tokens: int = 700,
    capacity: int = 128,
    guard: Annotated[float, typer.Option(help="share of the capacity protected at either end")] = 0.1,
    max_new_tokens: int = 64,
    seed: int = 2027,
    out: Annotated[Path, typer.Option(help="relative paths start at the project's folder")] = Path(EMBEDDED),
) -> None:
    """Learn on the embedded model, on the CPU in float32; print token F1 of the credit and of protected LRU."""
    from kvrepro.chapters.protection.harness import generate
    from kvrepro.experiment import data
    from kvrepro.experiment.measure import token_f1

    try:
        loaded = models.load()
        drawn = data.load_items(items, n, seed, tokens)
        prompts = [data.build_prompt(item, loaded.tokenizer, loaded.context - max_new_tokens).ids for item in drawn]
        condition = Condition("lru", capacity, guard, guard)
        given = {"max_new_tokens": max_new_tokens, "stop_ids": models.stop_ids(loaded)}
        answers, learned = run(loaded.model, prompts, condition, **given)
        beside = [row[0].tokens for row in generate(loaded.model, prompts, [condition], **given)]
    except InputError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None

    def f1(tokens: list[list[int]]) -> float:
        texts = [loaded.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
        return sum(token_f1(text, item.answer) for text, item in zip(texts, drawn, strict=True)) / len(texts)

    facts = {"model": loaded.hash, "items": items, "n": n, "tokens": tokens, "capacity": capacity, "guard": guard,
             "seed": seed, "calls": sum(a.policy_call_count for a in answers),
             "open": sum(a.gate_open_count for a in answers),
             "same_answers": sum(a.tokens == b for a, b in zip(answers, beside, strict=True)),
             "f1_credit": round(f1([a.tokens for a in answers]), 4), "f1_lru": round(f1(beside), 4),
             "estimator": asdict(learned)}  # fmt: skip
    (ROOT / out).write_text(json.dumps(facts) + "\n")
    print(json.dumps(facts))


if __name__ == "__main__":
    typer.run(main)
