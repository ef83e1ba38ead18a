"""The studies of the chapter on DropKV's bound: tidy frames over triples of real prompts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from kvrepro.chapters.dropkv_bound import assumptions, bound, cone, triples
from kvrepro.chapters.dropkv_bound.settings import Given, Sampling, pool_name
from kvrepro.chapters.dropkv_bound.triples import RULES, Layer, Triple
from kvrepro.engine.policy import find
from kvrepro.engine.score.window import pooled
from kvrepro.errors import InputError
from kvrepro.experiment import data, run
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item

PARTS = ("assumptions", "records", "lemma", "budgets", "alignment", "weights")
WHERE = ["layer", "head", "position"]
KS, TWENTY = (10, 18), 20  # of so many keys these are evicted
Where = tuple[int, int, int]  # layer, head, position
Rule = tuple[str, int, int]  # its name, the queries that it observes, the kernel of its pooling


# ---------------------------------------------------------------- prompts of a given length


def questions(loaded: Loaded, items: str, n_items: int, settings: Given, filled: bool = False) -> list[Item]:
    """Items whose prompts have at most `settings.tokens` tokens of the model's own tokenizer; filled: and about as many
    (`data.filling`).

    items, n_items: as in `data.load_fitting`. Raises InputError, also if the answer or the pools find no room.
    """
    tokens, new = settings.tokens, settings.max_new_tokens
    if tokens + new > loaded.context:
        raise InputError(f"{tokens} + {new} tokens > context {loaded.context} of {loaded.name}: lower tokens")
    found = data.load_fitting(items, n_items, loaded.tokenizer, tokens, settings.seed)
    if filled:
        found = data.filling(found, items, loaded.tokenizer, tokens)
    for item, count in zip(found, _counts(loaded, found, tokens), strict=True):
        with data.named(item):
            _hold(settings.sampling, count)
    return found


def questions_by_length(loaded: Loaded, items: str, n_items: int, settings: Given) -> dict[int, list[Item]]:
    """Half as many `questions` at each of `settings.lengths`, which they fill. A length that the model or the items
    cannot have is left out, which is printed; none left: InputError. Messages that can neither be built nor cut to a
    length count at their longest."""
    n_items, lengths = data.AtMost(max(1, n_items // 2)), list(settings.lengths)
    room, given = loaded.context - settings.max_new_tokens, []
    if items.partition(":")[0] != "tinyworld":
        given = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed)
    if given and all(item.context is None for item in given):
        lengths = [max(_counts(loaded, given, 0))]
    few, reasons = replace(settings, pools=settings.pools[:2]), []
    found: dict[int, list[Item]] = {}
    for length in lengths:
        try:
            found[length] = questions(loaded, items, n_items, replace(few, tokens=length), filled=True)
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
    theorem 2's bound on the ratio for the half of the pool that DropKV evicts).
    records: triple, stratum, k, objective and rule (ratio, value, best; bound, eps, c_low, c_high for the query's F).
    lemma: triple (largest relative errors of lemma 1). budgets: layer, share kept, allocation, pooling, rounding
    (error: relative shift of the layer's output at the last query). alignment: the 20 most aligned keys of a triple
    (cosine, ranks by AnDPro and DropKV, 1 = evicted first; `_value`: without the attention weight). weights: triple,
    stratum, k and way to weigh a key (`triples.WEIGHTS`): shift of the query's output (query), of the window's (window)
    and of the query's after W_O (projected); same_alone: for the last query alone, does it choose DropKV's set?
    """

    assumptions: pd.DataFrame
    records: pd.DataFrame
    lemma: pd.DataFrame
    budgets: pd.DataFrame
    alignment: pd.DataFrame
    weights: pd.DataFrame


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
    """`Study.assumptions` for prompts of several lengths (column `length`), first two pools; `place`: of the query in
    the prompt, as a share.

    found: the study at `settings.tokens`, which is not run again; of it the prompts that fill these. items:
    `questions_by_length`; there, one ascent has to do where the cone condition fails.
    """
    few = replace(settings.sampling, pools=settings.pools[:2], steps=1)
    a = found.assumptions
    a = a[a.groupby("item").position.transform("max") + 1 >= data.FILLED * settings.tokens]
    frames = [a[a.pool.isin([pool_name(size) for size in few.pools])].assign(length=settings.tokens)]
    for length, prompts in items.items():
        if length != settings.tokens:
            given = {"s": few, "limit": length, "parts": ("assumptions",)}
            study = run.PerItem("dropkv_bound", "triples", _shared_out(prompts, 0), of_item, given)
            frames.append(run.run(study, loaded, settings)["assumptions"].assign(length=length))
    rows = pd.concat(frames, ignore_index=True)
    ends = rows.groupby(["item", "length"]).position.transform("max")  # the last query is the prompt's last token
    return rows.assign(place=((rows.position + 1) / (ends + 1)).round(2))


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
    positions = triples.spread(len(ids), s.positions, s.since)
    chosen = _chosen(_every(loaded, ids, s), ids, s, item[1])
    drawn: list[dict] = []

    def visit(layer: Layer) -> None:
        for one in (layer.triple(head, t) for number, head, t in chosen if number == layer.number):
            drawn.extend(_drawn(one, s, _sets(one, s), {(policy, s.window, 1): triples.scores_of(found, one)}))

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    return _records(drawn, s, loaded.model.device, compared=False).assign(item=item[0].id, task=item[0].task)


def _every(loaded: Loaded, ids: Sequence[int], s: Sampling) -> list[Where]:
    """The triples of a prompt."""
    shape = loaded.model.config.get_text_config()
    layers, heads = range(shape.num_hidden_layers), range(shape.num_attention_heads)
    positions = triples.spread(len(ids), s.positions, s.since)
    return [(layer, head, t) for layer in layers for head in heads for t in positions]


def _chosen(every: Sequence[Where], ids: Sequence[int], s: Sampling, take: int) -> list[Where]:
    """`take` of a prompt's triples, drawn at random, or all it has; in order."""
    seed = np.random.default_rng([s.seed, len(ids), *ids[-8:]])
    return [every[i] for i in sorted(seed.choice(len(every), min(take, len(every)), replace=False))]


def prompt(
    loaded: Loaded, ids: Sequence[int], s: Sampling, take: int, parts: Sequence[str] = PARTS
) -> dict[str, pd.DataFrame]:
    """The frames of one prompt; `take` of its triples, or all it has, enter the enumeration, and `s.cones` of them and
    these the study of the assumptions."""
    positions, every = triples.spread(len(ids), s.positions, s.since), _every(loaded, ids, s)
    chosen = _chosen(every, ids, s, take if "records" in parts else 0)
    even = {every[i] for i in assumptions.evenly(len(every), s.cones)}
    asked = [where for where in every if where in even.union(chosen)]
    rows: dict[str, list[dict]] = {name: [] for name in PARTS}
    drawn: list[dict] = []
    studied = [assumptions.Triples(t, s, len(every)) for t in positions if "assumptions" in parts]

    def visit(layer: Layer) -> None:
        for of_position in studied:
            of_position.add(
                layer, [head for number, head, t in asked if (number, t) == (layer.number, of_position.position)]
            )
        for one in (layer.triple(head, t) for number, head, t in chosen if number == layer.number):
            rows["lemma"].append(one.where | lemma_error(one, s.seed))
            sets = _sets(one, s)
            drawn.extend(_drawn(one, s, sets))
            rows["alignment"] += _alignment(one, sets["aligned"])
            rows["weights"] += _weights(one, sets)
        if "budgets" in parts:
            rows["budgets"] += _budgets(layer, s)

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    frames = {name: pd.DataFrame(rows[name]) for name in parts}
    if studied:
        found = pd.concat([of_position.frame() for of_position in studied if of_position.held])
        frames["assumptions"] = found.sort_values(WHERE, kind="stable", ignore_index=True)
    return frames | ({"records": _records(drawn, s, loaded.model.device)} if "records" in parts else {})


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
        scores[name, s.window, s.kernel] = pooled(scores[name, s.window, 1], "max", s.kernel)
    return scores


def _sets(t: Triple, s: Sampling) -> dict[str, Tensor]:
    """Per stratum of a triple its 20 keys."""
    return triples.strata(t, bound.pool(t.p, s.pools[0], s.window), TWENTY, s.seed)


def _drawn(
    t: Triple, s: Sampling, sets: Mapping[str, Tensor], other: Mapping[Rule, Tensor] | None = None
) -> list[dict]:
    """Per stratum of a triple its 20 keys: p, r and every rule's scores on them, or those of another policy."""
    found, scores = [], _scores(t, s) if other is None else other
    for stratum, keys in sets.items():
        p, r = t.p[keys], t.r[keys]
        exact = {("dropkv", 1, 1): bound.single_cost(p, r), ("random", 1, 1): _lot(t, len(keys), s.seed)}
        here = (exact if other is None else {}) | {rule: score[keys] for rule, score in scores.items()}
        window = {"p_window": t.window_p[:, keys], "r_window": t.window_a[:, None] - t.v[keys]}
        found.append({"where": t.where | {"stratum": stratum}, "p": p, "r": r, "scores": here} | window)
    return found


def _lot(t: Triple, count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed * 7919 + t.layer * 997 + t.head * 31 + t.position)
    return torch.rand(count, dtype=torch.float64, generator=draw)


def _records(drawn: list[dict], s: Sampling, device: torch.device, compared: bool = True) -> pd.DataFrame:
    """A row per triple, stratum, k, objective and rule; F of the query, on the paper's strata also of the window.

    compared: with the optimum over all subsets, and theorem 1's bound on the ratio to it.
    """
    if not drawn:
        return pd.DataFrame()
    p, r = _stack(drawn, "p", device), _stack(drawn, "r", device)
    plain = [one for one in drawn if one["where"]["stratum"] in triples.STRATA]
    pw, rw = _stack(plain, "p_window", device), _stack(plain, "r_window", device)
    query, window, frames = partial(bound.joint_cost, p, r), partial(bound.window_cost, pw, rw), []
    found, eps = cone.cone(r, steps=s.steps) if compared else None, p.amax(-1)
    for k in KS:
        facts, facts_of_window = {}, {}
        if found is not None:
            facts = {"best": bound.optimum(p, r, k).value, "eps": eps, "c_low": found.low, "c_high": found.high}
            facts |= {"bound": bound.factor(found.low, eps, k)}
            facts_of_window = {"best": bound.window_optimum(pw, rw, k).value}
        frames += _by_rule(drawn, k, "query", query, facts, device)
        frames += _by_rule(plain, k, "window", window, facts_of_window, device)
    return pd.concat(frames, ignore_index=True)


def _stack(drawn: list[dict], name: str, device: torch.device) -> Tensor:
    return torch.stack([one[name] for one in drawn]).to(device)


def _by_rule(
    drawn: list[dict], k: int, objective: str, cost: Callable[[Tensor], Tensor], facts: Mapping[str, Tensor],
    device: torch.device,
) -> list[pd.DataFrame]:  # fmt: skip
    base = pd.DataFrame([one["where"] for one in drawn]).assign(k=k, objective=objective)
    base = base.assign(**{name: values.cpu().numpy() for name, values in facts.items()})
    frames = []
    for rule, queries, kernel in drawn[0]["scores"]:
        score = torch.stack([one["scores"][rule, queries, kernel] for one in drawn])
        value = cost(bound.smallest(score.to(device), k))
        frame = base.assign(rule=rule, queries=queries, kernel=kernel, value=value.cpu().numpy())
        frames.append(frame.assign(ratio=(value / facts["best"]).cpu().numpy()) if facts else frame)
    return frames


def _alignment(t: Triple, keys: Tensor) -> list[dict]:
    """Per key of the aligned stratum: rank by AnDPro and DropKV for this query (1 = evicted first), whole and with the
    attention weight taken off, <a, v_j> and ||a - v_j||."""
    a, v, r, p = t.window_a[-1], t.v[keys], t.r[keys], t.p[keys]
    along, off = v @ a, r.norm(dim=-1)
    scores = {"andpro": p * along, "dropkv": bound.single_cost(p, r), "andpro_value": along, "dropkv_value": off}
    ranks = {name: scipy_stats.rankdata(score.numpy()) for name, score in scores.items()}
    cosine = along / (v.norm(dim=-1) * a.norm())
    return pd.DataFrame({"cosine": cosine.numpy(), **ranks}).assign(**t.where).to_dict("records")


def _weights(t: Triple, sets: Mapping[str, Tensor]) -> list[dict]:
    """Per stratum of the paper, k and way to weigh a key: what the chosen set moves, and whether it is DropKV's for the
    last query alone."""
    found = []
    ways = {name: (way(t), way(t.last(1))) for name, way in triples.WEIGHTS.items()}
    for stratum, keys in ((name, sets[name]) for name in triples.STRATA):
        p, r, after = t.p[keys], t.r[keys], t.projected(t.r[keys])
        pw, rw = t.window_p[:, keys], t.window_a[:, None] - t.v[keys]
        for k in KS:
            gone = {name: [bound.smallest(cost[keys], k) for cost in costs] for name, costs in ways.items()}
            for name, (chosen, alone) in gone.items():
                moved = {"query": bound.joint_cost(p, r, chosen), "window": bound.window_cost(pw, rw, chosen)}
                moved["projected"] = bound.joint_cost(p, after, chosen)
                row = t.where | {"stratum": stratum, "k": k, "way": name, **{n: x.item() for n, x in moved.items()}}
                found.append(row | {"same_alone": torch.equal(alone, gone["squared"][1])})
    return found


# ---------------------------------------------------------------- budgets over the heads of a layer


def _budgets(layer: Layer, s: Sampling) -> list[dict]:
    """Relative shift of one layer's output at the last query: uniform budgets of its KV heads against adaptive ones.

    Scores as in the public code: mean over the group of `triples.dropkv`, pooled; the window always stays. Adaptive:
    the layer's budget goes to its highest scores, whichever head they are in.
    """
    last, heads = max(layer.positions), len(layer.key)
    p, a, v = layer.attention(last)[:, -1], layer.outputs(last)[:, -1], layer.value[:, : last + 1].double()
    tokens, rows, found = last + 1, [], []
    costs = {bf16: layer.cost(last, bf16=bf16).view(heads, layer.group, tokens).mean(1) for bf16 in (False, True)}
    for pooling, bf16 in (("max", False), ("average", False), ("none", False), ("max", True)):
        score = pooled(costs[bf16], pooling, s.kernel)
        score = score[:, : tokens - s.window]
        for share in s.shares:
            gone = tokens - max(int(share * tokens), s.window)
            uniform, adaptive = torch.zeros(2, heads, tokens, dtype=torch.bool, device=p.device)
            uniform.scatter_(1, bound.smallest(score, gone), True)
            chosen = bound.smallest(score.flatten(), gone * heads)
            adaptive[chosen // score.shape[1], chosen % score.shape[1]] = True
            for allocation, evicted in (("uniform", uniform), ("adaptive", adaptive)):
                row = {"layer": layer.number, "share": share, "allocation": allocation, "pooling": pooling}
                rows.append(row | {"bf16": bf16})
                found.append(torch.stack([_shift(p, a, v, evicted), evicted.sum().double()]))
    values = zip(rows, torch.stack(found).tolist(), strict=True)  # one transfer
    return [row | {"error": error, "evicted": int(count)} for row, (error, count) in values]


def _shift(p: Tensor, a: Tensor, v: Tensor, evicted: Tensor) -> Tensor:
    """||Delta|| of a layer's output for one query, over ||a||, by lemma 1 without a residual for every key.

    p [heads, tokens], a [heads, dim], v [kv_heads, tokens, dim], evicted: bool [kv_heads, tokens].
    """
    heads = len(v)
    gone = p.view(heads, -1, p.shape[1]) * evicted[:, None]
    mass = gone.sum(-1, keepdim=True)
    moved = (mass * a.view(heads, -1, a.shape[1]) - gone @ v) / (1 - mass)
    return (moved.square().sum() / a.square().sum()).sqrt()
