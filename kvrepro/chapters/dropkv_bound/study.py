"""The study behind the chapter on DropKV's bound: tidy frames over triples of real prompts.

Tables, intervals and verdicts from these frames: `kvrepro.chapters.dropkv_bound.tables`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from scipy import stats as scipy_stats
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound, cone, triples
from kvrepro.chapters.dropkv_bound.triples import RULES, Triple
from kvrepro.engine.allowed import Number, Size, ensure
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment import run as runs
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item

ONE_QUERY = ("dropkv", "attention", "random")  # table 16's selections, by the query's own attention
PARTS = ("assumptions", "records", "lemma", "budgets", "alignment")
MU_AT = 0.1  # c at which the pool's mass outside the cone is reported
FRACTION = Number(0, 1, above=True, below=True)
WORLD = (200, 4000)  # tokens of the embedded world's own tokenizer that its prompts may have


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open, and the sizes of the study."""

    pools: Sequence[float | int] = (0.95, 0.5, 256)  # share or number of lowest-attention keys; the first is drawn from
    positions: int = 2  # query positions per prompt, layer and head
    since: float = 0.5  # they lie in the prompt after this share
    window: int = 8  # final keys outside the pool, and queries that a rule observes
    ks: Sequence[int] = (10, 18)  # of 20 keys
    per_cell: int = 150  # triples per stratum and k, over all prompts, at most
    kernel: int = 11
    shares: Sequence[float] = (0.05, 0.10, 0.30)  # of the prompt kept, for the budgets
    steps: int = 6  # ascents where the cone condition fails
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        several(pools=self.pools, shares=self.shares)
        if len(self.pools) > 4:
            raise InputError(f"{len(self.pools)} pools > 4 that a figure can tell apart: give fewer")
        for pool in self.pools:
            ensure((Size, FRACTION), pools=pool)
        for share in self.shares:
            ensure(FRACTION, shares=share)
        ensure(Size, positions=self.positions, window=self.window)


def several(**named: Sequence) -> None:
    """Raise InputError for what is not a list with at least one entry."""
    for name, values in named.items():
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"{name} is {values!r}: give a list with at least one entry")


SIZES = {"quick": (12, Settings()), "full": (48, Settings(positions=4, per_cell=600))}


def size(profile: str, n_items: int | None = None, *, k: int = 200, **changes) -> tuple[int, Settings]:
    """Prompts and settings of a profile; a change that is None keeps the profile's value. k, of the bound, is checked
    only."""
    if profile not in SIZES:
        raise InputError(f"unknown profile {profile!r}: choose {' or '.join(SIZES)}")
    items, settings = SIZES[profile]
    given = {name: value for name, value in changes.items() if value is not None}
    count = items if n_items is None else n_items
    ensure(Size, n_items=count, k=k)
    return count, Settings(**{**vars(settings), **given})


# ---------------------------------------------------------------- prompts of a given length


def questions(
    loaded: Loaded, items: str, n_items: int, tokens: int, settings: Settings, *, max_new_tokens: int = 48
) -> list[Item]:
    """Items whose prompts have at most `tokens` tokens of the model's own tokenizer.

    items, n_items: as in `data.load_items`. The embedded world counts in its own tokens, so it is asked for fewer or
    more until its longest prompt fits; a passage is cut; other messages are as long as they are. Raises InputError,
    also if the answer or the settings' pools find no room.
    """
    ensure(Size, tokens=tokens, max_new_tokens=max_new_tokens)
    if tokens + max_new_tokens > loaded.context:
        raise InputError(
            f"{tokens} + {max_new_tokens} tokens > context {loaded.context} of {loaded.name}: lower tokens"
        )
    aim, world = tokens, items.partition(":")[0] == "tinyworld"
    for _ in range(8):
        aim = min(max(aim, WORLD[0]), WORLD[1])
        found = data.load_items(items, n_items, seed=settings.seed, tokens=aim)
        counts = _counts(loaded, found, tokens)
        longest = max(counts)
        if longest <= tokens and (not world or longest > 0.9 * tokens):
            _hold(settings, min(counts))
            return found
        if not world:
            raise InputError(f"a prompt of {items} has {longest} tokens > {tokens}: raise tokens or take shorter ones")
        aim = round(0.99 * aim * tokens / longest)
    raise InputError(
        f"prompts of {tokens} tokens of {loaded.name} wanted, but the nearest of {items} have {longest}: "
        "set tokens and lengths so"
    )


def questions_by_length(
    loaded: Loaded, items: str, n_items: int, lengths: Sequence[int], settings: Settings, *, max_new_tokens: int = 48
) -> dict[int, list[Item]]:
    """`questions` at each of `lengths`. A length that the model or the items cannot have is left out, which is printed;
    none left: InputError. Messages that can neither be built nor cut to a length count at their longest."""
    several(lengths=lengths)
    few = _few(settings)
    given = [] if items.partition(":")[0] == "tinyworld" else data.load_items(items, n_items, seed=settings.seed)
    if given and all(item.context is None for item in given):
        lengths = [max(_counts(loaded, given, 0))]
    found, reasons = {}, []
    for length in dict.fromkeys(lengths):
        ensure(Size, lengths=length)
        try:
            found[length] = questions(loaded, items, n_items, length, few, max_new_tokens=max_new_tokens)
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


def _hold(s: Settings, tokens: int) -> None:
    """Do the pools find their keys before the window of the earliest query?"""
    keys = triples.spread(tokens, s.positions, s.since)[0] + 1 - s.window
    largest = max([size for size in s.pools if isinstance(size, int)], default=1)
    if keys < largest:
        raise InputError(f"{keys} keys before a query's window < pool of {largest}: longer prompts, or smaller pools")


def _few(settings: Settings) -> Settings:
    """What is looked at in prompts of other lengths."""
    return replace(settings, pools=settings.pools[:2], per_cell=0, positions=1, steps=1)


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
    settings: Settings = field(default_factory=Settings)


def run(
    loaded: Loaded,
    items: Sequence[Item],
    settings: Settings,
    how: runs.Settings,
    *,
    limit: int | None = None,
    parts: Sequence[str] = PARTS,
) -> Study:
    """All frames over the items' prompts, passages cut to `limit` tokens. parts: the frames to fill."""
    take = [_share(settings.per_cell, number, len(items)) for number in range(len(items))]
    named = {item.id: (item, count) for item, count in zip(items, take, strict=True)}
    given = {"settings": settings, "limit": limit or loaded.context, "parts": tuple(parts)}
    frames = runs.run(runs.PerItem("dropkv_bound", "triples", named, of_item, given), loaded, how)
    return Study(**{name: frames.get(name, pd.DataFrame()) for name in PARTS}, settings=settings)


def of_item(
    loaded: Loaded, item: tuple[Item, int], settings: Settings, limit: int, parts: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """The frames of one item, of which so many triples enter the enumeration."""
    ids = data.build_prompt(item[0], loaded.tokenizer, limit).ids
    return {name: frame.assign(item=item[0].id, task=item[0].task)
            for name, frame in prompt(loaded, ids, settings, item[1], parts).items()}  # fmt: skip


def by_length(
    loaded: Loaded, found: Study, items: Mapping[int, Sequence[Item]], how: runs.Settings, *, tokens: int
) -> pd.DataFrame:
    """`Study.assumptions` for prompts of several lengths (column `length`), last query, first two pools.

    found: the study at `tokens`, which is not run again. items: `questions_by_length`; there, one ascent has to do
    where the cone condition fails.
    """
    few = _few(found.settings)
    a = found.assumptions
    last = a.position == a.groupby("item").position.transform("max")
    frames = [a[last & a.pool.isin([pool_name(size) for size in few.pools])].assign(length=tokens)]
    frames += [
        run(loaded, prompts, few, how, limit=length, parts=("assumptions",)).assumptions.assign(length=length)
        for length, prompts in items.items()
        if length != tokens
    ]
    return pd.concat(frames, ignore_index=True)


def _share(total: int, number: int, of: int) -> int:
    return total * (number + 1) // of - total * number // of


def prompt(
    loaded: Loaded, ids: Sequence[int], settings: Settings, take: int, parts: Sequence[str] = PARTS
) -> dict[str, pd.DataFrame]:
    """The frames of one prompt; `take` of its triples, drawn at random, or all it has enter the enumeration."""
    s = settings
    shape = loaded.model.config.get_text_config()
    positions = triples.spread(len(ids), s.positions, s.since)
    layers = range(shape.num_hidden_layers) if s.layers is None else s.layers
    heads = range(shape.num_attention_heads) if s.heads is None else s.heads
    every = [(layer, head, t) for layer in layers for head in heads for t in positions]
    take = min(take, len(every)) if "records" in parts else 0
    drawn = np.random.default_rng([s.seed, len(ids), *ids[-8:]]).choice(len(every), take, replace=False)
    chosen = {every[i] for i in drawn}
    rows: dict[str, list[dict]] = {name: [] for name in PARTS}
    drawn_keys: list[dict] = []

    def visit(found: Iterator[Triple]) -> None:
        last = []
        for t in found:
            rows["assumptions"] += _assumptions(t, s)
            if t.position == positions[-1]:
                last.append(t)
            if (t.layer, t.head, t.position) in chosen:
                rows["lemma"].append(_where(t) | lemma_error(t, s.seed))
                drawn_keys.extend(_drawn(t, s))
                rows["alignment"] += _alignment(t, s)
        if "budgets" in parts:
            rows["budgets"] += _budgets(last, shape.num_attention_heads // shape.num_key_value_heads, s)

    triples.triples(loaded.model, ids, positions, visit, layers=s.layers, heads=s.heads, window=s.window)
    frames = {name: pd.DataFrame(found) for name, found in rows.items()}
    frames["records"] = _records(drawn_keys, s)
    return {name: frames[name] for name in parts}


def _where(t: Triple) -> dict:
    return {"layer": t.layer, "head": t.head, "position": t.position}


def pool_name(size: float | int) -> str:
    """`lowest 95%` or `256 lowest`."""
    return f"{size} lowest" if isinstance(size, int) else f"lowest {size:.0%}"


def _assumptions(t: Triple, s: Settings) -> list[dict]:
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
        rows.append(
            _where(t)
            | {"tokens": len(t.p), "pool": pool_name(size), "pool_size": len(keys), "eps": p.max().item()}
            | {"c_low": c.low.item(), "c_high": c.high.item()}
            | {"mu_share": mu / (p * r.norm(dim=-1)).sum().item()}
            | {
                "guarantee": (proxy / robust.lower).item(),
                "robust_c": robust.c.item(),
                "robust_mu": robust.share.item(),
            }
        )
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


def _drawn(t: Triple, s: Settings) -> list[dict]:
    """Per stratum of a triple its 20 keys: p, r and every rule's scores on them, large = keep."""
    scores = {(name, 1, 1): t.p if name == "attention" else None for name in ONE_QUERY}
    scores |= {(name, 1, 1): RULES[name](t.last(1)) for name in ("criticalkv", "andpro")}
    scores |= {(name, s.window, 1): rule(t) for name, rule in RULES.items()}
    for name in ("snapkv", "dropkv"):
        scores[name, s.window, s.kernel] = triples.pooled(scores[name, s.window, 1], s.kernel)
    found = []
    for stratum, keys in triples.strata(t, bound.pool(t.p, s.pools[0], s.window), seed=s.seed).items():
        p, r = t.p[keys], t.r[keys]
        own = scores | {("dropkv", 1, 1): bound.single_cost(p, r), ("random", 1, 1): _lot(t, len(keys), s.seed)}
        here = {rule: score if len(score) == len(keys) else score[keys] for rule, score in own.items()}
        window = {"p_window": t.window_p[:, keys], "r_window": t.window_a[:, None] - t.v[keys]}
        found.append({"where": _where(t) | {"stratum": stratum}, "p": p, "r": r, "scores": here} | window)
    return found


def _lot(t: Triple, count: int, seed: int) -> Tensor:
    return torch.rand(
        count,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed * 7919 + t.layer * 997 + t.head * 31 + t.position),
    )


def _records(drawn: list[dict], s: Settings) -> pd.DataFrame:
    """A row per triple, stratum, k, objective and rule; F of the query, on the paper's strata also of the window."""
    if not drawn:
        return pd.DataFrame()
    frames = []
    p, r = _stack(drawn, "p"), _stack(drawn, "r")
    found, eps = cone.cone(r, steps=s.steps), p.amax(-1)
    plain = [one for one in drawn if one["where"]["stratum"] in triples.STRATA]
    pw, rw = _stack(plain, "p_window"), _stack(plain, "r_window")

    def of_query(evicted: Tensor) -> Tensor:
        return bound.joint_cost(p, r, evicted)

    def of_window(evicted: Tensor) -> Tensor:
        return bound.window_cost(pw, rw, evicted)

    for k in s.ks:
        best = bound.optimum(p, r, k).value
        facts = {"eps": eps, "c_low": found.low, "c_high": found.high, "bound": bound.factor(found.low, eps, k)}
        frames += _by_rule(drawn, k, "query", best, of_query, facts)
        frames += _by_rule(plain, k, "window", bound.window_optimum(pw, rw, k).value, of_window, {})
    return pd.concat(frames, ignore_index=True)


def _stack(drawn: list[dict], name: str) -> Tensor:
    return torch.stack([one[name] for one in drawn])


def _by_rule(
    drawn: list[dict], k: int, objective: str, best: Tensor, cost: Callable[[Tensor], Tensor], facts: dict[str, Tensor]
) -> list[pd.DataFrame]:
    base = pd.DataFrame([one["where"] for one in drawn]).assign(k=k, objective=objective, best=best.numpy())
    base = base.assign(**{name: values.numpy() for name, values in facts.items()})
    frames = []
    for rule, queries, kernel in drawn[0]["scores"]:
        score = torch.stack([one["scores"][rule, queries, kernel] for one in drawn])
        value = cost(bound.smallest(score, k))
        values = {"value": value.numpy(), "ratio": (value / best).numpy()}
        frames.append(base.assign(rule=rule, queries=queries, kernel=kernel, **values))
    return frames


def _alignment(t: Triple, s: Settings) -> list[dict]:
    """Per key of the aligned stratum: rank by AnDPro and DropKV for this query (1 = evicted first), whole and with the
    attention weight taken off, <a, v_j> and ||a - v_j||."""
    keys = triples.strata(t, bound.pool(t.p, s.pools[0], s.window), seed=s.seed)["aligned"]
    a, v, r, p = t.window_a[-1], t.v[keys], t.r[keys], t.p[keys]
    along, off = v @ a, r.norm(dim=-1)
    scores = {"andpro": p * along, "dropkv": bound.single_cost(p, r), "andpro_value": along, "dropkv_value": off}
    ranks = {name: scipy_stats.rankdata(score.numpy()) for name, score in scores.items()}
    cosine = along / (v.norm(dim=-1) * a.norm())
    return [
        _where(t) | {"cosine": cosine[i].item(), **{name: rank[i] for name, rank in ranks.items()}}
        for i in range(len(keys))
    ]


# ---------------------------------------------------------------- budgets over the heads of a layer


def _budgets(last: list[Triple], group: int, s: Settings) -> list[dict]:
    """Relative shift of one layer's output at the last query: uniform budgets of its KV heads against adaptive ones.

    Scores as in the public code: mean over the group of `triples.dropkv`, pooled; the window always stays. Adaptive:
    the layer's budget goes to its highest scores, whichever head they are in.
    """
    if not last:
        return []
    rows = []
    kv_heads = sorted({t.head // group for t in last})
    tokens = len(last[0].p)
    costs = {bf16: [triples.dropkv(t, bf16=bf16) for t in last] for bf16 in (False, True)}
    for pooling, bf16 in (("max", False), ("average", False), ("none", False), ("max", True)):
        of_head = [[cost for t, cost in zip(last, costs[bf16], strict=True) if t.head // group == h] for h in kv_heads]
        score = torch.stack([torch.stack(found).mean(0) for found in of_head])
        score = score if pooling == "none" else triples.pooled(score[:, None], s.kernel, pooling)[:, 0]
        score = score[:, : tokens - s.window]
        for share in s.shares:
            gone = tokens - max(int(share * tokens), s.window)
            for allocation in ("uniform", "adaptive"):
                evicted = torch.zeros(len(kv_heads), tokens, dtype=torch.bool)
                if allocation == "uniform":
                    evicted.scatter_(1, bound.smallest(score, gone), True)
                else:
                    chosen = bound.smallest(score.flatten(), gone * len(kv_heads))
                    evicted[chosen // score.shape[1], chosen % score.shape[1]] = True
                moved = [_moved(t, evicted[kv_heads.index(t.head // group)]) for t in last]
                whole = [t.window_a[-1].square().sum() for t in last]
                rows.append(
                    {"layer": last[0].layer, "share": share, "allocation": allocation, "pooling": pooling, "bf16": bf16}
                    | {"error": (sum(moved) / sum(whole)).sqrt().item(), "evicted": int(evicted.sum())}
                )
    return rows


def _moved(t: Triple, evicted: Tensor) -> Tensor:
    """||Delta(J)||^2 of the query, by lemma 1 without a residual for every key."""
    gone = t.p * evicted
    return ((gone.sum() * t.window_a[-1] - gone @ t.v) / (1 - gone.sum())).square().sum()
