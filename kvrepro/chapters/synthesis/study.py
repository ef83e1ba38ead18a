"""The parts of eviction methods, crossed, and the chapter's rows: common items under this grid and under published
methods, on every model of a family.

A cell of the grid has a level of each factor, or None where the factor does not exist for it: scores that do not come
from single queries have nothing to aggregate. There are thousands of cells; `design` chooses some, such that any two
levels of different factors meet about equally often. Then main effects and interactions of two factors can be told
apart.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from kvrepro.chapters.synthesis.policies import NAMES, OF_WINDOW, SCORERS, SPLITS
from kvrepro.engine.attention import attend, read_once
from kvrepro.engine.condition import Condition, DecodeCap, Generation, Odd, Prefill, Prompt, ProperShare, Size
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import generate, unmet
from kvrepro.engine.policy import is_own
from kvrepro.experiment import data, measure, models
from kvrepro.experiment import run as runner
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

TASKS = {  # of the embedded world, and what each stands for
    "needle_multikey": "one fact",
    "several": "several facts",
    "entries": "a long answer",
}
ITEMS = f"tinyworld:{','.join(TASKS)}"
# Items; cells on the first model, and on each of the others. With 32 cells shares of variance are far off (small-mha,
# 48 items: 8 to 15% for factors that explain 0 to 4% with 240 cells, and -45% for the rest); from 48 cells on they are
# not. The main effects have 21 columns.
SIZES = {"quick": (6, 140, 48), "full": (48, 240, 240)}
BESIDE = {"quick": ("small-gqa-seed-0",), "full": tuple(models.embedded())}  # other models of the run
FILE = "kvrepro/chapters/synthesis/policies.py"
FACTORS: dict[str, tuple[str, ...]] = {
    "scorer": tuple(SCORERS),
    "aggregator": ("mean", "mean_var", "defensive"),
    "pooling": ("none", "average", "max"),
    "guard": ("none", "sinks", "ends"),
    "split": tuple(SPLITS),
    "quota": ("none", "parts"),
    "regime": ("question seen", "question unseen", "decode cap"),
}
RIVALS = ("key_diff", "dropkv", "snapkv", "h2o", "defensive_kv")  # whom the finding on KeyDiff compares
PUBLISHED = "streaming_llm snapkv ada_kv dropkv key_diff k_norm h2o defensive_kv layer_defensive_kv".split()
COMPARED = ("key_diff", "dropkv", "snapkv", "random")  # whose kept tokens are looked at
MEASURES = ("evidence", "distinct", "mass", "shift")  # see `of_heads`


@dataclass(frozen=True)
class Settings(runner.Settings):
    """Settings of the synthesis."""

    family: tuple[str, ...] | None = None  #: models beside `model`; None: for an embedded one the profile's, else none
    measure: Literal["score", "rest_f1"] = "score"  #: of answers; "rest_f1": without the first word
    cells: Annotated[int, Ge(8)] | None = None  #: None: the profile's; below 48 no shares of variance
    tokens: Size = 1900  #: of a prompt, in the model's own tokenizer, at most
    kept: tuple[ProperShare, ...] = (0.05, 0.1, 0.2)  #: shares of the compressed tokens that stay
    guarded: Annotated[float, Gt(0), Lt(0.5)] = 0.1  #: of the budget, at each end
    parts: Annotated[int, Ge(2)] = 4  #: of a prompt, each with its share of the budget under a quota
    window: Size = 16  #: last queries that the scorers of a window observe
    kernel: Odd = 5  #: tokens that are pooled
    interval: Size = 8  #: generated tokens between two evictions under a cap
    answer_words: Size = 24  #: an answer is read and judged as far as that
    block_size: Size = 16  #: tokens of a block of the paged cache
    draws: Annotated[int, Ge(1), Le(100_000)] = 1000  #: resamples of items for intervals of shares

    @property
    def middle(self) -> float:
        """The share at which the heads' kept tokens are looked at."""
        return sorted(self.kept)[len(self.kept) // 2]

    @property
    def part_names(self) -> tuple[str, ...]:
        """Spans that a quota counts."""
        return tuple(f"part {i + 1}" for i in range(self.parts))


# ---- the grid


def factors(kept: Sequence[float]) -> dict[str, tuple[object, ...]]:
    """Every factor with its levels, including the shares kept."""
    return {**FACTORS, "kept": tuple(kept)}


def cells(kept: Sequence[float], *, kv_heads: int = 2, slides: bool = False, asks: bool = True) -> pd.DataFrame:
    """Every cell that exists, a column per factor; None where it does not have the factor.

    Also left out are heads that compete within a layer if it has only one (`kv_heads`), one set of tokens for all
    layers if some layers slide and hold other tokens than the rest (`slides`), and "question unseen" for prompts that
    mark no question (`asks`).
    """
    every = factors(kept)
    frame = pd.DataFrame(itertools.product(*every.values()), columns=list(every)).astype(object)
    frame.loc[~frame.scorer.isin(OF_WINDOW), ["aggregator", "pooling"]] = None
    frame.loc[frame.scorer == "position", "split"] = None  # the same tokens everywhere, however a budget is shared out
    frame.loc[frame.regime == "decode cap", "quota"] = None  # a quota is set once, for a prompt
    gone = {"split": ["per head"] * (kv_heads == 1) + ["one set"] * slides, "regime": ["question unseen"] * (not asks)}
    frame = frame[~frame.split.isin(gone["split"]) & ~frame.regime.isin(gone["regime"])]
    return frame.where(frame.notna(), None).drop_duplicates().reset_index(drop=True)


def design(frame: pd.DataFrame, count: int, seed: int = 0) -> pd.DataFrame:
    """`count` of the cells, or all if there are fewer, in an order of which every beginning is balanced, too.

    Each step takes the cell whose pairs of levels are, on average, the rarest so far, in relation to how often a pair
    would occur by chance. Among equals a random number decides.
    """
    codes = [pd.factorize(frame[name])[0] for name in frame]  # -1: does not have the factor
    sizes = [code.max() + 1 for code in codes]
    pairs = [(a, b) for a, b in itertools.combinations(range(len(codes)), 2) if sizes[a] > 1 and sizes[b] > 1]
    at = np.stack([np.where((codes[a] < 0) | (codes[b] < 0), -1, codes[a] * sizes[b] + codes[b]) for a, b in pairs], 1)
    counts = [np.zeros(sizes[a] * sizes[b] + 1) for a, b in pairs]  # by pair of levels; the last: no such pair
    existing, lot = (at >= 0).sum(1).clip(min=1), np.random.default_rng(seed).random(len(frame))
    taken: list[int] = []
    for _ in range(min(count, len(frame))):
        frequency = sum(met[at[:, i]] * (len(met) - 1) for i, met in enumerate(counts)) / existing + 1e-6 * lot
        frequency[taken] = np.inf
        rarest = int(frequency.argmin())
        taken.append(rarest)
        for i, met in enumerate(counts):
            met[at[rarest, i]] += at[rarest, i] >= 0
    return frame.iloc[taken].reset_index(drop=True)


def condition(cell: Mapping[str, Any], settings: Settings) -> Condition:
    """The engine's condition for a cell."""
    switches: dict[str, object] = {"window": settings.window}
    if cell["aggregator"] is not None:
        switches |= {"aggregate": cell["aggregator"], "pool": cell["pooling"], "kernel": settings.kernel}
    if cell["guard"] == "sinks":
        switches["sinks"] = 4
    policy, share = f"{FILE}:{NAMES[cell['scorer'], cell['split'] or 'uniform']}", float(cell["kept"])
    parts = settings.part_names if cell["quota"] == "parts" else ()
    until = "question" if cell["regime"] == "question unseen" else ""
    prefill = Prefill(until=until, fair=1.0 if parts else None, spans=parts)
    regime = DecodeCap(settings.interval) if cell["regime"] == "decode cap" else prefill
    side = settings.guarded if cell["guard"] == "ends" else 0.0
    given = tuple(sorted(switches.items()))
    return Condition(policy, share, regime, side, side, reading="as_described", switches=given)


# ---- items and rows


def family(model: str, named: Sequence[str] | None, profile: str) -> list[str]:
    """The models of a run: `model`, then those `named`. None: after an embedded model the profile's others, after any
    other model none."""
    if named is None:
        named = [name for name in BESIDE[profile] if name in models.embedded()] if model in models.embedded() else []
    return list(dict.fromkeys([model, *named]))


def questions(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> list[Item]:
    """Items as in `data.load_fitting` (None: as many as the profile says), with answers cut to `settings.answer_words`
    words and evidence in proportion: long answers of the embedded world follow the order of the prompt."""
    count = data.AtMost(SIZES[settings.profile][0]) if n_items is None else n_items
    fitting = data.load_fitting(items, count, loaded.tokenizer, settings.tokens, settings.seed)
    return [_cut(loaded, item, settings) for item in fitting]


def _cut(loaded: Loaded, item: Item, settings: Settings) -> Item:
    """The item with its answer cut if it is long, so that generation ends there; a short answer leaves generation room
    for more tokens."""
    words, most = item.answer.split(), settings.answer_words
    answer = " ".join(words[:most])
    tokens = len(loaded.tokenizer.encode(answer, add_special_tokens=False))
    if len(words) <= most or "metric" in item.meta or "answers" in item.meta:
        more = {"max_new_tokens": item.new_tokens(tokens + settings.interval)}
        return replace(item, meta=item.meta | more)
    evidence = [span for span in item.spans if span.name == "evidence"]
    needed = evidence[: math.ceil(len(evidence) * most / len(words))]
    spans = tuple(span for span in item.spans if span.name != "evidence" or span in needed)
    return replace(item, answer=answer, spans=spans, meta=item.meta | {"max_new_tokens": tokens})


def with_parts(loaded: Loaded, item: Item, settings: Settings) -> Prompt:
    """The item's prompt. The text before its question (all text without one) has equal parts, which a quota counts."""
    prompt = data.build_prompt(item, loaded.tokenizer, settings.tokens)
    end, count = min(prompt.spans.get("question", [len(prompt.ids)])), settings.parts
    parts = {name: [*range(end * i // count, end * (i + 1) // count)] for i, name in enumerate(settings.part_names)}
    return replace(prompt, spans=prompt.spans | parts)


def kept_of(item: Item, prompt: Prompt, answer: Generation, block_size: int) -> dict[str, Any]:
    """Measures of the tokens that are kept: `held`, their share over heads and layers; `freed` and `freed_compacted`,
    the shares of blocks of `block_size` tokens that are free as they are, and after compaction (a slot is free when no
    head of any layer holds its token); `evidence_heads`, the share of the evidence's tokens that a head holds on
    average."""
    keep = np.concatenate(answer.kept_sets or [])  # [layers * kv_heads, tokens]
    tokens = keep.shape[1]
    living, blocks = keep.any(0), -(-tokens // block_size)
    used = np.add.reduceat(living, np.arange(0, tokens, block_size)) > 0
    evidence = [at for at in prompt.spans.get("evidence", ()) if at < tokens]
    return {
        "held": float(keep.mean()),
        "freed": 1 - int(used.sum()) / blocks,
        "freed_compacted": 1 - -(-int(living.sum()) // block_size) / blocks,
        "evidence_heads": float(keep[:, evidence].mean()) if evidence else math.nan,
    }


def answers(
    loaded: Loaded, items: Sequence[Item], count: int, policies: Sequence[str], settings: Settings
) -> pd.DataFrame:
    """Rows of one model, as `tidy` gives them: the full cache, published methods at every share with the question seen,
    and `count` cells of the grid."""
    facts = ModelFacts.of(loaded.model)
    asks = all("question" in with_parts(loaded, item, settings).spans for item in items)
    every = cells(settings.kept, kv_heads=max(facts.kv_heads.values()), slides=bool(facts.sliding), asks=asks)
    chosen = design(every, count, settings.seed).to_dict("records")
    methods = [Condition(p, s, Prefill(), reading="as_described") for p in policies for s in settings.kept]
    conditions = [Condition(), *methods, *(condition(cell, settings) for cell in chosen)]
    prompt_of, note = partial(with_parts, settings=settings), partial(kept_of, block_size=settings.block_size)
    most = max(item.new_tokens(settings.answer_words) for item in items)
    study = Answers("synthesis", "grid", items, conditions, most, settings.tokens, prompt_of, note)
    of_conditions = [dict.fromkeys(FACTORS)] * (1 + len(methods)) + chosen
    cell_of = pd.DataFrame(of_conditions * len(items), columns=list(FACTORS), dtype=object)
    return tidy(run(study, loaded, settings), cell_of)


def tidy(rows: pd.DataFrame, cell_of: pd.DataFrame) -> pd.DataFrame:
    """The runner's rows with `kept`, `kind` ("full", "published", "grid"), `method`, `score`, the levels of the row's
    cell (`cell_of`; None for rows of other kinds), and what `kept_of` says of the kept set."""
    kind = rows.policy.where(rows.policy == "full", "published").mask(cell_of.scorer.notna(), "grid")
    shown = rows[["model", "item", "task", "prediction", "rest_f1", "evidence_at"]]
    shown = shown.assign(kind=kind, kept=rows.share, method=rows.policy.where(kind == "published"))
    notes = [json.loads(note) if isinstance(note, str) else {} for note in rows.note]  # {}: it failed
    return pd.concat([shown.assign(score=measure.scores(rows)), cell_of, pd.DataFrame(notes)], axis=1)


def of_family(
    first: Loaded, others: Sequence[str], items: str, n_items: int | None, policies: Sequence[str], settings: Settings
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of every model, and the tables of `of_heads`. In the quick profile the models after the first run fewer
    policies: `RIVALS` and a reader's own."""
    few = [name for name in policies if name in RIVALS or is_own(name)]
    rows, heads = [], []
    for name in [None, *others]:
        loaded = first if name is None else models.load(name, first.device, settings.dtype, settings.enable_thinking)
        chosen = questions(loaded, items, n_items, settings)
        model_policies = list(policies) if name is None or settings.profile == "full" else few
        most, fewer = SIZES[settings.profile][1:]
        most = settings.cells or most
        count = most if name is None else min(most, fewer)
        rows.append(answers(loaded, chosen, count, model_policies, settings))
        arguments = {"policies": COMPARED, "share": settings.middle, "tokens": settings.tokens}
        looked_at = run(PerItem("synthesis", "kept", chosen, of_heads, arguments), loaded, settings)
        heads.append(looked_at.assign(model=loaded.name))
    return pd.concat(rows, ignore_index=True), pd.concat(heads, ignore_index=True)


# ---- what heads keep, and how that changes attention


def of_heads(loaded: Loaded, item: Item, policies: Sequence[str], share: float, tokens: int) -> pd.DataFrame:
    """What each policy, as its paper describes it, keeps of a prompt: rows (policy, layer, head of keys and values).

    evidence: share of the evidence's tokens; distinct: 1 - the mean cosine of two different kept keys; mass: share of
    the last query's attention, mean over the query heads; shift: length of the change of a query head's output at the
    last query, over the output's length, mean over the query heads.
    """
    prompt = data.build_prompt(item, loaded.tokenizer, tokens)
    every = [Condition(p, share, Prefill(), reading="as_described") for p in policies]
    gaps = unmet(loaded.model, [prompt], [every], [1])
    conditions = [c for c in every if (0, c) not in gaps]
    [kept] = generate(loaded.model, [prompt], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True)
    layers, parts = last_attention(loaded, prompt.ids), []
    for c, answer in zip(conditions, kept, strict=True):
        for (layer, (key, value, p)), keep in zip(layers.items(), answer.kept_sets, strict=True):
            mask = torch.as_tensor(keep, device=key.device)
            evidence = mask[:, prompt.spans.get("evidence", [])].float().mean(1)  # nan without evidence
            measures = {"evidence": evidence} | of_layer(key, value, p, mask)
            columns = {measure: values.tolist() for measure, values in measures.items()}
            parts.append(pd.DataFrame({"policy": c.policy, "layer": layer, "head": range(len(mask)), **columns}))
    return pd.concat(parts, ignore_index=True)


def of_layer(key: Tensor, value: Tensor, p: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Measures of one layer, each [kv_heads]. key, value: [kv_heads, tokens, dim]; p: the last query's attention,
    [kv_heads, group, tokens]; kept: bool [kv_heads, tokens]."""
    count = kept.sum(1)
    unit = F.normalize(key.float(), dim=-1) * kept[..., None]
    likeness = (unit.sum(1).square().sum(1) - count) / (count * (count - 1)).clamp(min=1)
    left = p * kept[:, None]
    mass = left.sum(-1)
    before, after = p @ value.float(), (left / mass.clamp(min=1e-9)[..., None]) @ value.float()
    shift = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-9)
    return {"distinct": 1 - likeness, "mass": mass.mean(1), "shift": shift.mean(1)}


def last_attention(loaded: Loaded, ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """By layer, of those that evict: keys and values [kv_heads, tokens, dim], the last query's attention [kv_heads,
    group, tokens]."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    class Looking:
        def attend(
            self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Any, sliding: int | None = None
        ):
            at = torch.arange(len(ids), device=query.device)[None]
            parts, last = [(key, value, at[:, None])], []
            attend(query[:, :, -1:], at[:, -1:], parts, scaling, sliding, lambda p, _: last.append(p[0, :, :, 0]))
            seen[layer] = key[0], value[0], last[0].float()
            return attend(query, at, parts, scaling, sliding, prompt=True)

    read_once(loaded.model, ids, Looking())
    return {layer: seen[layer] for layer in ModelFacts.of(loaded.model).evictable}
