"""The online credit estimator, version 2: a linear guess of how much a token will be missed, learned while decoding.

`run` answers prompts with it through the engine, one after the other, in the protection paper's regime; what it learns
from one answer it uses for the next.

Source: protection paper, section 8 and appendix D; artifact 496739f (estimator.py, interfaces.py:54-77,
online_credit_generator.py). They leave some points open, which we decide thus: the bias learns like a weight whose
feature is 1; an event's tokens teach in the order of their positions; means and variances of features follow the
event's mean; equal credits rank by LRU; an eviction shortly before an answer's end is judged by the log-probabilities
that follow, and not at all if none does.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvrepro.engine import shared
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.decode import decode
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import find, own
from kvrepro.engine.prefill import read
from kvrepro.engine.rows import Call, Rows
from kvrepro.engine.shapes import Mask, PreTrainedModel, RowInts, Scores, TokenFloats, TokenInts, TokenMask
from kvrepro.engine.shared import ACCESS

BEFORE, AFTER = 8, 6  # log-probabilities averaged on either side of an eviction
NOISE = 0.003  # smaller changes of their mean teach nothing
WARM, RAMP, MOST = 8, 24, 0.40  # updates before the first blend, then until the full one; the full one's weight
DOUBT = 0.70  # mean uncertainty above which LRU decides alone


@dataclass(frozen=True)
class Estimator:
    """credit = bias + weights . features: what is expected to be lost with a token, in mean log-probability. It lasts
    from one prompt to the next."""

    weights: tuple[float, ...] = (-0.5, -0.1, 0.3, 0.5)
    bias: float = 0.0
    updates: int = 0  # u, evictions learned from
    error: float = 1.0  # v, running mean of squared errors
    mean: tuple[float, ...] = (0.5,) * 4  # of features, running
    variance: tuple[float, ...] = (0.25,) * 4


def features(o: Observation, uses: TokenInts, budget: RowInts) -> Float[Tensor, "batch tokens 4"]:
    """Idle time log(1 + t - L) / d, age log(1 + t - I) / d, uses N / (N + 4), attention a; each at most 1. float64.

    d = log(1 + 4 C). uses: N, 1 when a token enters and 1 more each time that attention marks it as used.
    """
    d = (1 + 4 * budget.double()).log()[:, None]
    idle, age = ((1 + (o.step - o.sums[when][:, 0]).double()).log() / d for when in ("last_use", "entered"))
    return torch.stack([idle, age, uses / (uses.double() + 4), o.sums["latest"][:, 0].double()], -1).clamp(max=1)


def uncertainty(e: Estimator, f: Float[Tensor, "batch tokens 4"]) -> TokenFloats:
    """sqrt(v) (1 + mean((f - mean)^2 / (variance + 1e-4)) / 2); 1 before 8 updates."""
    if e.updates < WARM:
        return torch.ones_like(f[..., 0])
    mean, variance = (torch.tensor(x, dtype=f.dtype, device=f.device) for x in (e.mean, e.variance))
    return math.sqrt(e.error) * (1 + 0.5 * ((f - mean).square() / (variance + 1e-4)).mean(-1))


def blend(e: Estimator, doubt: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Weight of the estimator beside LRU: 0.40 min(1, (u - 8) / 24), 0 where the mean uncertainty exceeds 0.70."""
    full = MOST * min(1.0, max(0, e.updates - WARM) / RAMP)
    return (doubt <= DOUBT).double() * full


def mixed(
    e: Estimator, o: Observation, uses: TokenInts, budget: RowInts, evictable: TokenMask, tie_break: str = "string"
) -> tuple[Scores, Float[Tensor, " batch"]]:
    """(keep scores, blend beta): beta rank_credit + (1 - beta) rank_LRU among the evictable tokens, ranks in [0, 1].

    Credit ranks by credit - 0.2 uncertainty + 0.25 [N <= 1 and max(a, M) >= 0.70], LRU by (L, I, position).
    """
    f = features(o, uses, budget)
    unsure = uncertainty(e, f)
    strong = (uses <= 1) & (torch.maximum(o.sums["latest"], o.sums["largest"])[:, 0] >= 0.70)
    credit = e.bias + f @ torch.tensor(e.weights, dtype=f.dtype, device=f.device)
    value = credit - 0.2 * unsure + 0.25 * strong
    counted = evictable.sum(1)
    beta = blend(e, (unsure * evictable).sum(1) / counted.clamp(min=1))
    by_use = shared.rank(shared.tie_key(o, ("last_use", "entered"), tie_break)[:, 0], evictable)
    levels = value.unique(return_inverse=True)[1]  # equal credits share a level, on which the last use decides
    by_credit = shared.rank(levels << shared.FIELD_BITS | by_use, evictable)
    ranks = beta[:, None] * by_credit + (1 - beta[:, None]) * by_use
    return (ranks / (counted - 1).clamp(min=1)[:, None])[:, None], beta


def targets(attention: Float[Tensor, " tokens"], before: Sequence[float], after: Sequence[float]) -> Tensor | None:
    """Each evicted token's part of the fall of the mean log-probability, in proportion to its attention when it left
    (equal parts if all attention is 0). None if the change is noise or one side is missing."""
    if not before or not after:
        return None
    change = sum(before) / len(before) - sum(after) / len(after)
    if abs(change) < NOISE:
        return None
    blame = attention.double() if attention.any() else torch.ones_like(attention).double()
    return change * blame / blame.sum()


def update(e: Estimator, f: Float[Tensor, "tokens 4"], target: Float[Tensor, " tokens"]) -> Estimator:
    """The estimator after one eviction: a step for each token, by its error clipped to [-1, 1] and the rate
    0.08 / sqrt(u + 1); then the running averages of squared errors (0.92) and of the features' mean and variance
    (0.95)."""
    weights, bias, rate, errors = list(e.weights), e.bias, 0.08 / math.sqrt(e.updates + 1), []
    for token_features, token_target in zip(f.tolist(), target.tolist(), strict=True):
        guess = bias + sum(w * x for w, x in zip(weights, token_features, strict=True))
        error = max(-1.0, min(1.0, token_target - guess))
        weights = [w + rate * error * x for w, x in zip(weights, token_features, strict=True)]
        bias += rate * error
        errors.append(error)
    mean = 0.95 * torch.tensor(e.mean, dtype=f.dtype) + 0.05 * f.mean(0).cpu()
    variance = 0.95 * torch.tensor(e.variance, dtype=f.dtype) + 0.05 * (f.cpu() - mean).square().mean(0)
    error = 0.92 * e.error + 0.08 * sum(x**2 for x in errors) / len(errors)
    return Estimator(tuple(weights), bias, e.updates + 1, error, tuple(mean.tolist()), tuple(variance.tolist()))


# ---- decoding


class Lessons:
    """An answer that is being generated, and the estimator that learns from its evictions: from each when `AFTER`
    log-probabilities have followed it, or when the answer ends."""

    def __init__(self, estimator: Estimator, tokens: int, device: torch.device):
        self.estimator = estimator
        self.uses = torch.ones(1, tokens, dtype=torch.long, device=device)  # N by position
        self.judged: tuple[Tensor, Tensor] | None = None  # (positions, features) of the last eviction's candidates
        self.log_p: list[float] = []  # log-probabilities of its tokens so far
        self.events: list[tuple[int, Tensor]] = []  # evictions: (tokens before it, features of the evicted)

    def score(self, o: Observation, budget: RowInts, guarded: Mask, tie_break: str) -> Scores:
        """`mixed`, as a policy's scorer."""
        uses = self.uses.gather(1, o.positions[:, 0].clamp(min=0))
        self.judged = o.positions, features(o, uses, budget)
        return mixed(self.estimator, o, uses, budget, (o.alive & ~guarded)[:, 0], tie_break)[0]

    def picked(self, rows: Rows, tokens: Tensor) -> None:
        """The engine calls this with every step's token: record the last step's evictions, count uses, learn what has
        come due."""
        s = rows.signals
        if self.log_p:  # at the first token the attention is the prompt's own
            self.uses += s.held[:, 0] & (s.tables["latest"] > ACCESS * s.tables["latest"].amax(1, keepdim=True))
        if self.judged is not None:
            (positions, f), self.judged = self.judged, None
            gone = ((positions >= 0) & ~s.held_at(positions))[0, 0]
            self.events += [(len(self.log_p), f[0, gone])] if gone.any() else []
        self.log_p.append(rows.logits.float().log_softmax(-1)[0, tokens[0]].item())
        self.learn()

    def learn(self, ended: bool = False) -> None:
        """Learn from the evictions that have come due, or from all that are left."""
        while self.events and (ended or len(self.log_p) - self.events[0][0] >= AFTER):
            at, f = self.events.pop(0)
            target = targets(f[:, 3], self.log_p[max(0, at - BEFORE) : at], self.log_p[at : at + AFTER])
            if target is not None:
                self.estimator = update(self.estimator, f, target)


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    condition: Condition,
    max_new_tokens: int,
    stop_ids: Collection[int],
    estimator: Estimator | None = None,
) -> tuple[list[Generation], Estimator]:
    """Greedy answers in the order of `prompts`, and the estimator after them. condition: of policy lru, in regime
    `SharedCap`; estimator: to begin with; None: untaught."""
    answers, e, facts = [], estimator or Estimator(), ModelFacts.of(model, one_set=True)
    with installed(model):
        for prompt in prompts:
            lessons = Lessons(e, len(prompt) + max_new_tokens, model.device)
            with_credit = replace(condition, policy=own("lru with credit", replace(find("lru"), score=lessons.score)))
            texts = [Prompt(list(prompt), {})]
            call = Call(model, texts, [with_credit], [max_new_tokens], facts, watch=lessons.picked)
            [rows] = read(call, [0], [0])
            [(_, generation)] = decode(call, rows, stop_ids)
            lessons.learn(ended=True)
            answers.append(generation)
            e = lessons.estimator
    return answers, e
