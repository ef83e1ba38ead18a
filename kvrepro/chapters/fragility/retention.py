"""Retained importance: the share of the importance in the full cache that half of the cache still holds, at each step.

I[t, i] = A[t, i] ||v_i W_O||, from one plain forward pass over prompt and answer. Only the attention rows of the past
queries and of the answer are computed, one layer at a time. At the end: the Bernoulli mixture of appendix C.
Source: DefensiveKV, sections 3.1 to 3.3, algorithms 1 and 2, appendix C.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from kvrepro.engine import allocate
from kvrepro.engine.allowed import Count, Odd, PositiveShare, Size, ensure_fields
from kvrepro.engine.attention import attend, attend_prompt, read_once
from kvrepro.engine.condition import Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.score.window import pooled
from kvrepro.engine.select import select
from kvrepro.errors import InputError
from kvrepro.experiment import stats

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Rule:
    """How the history's tokens are ranked: by the importance that `queries` give them."""

    queries: Literal["single", "past", "answer"] = "past"
    largest: bool = False  #: over queries, and over query heads that choose together; False: their mean
    prior: bool = False  #: no score is less than the head's mean score


RULES = {
    "single": Rule("single"),
    "mean": Rule(),
    "mean with prior": Rule(prior=True),
    "max": Rule(largest=True),
    "defensive": Rule(largest=True, prior=True),  # algorithm 1, both of its parts
    "true risk": Rule("answer", largest=True),  # which the largest over the past estimates (definition 1)
}
AGGREGATIONS = [name for name, rule in RULES.items() if rule.queries == "past"]  # with and without each part
CHANGES = {  # what each part of defensive aggregation changes, alone or on top of the other: rule minus rule
    "largest": ("max", "mean"),
    "prior alone": ("mean with prior", "mean"),
    "prior": ("defensive", "max"),
    "both": ("defensive", "mean"),
}
OUTLIER = 0.5  # a step that retains less is an outlier
AttentionRows: TypeAlias = Float[Tensor, "kv_heads group queries tokens"]  # attention
Norms: TypeAlias = Float[Tensor, "kv_heads group tokens"]
Scores: TypeAlias = Float[Tensor, "heads tokens"]


@dataclass(frozen=True)
class Setting:
    """The choices that figures 1 and 3 and table 1 leave open. The defaults are ours. Raises InputError."""

    layer: Count | None = None  #: the headline's, from 0 among those that may evict; None: at the depth of figure 1
    head: Count | None = None  #: the query head that is looked at, from 0; None: a layer's heads together
    until: str = "question"  #: the history ends before this part of the prompt; "": with the prompt
    window: Size = 32  #: past queries: the last ones of the history
    single: Size = 16  #: which of them stands alone, counted from 1
    share: PositiveShare = 0.5  #: of the history that stays
    norm: Literal["l1", "l2", "value", "none"] = "l1"  #: of v W_O; "value": L2 of v alone; "none": attention alone
    pool: Literal["none", "average", "max"] = "none"  #: of each past query's attention, over `kernel` tokens
    kernel: Odd = 5  #: tokens
    joined: bool = True  #: the query heads of a KV head choose together; False: each keeps tokens of its own
    budget: Literal["head", "layer"] = "head"  #: the same for each head; "layer": shared by the heads of a layer
    forced: bool = True  #: the past queries' own tokens stay
    prior: Literal["importance", "attention"] = "importance"  #: what the prior bounds; attention: norm last
    ties: Literal["newest", "oldest"] = "newest"  #: who stays among equals, which the prior makes of half of the tokens
    later: bool = False  #: question and generated tokens, which nothing evicts, count: above and below the line

    def __post_init__(self) -> None:
        ensure_fields(self, Setting)
        if self.single > self.window:
            raise InputError(f"single {self.single} of {self.window} past queries: count from 1 to the window")


MEANS: dict[str, dict[Any, str]] = {  # the choices that are open, and how a figure names them
    "until": {"question": "history to the question", "": "history to the prompt's end"},
    "norm": {
        "l1": "L1 norm of the projected value",
        "none": "attention alone",
        "l2": "L2 norm of the projected value",
        "value": "norm of the value alone",
    },
    "pool": {"none": "not pooled", "average": "pooled: average", "max": "pooled: largest"},
    "joined": {True: "query heads choose together", False: "each query head for itself"},
    "budget": {"head": "each head its budget", "layer": "heads share the budget"},
    "forced": {True: "past queries' tokens stay", False: "past queries' tokens may leave"},
    "prior": {"importance": "prior after the norm", "attention": "prior before the norm"},
    "ties": {"newest": "ties go to the newest", "oldest": "ties go to the oldest"},
    "later": {False: "the history alone counts", True: "question and answer count"},
}
OPEN = {field: tuple(names)[:2] for field, names in MEANS.items() if field not in ("budget", "ties")}  # all combined
OURS = Setting()
DEFAULT = "default"
TOKEN = "token "  # begins the names of `singles`
ALGORITHM_2: dict[str, Any] = {"pool": "average", "budget": "layer", "prior": "attention"}


def variants(base: Setting = OURS) -> dict[str, Setting]:
    """By name: the base ("default"), each setting that differs from it in one choice, and DefensiveKV's algorithm 2."""
    settings = {DEFAULT: base}
    for field, names in MEANS.items():
        settings |= {name: replace(base, **{field: v}) for v, name in names.items() if getattr(base, field) != v}
    return settings | {"algorithm 2": replace(base, **ALGORITHM_2)}


def specifications(base: Setting = OURS) -> dict[str, Setting]:
    """Every combination of the `OPEN` choices, by a name that begins with #."""
    combinations = itertools.product(*OPEN.values())
    return {f"#{i}": replace(base, **dict(zip(OPEN, values, strict=True))) for i, values in enumerate(combinations)}


def singles(base: Setting = OURS) -> dict[str, Setting]:
    """Settings with another single past query (figure 13): the first, the last and two between, named "token k"."""
    w = base.window
    return {f"{TOKEN}{k}": replace(base, single=k) for k in sorted({1, w // 4, 3 * w // 4, w} - {0, base.single})}


def _is_further(name: str) -> bool:
    """Is it one of `specifications` or `singles`?"""
    return name.startswith(("#", TOKEN))


# ---- one layer


def norms(values: Float[Tensor, "kv_heads tokens dim"], output: Float[Tensor, "heads dim hidden"]) -> dict[str, Norms]:
    """Norms of v W_O per query head ("l1", "l2"), of v ("value"), and 1 ("none"), in blocks of 256 tokens."""
    kv_heads, tokens, dim = values.shape
    w = output.view(kv_heads, -1, dim, output.shape[-1]).float()
    l1 = torch.empty(kv_heads, w.shape[1], tokens, device=values.device)
    l2 = torch.empty_like(l1)
    for a in range(0, tokens, 256):
        x = torch.einsum("knd,kgdh->kgnh", values[:, a : a + 256].float(), w)
        l1[..., a : a + 256], l2[..., a : a + 256] = x.abs().sum(-1), x.norm(dim=-1)
    alone = values.float().norm(dim=-1)[:, None].expand_as(l1)
    return {"l1": l1, "l2": l2, "value": alone, "none": torch.ones_like(l1)}


def score(p: AttentionRows, norm: Norms, rule: str, s: Setting) -> Scores:
    """Scores by which `rule` ranks the history's tokens; heads are KV heads, or query heads if each chooses for itself.

    p: pooled attention of the past queries (for "true risk": of the answer's queries) to the history; norm: of the
    history's tokens.
    """
    by, norm_first = RULES[rule], s.prior == "importance"
    x = p[:, :, s.single - 1] if by.queries == "single" else p.amax(2) if by.largest else p.mean(2)
    x = x * norm if norm_first else x
    x = (x.amax(1) if by.largest else x.mean(1)) if s.joined else x.flatten(0, 1)
    x = torch.maximum(x, x.mean(-1, keepdim=True)) if by.prior else x
    return x if norm_first else x * (norm.mean(1) if s.joined else norm.flatten(0, 1))


def keep(scores: Float[Tensor, "rules heads tokens"], s: Setting) -> Bool[Tensor, "rules heads tokens"]:
    """The int(share * tokens) best of each head, or as many on average over the heads of the layer."""
    tokens = scores.shape[2]
    budget = torch.full((len(scores),), int(s.share * tokens), device=scores.device)
    protected = torch.zeros_like(scores, dtype=torch.bool)
    if s.forced:
        protected[..., -s.window :] = True
    given = scores, protected
    if s.ties != "newest":
        given = scores.flip(-1), protected.flip(-1)
    counts = allocate.joint(*given, budget) if s.budget == "layer" else allocate.uniform(*given, budget)
    kept = select(*given, counts)
    return kept if s.ties == "newest" else kept.flip(-1)


# ---- an answer


def retained(
    model: PreTrainedModel, prompt: Prompt, answer: Sequence[int], settings: Mapping[str, Setting], layer: int = 0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(curves, summary) of one answer: one forward pass for all settings and rules.

    A step is the query that yields one token of the answer; the first is the prompt's last token.
    curves: setting, rule, layer, step (from 1), retained; of a layer's query heads together, or of the setting's one;
    layer -1: all layers.
    summary: of the same curves, and of those of each query head in the default setting: setting, rule, layer, head (-1:
    together), worst, mean, below (share of steps under one half), at (the worst step), steps, tied (share of the kept
    tokens that stayed by their place alone, as a token that left has the same score), counted (share of all importance
    that the measure looks at).
    settings: by name; those of `specifications` and `singles` are looked at in `layer` only and without curves, by the
    rules `AGGREGATIONS`, or by the single query. Raises InputError.
    """
    sums = _Sums(model, prompt, len(answer), settings, layer)
    read_once(model, [*prompt.ids, *answer[:-1]], sums)
    return sums.tables()


class _Sums:
    """Computes each layer's attention during one pass, and sums up what each rule keeps at each step and setting."""

    def __init__(self, model: Any, prompt: Prompt, answer: int, settings: Mapping[str, Setting], layer: int):
        self.steps = range(len(prompt.ids) - 1, len(prompt.ids) + answer - 1)
        self.settings, self.layer = settings, layer
        self.ends = {s.until: end_of(prompt, s) for s in settings.values()}
        self.past = {s: range(self.ends[s.until] - s.window, self.ends[s.until]) for s in settings.values()}
        self.queries = sorted({*self.steps, *itertools.chain(*self.past.values())})
        self.row = {position: i for i, position in enumerate(self.queries)}
        self.rows: list[dict] = []
        self.curves: dict[tuple[str, str, int], Tensor] = {}
        self.facts = ModelFacts.of(model)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding: int | None = None):
        """The layer's attention. If the layer may evict, what its rules keep is summed up."""
        positions = torch.arange(key.shape[2], device=key.device)
        parts = [(key, value, positions.expand(1, 1, -1))]
        if layer in self.facts.evictable:
            at = torch.tensor([self.queries], device=key.device)
            rows: list[Tensor] = []
            attend(query[:, :, at[0]], at, parts, scaling, sliding, watch=lambda p, _: rows.append(p[0]))
            norms_by_name = norms(value[0], self.facts.outputs[layer])
            self._look(self.facts.evictable.index(layer), torch.cat(rows, 2), norms_by_name)
        if sliding is not None and key.shape[2] > sliding:
            return attend(query, positions[None], parts, scaling, sliding)
        return attend_prompt(query, key, value, scaling)

    def _look(self, layer: int, p: AttentionRows, norms: Mapping[str, Norms]) -> None:
        now = p[:, :, [self.row[t] for t in self.steps]]
        pooled_by_look: dict[tuple, Tensor] = {}
        parts = {}
        for name, s in self.settings.items():
            if _is_further(name) and layer != self.layer:
                continue
            end, look = self.ends[s.until], (s.until, s.window, s.pool, s.kernel)
            if look not in pooled_by_look:
                pooled_by_look[look] = pooled(p[:, :, [self.row[t] for t in self.past[s]]][..., :end], s.pool, s.kernel)
            rules = ["single"] if name.startswith(TOKEN) else AGGREGATIONS if _is_further(name) else list(RULES)
            parts[name] = (rules, *_weights(pooled_by_look[look], now, norms[s.norm], rules, end, s))
        sums = (now @ torch.cat([weights for _, weights, _ in parts.values()], -1)).permute(3, 0, 1, 2)
        columns = sums.flatten(1, 2).cpu().split([len(rules) + 2 for rules, *_ in parts.values()])  # [, heads, steps]
        for (name, (rules, _, tied)), of_setting in zip(parts.items(), columns, strict=True):
            for i, rule in enumerate(rules):
                self._add(name, rule, layer, of_setting[[i, -2, -1]], tied[i])

    def _add(self, name: str, rule: str, layer: int, heads: Float[Tensor, "three heads steps"], tied: float):
        head = self.settings[name].head
        looked = heads.sum(1) if head is None else heads[:, head]
        where = {"setting": name, "rule": rule, "layer": layer}
        self.rows.append(where | {"head": -1, "tied": tied} | _summary(looked))
        if not _is_further(name):
            self.curves[name, rule, layer] = looked
        if name == DEFAULT:
            self.rows.extend(where | {"head": h} | _summary(part) for h, part in enumerate(heads.unbind(1)))

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """curves and summary, all layers together last."""
        totals: dict[tuple[str, str, int], Tensor] = {}
        for (name, rule, _), part in self.curves.items():
            totals[name, rule, -1] = totals.get((name, rule, -1), 0) + part
        where = ["setting", "rule", "layer"]
        self.rows += [dict(zip(where, at, strict=True)) | {"head": -1} | _summary(part) for at, part in totals.items()]
        curves = self.curves | totals
        table = pd.DataFrame(list(curves), columns=where)
        table = table.loc[table.index.repeat(len(self.steps))].reset_index(drop=True)
        table["step"] = np.tile(np.arange(1, len(self.steps) + 1), len(curves))
        table["retained"] = torch.cat([part[0] / part[1] for part in curves.values()]).numpy()
        return table, pd.DataFrame(self.rows)


def _weights(
    before: AttentionRows, now: AttentionRows, norm: Norms, rules: Sequence[str], end: int, s: Setting
) -> tuple[Float[Tensor, "kv_heads group tokens sums"], list[float]]:
    """Weights whose product with a step's attention gives the importance that each rule keeps, that which counts, and
    all; and by rule the share of the kept tokens that ties decide. before: pooled attention of the past."""
    history, answer = norm[..., :end], now[..., :end]
    looked = [answer if RULES[rule].queries == "answer" else before for rule in rules]
    scores = torch.stack([score(p, history, rule, s) for p, rule in zip(looked, rules, strict=True)])
    kept = keep(scores, s)
    by_place = kept & (scores == scores.masked_fill(kept, -torch.inf).amax(-1, keepdim=True))
    by_place[..., end - s.window * s.forced :] = False  # these stay whatever their score
    tied = (by_place.sum((1, 2)) / kept.sum((1, 2))).tolist()
    counted = [heads[:, None].expand(history.shape) if s.joined else heads.view_as(history) for heads in kept]
    counted.append(torch.ones_like(history, dtype=torch.bool))
    after = norm.shape[-1] - end
    weights = [F.pad(heads.float(), (0, after), value=float(s.later)) for heads in counted]
    return torch.stack([*weights, torch.ones_like(norm)], -1) * norm[..., None], tied


def end_of(prompt: Prompt, s: Setting) -> int:
    """Number of tokens of the history. Raises InputError if the prompt lacks the span `until`, or is too short."""
    if s.until:
        prompt.ensure_span(s.until)
    end = min(prompt.spans[s.until]) if s.until else len(prompt.ids)
    if int(s.share * end) < s.window:
        raise InputError(f"{s.share:.0%} of {end} tokens keeps fewer than the {s.window} past queries: longer prompts")
    return end


def _summary(part: Float[Tensor, "three steps"]) -> dict:
    share = part[0] / part[1]
    shares = {"worst": share.min(), "mean": share.mean(), "below": (share < OUTLIER).float().mean()}
    shares |= {"counted": (part[1] / part[2]).mean()}
    return {k: float(v) for k, v in shares.items()} | {"at": int(share.argmin()) + 1, "steps": len(share)}


# ---- appendix C: an entry that is unimportant except for rare spikes


@dataclass(frozen=True)
class Mixture:
    """Definition 2 with uniform parts: with probability `eps` importance lies in [spike, risk], else in [0, low].

    `risk` is the true risk R, the largest importance that the future can bring (definition 1).
    """

    eps: float = 0.02
    low: float = 0.1
    spike: float = 0.6
    risk: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.eps < 1 and 0 < self.low <= self.spike < self.risk):
            raise InputError(f"{self}: needs 0 < eps < 1 and 0 < low <= spike < risk")

    @property
    def mean_low(self) -> float:
        return self.low / 2

    @property
    def mean_high(self) -> float:
        return (self.spike + self.risk) / 2


def bias_of_mean(x: Mixture) -> float:
    """R - E[mean] = R - (1 - eps) mu_low - eps mu_high, whatever the window; it tends to R - mu_low as eps to 0.

    The paper calls that limit a large negative value; R - mu_low is positive. Source: theorem 1.
    """
    return x.risk - (1 - x.eps) * x.mean_low - x.eps * x.mean_high


def bias_of_max(x: Mixture, window: int) -> float:
    """R - E[max], exactly: the integral of F^m over [0, R], with F the mixture's distribution function."""
    stay = (1 - x.eps) ** window  # chance that no past query shows the spike (proof 2)
    rise = (x.risk - x.spike) * (1 - stay * (1 - x.eps)) / (x.eps * (window + 1))
    return stay * (x.low / (window + 1) + x.spike - x.low) + rise


def bound_of_max(x: Mixture, window: int) -> float:
    """Upper bound on R - E[max]: R - (1 - eps)^m mu_low - (1 - (1 - eps)^m) mu_high. Source: theorem 2."""
    stay = (1 - x.eps) ** window
    return x.risk - stay * x.mean_low - (1 - stay) * x.mean_high


def draw(x: Mixture, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Independent importances of an entry that follows the mixture."""
    rng = np.random.default_rng(seed)
    high = rng.random(shape) < x.eps
    u = rng.random(shape)
    return np.where(high, x.spike + (x.risk - x.spike) * u, x.low * u)


def theorems() -> dict[str, pd.Series]:
    """What appendix C proves, for each case of a grid of mixtures; every value must be above 0.

    theorem_1: growth of the mean's bias when spikes are half as frequent. theorem_2: the mean's bias minus that of the
    largest, for 2 to 128 past queries. limit: the mean's bias as spikes vanish, which the text calls negative.
    """
    axes = {"eps": (0.001, 0.01, 0.1, 0.4), "low": (0.05, 0.3), "spike": (0.3, 0.8), "risk": (0.9, 3.0)}
    grid = [Mixture(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    rarer = {str(x): bias_of_mean(replace(x, eps=x.eps / 2)) - bias_of_mean(x) for x in grid}
    ahead = {f"{x}, {m} queries": bias_of_mean(x) - bias_of_max(x, m) for x in grid for m in (2, 8, 32, 128)}
    limit = {str(x): x.risk - x.mean_low for x in grid}
    return {"theorem_1": pd.Series(rarer), "theorem_2": pd.Series(ahead), "limit": pd.Series(limit)}


def theory(x: Mixture, windows: Sequence[int], draws: int = 20_000, seed: int = 0) -> pd.DataFrame:
    """Simulation and closed form. Columns window, quantity ("bias", "missed"), rule ("mean", "max"), value, low, high
    (95%), exact, bound (theorem 2; nan elsewhere)."""
    observed = draw(x, (draws, max(windows)), seed)
    rows = []
    for m in windows:
        largest = observed[:, :m].max(1)
        for quantity, rule, values, exact, bound in (
            ("bias", "mean", x.risk - observed[:, :m].mean(1), bias_of_mean(x), np.nan),
            ("bias", "max", x.risk - largest, bias_of_max(x, m), bound_of_max(x, m)),
            ("missed", "max", (largest <= x.low).astype(float), (1 - x.eps) ** m, np.nan),
        ):
            ends = stats.UNIT if quantity == "missed" else None
            rows.append((m, quantity, rule, *stats.interval(values, bounds=ends).triple, exact, bound))
    return pd.DataFrame(rows, columns=["window", "quantity", "rule", "value", "low", "high", "exact", "bound"])


def survival(x: Mixture, windows: Sequence[int], heads: int = 200) -> pd.DataFrame:
    """Simulated survival of fragile entries, which the bias does not tell. Columns window, quantity ("survives"), rule,
    value (share of fragile entries kept), low, high (95%).

    Of a head's 200 entries a tenth follows the mixture; each of the others has a level, uniform in [0, 0.3], and varies
    by 10% around it. The better half by mean, max and defensive aggregation is kept; ties, which the prior causes, are
    broken at random.
    """
    rng = np.random.default_rng(0)
    n = 20
    spiky = draw(x, (heads, n, max(windows)), 0)
    calm = rng.uniform(0, 0.3, (heads, 180, 1)) * rng.uniform(0.9, 1.1, (heads, 180, max(windows)))
    rows = []
    for m in windows:
        seen = np.concatenate([spiky[..., :m], calm[..., :m]], 1)
        largest = seen.max(2)
        defensive = np.maximum(largest, largest.mean(1, keepdims=True))
        for rule, value in (("mean", seen.mean(2)), ("max", largest), ("defensive", defensive)):
            place = np.lexsort((rng.random(value.shape), -value), axis=1).argsort(1)
            kept = (place[:, :n] < 100).mean(1)
            rows.append((m, "survives", rule, *stats.within(stats.interval(kept), stats.UNIT).triple))
    return pd.DataFrame(rows, columns=["window", "quantity", "rule", "value", "low", "high"])
