"""The studies of the chapter on DropKV's bound: tidy frames over triples (layer, head, position) of real prompts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound, triples
from kvrepro.chapters.dropkv_bound.settings import Sampling, Settings, pool_name
from kvrepro.chapters.dropkv_bound.triples import RULES, Layer, Triple
from kvrepro.engine.policy import find, is_own
from kvrepro.errors import InputError
from kvrepro.experiment import data, run
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item

PARTS = ("assumptions", "records", "alignment", "weights")
WHERE = ["layer", "head", "position"]
KS, TWENTY = (10, 18), 20  # 10 or 18 of 20 keys are evicted
Rule = tuple[str, int]  # its name, and the queries that it observes


# ---------------------------------------------------------------- prompts of a given length


def questions(loaded: Loaded, items: str, n_items: int, settings: Settings, filled: bool = False) -> list[Item]:
    """Items whose prompts have at most `settings.tokens` tokens of the model's own tokenizer.

    items, n_items: as in `data.load_fitting`. filled: take prompts of nearly that length only (`data.filling`).
    Prompts that are too short for the pools are left out (`data.usable`). Raises InputError, also if the prompts leave
    no room for the answer.
    """
    tokens, answer_tokens = settings.tokens, settings.max_new_tokens
    if tokens + answer_tokens > loaded.context:
        raise InputError(f"{tokens} + {answer_tokens} tokens > context {loaded.context} of {loaded.name}: lower tokens")
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, tokens, settings.seed)
    if filled:
        fitting = data.filling(fitting, items, loaded.tokenizer, tokens)

    def check_length(item: Item) -> None:
        with data.named(item):
            _check_pools(settings.sampling, *_prompt_tokens(loaded, [item], tokens))

    return data.usable(fitting, "dropkv_bound", check_length)


def questions_by_length(loaded: Loaded, items: str, n_items: int, settings: Settings) -> dict[int, list[Item]]:
    """Half of `n_items` as `questions` that fill each of `settings.lengths`, by length.

    A length that the model or the items cannot have is left out, and this is printed; InputError if none is left.
    Messages can neither be built nor cut to a length: they have one length, that of the longest.
    """
    n_items, lengths = data.AtMost(max(1, n_items // 2)), list(settings.lengths)
    room, fitting = loaded.context - settings.max_new_tokens, []
    if items.partition(":")[0] != "tinyworld":
        fitting = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed)
    if fitting and all(item.context is None for item in fitting):
        lengths = [max(_prompt_tokens(loaded, fitting, 0))]
    two_pools, reasons = replace(settings, pools=settings.pools[:2]), []
    prompts_by_length: dict[int, list[Item]] = {}
    for length in lengths:
        try:
            prompts_by_length[length] = questions(
                loaded, items, n_items, replace(two_pools, tokens=length), filled=True
            )
        except InputError as error:
            reasons.append(f"length {length} is left out: {error}")
    if not prompts_by_length:
        raise InputError(reasons[0])
    print(*reasons, sep="\n", end="\n" if reasons else "")
    return prompts_by_length


def _prompt_tokens(loaded: Loaded, items: Sequence[Item], tokens: int) -> list[int]:
    """Prompt tokens of each item; a passage is cut to `tokens`, other messages are as long as they are."""
    limits = ((item, tokens if item.context is not None else 10**9) for item in items)
    return [len(data.build_prompt(item, loaded.tokenizer, limit).ids) for item, limit in limits]


def _check_pools(s: Sampling, tokens: int) -> None:
    """Raise InputError if a pool has too few keys before the window of the earliest query of `tokens`."""
    keys = s.queries(tokens)[0] + 1 - s.window
    largest = max([size for size in s.pools if isinstance(size, int)], default=1)
    if keys < largest:
        raise InputError(f"{keys} keys before a query's window < pool of {largest}: longer prompts, or smaller pools")
    least = min(size if isinstance(size, int) else math.floor(size * keys) for size in s.pools)
    if least < TWENTY:
        raise InputError(f"a pool of {least} of {keys} keys < {TWENTY} to draw: longer prompts, or larger pools")


# ---------------------------------------------------------------- the run


@dataclass
class Study:
    """The frames of one run; the name of each, what one of its rows is about, and (in brackets) its other columns.

    assumptions: a triple and a pool (eps, c_low, c_high).
    records: a triple, stratum, k, objective and rule (ratio to the optimum; bound for the query's F).
    alignment: one of the 20 nearest or most aligned keys of a triple (stratum; distance: ||a - v|| / ||a||; ranks by
    AnDPro and DropKV, 1 = evicted first).
    weights: a triple, stratum, k and way to weigh a key, `triples.WEIGHTS` (shift of the window's outputs: window, and
    of the query's after W_O: projected; same_alone: does the way choose DropKV's set for the last query alone?).
    """

    assumptions: pd.DataFrame
    records: pd.DataFrame
    alignment: pd.DataFrame
    weights: pd.DataFrame


def triples_of(loaded: Loaded, items: Sequence[Item], settings: Settings, policies: Sequence[str] = ()) -> Study:
    """All frames over the items' prompts, passages cut to `settings.tokens`.

    The records cover table 11's rules, and those of `policies` that can choose for a single query.
    """
    given = {"s": settings.sampling, "limit": settings.tokens}
    shared = _with_shares(items, settings.enumerated)
    plan = run.PerItem("dropkv_bound", "triples", shared, of_item, given | {"parts": PARTS})
    study = Study(**run.run(plan, loaded, settings))
    for name in dict.fromkeys(policies):
        if name not in RULES and not triples.why_no_score(find(name)):
            more = {"parts": ("records",), "policy": name}
            try:
                rows = run.run(run.PerItem("dropkv_bound", "others", shared, of_item, given | more), loaded, settings)
            except run.StudyFailed as error:
                if not is_own(name):
                    raise
                print(f"{name} is left out of the records: {error}")
                continue
            study.records = pd.concat([study.records, rows["records"]], ignore_index=True)
    return study


def _with_shares(items: Sequence[Item], total: int) -> dict[str, tuple[Item, int]]:
    """By id, each item and the number of its triples that enter the enumeration, `total` over all items."""
    n = len(items)
    return {item.id: (item, total * (i + 1) // n - total * i // n) for i, item in enumerate(items)}


def of_item(
    loaded: Loaded, item: tuple[Item, int], s: Sampling, limit: int, parts: Sequence[str], policy: str = ""
) -> dict[str, pd.DataFrame]:
    """`prompt` of one item, as `_with_shares` has it."""
    ids = data.build_prompt(item[0], loaded.tokenizer, limit).ids
    frames = prompt(loaded, ids, s, item[1], parts, policy)
    return {name: frame.assign(item=item[0].id, task=item[0].task) for name, frame in frames.items()}


def prompt(
    loaded: Loaded, ids: Sequence[int], s: Sampling, take: int, parts: Sequence[str] = PARTS, policy: str = ""
) -> dict[str, pd.DataFrame]:
    """The frames of one prompt. `take` of its triples, drawn at random, or all it has, enter the enumeration; these,
    and `s.cones` spread evenly over all, enter the study of the assumptions.

    policy: the records are about its choice among the same keys, in place of the rules of table 11.
    """
    shape, positions = loaded.model.config.get_text_config(), s.queries(len(ids))
    every = list(product(range(shape.num_hidden_layers), range(shape.num_attention_heads), positions))
    draw = np.random.default_rng([s.seed, len(ids), *ids[-8:]])
    sampled = [every[i] for i in sorted(draw.choice(len(every), min(take, len(every)), replace=False))]
    with_cone = {every[i] for i in _evenly(len(every), s.cones)}.union(sampled) if "assumptions" in parts else set()
    rows: dict[str, list[dict]] = {name: [] for name in PARTS}

    def visit(layer: Layer) -> None:
        for t in positions:
            heads = [head for head in range(len(layer.query)) if (layer.number, head, t) in with_cone]
            rows["assumptions"] += _assumptions(layer, t, heads, s) if heads else []
        for triple in (layer.triple(head, t) for number, head, t in sampled if number == layer.number):
            sets = triples.strata(triple, bound.pool(triple.p, s.pools[0], s.window), TWENTY, s.seed)
            rows["records"] += _records(triple, sets, s, loaded.model.device, policy)
            if not policy:
                rows["alignment"] += _alignment(triple, sets)
                rows["weights"] += _weights(triple, sets)

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    frames = {name: pd.DataFrame(rows[name]) for name in parts}
    if rows["assumptions"]:
        tested = frames["assumptions"].sort_values(WHERE, kind="stable", ignore_index=True)
        frames["assumptions"] = tested.assign(tokens=tested.position + 1, of_triples=len(every))
    return frames


# ---------------------------------------------------------------- assumptions


def _evenly(count: int, take: int) -> list[int]:
    """`take` of the numbers 0 ... count - 1, or all, ascending and without a period: those whose multiples of the
    golden ratio have the least fractions. So triples in order are taken evenly from layers, heads and positions."""
    fraction = np.arange(count) * (math.sqrt(5) - 1) / 2 % 1
    return sorted(fraction.argsort(kind="stable")[:take].tolist())


def _assumptions(layer: Layer, t: int, heads: Iterable[int], s: Sampling) -> list[dict]:
    """A row per query head and pool at a position: the pool's largest weight, and its cone constant from both sides."""
    attention, outputs, rows = layer.attention(t)[:, -1], layer.outputs(t)[:, -1], []
    for head, size in product(heads, s.pools):
        p = attention[head]
        keys = bound.pool(p, size, s.window)
        cone = bound.cone(outputs[head] - layer.value[head // layer.group, keys].double(), s.steps)
        where = {"layer": layer.number, "position": t, "head": head, "pool": pool_name(size), "pool_size": len(keys)}
        rows.append(where | {"eps": p[keys].max().item(), "c_low": cone.low.item(), "c_high": cone.high.item()})
    return rows


# ---------------------------------------------------------------- realised ratio


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
    low, eps = bound.cone(r, s.steps).low, p.amax(-1)
    for k in KS:
        evicted, factors = bound.smallest(score, k), bound.factor(low, eps, k).tolist()
        of_query = bound.joint_cost(p, r, evicted) / bound.optimum(p, r, k).value
        of_window = bound.window_cost(pw, rw, evicted[:, :paper]) / bound.window_optimum(pw, rw, k).value
        for objective, ratios in (("query", of_query.tolist()), ("window", of_window.tolist())):
            for (rule, queries), of_rule in zip(scores, ratios, strict=True):
                row = t.where | {"k": k, "objective": objective, "rule": rule, "queries": queries}
                for name, ratio, factor in zip(sets, of_rule, factors, strict=False):  # of the window the paper's alone
                    limit = factor if objective == "query" else math.nan
                    rows.append(row | {"stratum": name, "ratio": ratio, "bound": limit})
    return rows


def _alignment(t: Triple, sets: Mapping[str, Tensor]) -> list[dict]:
    """A row per key of the strata near and aligned: ||a - v_j|| / ||a||, its rank by AnDPro and DropKV for this query
    (1 = evicted first)."""
    a, rows = t.window_a[-1], []
    for stratum in ("near", "aligned"):
        v, r, p = (x[sets[stratum]] for x in (t.v, t.r, t.p))
        scores = {"andpro": p * (v @ a), "dropkv": bound.single_cost(p, r)}
        ranks = {name: scipy_stats.rankdata(score.numpy()) for name, score in scores.items()}
        table = pd.DataFrame({"distance": (r.norm(dim=-1) / a.norm()).numpy(), **ranks})
        rows += table.assign(stratum=stratum, **t.where).to_dict("records")
    return rows


def _weights(t: Triple, sets: Mapping[str, Tensor]) -> list[dict]:
    """A row per stratum of the paper, k and way to weigh a key: how far the set that it chooses moves the outputs, and
    whether it chooses DropKV's set when it observes the last query alone."""
    keys, rows = torch.stack([sets[name] for name in triples.STRATA]), []
    p, after, (pw, rw) = t.p[keys], t.projected(t.r[keys]), _of_window(t, keys)
    costs = {way: (cost(t)[keys], cost(t.last(1))[keys]) for way, cost in triples.WEIGHTS.items()}
    for k in KS:
        alone = {way: bound.smallest(cost, k) for way, (_, cost) in costs.items()}
        for way, (cost, _) in costs.items():
            chosen = bound.smallest(cost, k)
            moved = {"window": bound.window_cost(pw, rw, chosen), "projected": bound.joint_cost(p, after, chosen)}
            moved |= {"same_alone": (alone[way] == alone["squared"]).all(-1)}
            table = pd.DataFrame({name: x.numpy() for name, x in moved.items()}).assign(stratum=triples.STRATA)
            rows += table.assign(k=k, way=way, **t.where).to_dict("records")
    return rows
