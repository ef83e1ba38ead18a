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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound, triples
from kvrepro.chapters.dropkv_bound.triples import RULES, Layer, Triple
from kvrepro.engine.condition import Condition, Odd, Prefill, ProperShare, Size
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
CONES = 2048  # most triples of a prompt whose cone is asked for
Rule = tuple[str, int]  # its name, and the queries that it observes
Sizes = Sequence[float | int]  # of pools

PEERS = ("snapkv", "pyramid_kv", "streaming_llm", "key_diff", "cake", "critical_kv", "andpro")
POOLED = "AnDPro, max pooling"  # with the pooling that the others have
BY_LENGTH = ("snapkv", "andpro")  # and a reader's own policies
RETRIEVAL = "tinyworld:needle,needle_multikey,needle_multivalue,needle_multiquery,variable_tracking,frequent_words"
PROFILES = {"quick": (16, 2, 150), "full": (300, 4, 600)}  # prompts, query positions, triples for the enumeration


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the chapter on DropKV's bound. The sets of twenty keys come from the first pool."""

    pools: tuple[Size | ProperShare, ...] = (0.95, 0.5, 256)  #: of lowest attention: share of the keys, or their number
    shares: tuple[ProperShare, ...] = (0.05, 0.10, 0.30)  #: of the prompt kept
    tokens: Size = 1900  #: of a prompt, in the model's own tokenizer, at most
    lengths: tuple[Size, ...] = (500, 1900, 3000)  #: for the study of lengths; what cannot be had is left out
    window: Size = 8  #: final keys outside the pool, and queries that a rule observes
    positions: Size | None = None  #: query positions per prompt, layer and head; None: the profile's
    triples: Size | None = None  #: for the enumeration, over all prompts; None: the profile's
    kernel: Odd = 11  #: tokens that are pooled, for the answers
    max_new_tokens: Size = 48  #: of an answer

    def ensure_runs(self, policy: str) -> None:
        """Raise InputError for a policy that cannot be compared with DropKV."""
        for peer in peers_of([policy]):
            super().ensure_runs(peer)

    def within(self, model: Any) -> "Settings":
        """These settings, with `tokens` and `lengths` lowered (which is printed) so that sliding layers of the model
        see each prompt and answer whole, as the theory assumes.

        Raises InputError for a model to which the theory does not apply: layers without keys, softcapped logits, sinks.
        """
        check_attention_only(model)
        for module in attention_modules(model).values():
            if any(getattr(module, name, None) is not None for name in ("attn_logit_softcapping", "sinks")):
                raise InputError("the bound takes plain logits, but this model caps them or has sinks: take another")
        window = min(ModelFacts.of(model).sliding.values(), default=10**9)
        most = window - self.max_new_tokens
        if self.tokens <= most:
            return self
        print(f"dropkv_bound: prompts of {most:,} tokens at most, since layers of this model see {window:,}")
        return replace(self, tokens=most, lengths=(*(n for n in self.lengths if n < most), most))

    def prompts(self, n_items: int | None) -> int:
        """Number of prompts: `n_items`, or the profile's."""
        return AtMost(PROFILES[self.profile][0]) if n_items is None else n_items

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings that decide the rows of a prompt, with the profile's numbers filled in."""
        given = {name: getattr(self, name) for name in ("pools", "window", "seed")}
        return given | {"positions": self.positions or PROFILES[self.profile][1]}


def queries(tokens: int, positions: int) -> list[int]:
    """The positions of the queries of a prompt: evenly spaced in its second half, the last token included."""
    return [tokens - 1 - round(tokens / 2 / positions * i) for i in reversed(range(positions))]


def pool_name(size: float | int) -> str:
    """`lowest 95%` or `256 lowest`."""
    return f"{size} lowest" if isinstance(size, int) else f"lowest {size:.0%}"


# ---------------------------------------------------------------- prompts of a given length


def questions(loaded: Loaded, items: str, n_items: int, settings: Settings) -> list[Item]:
    """Items whose prompts have at most `settings.tokens` tokens of the model's own tokenizer, as in
    `data.load_fitting`. Prompts that are too short for the pools are left out (`data.usable`). Raises InputError, also
    if the prompts leave no room for the answer."""
    limit, positions = prompt_limit(loaded, settings.max_new_tokens, settings.tokens), settings.sampling["positions"]
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, limit, settings.seed)

    def check_pools(item: Item) -> None:
        keys = queries(len(data.build_prompt(item, loaded.tokenizer, limit).ids), positions)[0] + 1 - settings.window
        with data.named(item):
            for size in settings.pools:
                bound.keys_in_pool(size, keys, least=TWENTY)

    return data.usable(fitting, "dropkv_bound", check_pools)


def questions_by_length(loaded: Loaded, items: str, n_items: int, settings: Settings) -> dict[int, list[Item]]:
    """Half of `n_items` for each of `settings.lengths` but `settings.tokens`, with prompts that fill it, by length. One
    that the model or the items cannot have is left out, and this is printed."""
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
    """All tables over the items' prompts, passages cut to `settings.tokens`. The records cover table 11's rules, and
    those of `policies` that are `scored_alone`."""
    total, n = settings.triples or PROFILES[settings.profile][2], len(items)
    taken = {item.id: (item, total * (i + 1) // n - total * i // n) for i, item in enumerate(items)}
    given = settings.sampling | {"limit": settings.tokens}
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


def of_item(loaded: Loaded, item: tuple[Item, int], limit: int, **given: Any) -> dict[str, pd.DataFrame]:
    """`prompt` of an item, and of how many of its triples enter the enumeration."""
    ids = data.build_prompt(item[0], loaded.tokenizer, limit).ids
    tables = prompt(loaded, ids, item[1], **given)
    return {name: table.assign(item=item[0].id, task=item[0].task) for name, table in tables.items()}


def prompt(
    loaded: Loaded,
    ids: Sequence[int],
    take: int,
    policy: str = "",
    *,
    pools: Sizes,
    window: int,
    positions: int,
    seed: int = 0,
) -> dict[str, pd.DataFrame]:
    """The tables of one prompt. `take` of its triples, drawn at random, or all it has, enter the enumeration; these,
    and as many as `CONES` of all, enter the study of the assumptions. policy: only records, about its choice among the
    same keys, in place of the rules of table 11."""
    shape, at = loaded.model.config.get_text_config(), queries(len(ids), positions)
    every = list(product(range(shape.num_hidden_layers), range(shape.num_attention_heads), at))
    draw = np.random.default_rng([seed, len(ids), *ids[-8:]])
    drawn = [draw.choice(len(every), min(n, len(every)), replace=False) for n in (take, CONES)]
    sampled, with_cone = [every[i] for i in sorted(drawn[0])], {every[i] for i in np.union1d(*drawn)}
    names = ("records",) if policy else ("assumptions", "records", "alignment", "weights")
    rows: dict[str, list[dict]] = {name: [] for name in names}

    def visit(layer: Layer) -> None:
        for t in [] if policy else at:
            heads = [head for head in range(len(layer.query)) if (layer.number, head, t) in with_cone]
            rows["assumptions"] += _assumptions(layer, t, heads, pools, window) if heads else []
        for triple in (layer.triple(head, t) for number, head, t in sampled if number == layer.number):
            sets = triples.strata(triple, bound.pool(triple.p, pools[0], window), TWENTY, seed)
            scores = _scores(triple, torch.stack(list(sets.values())), window, seed, policy)
            rows["records"] += _records(triple, sets, scores, loaded.model.device)
            if not policy:
                rows["alignment"] += _alignment(triple, sets)
                rows["weights"] += _weights(triple, sets)

    triples.triples(loaded.model, ids, at, visit, window=window)
    tables = {name: pd.DataFrame(of_table) for name, of_table in rows.items()}
    if not policy:
        tested = tables["assumptions"].sort_values(WHERE, kind="stable", ignore_index=True)
        tables["assumptions"] = tested.assign(tokens=tested.position + 1)
    return tables


def _assumptions(layer: Layer, t: int, heads: list[int], pools: Sizes, window: int) -> list[dict]:
    """A row per query head and pool at a position: the pool's largest weight, and its cone constant from below."""
    rows, attention = [], layer.attention[t][heads, -1]
    shared = [head * len(layer.value) // len(layer.query) for head in heads]
    v = layer.value[shared, : t + 1].double()  # [heads, tokens, dim]
    for size in pools:
        keys = bound.pool(attention, size, window)
        c_low = bound.cone((attention[:, None] @ v - v)[keys].view(len(heads), -1, v.shape[-1]))
        eps = attention.where(keys, 0).amax(1)
        for head, largest, low in zip(heads, eps.tolist(), c_low.tolist(), strict=True):
            row = {"layer": layer.number, "position": t, "head": head, "pool": pool_name(size)}
            rows.append(row | {"eps": largest, "c_low": low})
    return rows


def _scores(t: Triple, keys: Tensor, window: int, seed: int, policy: str) -> dict[Rule, Tensor]:
    """Scores of a triple's `keys` [strata, 20] by every rule, or the policy, without pooling: large = keep."""
    if policy:
        return {(policy, window): triples.scores_of(find(policy), t)[keys]}
    draw = torch.Generator().manual_seed(seed * 7919 + t.layer * 997 + t.head * 31 + t.position)
    random = torch.rand(TWENTY, dtype=torch.float64, generator=draw)
    scores = {("attention", 1): t.p} | {(name, 1): RULES[name](t.last(1)) for name in ("critical_kv", "andpro")}
    scores |= {(name, window): rule(t) for name, rule in RULES.items()}
    of_query = {("dropkv", 1): bound.single_cost(t.p, t.r)[keys], ("random", 1): random.expand(keys.shape)}
    return of_query | {rule: score[keys] for rule, score in scores.items()}


def _of_window(t: Triple, keys: Tensor) -> tuple[Tensor, Tensor]:
    """p [strata, window, 20] and r [strata, window, 20, dim] of the window's queries."""
    r = t.window_a[:, None, None] - t.v[keys]
    return t.window_p[:, keys].transpose(0, 1), r.transpose(0, 1)


def _records(t: Triple, sets: Mapping[str, Tensor], scores: Mapping[Rule, Tensor], device: torch.device) -> list[dict]:
    """A row per stratum, k, objective and rule: F of the query, and on the paper's strata also of the window, over the
    least of all subsets; and theorem 1's bound on this ratio for DropKV's choice for the query."""
    keys, rows = torch.stack(list(sets.values())), []  # [strata, 20]
    objectives = {
        "query": (t.p[keys][:, None], t.r[keys][:, None]),
        "window": _of_window(t, keys[: len(triples.STRATA)]),
    }
    score, low = torch.stack(list(scores.values())).to(device), bound.cone(t.r[keys].to(device))
    eps = t.p[keys].amax(-1).to(device)
    for k in KS:
        evicted, factors = bound.lowest(score, k), bound.factor(low, eps, k).tolist()  # [rules, strata, 20]
        for objective, of_keys in objectives.items():
            p, r = (x.to(device) for x in of_keys)
            ratios = bound.cost(p, r, evicted[:, : len(p)]) / bound.cost(p, r, bound.optimum(p, r, k))
            for (rule, queries), of_rule in zip(scores, ratios.tolist(), strict=True):
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
        ranks = pd.DataFrame({"andpro": p * (v @ a), "dropkv": bound.single_cost(p, r)}).rank()
        rows += ranks.assign(distance=r.norm(dim=-1) / a.norm(), stratum=stratum, **t.where).to_dict("records")
    return rows


def _weights(t: Triple, sets: Mapping[str, Tensor]) -> list[dict]:
    """A row per stratum of the paper, k and way to weigh a key."""
    keys, rows = torch.stack([sets[name] for name in triples.STRATA]), []
    p, after, of_window = t.p[keys][:, None], (t.r[keys] @ t.root)[:, None], _of_window(t, keys)
    for k in KS:
        evicted = {way: bound.lowest(cost(t)[keys], k) for way, cost in triples.WEIGHTS.items()}
        alone = {way: bound.lowest(cost(t.last(1))[keys], k) for way, cost in triples.WEIGHTS.items()}
        for way, chosen in evicted.items():
            moved = {"window": bound.cost(*of_window, chosen), "projected": bound.cost(p, after, chosen)}
            same = (alone[way] == alone["squared"]).all(-1)
            table = pd.DataFrame(moved | {"same_alone": same, "stratum": triples.STRATA})
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
