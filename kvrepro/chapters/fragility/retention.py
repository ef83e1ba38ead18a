"""Retained importance: the share of the importance in the full cache that half of the cache still holds, at each step.

I[t, i] = A[t, i] ||v_i W_O||, from one plain forward pass over prompt and answer. Only the attention rows of the past
queries and of the answer are computed, one layer at a time.
Source: DefensiveKV, sections 3.1 to 3.3, algorithms 1 and 2.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from kvrepro.engine import allocate
from kvrepro.engine.allocate import select
from kvrepro.engine.attention import attend, attend_prompt, read_once
from kvrepro.engine.condition import Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.score.window import pooled
from kvrepro.errors import InputError

AttentionRows: TypeAlias = Float[Tensor, "kv_heads group queries tokens"]
Norms: TypeAlias = Float[Tensor, "kv_heads group tokens"]

# How the history's tokens are ranked: by the importance that one past query gives them, by the mean or the largest over
# past queries (and over query heads that choose together), or by these where no score is less than the head's mean.
RULES = ("single", "mean", "mean with prior", "max", "defensive")
LARGEST, PRIOR = ("max", "defensive"), ("mean with prior", "defensive")  # "defensive": algorithm 1, both of its parts
OUTLIER = 0.5  # a step that retains less is an outlier
KERNEL = 5  # tokens over which attention is pooled
DEFAULT, TOKEN = "default", "token "  # a setting's name, and how those with another single past query begin
OPEN: dict[str, dict[Any, str]] = {  # the choices that are combined, and how a setting is named for them
    "until": {"question": "history to the question", "": "history to the prompt's end"},
    "norm": {"l1": "L1 norm of the projected value", "none": "attention alone"},
    "pool": {"none": "not pooled", "average": "pooled"},
    "joined": {True: "query heads choose together", False: "each query head for itself"},
    "forced": {True: "past queries' tokens stay", False: "past queries' tokens may leave"},
    "prior": {"importance": "prior after the norm", "attention": "prior before the norm"},
    "later": {False: "the history alone counts", True: "question and answer count"},
}


@dataclass(frozen=True)
class Setting:
    """The choices that figures 1 and 3 and table 1 leave open. The defaults are ours."""

    until: str = "question"  # the history ends before this part of the prompt; "": with the prompt
    window: int = 32  # past queries: the last ones of the history
    single: int = 16  # which of them stands alone, counted from 1
    share: float = 0.5  # of the history that stays
    norm: str = "l1"  # of v W_O; "none": attention alone
    pool: str = "none"  # of each past query's attention; or "average"
    joined: bool = True  # the query heads of a KV head choose together; False: each keeps tokens of its own
    forced: bool = True  # the past queries' own tokens stay
    prior: str = "importance"  # what the prior bounds; "attention": norm last
    later: bool = False  # question and generated tokens, which nothing evicts, count: above and below the line


def variants(base: Setting = Setting()) -> dict[str, Setting]:
    """Settings by name: the base ("default"), every combination of the `OPEN` choices, named for what it changes, and
    other single past queries (figure 13): the first, the last and two between, "token k"."""
    settings = {DEFAULT: base}
    for values in itertools.product(*OPEN.values()):
        chosen = dict(zip(OPEN, values, strict=True))
        changed = [OPEN[field][value] for field, value in chosen.items() if value != getattr(base, field)]
        settings[", ".join(changed) or DEFAULT] = replace(base, **chosen)
    w = base.window
    return settings | {f"{TOKEN}{k}": replace(base, single=k) for k in sorted({1, w // 4, 3 * w // 4, w})}


def norm_of(values: Float[Tensor, "kv_heads tokens dim"], output: Float[Tensor, "heads dim hidden"]) -> Norms:
    """||v W_O||_1 per query head, in blocks of 256 tokens."""
    weights = output.view(len(values), -1, *output.shape[1:]).float()
    blocks = [torch.einsum("knd,kgdh->kgnh", block.float(), weights) for block in values.split(256, 1)]
    return torch.cat([block.abs().sum(-1) for block in blocks], -1)


def score(p: AttentionRows, norm: Norms, rule: str, s: Setting) -> Float[Tensor, "heads tokens"]:
    """Scores by which `rule` ranks the history's tokens; heads are KV heads, or query heads if each chooses for itself.

    p: pooled attention of the past queries to the history; norm: of the history's tokens.
    """
    largest, norm_first = rule in LARGEST, s.prior == "importance"
    x = p[:, :, s.single - 1] if rule == "single" else p.amax(2) if largest else p.mean(2)
    x = x * norm if norm_first else x
    x = (x.amax(1) if largest else x.mean(1)) if s.joined else x.flatten(0, 1)
    x = torch.maximum(x, x.mean(-1, keepdim=True)) if rule in PRIOR else x
    return x if norm_first else x * (norm.mean(1) if s.joined else norm.flatten(0, 1))


def keep(scores: Float[Tensor, "rules heads tokens"], s: Setting) -> Bool[Tensor, "rules heads tokens"]:
    """The int(share * tokens) best of each head."""
    protected = torch.zeros_like(scores, dtype=torch.bool)
    protected[..., scores.shape[2] - s.window * s.forced :] = True
    budget = torch.full((len(scores),), int(s.share * scores.shape[2]), device=scores.device)
    return select(scores, protected, allocate.uniform(scores, protected, budget))


def end_of(prompt: Prompt, s: Setting) -> int:
    """Number of tokens of the history. Raises InputError if the prompt lacks the span `until`, or is too short."""
    if s.until:
        prompt.ensure_span(s.until)
    end = min(prompt.spans[s.until]) if s.until else len(prompt.ids)
    if int(s.share * end) < s.window:
        raise InputError(f"{s.share:.0%} of {end} tokens keeps fewer than the {s.window} past queries: longer prompts")
    return end


def retained(
    model: Any, prompt: Prompt, answer: Sequence[int], settings: Mapping[str, Setting], layer: int = 0
) -> dict[str, pd.DataFrame]:
    """The share of importance that each rule retains, per step of `answer`; layers count from 0 among those that may
    evict. A step is the query that yields one token of the answer; the first is the prompt's last token.

    curves, of the default setting in `layer`: rule, step (from 1), retained. summary: setting, rule, layer, steps,
    worst, mean, below (share of steps under one half), tied (share of the kept tokens that stayed by their place alone,
    as a token that left has the same score). settings: by name, as in `variants`. The default is looked at in every
    layer and by every rule; "token k" in `layer`, by the single query; others in `layer`, by the other rules.
    """
    steps = range(len(prompt.ids) - 1, len(prompt.ids) + len(answer) - 1)
    past = {name: range((end := end_of(prompt, s)) - s.window, end) for name, s in settings.items()}
    queries = sorted({*steps, *itertools.chain(*past.values())})
    row = {position: i for i, position in enumerate(queries)}
    facts, curves, summary = ModelFacts.of(model), list[pd.DataFrame](), list[pd.DataFrame]()

    def see(number: int, p: AttentionRows, l1: Norms) -> None:
        now = p[:, :, [row[t] for t in steps]]
        for name in settings if number == layer else [DEFAULT]:
            s = settings[name]
            attention = pooled(p[:, :, [row[t] for t in past[name]], : past[name].stop], s.pool, KERNEL)
            norm = l1 if s.norm == "l1" else torch.ones_like(l1)
            rules = RULES[:1] if name.startswith(TOKEN) else RULES if name == DEFAULT else RULES[1:]
            shares, tied = _shares(attention, now, norm, rules, s)
            seen = {"worst": shares.min(1), "mean": shares.mean(1), "below": (shares < OUTLIER).mean(1), "tied": tied}
            looked = {"setting": name, "rule": list(rules), "layer": number, "steps": len(steps)}
            summary.append(pd.DataFrame(looked | seen))
            if name == DEFAULT and number == layer:
                wide = pd.DataFrame(shares, list(rules), range(1, len(steps) + 1)).rename_axis("rule")
                curves.append(wide.reset_index().melt("rule", var_name="step", value_name="retained"))

    class Looking:
        def attend(self, at: int, query: Tensor, key: Tensor, value: Tensor, scaling: Any, sliding: int | None = None):
            tokens = torch.arange(key.shape[2], device=key.device)[None]
            part, chosen, rows = [(key, value, tokens[None])], tokens[:, queries], list[Tensor]()
            if at in facts.evictable:
                attend(query[:, :, queries], chosen, part, scaling, sliding, lambda p, _: rows.append(p[0]))
                see(facts.evictable.index(at), torch.cat(rows, 2), norm_of(value[0], facts.outputs[at]))
            if sliding is not None and key.shape[2] > sliding:
                return attend(query, tokens, part, scaling, sliding)
            return attend_prompt(query, key, value, scaling)

    read_once(model, [*prompt.ids, *answer[:-1]], Looking())
    return {"curves": pd.concat(curves, ignore_index=True), "summary": pd.concat(summary, ignore_index=True)}


def _shares(
    past: AttentionRows, now: AttentionRows, norm: Norms, rules: Sequence[str], s: Setting
) -> tuple[np.ndarray, list[float]]:
    """The share of importance [rules, steps] that each rule keeps, and the share of its kept tokens that ties decide.

    past: pooled attention of the past queries to the history; now: of the steps to all tokens.
    """
    end, kv_heads = past.shape[-1], len(norm)
    scores = torch.stack([score(past, norm[..., :end], rule, s) for rule in rules])
    kept = keep(scores, s)
    by_place = kept & (scores == scores.masked_fill(kept, -torch.inf).amax(-1, keepdim=True))
    by_place[..., end - s.window * s.forced :] = False  # these stay whatever their score
    tied = (by_place.sum((1, 2)) / kept.sum((1, 2))).tolist()
    counted = kept.unflatten(1, (kv_heads, -1)).expand(-1, -1, norm.shape[1], -1)
    counted = torch.cat([counted, torch.ones_like(counted[:1])]).float()  # last: all that there is to keep
    weights = F.pad(counted, (0, norm.shape[-1] - end), value=float(s.later)) * norm
    sums = torch.einsum("kgst,rkgt->rs", now, weights)
    return (sums[:-1] / sums[-1]).cpu().numpy(), tied
