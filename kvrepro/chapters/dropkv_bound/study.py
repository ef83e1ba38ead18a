"""The studies of the chapter on DropKV's bound: triples (layer, head, position) of real prompts, and answers.

`triples_of` gives tables over triples. By name, what one of their rows is about, and (in brackets) its other columns:

- assumptions: a triple and a pool (eps, c_low).
- records: a triple, stratum, k, objective and rule (ratio to the optimum; bound for the query's F).
- alignment: one of the 20 nearest or most aligned keys of a triple (stratum; distance: ||a - v|| / ||a||; ranks by
  AnDPro and DropKV, 1 = evicted first).
- weights: a triple, stratum, k and way to weigh a key, `triples.WEIGHTS` (shift of the window's outputs: window, and
  of the query's after W_O: projected; same_alone: does the way choose DropKV's set for the last query alone?).

`answers` compares DropKV with its peers: the question visible, the prompt reduced once, 5 to 30% of it kept. Every
method looks through the last 8 queries and pools over 11 tokens, where it does either (DropKV, section 5).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, product
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound, triples
from kvrepro.chapters.dropkv_bound.triples import RULES, Layer, Triple
from kvrepro.engine.condition import Condition, Count, Odd, Prefill, ProperShare, Size
from kvrepro.engine.facts import ModelFacts, attention_modules
from kvrepro.engine.generate import check_attention_only
from kvrepro.engine.policy import find, is_own
from kvrepro.errors import InputError, Stopped
from kvrepro.experiment import data, measure, run
from kvrepro.experiment.answers import prompt_limit
from kvrepro.experiment.data import AtMost
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item

WHERE = ["layer", "head", "position"]
KS, TWENTY = (10, 18), 20  # 10 or 18 of 20 keys are evicted
Rule = tuple[str, int]  # its name, and the queries that it observes

PEERS = ("snapkv", "pyramid_kv", "streaming_llm", "key_diff", "cake", "critical_kv", "andpro")
POOLED = "AnDPro, max pooling"  # with the pooling that the others have
BY_LENGTH = ("snapkv", "andpro")  # and a reader's own policies
RETRIEVAL = "tinyworld:needle,needle_multikey,needle_multivalue,needle_multiquery,variable_tracking,frequent_words"
PROFILES = {"quick": (16, 2, 150), "full": (300, 4, 600)}  # prompts, query positions, triples for the enumeration


@dataclass(frozen=True)
class Sampling:
    """The settings that decide the rows of a prompt."""

    pools: tuple[Size | ProperShare, ...] = (0.95, 0.5, 256)  #: of lowest attention: share of the keys, or their number
    positions: Size | None = None  #: query positions per prompt, layer and head; None: the profile's
    since: ProperShare = 0.5  #: they lie in the prompt after this share of it
    window: Size = 8  #: final keys outside the pool, and queries that a rule observes
    steps: Count = 6  #: ascents where the cone condition fails
    cones: Size = 2048  #: of a prompt's triples so many, spread evenly, are asked for their cone; fewer: all it has
    seed: int = 0  #: of the items, and of what is drawn from them

    def queries(self, tokens: int) -> list[int]:
        """The positions of the queries of a prompt: evenly spaced, the last token included."""
        assert self.positions is not None  # `Settings.sampling` fills in the profile's number
        step = (1 - self.since) * tokens / self.positions
        return [tokens - 1 - round(step * i) for i in reversed(range(self.positions))]


@dataclass(frozen=True)
class Settings(run.Settings, Sampling):
    """Settings of the chapter on DropKV's bound. The sets of twenty keys come from the first pool."""

    shares: tuple[ProperShare, ...] = (0.05, 0.10, 0.30)  #: of the prompt kept
    tokens: Size = 1900  #: of a prompt, in the model's own tokenizer, at most
    lengths: tuple[Size, ...] = (500, 1900, 3000)  #: for the study of lengths; what cannot be had is left out
    k: Size = 200  #: in 1 - k eps, of figures and tables
    triples: Size | None = None  #: for the enumeration, over all prompts; None: the profile's
    kernel: Odd = 11  #: tokens that are pooled, for the answers
    max_new_tokens: Size = 48  #: of an answer

    def within(self, model: Any) -> "Settings":
        """These settings, with `tokens` and `lengths` lowered (which is printed) so that sliding layers of the model
        see each prompt and answer whole, as the theory assumes.

        Raises InputError for a model to which the theory does not apply: layers without keys, softcapped logits, sinks.
        """
        check_attention_only(model)
        for module in attention_modules(model).values():
            if any(getattr(module, name, None) is not None for name in ("attn_logit_softcapping", "sinks")):
                raise InputError("the bound takes plain logits, but this model caps them or has sinks: take another")
        window = min(ModelFacts.of(model).sliding.values(), default=None)
        if window is None or self.tokens + self.max_new_tokens <= window:
            return self
        tokens = window - self.max_new_tokens
        if tokens <= self.window:
            raise InputError(f"layers of this model see {window} tokens: too few for the bound, take another model")
        print(f"dropkv_bound: prompts of {tokens:,} tokens at most, since layers of this model see {window:,}")
        lengths = tuple(length for length in self.lengths if length < tokens)
        return replace(self, tokens=tokens, lengths=(*lengths, tokens))

    def prompts(self, n_items: int | None) -> int:
        """Number of prompts: `n_items`, or the profile's."""
        return AtMost(PROFILES[self.profile][0]) if n_items is None else n_items

    @property
    def enumerated(self) -> int:
        """Triples that enter the enumeration, over all prompts."""
        return self.triples or PROFILES[self.profile][2]

    @property
    def sampling(self) -> Sampling:
        """The settings that decide the rows, with the profile's numbers filled in."""
        values = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        return Sampling(**values | {"positions": self.positions or PROFILES[self.profile][1]})


def pool_name(size: float | int) -> str:
    """`lowest 95%` or `256 lowest`."""
    return f"{size} lowest" if isinstance(size, int) else f"lowest {size:.0%}"


# ---------------------------------------------------------------- prompts of a given length


def questions(loaded: Loaded, items: str, n_items: int, settings: Settings) -> list[Item]:
    """Items whose prompts have at most `settings.tokens` tokens of the model's own tokenizer.

    items, n_items: as in `data.load_fitting`. Prompts that are too short for the pools are left out (`data.usable`).
    Raises InputError, also if the prompts leave no room for the answer.
    """
    sampling, limit = settings.sampling, prompt_limit(loaded, settings.max_new_tokens, settings.tokens)
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, limit, settings.seed)

    def check_pools(item: Item) -> None:
        prompt = data.build_prompt(item, loaded.tokenizer, limit)
        keys = sampling.queries(len(prompt.ids))[0] + 1 - sampling.window
        with data.named(item):
            for size in sampling.pools:
                bound.keys_in_pool(size, keys, least=TWENTY)

    return data.usable(fitting, "dropkv_bound", check_pools)


def questions_by_length(loaded: Loaded, items: str, n_items: int, settings: Settings) -> dict[int, list[Item]]:
    """Half of `n_items` for each of `settings.lengths` but `settings.tokens`, with prompts that fill it, by length.

    A length that the model or the items cannot have is left out, and this is printed.
    """
    half, by_length = data.AtMost(max(1, n_items // 2)), {}
    for length in settings.lengths:
        if length != settings.tokens:
            try:
                limit = prompt_limit(loaded, settings.max_new_tokens, length)
                fitting = data.load_fitting(items, half, loaded.tokenizer, limit, settings.seed)
                by_length[length] = data.fitting(fitting, items, loaded.tokenizer, length, data.FILLED)
            except InputError as error:
                print(f"length {length} is left out: {error}")
    return by_length


# ---------------------------------------------------------------- tables over triples


def triples_of(
    loaded: Loaded, items: Sequence[Item], settings: Settings, policies: Sequence[str] = ()
) -> dict[str, pd.DataFrame]:
    """All tables over the items' prompts, passages cut to `settings.tokens`.

    The records cover table 11's rules, and those of `policies` that are `scored_alone`.
    """
    total, n = settings.enumerated, len(items)
    taken = {item.id: (item, total * (i + 1) // n - total * i // n) for i, item in enumerate(items)}
    given = {"s": settings.sampling, "limit": settings.tokens}
    tables = run.run(run.PerItem("dropkv_bound", "triples", taken, of_item, given), loaded, settings)
    for name in dict.fromkeys(policies):
        if name not in RULES and triples.scored_alone(find(name)):
            other = run.PerItem("dropkv_bound", "others", taken, of_item, given | {"policy": name})
            try:
                rows = run.run(other, loaded, settings)["records"]
            except Stopped as error:
                print(f"{name} is left out of the records: {error}")
            else:
                tables["records"] = pd.concat([tables["records"], rows], ignore_index=True)
    return tables


def of_item(
    loaded: Loaded, item: tuple[Item, int], s: Sampling, limit: int, policy: str = ""
) -> dict[str, pd.DataFrame]:
    """`prompt` of an item, and of how many of its triples enter the enumeration."""
    ids = data.build_prompt(item[0], loaded.tokenizer, limit).ids
    tables = prompt(loaded, ids, s, item[1], policy)
    return {name: table.assign(item=item[0].id, task=item[0].task) for name, table in tables.items()}


def prompt(loaded: Loaded, ids: Sequence[int], s: Sampling, take: int, policy: str = "") -> dict[str, pd.DataFrame]:
    """The tables of one prompt. `take` of its triples, drawn at random, or all it has, enter the enumeration; these,
    and `s.cones` spread evenly over all, enter the study of the assumptions.

    policy: only records, about its choice among the same keys, in place of the rules of table 11.
    """
    shape, positions = loaded.model.config.get_text_config(), s.queries(len(ids))
    every = list(product(range(shape.num_hidden_layers), range(shape.num_attention_heads), positions))
    draw = np.random.default_rng([s.seed, len(ids), *ids[-8:]])
    sampled = [every[i] for i in sorted(draw.choice(len(every), min(take, len(every)), replace=False))]
    with_cone = {every[i] for i in _evenly(len(every), s.cones)}.union(sampled)
    names = ("records",) if policy else ("assumptions", "records", "alignment", "weights")
    rows: dict[str, list[dict]] = {name: [] for name in names}

    def visit(layer: Layer) -> None:
        for t in [] if policy else positions:
            heads = [head for head in range(len(layer.query)) if (layer.number, head, t) in with_cone]
            rows["assumptions"] += _assumptions(layer, t, heads, s) if heads else []
        for triple in (layer.triple(head, t) for number, head, t in sampled if number == layer.number):
            sets = triples.strata(triple, bound.pool(triple.p, s.pools[0], s.window), TWENTY, s.seed)
            rows["records"] += _records(triple, sets, s, loaded.model.device, policy)
            if not policy:
                rows["alignment"] += _alignment(triple, sets)
                rows["weights"] += _weights(triple, sets)

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    tables = {name: pd.DataFrame(of_table) for name, of_table in rows.items()}
    if not policy:
        tested = tables["assumptions"].sort_values(WHERE, kind="stable", ignore_index=True)
        tables["assumptions"] = tested.assign(tokens=tested.position + 1)
    return tables


def _evenly(count: int, take: int) -> list[int]:
    """`take` of the numbers 0 ... count - 1, or all, ascending and without a period: those whose multiples of the
    golden ratio have the least fractions. So triples in order are taken evenly from layers, heads and positions."""
    fraction = np.arange(count) * (math.sqrt(5) - 1) / 2 % 1
    return sorted(fraction.argsort(kind="stable")[:take].tolist())


def _assumptions(layer: Layer, t: int, heads: Iterable[int], s: Sampling) -> list[dict]:
    """A row per query head and pool at a position: the pool's largest weight, and its cone constant from below."""
    heads, rows = list(heads), []
    attention, outputs = layer.attention(t)[heads, -1], layer.outputs(t)[heads, -1]
    values = layer.value[[head // layer.group for head in heads]].double()
    for size in s.pools:
        keys = bound.pool(attention, size, s.window)  # [heads, keys]
        residuals = outputs[:, None] - values.gather(1, keys[..., None].expand(*keys.shape, values.shape[-1]))
        low, _ = bound.cone(residuals, s.steps)
        for head, p, c_low in zip(heads, attention.gather(1, keys), low.tolist(), strict=True):
            row = {"layer": layer.number, "position": t, "head": head, "pool": pool_name(size)}
            rows.append(row | {"eps": p.max().item(), "c_low": c_low})
    return rows


def _scores(t: Triple, keys: Tensor, s: Sampling) -> dict[Rule, Tensor]:
    """Scores of a triple's `keys` [strata, 20] by every rule without pooling, [strata, 20], large = keep."""
    draw = torch.Generator().manual_seed(s.seed * 7919 + t.layer * 997 + t.head * 31 + t.position)
    random = torch.rand(keys.shape[1], dtype=torch.float64, generator=draw)
    scores = {("attention", 1): t.p} | {(name, 1): RULES[name](t.last(1)) for name in ("critical_kv", "andpro")}
    scores |= {(name, s.window): rule(t) for name, rule in RULES.items()}
    of_query = {("dropkv", 1): bound.single_cost(t.p, t.r)[keys], ("random", 1): random.expand(keys.shape)}
    return of_query | {rule: score[keys] for rule, score in scores.items()}


def _of_window(t: Triple, keys: Tensor) -> tuple[Tensor, Tensor]:
    """p [strata, window, 20] and r [strata, window, 20, dim] of the window's queries."""
    r = t.window_a[:, None, None] - t.v[keys]
    return t.window_p[:, keys].transpose(0, 1), r.transpose(0, 1)


def _records(t: Triple, sets: Mapping[str, Tensor], s: Sampling, device: torch.device, policy: str = "") -> list[dict]:
    """A row per stratum, k, objective and rule: F of the query, and on the paper's strata also of the window, over the
    least of all subsets; and theorem 1's bound on this ratio for DropKV's choice for the query."""
    keys, paper = torch.stack(list(sets.values())), len(triples.STRATA)
    p, r, pw, rw = (x.to(device) for x in (t.p[keys], t.r[keys], *_of_window(t, keys[:paper])))
    scores = {(policy, s.window): triples.scores_of(find(policy), t)[keys]} if policy else _scores(t, keys, s)
    score, rows = torch.stack(list(scores.values())).to(device), []  # [rules, strata, 20]
    (low, _), eps = bound.cone(r, s.steps), p.amax(-1)
    for k in KS:
        evicted, factors = bound.smallest(score, k), bound.factor(low, eps, k).tolist()
        best, best_of_window = bound.optimum(p[:, None], r[:, None], k), bound.optimum(pw, rw, k)
        of_query = bound.joint_cost(p, r, evicted) / bound.joint_cost(p, r, best)
        of_window = bound.window_cost(pw, rw, evicted[:, :paper]) / bound.window_cost(pw, rw, best_of_window)
        for objective, ratios in (("query", of_query.tolist()), ("window", of_window.tolist())):
            for (rule, queries), of_rule in zip(scores, ratios, strict=True):
                row = t.where | {"k": k, "objective": objective, "rule": rule, "queries": queries}
                for name, ratio, factor in zip(sets, of_rule, factors, strict=False):  # of the window the paper's alone
                    limit = factor if objective == "query" else math.nan
                    rows.append(row | {"stratum": name, "ratio": ratio, "bound": limit})
    return rows


def _alignment(t: Triple, sets: Mapping[str, Tensor]) -> list[dict]:
    """A row per key of the strata near and aligned."""
    a, rows = t.window_a[-1], []
    for stratum in ("near", "aligned"):
        v, r, p = (x[sets[stratum]] for x in (t.v, t.r, t.p))
        scores = {"andpro": p * (v @ a), "dropkv": bound.single_cost(p, r)}
        ranks = {name: scipy_stats.rankdata(score.numpy()) for name, score in scores.items()}
        table = pd.DataFrame({"distance": (r.norm(dim=-1) / a.norm()).numpy(), **ranks})
        rows += table.assign(stratum=stratum, **t.where).to_dict("records")
    return rows


def _weights(t: Triple, sets: Mapping[str, Tensor]) -> list[dict]:
    """A row per stratum of the paper, k and way to weigh a key."""
    keys, rows = torch.stack([sets[name] for name in triples.STRATA]), []
    p, after, (pw, rw) = t.p[keys], t.projected(t.r[keys]), _of_window(t, keys)
    for k in KS:
        of_way = {way: (cost(t)[keys], cost(t.last(1))[keys]) for way, cost in triples.WEIGHTS.items()}
        evicted = {way: [bound.smallest(cost, k) for cost in costs] for way, costs in of_way.items()}
        for way, (chosen, alone) in evicted.items():
            moved = {"window": bound.window_cost(pw, rw, chosen), "projected": bound.joint_cost(p, after, chosen)}
            moved |= {"same_alone": (alone == evicted["squared"][1]).all(-1)}
            table = pd.DataFrame({name: x.numpy() for name, x in moved.items()}).assign(stratum=triples.STRATA)
            rows += table.assign(k=k, way=way, **t.where).to_dict("records")
    return rows


# ---------------------------------------------------------------- answers


def peers_of(policies: Sequence[str]) -> list[str]:
    """The policies to compare with DropKV, each once."""
    return [name for name in dict.fromkeys(policies) if name not in ("full", "dropkv")]


def condition(policy: str, share: float, settings: Settings, **switches: object) -> Condition:
    """Keep `share` of the prompt, with the window and kernel of DropKV's paper; `switches` add to these."""
    parameters = find(policy).parameters
    of_paper = {name: getattr(settings, name) for name in ("window", "kernel") if name in parameters}
    all_switches = tuple(sorted((of_paper | switches).items()))
    return Condition(policy, share, Prefill(), reading="as_described", switches=all_switches)


def grid(settings: Settings, peers: Sequence[str] = PEERS) -> dict[str, list[Condition]]:
    """Conditions by their name in tables: the full cache, DropKV and its peers at every share, and `POOLED` at the
    smallest."""
    names = ("dropkv", *peers)
    conditions = {name: [condition(name, share, settings) for share in settings.shares] for name in names}
    pooled = condition("andpro", min(settings.shares), settings, pool="max")
    return {"full": [Condition()]} | conditions | {POOLED: [pooled]}


def answers(
    loaded: Loaded,
    items: Sequence[Item],
    by_length: Mapping[int, Sequence[Item]],
    peers: Sequence[str],
    settings: Settings,
) -> pd.DataFrame:
    """Rows of `run` with `method` (its name in tables), `length` and `score` (`measure.scores`).

    `items`, cut to `settings.tokens`, are answered under the whole grid; those of each other length under DropKV,
    SnapKV, AnDPro and the reader's own policies at the smallest share.
    """
    few = ["dropkv", *(name for name in peers if name in BY_LENGTH or is_own(name))]
    least = {"full": [Condition()]} | {name: [condition(name, min(settings.shares), settings)] for name in few}
    parts = []
    for length, asked in sorted({**by_length, settings.tokens: items}.items()):
        part = grid(settings, peers) if length == settings.tokens else least
        names = [name for name, conditions in part.items() for _ in conditions]
        limit = length if any(item.context is not None for item in asked) else None
        plan = run.Answers(
            "dropkv_bound", f"quality-{length}", asked, list(chain(*part.values())), settings.max_new_tokens, limit
        )
        rows = run.run(plan, loaded, settings)
        parts.append(rows.assign(method=names * len(asked), length=length))
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(share=rows["share"].astype(float).fillna(1.0), score=measure.scores(rows))


def main(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the prompt length at which all methods were run."""
    return rows[rows.length == rows.groupby("length").method.nunique().idxmax()]
