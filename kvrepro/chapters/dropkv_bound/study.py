"""The studies of the chapter on DropKV's bound: tidy frames over triples (layer, head, position) of real prompts."""

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
from kvrepro.chapters.dropkv_bound.settings import Sampling, Settings, pool_name
from kvrepro.chapters.dropkv_bound.triples import RULES, Layer, Triple
from kvrepro.engine.policy import find, is_own
from kvrepro.engine.score.window import pooled
from kvrepro.errors import InputError
from kvrepro.experiment import data, run
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item

PARTS = ("assumptions", "records", "lemma", "budgets", "alignment", "weights")
WHERE = ["layer", "head", "position"]
KS, TWENTY = (10, 18), 20  # 10 or 18 of 20 keys are evicted
Where = tuple[int, int, int]  # layer, head, position
Rule = tuple[str, int, int]  # its name, the queries that it observes, the kernel of its pooling


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
    """The frames of one run; the name of each, what one of its rows is about, and (in brackets) its other columns.

    assumptions: a triple and a pool (eps, c_low, c_high; mu_share: the pool's mass outside a cone of c = 0.1;
    guarantee: theorem 2's bound on the ratio for the half of the pool that DropKV evicts).
    records: a triple, stratum, k, objective and rule (ratio, value, best; bound, eps, c_low, c_high for the query's F).
    lemma: a triple (largest relative errors of lemma 1).
    budgets: a layer, share kept, allocation, pooling and rounding (error: relative shift of the layer's output at the
    last query).
    alignment: one of the 20 most aligned keys of a triple (cosine, ranks by AnDPro and DropKV, 1 = evicted first;
    `_value`: without the attention weight).
    weights: a triple, stratum, k and way to weigh a key, `triples.WEIGHTS` (shift of the query's output: query, of the
    window's: window, and of the query's after W_O: projected; same_alone: does the way choose DropKV's set for the last
    query alone?).
    """

    assumptions: pd.DataFrame
    records: pd.DataFrame
    lemma: pd.DataFrame
    budgets: pd.DataFrame
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
    where = ["item", *WHERE, "stratum", "k", "objective"]
    optima = study.records.query("rule == 'dropkv' and queries == 1")
    for name in dict.fromkeys(policies):
        if name not in RULES and not triples.why_no_score(find(name)):
            other_plan = run.PerItem("dropkv_bound", "others", shared, other_of_item, given | {"policy": name})
            try:
                rows = run.run(other_plan, loaded, settings).merge(optima[[*where, "best"]], on=where)
            except run.StudyFailed as error:
                if not is_own(name):
                    raise
                print(f"{name} is left out of the records: {error}")
                continue
            study.records = pd.concat([study.records, rows.assign(ratio=rows.value / rows.best)], ignore_index=True)
    return study


def by_length(loaded: Loaded, study: Study, items: Mapping[int, Sequence[Item]], settings: Settings) -> pd.DataFrame:
    """`Study.assumptions` of the first two pools for prompts of several lengths, with two more columns: `length`, and
    `place`, where the query stands in its prompt (share).

    study: at `settings.tokens`, which is not run again; its prompts that nearly fill this length are taken. items: of
    `questions_by_length`; to save time, one ascent is made where the cone condition fails.
    """
    sampling = replace(settings.sampling, pools=settings.pools[:2], steps=1)
    rows = study.assumptions
    rows = rows[rows.groupby("item").position.transform("max") + 1 >= data.FILLED * settings.tokens]
    frames = [rows[rows.pool.isin([pool_name(size) for size in sampling.pools])].assign(length=settings.tokens)]
    for length, prompts in items.items():
        if length != settings.tokens:
            given = {"s": sampling, "limit": length, "parts": ("assumptions",)}
            plan = run.PerItem("dropkv_bound", "triples", _with_shares(prompts, 0), of_item, given)
            frames.append(run.run(plan, loaded, settings)["assumptions"].assign(length=length))
    all_rows = pd.concat(frames, ignore_index=True)
    ends = all_rows.groupby(["item", "length"]).position.transform("max")  # the last query is the prompt's last token
    return all_rows.assign(place=((all_rows.position + 1) / (ends + 1)).round(2))


def _with_shares(items: Sequence[Item], total: int) -> dict[str, tuple[Item, int]]:
    """By id, each item and the number of its triples that enter the enumeration, `total` over all items."""
    n = len(items)
    return {item.id: (item, total * (i + 1) // n - total * i // n) for i, item in enumerate(items)}


def of_item(
    loaded: Loaded, item: tuple[Item, int], s: Sampling, limit: int, parts: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """The frames of one item. item: as `_with_shares` has it."""
    ids = data.build_prompt(item[0], loaded.tokenizer, limit).ids
    frames = prompt(loaded, ids, s, item[1], parts)
    return {name: frame.assign(item=item[0].id, task=item[0].task) for name, frame in frames.items()}


def other_of_item(loaded: Loaded, item: tuple[Item, int], policy: str, s: Sampling, limit: int) -> pd.DataFrame:
    """Records of a policy that is not in table 11, on the same keys as `of_item`'s; without the optimum and bound."""
    ids, chooser = data.build_prompt(item[0], loaded.tokenizer, limit).ids, find(policy)
    positions = triples.spread(len(ids), s.positions, s.since)
    sampled = _sampled(_all_triples(loaded, ids, s), ids, s, item[1])
    scored_sets: list[dict] = []

    def visit(layer: Layer) -> None:
        for triple in (layer.triple(head, t) for number, head, t in sampled if number == layer.number):
            scores = {(policy, s.window, 1): triples.scores_of(chooser, triple)}
            scored_sets.extend(_scored_sets(triple, s, _keys_by_stratum(triple, s), scores))

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    return _records(scored_sets, s, loaded.model.device, compared=False).assign(item=item[0].id, task=item[0].task)


def _all_triples(loaded: Loaded, ids: Sequence[int], s: Sampling) -> list[Where]:
    """All triples of a prompt, in order."""
    shape = loaded.model.config.get_text_config()
    layers, heads = range(shape.num_hidden_layers), range(shape.num_attention_heads)
    positions = triples.spread(len(ids), s.positions, s.since)
    return [(layer, head, t) for layer in layers for head in heads for t in positions]


def _sampled(every: Sequence[Where], ids: Sequence[int], s: Sampling, take: int) -> list[Where]:
    """`take` of a prompt's triples, drawn at random, or all it has; in order."""
    rng = np.random.default_rng([s.seed, len(ids), *ids[-8:]])
    return [every[i] for i in sorted(rng.choice(len(every), min(take, len(every)), replace=False))]


def prompt(
    loaded: Loaded, ids: Sequence[int], s: Sampling, take: int, parts: Sequence[str] = PARTS
) -> dict[str, pd.DataFrame]:
    """The frames of one prompt. `take` of its triples, or all it has, enter the enumeration; these, and `s.cones`
    spread evenly over all, enter the study of the assumptions."""
    positions, all_triples = triples.spread(len(ids), s.positions, s.since), _all_triples(loaded, ids, s)
    sampled = _sampled(all_triples, ids, s, take if "records" in parts else 0)
    spread = {all_triples[i] for i in assumptions.evenly(len(all_triples), s.cones)}
    with_cone = [where for where in all_triples if where in spread.union(sampled)]
    rows: dict[str, list[dict]] = {name: [] for name in PARTS}
    scored_sets: list[dict] = []
    gathered = [assumptions.Triples(t, s, len(all_triples)) for t in positions if "assumptions" in parts]

    def visit(layer: Layer) -> None:
        for group in gathered:
            group.add(layer, [head for number, head, t in with_cone if (number, t) == (layer.number, group.position)])
        for triple in (layer.triple(head, t) for number, head, t in sampled if number == layer.number):
            rows["lemma"].append(triple.where | lemma_error(triple, s.seed))
            keys_by_stratum = _keys_by_stratum(triple, s)
            scored_sets.extend(_scored_sets(triple, s, keys_by_stratum))
            rows["alignment"] += _alignment(triple, keys_by_stratum["aligned"])
            rows["weights"] += _weights(triple, keys_by_stratum)
        if "budgets" in parts:
            rows["budgets"] += _budgets(layer, s)

    triples.triples(loaded.model, ids, positions, visit, window=s.window)
    frames = {name: pd.DataFrame(rows[name]) for name in parts}
    if gathered:
        tested = pd.concat([group.frame() for group in gathered if group.held])
        frames["assumptions"] = tested.sort_values(WHERE, kind="stable", ignore_index=True)
    if "records" in parts:
        frames["records"] = _records(scored_sets, s, loaded.model.device)
    return frames


def lemma_error(t: Triple, seed: int = 0) -> dict:
    """Largest error of lemma 1, relative to ||a|| / (1 - P_J), when one of the 64 keys of most weight is evicted
    (single), or a random half of all keys, 16 times (joint).

    Dividing by 1 - P_J amplifies rounding in the definition and in the lemma alike, and so is undone.
    """
    single = torch.nn.functional.one_hot(t.p.topk(min(64, len(t.p))).indices, len(t.p)).bool()
    joint = torch.rand(16, len(t.p), generator=torch.Generator().manual_seed(seed)) < 0.5
    errors = {"tokens": len(t.p)}
    for name, evicted in (("single", single), ("joint", joint)):
        error = (bound.shift(t.p, t.v, evicted) - bound.shift_by_definition(t.p, t.v, evicted)).norm(dim=-1)
        left = (t.p * ~evicted).sum(-1)
        errors[name] = (error * left / t.window_a[-1].norm()).max().item()
    return errors


# ---------------------------------------------------------------- realised ratio


def _scores(t: Triple, s: Sampling) -> dict[Rule, Tensor]:
    """Scores of every rule, [tokens], large = keep."""
    scores = {("attention", 1, 1): t.p} | {(name, 1, 1): RULES[name](t.last(1)) for name in ("critical_kv", "andpro")}
    scores |= {(name, s.window, 1): rule(t) for name, rule in RULES.items()}
    for name in ("snapkv", "dropkv"):
        scores[name, s.window, s.kernel] = pooled(scores[name, s.window, 1], "max", s.kernel)
    return scores


def _keys_by_stratum(t: Triple, s: Sampling) -> dict[str, Tensor]:
    """The numbers of a triple's 20 keys in each stratum."""
    return triples.strata(t, bound.pool(t.p, s.pools[0], s.window), TWENTY, s.seed)


def _scored_sets(
    t: Triple, s: Sampling, keys_by_stratum: Mapping[str, Tensor], other: Mapping[Rule, Tensor] | None = None
) -> list[dict]:
    """For each stratum of a triple p, r and the scores of its 20 keys by every rule, or only by those in `other`."""
    scored_sets, scores = [], _scores(t, s) if other is None else other
    for stratum, keys in keys_by_stratum.items():
        p, r = t.p[keys], t.r[keys]
        of_query = {("dropkv", 1, 1): bound.single_cost(p, r), ("random", 1, 1): _random_scores(t, len(keys), s.seed)}
        of_keys = (of_query if other is None else {}) | {rule: score[keys] for rule, score in scores.items()}
        window = {"p_window": t.window_p[:, keys], "r_window": t.window_a[:, None] - t.v[keys]}
        scored_sets.append({"where": t.where | {"stratum": stratum}, "p": p, "r": r, "scores": of_keys} | window)
    return scored_sets


def _random_scores(t: Triple, count: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed * 7919 + t.layer * 997 + t.head * 31 + t.position)
    return torch.rand(count, dtype=torch.float64, generator=draw)


def _records(scored_sets: list[dict], s: Sampling, device: torch.device, compared: bool = True) -> pd.DataFrame:
    """A row per triple, stratum, k, objective and rule: F of the query, and on the paper's strata also of the window.

    compared: add the optimum over all subsets, and theorem 1's bound on the ratio to it.
    """
    if not scored_sets:
        return pd.DataFrame()
    p, r = _stack(scored_sets, "p", device), _stack(scored_sets, "r", device)
    of_paper = [scored for scored in scored_sets if scored["where"]["stratum"] in triples.STRATA]
    pw, rw = _stack(of_paper, "p_window", device), _stack(of_paper, "r_window", device)
    query, window, frames = partial(bound.joint_cost, p, r), partial(bound.window_cost, pw, rw), []
    cones, eps = cone.cone(r, steps=s.steps) if compared else None, p.amax(-1)
    for k in KS:
        facts, facts_of_window = {}, {}
        if cones is not None:
            facts = {"best": bound.optimum(p, r, k).value, "eps": eps, "c_low": cones.low, "c_high": cones.high}
            facts |= {"bound": bound.factor(cones.low, eps, k)}
            facts_of_window = {"best": bound.window_optimum(pw, rw, k).value}
        frames += _by_rule(scored_sets, k, "query", query, facts, device)
        frames += _by_rule(of_paper, k, "window", window, facts_of_window, device)
    return pd.concat(frames, ignore_index=True)


def _stack(scored_sets: list[dict], name: str, device: torch.device) -> Tensor:
    return torch.stack([scored[name] for scored in scored_sets]).to(device)


def _by_rule(
    scored_sets: list[dict], k: int, objective: str, cost: Callable[[Tensor], Tensor], facts: Mapping[str, Tensor],
    device: torch.device,
) -> list[pd.DataFrame]:  # fmt: skip
    base = pd.DataFrame([scored["where"] for scored in scored_sets]).assign(k=k, objective=objective)
    base = base.assign(**{name: values.cpu().numpy() for name, values in facts.items()})
    frames = []
    for rule, queries, kernel in scored_sets[0]["scores"]:
        score = torch.stack([scored["scores"][rule, queries, kernel] for scored in scored_sets])
        value = cost(bound.smallest(score.to(device), k))
        frame = base.assign(rule=rule, queries=queries, kernel=kernel, value=value.cpu().numpy())
        frames.append(frame.assign(ratio=(value / facts["best"]).cpu().numpy()) if facts else frame)
    return frames


def _alignment(t: Triple, keys: Tensor) -> list[dict]:
    """A row per key of the aligned stratum: its rank by AnDPro and DropKV for this query (1 = evicted first), and by
    their scores without the attention weight, <a, v_j> and ||a - v_j||."""
    a, v, r, p = t.window_a[-1], t.v[keys], t.r[keys], t.p[keys]
    along, off = v @ a, r.norm(dim=-1)
    scores = {"andpro": p * along, "dropkv": bound.single_cost(p, r), "andpro_value": along, "dropkv_value": off}
    ranks = {name: scipy_stats.rankdata(score.numpy()) for name, score in scores.items()}
    cosine = along / (v.norm(dim=-1) * a.norm())
    return pd.DataFrame({"cosine": cosine.numpy(), **ranks}).assign(**t.where).to_dict("records")


def _weights(t: Triple, sets: Mapping[str, Tensor]) -> list[dict]:
    """A row per stratum of the paper, k and way to weigh a key: how far the set that it chooses moves the outputs, and
    whether it chooses DropKV's set when it observes the last query alone."""
    rows = []
    costs = {name: (cost(t), cost(t.last(1))) for name, cost in triples.WEIGHTS.items()}
    for stratum, keys in ((name, sets[name]) for name in triples.STRATA):
        p, r, after = t.p[keys], t.r[keys], t.projected(t.r[keys])
        pw, rw = t.window_p[:, keys], t.window_a[:, None] - t.v[keys]
        for k in KS:
            gone = {name: [bound.smallest(x[keys], k) for x in of_way] for name, of_way in costs.items()}
            for name, (chosen, alone) in gone.items():
                moved = {"query": bound.joint_cost(p, r, chosen), "window": bound.window_cost(pw, rw, chosen)}
                moved["projected"] = bound.joint_cost(p, after, chosen)
                row = t.where | {"stratum": stratum, "k": k, "way": name, **{n: x.item() for n, x in moved.items()}}
                rows.append(row | {"same_alone": torch.equal(alone, gone["squared"][1])})
    return rows


# ---------------------------------------------------------------- budgets over the heads of a layer


def _budgets(layer: Layer, s: Sampling) -> list[dict]:
    """Relative shift of one layer's output at the last query: uniform budgets of its KV heads against adaptive ones.

    Scores are those of the public code: `triples.dropkv`, averaged over the query heads of a KV head and pooled. The
    window always stays. Adaptive: the layer's budget goes to its highest scores, whichever head they are in.
    """
    last, heads = max(layer.positions), len(layer.key)
    p, a, v = layer.attention(last)[:, -1], layer.outputs(last)[:, -1], layer.value[:, : last + 1].double()
    tokens, rows, shifts = last + 1, [], []
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
                shifts.append(torch.stack([_output_shift(p, a, v, evicted), evicted.sum().double()]))
    values = zip(rows, torch.stack(shifts).tolist(), strict=True)  # one transfer
    return [row | {"error": error, "evicted": int(count)} for row, (error, count) in values]


def _output_shift(p: Tensor, a: Tensor, v: Tensor, evicted: Tensor) -> Tensor:
    """||Delta|| / ||a|| of a layer's output for one query, by lemma 1, without computing a residual for every key.

    p [heads, tokens], a [heads, dim], v [kv_heads, tokens, dim], evicted: bool [kv_heads, tokens].
    """
    heads = len(v)
    gone = p.view(heads, -1, p.shape[1]) * evicted[:, None]
    mass = gone.sum(-1, keepdim=True)
    moved = (mass * a.view(heads, -1, a.shape[1]) - gone @ v) / (1 - mass)
    return (moved.square().sum() / a.square().sum()).sqrt()
