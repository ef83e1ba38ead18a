"""Retained importance: what half of the cache still holds of the importance that the full cache sees, step by step.

I[t, i] = A[t, i] ||v_i W_O||, from one plain forward pass over prompt and answer; of its attention only the rows of the
past queries and of the answer exist, one layer at a time. Below: the Bernoulli mixture of the paper's appendix C.
Source: DefensiveKV, sections 3.1 to 3.3, algorithms 1 and 2, appendix C.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvrepro.engine import allocate
from kvrepro.engine.attention import attend, attend_prompt, installed
from kvrepro.engine.condition import Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.select import select
from kvrepro.errors import InputError

RULES = {  # who ranks the history's tokens
    "single": "importance for one past query",
    "mean": "mean over the past queries",
    "max": "largest over the past queries",
    "defensive": "the largest, but no less than the head's mean of it (algorithm 1)",
    "true risk": "largest over the answer itself: what the largest over the past stands in for (definition 1)",
}
ANSWER = "true risk"
OUTLIER = 0.5  # a step that retains less is an outlier


@dataclass(frozen=True)
class Setting:
    """What figures 1 and 3 and table 1 leave open, a field each. The defaults are ours. Raises InputError."""

    layer: int | None = None  # the headline's; None: at the depth of the paper's figure 1
    head: int | None = None  # the query head that is looked at; None: a layer's heads together
    until: str = "question"  # the history ends before this prompt span; "": with the prompt
    window: int = 32  # past queries
    single: int = 16  # the one that stands alone, counted from 1
    share: float = 0.5  # of the history that stays
    norm: str = "l1"  # of v W_O; or "l2", "value" (L2 of v), "none"
    pool: str = "none"  # or "average", "max": over `kernel` tokens, of each past query's attention
    kernel: int = 5
    joined: bool = True  # query heads of a KV head choose together; False: each keeps tokens of its own
    budget: str = "head"  # the same for each head; "layer": shared by the heads of a layer
    forced: bool = True  # the window's own tokens stay
    prior: str = "importance"  # the head's mean bounds A ||v W_O|| from below; "attention": bounds A (algorithm 2)
    ties: str = "newest"  # who stays among equals, which the prior makes of half of the tokens; or "oldest"
    later: bool = False  # question and generated tokens, which nothing evicts, count: above and below the line

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if name != "until" and not any(
                value is one or (value == one and type(value) is type(one)) for one in known
            ):
                raise InputError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, known))}")
        for name in ("window", "single", "kernel"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is {value!r}: a whole number, at least 1")
        for name in ("layer", "head"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise InputError(f"{name} is {value!r}: a whole number from 0, or None")
        if not isinstance(self.until, str):
            raise InputError(f"until is {self.until!r}: name a span of the prompt, or give '' for its end")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InputError(f"share of the history is {self.share!r}: above 0, at most 1")
        if self.single > self.window:
            raise InputError(f"single {self.single} of {self.window} past queries: count from 1 to the window")
        if self.kernel % 2 == 0:
            raise InputError(f"pooling kernel {self.kernel}: an odd number of tokens")


CHOICES: dict[str, tuple] = {
    "until": ("question", ""),
    "norm": ("l1", "l2", "value", "none"),
    "pool": ("none", "average", "max"),
    "joined": (True, False),
    "budget": ("head", "layer"),
    "forced": (True, False),
    "prior": ("importance", "attention"),
    "ties": ("newest", "oldest"),
    "later": (False, True),
}
MEANS: dict[tuple[str, Any], str] = {  # how a figure names a departure from the base
    ("until", "question"): "history to the question",
    ("until", ""): "history to the prompt's end",
    ("norm", "l1"): "L1 norm of v W_O",
    ("norm", "l2"): "L2 norm of v W_O",
    ("norm", "value"): "norm of v alone",
    ("norm", "none"): "attention alone",
    ("pool", "none"): "not pooled",
    ("pool", "average"): "pooled: average",
    ("pool", "max"): "pooled: largest",
    ("joined", True): "query heads choose together",
    ("joined", False): "each query head for itself",
    ("budget", "head"): "each head its budget",
    ("budget", "layer"): "heads share the budget",
    ("forced", True): "past queries' tokens stay",
    ("forced", False): "past queries' tokens may leave",
    ("prior", "importance"): "prior after the norm",
    ("prior", "attention"): "prior before the norm",
    ("ties", "newest"): "ties go to the newest",
    ("ties", "oldest"): "ties go to the oldest",
    ("later", False): "the history alone counts",
    ("later", True): "question and answer count",
}
OURS = Setting()
DEFAULT = "default"
ALGORITHM_2: dict[str, Any] = {"pool": "average", "budget": "layer", "prior": "attention"}


def variants(base: Setting = OURS) -> dict[str, Setting]:
    """The base, called default, one departure from it at a time, and DefensiveKV's algorithm 2, by name."""
    found = {DEFAULT: base}
    found |= {
        name: replace(base, **{field: value}) for (field, value), name in MEANS.items() if getattr(base, field) != value
    }
    return found | {"algorithm 2": replace(base, **ALGORITHM_2)}


def specifications(base: Setting = OURS, choices: Mapping[str, Sequence] | None = None) -> list[Setting]:
    """Every combination of the choices (default: the two first of each open field, ties and heads' budgets aside)."""
    if choices is None:
        choices = {
            k: v[:2] if k != "norm" else ("l1", "none") for k, v in CHOICES.items() if k not in ("ties", "budget")
        }
    return [replace(base, **dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())]


# ---- one layer


@dataclass(frozen=True)
class Layer:
    """Attention rows of the queries that were asked for, and the norms that importance may take, of one layer."""

    number: int  # among the layers that hold tokens
    p: Float[Tensor, "kv_heads group queries tokens"]
    norms: Mapping[str, Float[Tensor, "kv_heads group tokens"]]


def layers(model: PreTrainedModel, ids: Sequence[int], queries: Sequence[int], visit: Callable[[Layer], None]) -> None:
    """Hand the attention rows of `queries` (positions) to `visit`, layer by layer, as one forward pass reaches it."""
    if not queries or not 0 <= min(queries) <= max(queries) < len(ids):
        raise InputError(f"queries {min(queries, default=None)} to {max(queries, default=None)} of {len(ids)} tokens")
    looker = _Looker(ModelFacts.of(model), list(queries), visit)
    with torch.inference_mode(), installed(model):
        tokens = torch.tensor([list(ids)], device=model.device)
        model(input_ids=tokens, use_cache=False, logits_to_keep=1, kvrepro=looker)


class _Looker:
    def __init__(self, facts: ModelFacts, queries: list[int], visit: Callable[[Layer], None]):
        self.facts, self.queries, self.visit = facts, queries, visit

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding: int | None = None):
        everyone = torch.arange(key.shape[2], device=key.device)
        parts = [(key, value, everyone.expand(1, 1, -1))]
        if layer in self.facts.evictable:
            at = torch.tensor([self.queries], device=key.device)
            rows: list[Tensor] = []
            attend(query[:, :, at[0]], at, parts, scaling, sliding, watch=lambda p, _: rows.append(p[0]))
            found = norms(value[0], self.facts.outputs[layer])
            self.visit(Layer(self.facts.evictable.index(layer), torch.cat(rows, 2), found))
        if sliding is not None and key.shape[2] > sliding:
            return attend(query, everyone[None], parts, scaling, sliding)
        return attend_prompt(query, key, value, scaling)


def norms(
    values: Float[Tensor, "kv_heads tokens dim"], output: Float[Tensor, "heads dim hidden"]
) -> dict[str, Float[Tensor, "kv_heads group tokens"]]:
    """Norms of v W_O per query head ("l1", "l2"), of v ("value"), and 1 ("none"), in blocks of 256 tokens."""
    kv_heads, tokens, dim = values.shape
    w = output.view(kv_heads, -1, dim, output.shape[-1]).float()
    l1 = torch.empty(kv_heads, w.shape[1], tokens, device=values.device)
    l2 = torch.empty_like(l1)
    for a in range(0, tokens, 256):
        x = torch.einsum("knd,kgdh->kgnh", values[:, a : a + 256].float(), w)
        l1[..., a : a + 256], l2[..., a : a + 256] = x.abs().sum(-1), x.norm(dim=-1)
    return {
        "l1": l1,
        "l2": l2,
        "value": values.float().norm(dim=-1)[:, None].expand_as(l1),
        "none": torch.ones_like(l1),
    }


def pooled(
    p: Float[Tensor, "kv_heads group queries tokens"], s: Setting
) -> Float[Tensor, "kv_heads group queries tokens"]:
    """Attention of each query pooled along the tokens, zeros beyond the ends counted, as the setting asks."""
    if s.pool == "none":
        return p
    pool = F.avg_pool1d if s.pool == "average" else F.max_pool1d
    return pool(p.flatten(0, 2)[:, None], s.kernel, 1, s.kernel // 2)[:, 0].view_as(p)


def score(
    p: Float[Tensor, "kv_heads group queries tokens"],
    norm: Float[Tensor, "kv_heads group tokens"],
    rule: str,
    s: Setting,
) -> Float[Tensor, "heads tokens"]:
    """How `rule` ranks the history's tokens; heads are KV heads, or query heads where each chooses for itself.

    p: attention of the past queries (of the answer's, for "true risk") to the history, `pooled`; norm: of its tokens.
    Query heads are joined by their mean, for a largest importance by their largest.
    """
    largest = rule in ("max", "defensive", ANSWER)
    x = p[:, :, s.single - 1] if rule == "single" else p.amax(2) if largest else p.mean(2)
    x = x if largest and s.prior == "attention" else x * norm
    x = (x.amax(1) if largest else x.mean(1)) if s.joined else x.flatten(0, 1)
    if rule == "defensive":
        x = torch.maximum(x, x.mean(-1, keepdim=True))
    if largest and s.prior == "attention":
        x = x * (norm.mean(1) if s.joined else norm.flatten(0, 1))
    return x


def keep(scores: Float[Tensor, "heads tokens"], s: Setting) -> Bool[Tensor, "heads tokens"]:
    """The int(share * tokens) best of each head, or as many on average over the heads of the layer."""
    tokens = scores.shape[1]
    budget = torch.tensor([int(s.share * tokens)], device=scores.device)
    protected = torch.zeros_like(scores, dtype=torch.bool)
    if s.forced:
        protected[:, -s.window :] = True
    scores = scores if s.ties == "newest" else scores.flip(-1)
    given = scores[None], protected[None] if s.ties == "newest" else protected.flip(-1)[None]
    counts = allocate.joint(*given, budget) if s.budget == "layer" else allocate.uniform(*given, budget)
    kept = select(*given, counts)[0]
    return kept if s.ties == "newest" else kept.flip(-1)


# ---- an answer


def retained(
    model: PreTrainedModel,
    prompt: Prompt,
    answer: Sequence[int],
    settings: Mapping[str, Setting],
    *,
    more: Sequence[Setting] = (),
    more_layer: int | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(curves, summary) of one answer: one forward pass for all settings and rules.

    A step is the query that yields one token of the answer; the first is the prompt's last. curves: setting, rule,
    layer, step (from 1), retained; a layer's query heads together, or the setting's one; layer -1: all layers.
    summary: the same curves, and those of each query head in the default setting: setting, rule, layer, head (-1:
    together), worst, mean, below (share of steps under one half), at (the worst step), steps, tied (share of the kept
    that stands at the prior), counted (share of all importance that the measure looks at). more: further settings,
    named "#0" and so on, by mean and defensive aggregation at layer `more_layer` only, without curves. Raises
    InputError.
    """
    every = dict(settings) | {f"#{i}": s for i, s in enumerate(more)}
    ends = {s.until: end_of(prompt, s) for s in every.values()}
    steps = list(range(len(prompt.ids) - 1, len(prompt.ids) + len(answer) - 1))
    past = {s: list(range(ends[s.until] - s.window, ends[s.until])) for s in every.values()}
    queries = sorted({*steps, *itertools.chain(*past.values())})
    row = {position: i for i, position in enumerate(queries)}
    rows: list[dict] = []
    curves: dict[tuple[str, str, int], Tensor] = {}
    totals: dict[tuple[str, str], Tensor] = {}

    def visit(layer: Layer) -> None:
        now = layer.p[:, :, [row[t] for t in steps]]
        looks: dict[tuple, Tensor] = {}
        parts = {}
        for name, s in (every if layer.number == more_layer else settings).items():
            look = (s.until, s.window, s.pool, s.kernel)
            if look not in looks:
                looks[look] = pooled(layer.p[:, :, [row[t] for t in past[s]]][..., : ends[s.until]], s)
            rules = list(RULES) if name in settings else ["mean", "defensive"]
            parts[name] = (rules, *_weights(looks[look], now, layer.norms[s.norm], rules, ends[s.until], s))
        sums = (now @ torch.cat([weights for _, weights, _ in parts.values()], -1)).permute(3, 0, 1, 2)
        columns = sums.flatten(1, 2).cpu().split([len(rules) + 2 for rules, *_ in parts.values()])  # [, heads, steps]
        for (name, (rules, _, tied)), found in zip(parts.items(), columns, strict=True):
            head = every[name].head
            for i, rule in enumerate(rules):
                heads = found[[i, -2, -1]]
                where = {"setting": name, "rule": rule, "layer": layer.number}
                looked = heads.sum(1) if head is None else heads[:, head]
                rows.append(where | {"head": -1, "tied": tied.get(rule)} | _summary(looked))
                if name in settings:
                    curves[name, rule, layer.number] = looked
                    totals[name, rule] = totals.get((name, rule), 0) + looked
                if name == DEFAULT:
                    rows.extend(where | {"head": h} | _summary(part) for h, part in enumerate(heads.unbind(1)))

    layers(model, [*prompt.ids, *answer[:-1]], queries, visit)
    for (name, rule), part in totals.items():
        curves[name, rule, -1] = part
        rows.append({"setting": name, "rule": rule, "layer": -1, "head": -1} | _summary(part))
    keys = [np.repeat(column, len(steps)) for column in zip(*curves, strict=True)]
    table = pd.DataFrame(dict(zip(("setting", "rule", "layer"), keys, strict=True)))
    table["step"] = np.tile(np.arange(1, len(steps) + 1), len(curves))
    table["retained"] = torch.cat([part[0] / part[1] for part in curves.values()]).numpy()
    return table, pd.DataFrame(rows).astype({"tied": float})


def _weights(
    before: Float[Tensor, "kv_heads group past tokens"],
    now: Float[Tensor, "kv_heads group steps tokens"],
    norm: Float[Tensor, "kv_heads group tokens"],
    rules: Sequence[str],
    end: int,
    s: Setting,
) -> tuple[Float[Tensor, "kv_heads group tokens sums"], dict[str, float]]:
    """What to multiply a step's attention with, `before` being pooled: the importance that each rule keeps, all that
    counts, and all there is; and by rule the share of the kept tokens that stand at the prior."""
    history = norm[..., :end]
    found, tied = [], {}
    for rule in rules:
        scores = score(now[..., :end] if rule == ANSWER else before, history, rule, s)
        kept = keep(scores, s)
        if rule == "defensive":
            raised = scores > score(before, history, "max", s)
            tied[rule] = float((kept & raised).sum() / kept.sum())
        found.append(kept[:, None].expand(history.shape) if s.joined else kept.view_as(history))
    found.append(torch.ones_like(history, dtype=torch.bool))
    after = norm.shape[-1] - end
    weights = [F.pad(kept.float(), (0, after), value=float(s.later)) for kept in found]
    return torch.stack([*weights, torch.ones_like(norm)], -1) * norm[..., None], tied


def end_of(prompt: Prompt, s: Setting) -> int:
    """Tokens of the history. Raises InputError for a prompt without its end, or too short."""
    if s.until and not prompt.spans.get(s.until):
        raise InputError(f"the prompt has no span {s.until!r}: it has {', '.join(prompt.spans) or 'none'}")
    end = min(prompt.spans[s.until]) if s.until else len(prompt.ids)
    if int(s.share * end) < s.window:
        raise InputError(f"{s.share:.0%} of {end} tokens keeps fewer than the {s.window} past queries: longer prompts")
    return end


def _summary(part: Float[Tensor, "three steps"]) -> dict:
    share = part[0] / part[1]
    found = {"worst": share.min(), "mean": share.mean(), "below": (share < OUTLIER).float().mean()}
    found |= {"counted": (part[1] / part[2]).mean()}
    return {k: float(v) for k, v in found.items()} | {"at": int(share.argmin()) + 1, "steps": len(share)}


# ---- appendix C: an entry that is unimportant, but for rare spikes


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


def miss(eps: float, window: int) -> float:
    """(1 - eps)^m: chance that no past query shows the spike. Source: proof 2."""
    return (1 - eps) ** window


def bias_of_mean(x: Mixture) -> float:
    """R - E[mean] = R - (1 - eps) mu_low - eps mu_high, whatever the window; it tends to R - mu_low as eps to 0.

    The paper calls that limit a large negative value; R - mu_low is positive. Source: theorem 1.
    """
    return x.risk - (1 - x.eps) * x.mean_low - x.eps * x.mean_high


def bias_of_max(x: Mixture, window: int) -> float:
    """R - E[max], exactly: the integral of F^m over [0, R], with F the mixture's distribution function."""
    stay = miss(x.eps, window)
    rise = (x.risk - x.spike) * (1 - stay * (1 - x.eps)) / (x.eps * (window + 1))
    return stay * (x.low / (window + 1) + x.spike - x.low) + rise


def bound_of_max(x: Mixture, window: int) -> float:
    """Upper bound on R - E[max]: R - (1 - eps)^m mu_low - (1 - (1 - eps)^m) mu_high. Source: theorem 2."""
    stay = miss(x.eps, window)
    return x.risk - stay * x.mean_low - (1 - stay) * x.mean_high


def draw(x: Mixture, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Importances of such an entry, independent."""
    rng = np.random.default_rng(seed)
    high = rng.random(shape) < x.eps
    u = rng.random(shape)
    return np.where(high, x.spike + (x.risk - x.spike) * u, x.low * u)


def theory(x: Mixture, windows: Sequence[int], draws: int = 20_000, seed: int = 0) -> pd.DataFrame:
    """Simulated beside closed form: window, quantity ("bias of mean", "bias of max", "missed"), simulated, low, high
    (95%), exact, bound (theorem 2; nan elsewhere)."""
    observed = draw(x, (draws, max(windows)), seed)
    rows = []
    for m in windows:
        seen = observed[:, :m]
        largest = seen.max(1)
        parts = {
            "bias of mean": (x.risk - seen.mean(1), bias_of_mean(x), np.nan),
            "bias of max": (x.risk - largest, bias_of_max(x, m), bound_of_max(x, m)),
            "missed": ((largest <= x.low).astype(float), miss(x.eps, m), np.nan),
        }
        for name, (value, exact, bound) in parts.items():
            half = 1.96 * value.std(ddof=1) / np.sqrt(draws)
            found = {"window": m, "quantity": name, "simulated": value.mean()}
            found |= {"low": value.mean() - half, "high": value.mean() + half, "exact": exact, "bound": bound}
            rows.append(found)
    return pd.DataFrame(rows)


def survival(
    x: Mixture,
    windows: Sequence[int],
    *,
    stable: float = 0.3,
    entries: int = 200,
    fragile: float = 0.1,
    share: float = 0.5,
    heads: int = 200,
    seed: int = 0,
) -> pd.DataFrame:
    """What a bias does not say: who survives. window, rule, survives (share of fragile entries kept), low, high (95%).

    A head has `entries`; a share `fragile` of them follows the mixture, the others stay near a level of their own,
    uniform in [0, stable], with fluctuations of 10%. The best `share` by mean, max and defensive aggregation is kept;
    ties, which the prior makes, are broken at random.
    """
    rng = np.random.default_rng(seed)
    n = round(fragile * entries)
    spiky = draw(x, (heads, n, max(windows)), seed)
    level = rng.uniform(0, stable, (heads, entries - n, 1))
    calm = level * rng.uniform(0.9, 1.1, (heads, entries - n, max(windows)))
    rows = []
    for m in windows:
        seen = np.concatenate([spiky[..., :m], calm[..., :m]], 1)
        largest = seen.max(2)
        scores = {"mean": seen.mean(2), "max": largest}
        scores["defensive"] = np.maximum(largest, largest.mean(1, keepdims=True))
        for rule, value in scores.items():
            place = np.lexsort((rng.random(value.shape), -value), axis=1).argsort(1)
            kept = (place[:, :n] < int(share * entries)).mean(1)
            half = 1.96 * kept.std(ddof=1) / np.sqrt(heads)
            rows.append(
                {
                    "window": m,
                    "rule": rule,
                    "survives": kept.mean(),
                    "low": kept.mean() - half,
                    "high": kept.mean() + half,
                }
            )
    return pd.DataFrame(rows)
