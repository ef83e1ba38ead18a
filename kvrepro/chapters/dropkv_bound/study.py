"""The studies of the chapter on DropKV's bound: tidy frames over triples of real prompts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound, cone, triples
from kvrepro.chapters.dropkv_bound.settings import Given, Sampling, pool_name
from kvrepro.chapters.dropkv_bound.triples import RULES, Triple
from kvrepro.engine.policy import find
from kvrepro.errors import InputError
from kvrepro.experiment import data, run
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item

PARTS = ("assumptions", "records", "lemma", "budgets", "alignment")
WHERE = ["layer", "head", "position"]
KS, TWENTY = (10, 18), 20  # of so many keys these are evicted
MU_AT = 0.1  # c at which the pool's mass outside the cone is reported
Rule = tuple[str, int, int]  # its name, the queries that it observes, the kernel of its pooling


# ---------------------------------------------------------------- prompts of a given length


def questions(loaded: Loaded, items: str, n_items: int, settings: Given) -> list[Item]:
    """Items whose prompts have at most `settings.tokens` tokens of the model's own tokenizer.

    items, n_items: as in `data.load_fitting`. Raises InputError, also if the answer or the pools find no room.
    """
    tokens, new = settings.tokens, settings.max_new_tokens
    if tokens + new > loaded.context:
        raise InputError(f"{tokens} + {new} tokens > context {loaded.context} of {loaded.name}: lower tokens")
    found = data.load_fitting(items, n_items, loaded.tokenizer, tokens, settings.seed)
    _hold(settings.sampling, min(_counts(loaded, found, tokens)))
    return found


def questions_by_length(loaded: Loaded, items: str, n_items: int, settings: Given) -> dict[int, list[Item]]:
    """Half as many `questions` at each of `settings.lengths`. A length that the model or the items cannot have is left
    out, which is printed; none left: InputError. Messages that can neither be built nor cut to a length count at their
    longest."""
    n_items, lengths = max(1, n_items // 2), list(settings.lengths)
    room, given = loaded.context - settings.max_new_tokens, []
    if items.partition(":")[0] != "tinyworld":
        given = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed)
    if given and all(item.context is None for item in given):
        lengths = [max(_counts(loaded, given, 0))]
    few, reasons = replace(settings, pools=settings.pools[:2], positions=1), []
    found: dict[int, list[Item]] = {}
    for length in lengths:
        try:
            found[length] = questions(loaded, items, n_items, replace(few, tokens=length))
        except InputError as error:
            reasons.append(f"length {length} is left out: {error}")
    if not found:
        raise InputError(reasons[0])
    print(*reasons, sep="\n", end="\n" if reasons else "")
    return found


def _counts(loaded: Loaded, items: Sequence[Item], tokens: int) -> list[int]:
    """Prompt tokens of each item; a passage is cut to `tokens`, other messages are as long as they are."""
    limits = [tokens if item.context is not None else 10**9 for item in items]
    return [
        len(data.build_prompt(item, loaded.tokenizer, limit).ids) for item, limit in zip(items, limits, strict=True)
    ]


def _hold(s: Sampling, tokens: int) -> None:
    """Do the pools find their keys before the window of the earliest query?"""
    keys = triples.spread(tokens, s.positions, s.since)[0] + 1 - s.window
    largest = max([size for size in s.pools if isinstance(size, int)], default=1)
    if keys < largest:
        raise InputError(f"{keys} keys before a query's window < pool of {largest}: longer prompts, or smaller pools")
    least = min(size if isinstance(size, int) else math.floor(size * keys) for size in s.pools)
    if least < TWENTY:
        raise InputError(f"a pool of {least} of {keys} keys < {TWENTY} to draw: longer prompts, or larger pools")


# ---------------------------------------------------------------- the run


@dataclass
class Study:
    """Frames of one run, a row per ... in each.

    assumptions: triple and pool (eps, c_low, c_high; mu_share: the pool's mass outside a cone of c = 0.1; guarantee:
    theorem 2's bound on the ratio for the half of the pool that DropKV evicts, at robust_c and robust_mu).
    records: triple, stratum, k, objective and rule (ratio, value, best; bound, eps, c_low, c_high for the query's F).
    lemma: triple (largest relative errors of lemma 1). budgets: layer, share kept, allocation, pooling, rounding
    (error: relative shift of the layer's output at the last query). alignment: the 20 most aligned keys of a triple
    (cosine, ranks by AnDPro and DropKV, 1 = evicted first; `_value`: without the attention weight).
    """

    assumptions: pd.DataFrame
    records: pd.DataFrame
    lemma: pd.DataFrame
    budgets: pd.DataFrame
    alignment: pd.DataFrame


def triples_of(loaded: Loaded, items: Sequence[Item], settings: Given, policies: Sequence[str] = ()) -> Study:
    """All frames over the items' prompts, passages cut to `settings.tokens`.

    The records are those of table 11's rules, and of what else is among `policies` and can choose for a single query.
    """
    given = {"s": settings.sampling, "limit": settings.tokens}
    named = _shared_out(items, settings.enumerated)
    study = run.PerItem("dropkv_bound", "triples", named, of_item, given | {"parts": PARTS})
    found = Study(**run.run(study, loaded, settings))
    where = ["item", *WHERE, "stratum", "k", "objective"]
    of_dropkv = found.records.query("rule == 'dropkv' and queries == 1")
    for name in dict.fromkeys(policies):
        if name not in RULES and not triples.why_no_score(find(name)):
            other = run.PerItem("dropkv_bound", "others", named, other_of_item, given | {"policy": name})
            rows = run.run(other, loaded, settings).merge(of_dropkv[[*where, "best"]], on=where)
            found.records = pd.concat([found.records, rows.assign(ratio=rows.value / rows.best)], ignore_index=True)
    return found


def by_length(loaded: Loaded, found: Study, items: Mapping[int, Sequence[Item]], settings: Given) -> pd.DataFrame:
    """`Study.assumptions` for prompts of several lengths (column `length`), last query, first two pools.

    found: the study at `settings.tokens`, which is not run again. items: `questions_by_length`; there, one ascent has
    to do where the cone condition fails.
    """
    few = replace(settings.sampling, pools=settings.pools[:2], positions=1, steps=1)
    a = found.assumptions
    last = a.position == a.groupby("item").position.transform("max")
    frames = [a[last & a.pool.isin([pool_name(size) for size in few.pools])].assign(length=settings.tokens)]
    for length, prompts in items.items():
        if length != settings.tokens:
            given = {"s": few, "limit": length, "parts": ("assumptions",)}
            study = run.PerItem("dropkv_bound", "triples", _shared_out(prompts, 0), of_item, given)
            frames.append(run.run(study, loaded, settings)["assumptions"].assign(length=length))
    return pd.concat(frames, ignore_index=True)


def _shared_out(items: Sequence[Item], total: int) -> dict[str, tuple[Item, int]]:
    """Each item with its part of so many triples."""
    n = len(items)
    return {item.id: (item, total * (i + 1) // n - total * i // n) for i, item in enumerate(items)}


def of_item(
    loaded: Loaded, item: tuple[Item, int], s: Sampling, limit: int, parts: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """The frames of one item, of which so many triples enter the enumeration."""
    ids = data.build_prompt(item[0], loaded.tokenizer, limit).ids
    found = prompt(loaded, ids, s, item[1], parts)
    return {name: frame.assign(item=item[0].id, task=item[0].task) for name, frame in found.items()}


def other_of_item(loaded: Loaded, item: tuple[Item, int], policy: str, s: Sampling, limit: int) -> pd.DataFrame:
    """Records of a policy that is not of table 11, on the same keys as `of_item`'s; F only."""
    ids, found = data.build_prompt(item[0], loaded.tokenizer, limit).ids, find(policy)
    positions, chosen = _chosen(loaded, ids, s, item[1])
    drawn: list[dict] = []

    def visit(layer: Iterator[Triple]) -> None:
        for t in layer:
            if (t.layer, t.head, t.position) in chosen:
                drawn.extend(_drawn(t, s, {(policy, s.window, 1): triples.scores_of(found, t)}))

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    return _records(drawn, s, compared=False).assign(item=item[0].id, task=item[0].task)


def _chosen(loaded: Loaded, ids: Sequence[int], s: Sampling, take: int) -> tuple[list[int], set[tuple[int, int, int]]]:
    """The query positions of a prompt, and `take` of its triples, drawn at random, or all it has."""
    shape = loaded.model.config.get_text_config()
    positions = triples.spread(len(ids), s.positions, s.since)
    layers, heads = range(shape.num_hidden_layers), range(shape.num_attention_heads)
    every = [(layer, head, t) for layer in layers for head in heads for t in positions]
    seed = np.random.default_rng([s.seed, len(ids), *ids[-8:]])
    return positions, {every[i] for i in seed.choice(len(every), min(take, len(every)), replace=False)}


def prompt(
    loaded: Loaded, ids: Sequence[int], s: Sampling, take: int, parts: Sequence[str] = PARTS
) -> dict[str, pd.DataFrame]:
    """The frames of one prompt; `take` of its triples, or all it has, enter the enumeration."""
    shape = loaded.model.config.get_text_config()
    positions, chosen = _chosen(loaded, ids, s, take if "records" in parts else 0)
    rows: dict[str, list[dict]] = {name: [] for name in PARTS}
    drawn: list[dict] = []

    def visit(layer: Iterator[Triple]) -> None:
        last = []
        for t in layer:
            rows["assumptions"] += _assumptions(t, s)
            if t.position == positions[-1]:
                last.append(t)
            if (t.layer, t.head, t.position) in chosen:
                rows["lemma"].append(t.where | lemma_error(t, s.seed))
                drawn.extend(_drawn(t, s))
                rows["alignment"] += _alignment(t, s)
        if "budgets" in parts:
            rows["budgets"] += _budgets(last, shape.num_attention_heads // shape.num_key_value_heads, s)

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    frames = {name: pd.DataFrame(rows[name]) for name in parts}
    return frames | ({"records": _records(drawn, s)} if "records" in parts else {})


def _assumptions(t: Triple, s: Sampling) -> list[dict]:
    rows = []
    for size in s.pools:
        keys = bound.pool(t.p, size, s.window)
        p, r = t.p[keys], t.r[keys]
        c = cone.cone(r, steps=s.steps)
        evicted = bound.smallest(bound.single_cost(p, r), len(keys) // 2)
        proxy = bound.joint_cost(p, r, evicted)
        robust = bound.robust(p, r, c, proxy, len(evicted))
        at = torch.tensor([MU_AT], dtype=torch.float64)
        mu = min(bound.outside(p, r, u, at).item() for u in bound.directions(p, r, c))
        row = {"tokens": len(t.p), "pool": pool_name(size), "pool_size": len(keys), "eps": p.max().item()}
        row |= {"c_low": c.low.item(), "c_high": c.high.item(), "mu_share": mu / (p * r.norm(dim=-1)).sum().item()}
        row |= {"guarantee": (proxy / robust.lower).item()}
        rows.append(t.where | row | {"robust_c": robust.c.item(), "robust_mu": robust.share.item()})
    return rows


def lemma_error(t: Triple, seed: int = 0) -> dict:
    """Largest error of lemma 1, relative to ||a|| / (1 - P_J): evicting one of the 64 with most, or half of all.

    The division by what is left amplifies rounding in the definition as in the lemma; so it is taken off.
    """
    one = torch.nn.functional.one_hot(t.p.topk(min(64, len(t.p))).indices, len(t.p)).bool()
    half = torch.rand(16, len(t.p), generator=torch.Generator().manual_seed(seed)) < 0.5
    found = {"tokens": len(t.p)}
    for name, evicted in (("single", one), ("joint", half)):
        error = (bound.shift(t.p, t.v, evicted) - bound.shift_by_definition(t.p, t.v, evicted)).norm(dim=-1)
        left = (t.p * ~evicted).sum(-1)
        found[name] = (error * left / t.window_a[-1].norm()).max().item()
    return found


# ---------------------------------------------------------------- realised ratio


def _scores(t: Triple, s: Sampling) -> dict[Rule, Tensor]:
    """Scores [tokens] of every rule by (rule, observed queries, kernel of its pooling); large = keep."""
    scores = {("attention", 1, 1): t.p} | {(name, 1, 1): RULES[name](t.last(1)) for name in ("critical_kv", "andpro")}
    scores |= {(name, s.window, 1): rule(t) for name, rule in RULES.items()}
    for name in ("snapkv", "dropkv"):
        scores[name, s.window, s.kernel] = triples.pooled(scores[name, s.window, 1], s.kernel)
    return scores


def _drawn(t: Triple, s: Sampling, other: Mapping[Rule, Tensor] | None = None) -> list[dict]:
    """Per stratum of a triple its 20 keys: p, r and every rule's scores on them, or those of another policy."""
    found, scores = [], _scores(t, s) if other is None else other
    for stratum, keys in triples.strata(t, bound.pool(t.p, s.pools[0], s.window), TWENTY, s.seed).items():
        p, r = t.p[keys], t.r[keys]
        exact = {("dropkv", 1, 1): bound.single_cost(p, r), ("random", 1, 1): _lot(t, len(keys), s.seed)}
        here = (exact if other is None else {}) | {rule: score[keys] for rule, score in scores.items()}
        window = {"p_window": t.window_p[:, keys], "r_window": t.window_a[:, None] - t.v[keys]}
        found.append({"where": t.where | {"stratum": stratum}, "p": p, "r": r, "scores": here} | window)
    return found


def _lot(t: Triple, count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed * 7919 + t.layer * 997 + t.head * 31 + t.position)
    return torch.rand(count, dtype=torch.float64, generator=draw)


def _records(drawn: list[dict], s: Sampling, compared: bool = True) -> pd.DataFrame:
    """A row per triple, stratum, k, objective and rule; F of the query, on the paper's strata also of the window.

    compared: with the optimum over all subsets, and theorem 1's bound on the ratio to it.
    """
    if not drawn:
        return pd.DataFrame()
    p, r = _stack(drawn, "p"), _stack(drawn, "r")
    plain = [one for one in drawn if one["where"]["stratum"] in triples.STRATA]
    pw, rw = _stack(plain, "p_window"), _stack(plain, "r_window")
    query, window, frames = partial(bound.joint_cost, p, r), partial(bound.window_cost, pw, rw), []
    found, eps = cone.cone(r, steps=s.steps) if compared else None, p.amax(-1)
    for k in KS:
        facts, facts_of_window = {}, {}
        if compared:
            facts = {"best": bound.optimum(p, r, k).value, "eps": eps, "c_low": found.low, "c_high": found.high}
            facts |= {"bound": bound.factor(found.low, eps, k)}
            facts_of_window = {"best": bound.window_optimum(pw, rw, k).value}
        frames += _by_rule(drawn, k, "query", query, facts)
        frames += _by_rule(plain, k, "window", window, facts_of_window)
    return pd.concat(frames, ignore_index=True)


def _stack(drawn: list[dict], name: str) -> Tensor:
    return torch.stack([one[name] for one in drawn])


def _by_rule(
    drawn: list[dict], k: int, objective: str, cost: Callable[[Tensor], Tensor], facts: Mapping[str, Tensor]
) -> list[pd.DataFrame]:
    base = pd.DataFrame([one["where"] for one in drawn]).assign(k=k, objective=objective)
    base = base.assign(**{name: values.numpy() for name, values in facts.items()})
    frames = []
    for rule, queries, kernel in drawn[0]["scores"]:
        score = torch.stack([one["scores"][rule, queries, kernel] for one in drawn])
        value = cost(bound.smallest(score, k))
        frame = base.assign(rule=rule, queries=queries, kernel=kernel, value=value.numpy())
        frames.append(frame.assign(ratio=(value / facts["best"]).numpy()) if facts else frame)
    return frames


def _alignment(t: Triple, s: Sampling) -> list[dict]:
    """Per key of the aligned stratum: rank by AnDPro and DropKV for this query (1 = evicted first), whole and with the
    attention weight taken off, <a, v_j> and ||a - v_j||."""
    keys = triples.strata(t, bound.pool(t.p, s.pools[0], s.window), TWENTY, s.seed)["aligned"]
    a, v, r, p = t.window_a[-1], t.v[keys], t.r[keys], t.p[keys]
    along, off = v @ a, r.norm(dim=-1)
    scores = {"andpro": p * along, "dropkv": bound.single_cost(p, r), "andpro_value": along, "dropkv_value": off}
    ranks = {name: scipy_stats.rankdata(score.numpy()) for name, score in scores.items()}
    cosine = along / (v.norm(dim=-1) * a.norm())
    return pd.DataFrame({"cosine": cosine.numpy(), **ranks}).assign(**t.where).to_dict("records")


# ---------------------------------------------------------------- budgets over the heads of a layer


def _budgets(last: list[Triple], group: int, s: Sampling) -> list[dict]:
    """Relative shift of one layer's output at the last query: uniform budgets of its KV heads against adaptive ones.

    Scores as in the public code: mean over the group of `triples.dropkv`, pooled; the window always stays. Adaptive:
    the layer's budget goes to its highest scores, whichever head they are in.
    """
    rows, heads, tokens = [], len(last) // group, len(last[0].p)
    whole = sum(t.window_a[-1].square().sum() for t in last)
    costs = {bf16: torch.stack([triples.dropkv(t, bf16=bf16) for t in last]) for bf16 in (False, True)}
    for pooling, bf16 in (("max", False), ("average", False), ("none", False), ("max", True)):
        score = costs[bf16].view(heads, group, tokens).mean(1)
        score = score if pooling == "none" else triples.pooled(score, s.kernel, pooling)
        score = score[:, : tokens - s.window]
        for share in s.shares:
            gone = tokens - max(int(share * tokens), s.window)
            uniform, adaptive = torch.zeros(2, heads, tokens, dtype=torch.bool)
            uniform.scatter_(1, bound.smallest(score, gone), True)
            chosen = bound.smallest(score.flatten(), gone * heads)
            adaptive[chosen // score.shape[1], chosen % score.shape[1]] = True
            for allocation, evicted in (("uniform", uniform), ("adaptive", adaptive)):
                moved = sum(_moved(t, evicted[t.head // group]) for t in last)
                row = {"layer": last[0].layer, "share": share, "allocation": allocation, "pooling": pooling}
                row |= {"bf16": bf16, "error": (moved / whole).sqrt().item(), "evicted": int(evicted.sum())}
                rows.append(row)
    return rows


def _moved(t: Triple, evicted: Tensor) -> Tensor:
    """||Delta(J)||^2 of the query, by lemma 1 without a residual for every key."""
    gone = t.p * evicted
    return ((gone.sum() * t.window_a[-1] - gone @ t.v) / (1 - gone.sum())).square().sum()
