"""From evicted tokens to freed blocks: the studies of the reclamation chapter, each a tidy table.

`synthetic`, `toy` and `traffic` need only a ledger, no model; `arising` and `published` ask the engine which tokens of
a prompt stay. `run` makes all tables, with those of `acceptance`, `latency`, `streaming`, `sparsity`, `arithmetic` and
`quoted`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.reclamation import acceptance, arithmetic, quoted, sparsity, streaming, survivors
from kvrepro.chapters.reclamation.latency import latency, timed
from kvrepro.chapters.reclamation.ledger import Ledger, evict_to
from kvrepro.chapters.reclamation.settings import Settings
from kvrepro.chapters.reclamation.survivors import GRANULARITIES, POLICIES, Cells, cells, kept_sets, label, once
from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Chunked, Prefill, Prompt, Regime, Size, ensure
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import find, is_own
from kvrepro.errors import InputError, counted, error_line
from kvrepro.experiment import data
from kvrepro.experiment import run as runner
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import PerItem

SIZES = {  # prompts of each study; a claim on two cases needs seven (`stats.fewest`)
    "quick": {
        "arising": 24, "decoding": 12, "published": 6, "identity": 7, "latency": 7, "sharing": 3, "sparsity": 24,
        "pages": 3,
    },
    "full": {
        "arising": 48, "decoding": 24, "published": 48, "identity": 24, "latency": 24, "sharing": 24, "sparsity": 48,
        "pages": 24,
    },
}  # fmt: skip
DECODING = Chunked(16, "budget")  # a prompt is read as if its tokens were generated, and evicts every 16 of them


def prompts(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> dict[str, list[int]]:
    """Token ids by item, of `n_items` prompts (None: as many as the profile says).

    Messages without a passage to cut may be as long as the model's context allows. If all layers have a sliding window,
    no prompt is longer than the window, since budgets are shares of what the layers hold. Prompts too short for the
    settings, or too long, are left out (`data.usable`).
    """
    ensure(Size | None, n_items=n_items)
    held, count = ModelFacts.of(loaded.model).held, n_items or data.AtMost(SIZES[settings.profile]["arising"])
    most = settings.prompt_tokens
    tokens, room = held(most), held(max(most, loaded.context - _needed(settings)))
    if tokens < most:
        print(f"reclamation: prompts of {tokens:,} tokens at most, since no layer of this model holds more")
    fitting = data.load_fitting(items, count, loaded.tokenizer, tokens, settings.seed, room=room)
    ids = {
        item.id: data.build_prompt(item, loaded.tokenizer, room if item.context is None else tokens).ids
        for item in fitting
    }
    fitting = data.usable(
        fitting, "reclamation", lambda item: _check_length(item.id, len(ids[item.id]), settings, loaded.context)
    )
    return {item.id: ids[item.id] for item in fitting}


def _check_length(name: str, tokens: int, settings: Settings, context: int) -> None:
    """Raise InputError for a prompt that is too short for the settings, or too long for the model's context."""
    least, shared, needed = min(settings.kept), int(acceptance.PREFIX * tokens), _needed(settings)
    if settings.capacity >= tokens:
        why = f"capacity {settings.capacity} >= {tokens} tokens of a prompt: nothing leaves; lower it"
    elif round(least * tokens) < 16:
        why = f"kept {least:g} of {tokens} tokens are {least * tokens:.0f}, fewer than 16: raise it"
    elif settings.block_size > shared:
        why = f"block_size {settings.block_size} > {shared} tokens that prompts share: lower it"
    elif tokens + needed > context:
        exceeding = f"{tokens} tokens of a prompt and {needed} after it exceed the model's {context}"
        why = f"{exceeding}: lower prompt_tokens, timed_cadences or max_new_tokens"
    else:
        return
    raise InputError(f"item {name}: {why}")


def _needed(settings: Settings) -> int:
    """Most tokens that follow a prompt."""
    return max(timed(settings.timed_cadences), settings.max_new_tokens)


# ---- what a survivor set gives back


def reclaim(keep: np.ndarray, block_size: int = 16) -> dict[str, float]:
    """What a survivor set `[..., tokens]` gives back, as one row.

    freed_*: blocks freed by eviction alone ("plain") or with a compaction. share_*: freed_* over all blocks; "packed"
    if each head packs its own survivors into the first of the request's blocks, so that the fullest head decides; "own"
    if each head had a block table of its own. copies_*: slots that move; copies_ratio: those of hole filling over those
    of a repack. shortfall: share of tokens evicted per head, less share of blocks freed by a repack. times_smaller:
    blocks over those that a repack leaves.
    """
    keep = keep[(None,) * (3 - keep.ndim)]
    tokens, held = keep.shape[-1], keep.sum(-1)  # held [layers, kv_heads]
    blocks = -(-tokens // block_size)
    row: dict[str, float] = {"tokens": tokens, "blocks": blocks}
    for name, layout in (("plain", "none"), ("repack", "repack"), ("fill", "fill")):
        ledger, _ = compacted(keep, layout, block_size)
        row[f"freed_{name}"], row[f"copies_{name}"] = ledger.freed, ledger.copied
    row["share_plain"], row["share_repack"] = row["freed_plain"] / blocks, row["freed_repack"] / blocks
    row["share_packed"] = (blocks - -(-int(held.max()) // block_size)) / blocks
    row["share_own"] = 1 - float(np.ceil(held / block_size).mean()) / blocks
    row["evicted"] = 1 - float(keep.mean())
    row["shortfall"] = row["evicted"] - row["share_repack"]
    left = blocks - row["freed_repack"]
    row["times_smaller"] = blocks / left if left else np.inf
    row["copies_ratio"] = row["copies_fill"] / row["copies_repack"] if row["copies_repack"] else np.nan
    return row


def compacted(keep: np.ndarray, layout: str, block_size: int = 16) -> tuple[Ledger, int]:
    """A ledger after an eviction and a compaction by `layout`, and the sequence in it."""
    ledger, number = dense(keep.shape[-1], block_size)
    ledger.evict(number, keep)
    ledger.compact(number, layout)
    return ledger, number


def dense(tokens: int, block_size: int, room: int = 0) -> tuple[Ledger, int]:
    """A ledger with room for more tokens, and the sequence in it."""
    ledger = Ledger(-(-(tokens + room) // block_size), block_size)
    number = ledger.new()
    ledger.append(number, tokens)
    return ledger, number


# ---- patterns made by hand


def patterns(tokens: int, random: np.random.Generator, block_size: int = 16) -> dict[str, np.ndarray]:
    """Survivor sets: the guide's three, and others that evict about as much. Bool [tokens]; per head [1, 8, tokens]."""
    position = np.arange(tokens)
    runs = np.repeat(random.random(-(-tokens // 64)) < 0.1, 64)[:tokens]
    lots = random.integers(0, 10, -(-tokens // 10))
    return {
        "every 10th": position % 10 == 0,
        "one per block": position % block_size == 0,
        "one aligned block evicted": position // block_size != 2,
        "one random of ten": position % 10 == lots[position // 10],
        "random 10%": random.random(tokens) < 0.1,
        "random 20%": random.random(tokens) < 0.2,
        "runs of 64": runs,
        "sinks and recency": (position < 4) | (position >= tokens - tokens // 10 + 4),
        "random 10% per head, 8 heads": random.random((1, 8, tokens)) < 0.1,
        "random victims while decoding": decoded(tokens, tokens // 10, random),
    }


def decoded(tokens: int, budget: int, random: np.random.Generator) -> np.ndarray:
    """Survivors of decoding under a budget, bool [tokens]: each new token takes the place of one drawn at random.

    Once the first tokens are gone, a token of age t is alive with probability exp(-t / budget), so that on average
    budget / b * H_b blocks of b tokens hold some, with the harmonic number H_b = 1 + 1/2 + ... + 1/b.
    """
    place = np.append(np.arange(budget), random.integers(budget, size=tokens - budget))  # into which each token goes
    _, age = np.unique(place[::-1], return_index=True)  # of the newest token in each place
    return np.isin(np.arange(tokens), tokens - 1 - age)


def synthetic(tokens: int = 16_000, block_size: int = 16, draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """`reclaim` of every pattern: `draws` times (column `draw`) if it is random, else once."""
    return pd.DataFrame([
        {"pattern": name, "block_size": block_size, "draw": draw, **reclaim(keep, block_size)}
        for draw in range(draws)
        for name, keep in patterns(tokens, np.random.default_rng([seed, draw]), block_size).items()
        if draw == 0 or "random" in name or "runs" in name
    ])  # fmt: skip


def toy() -> pd.DataFrame:
    """`reclaim` of the guide's example: 24 tokens in blocks of 4, of which four are evicted."""
    return pd.DataFrame([reclaim(np.isin(np.arange(24), [2, 9, 13, 21], invert=True), 4)])


def traffic(
    cadences: Sequence[int], budget: int = 2048, tokens: int = 512, block_size: int = 16, draws: int = 6
) -> pd.DataFrame:
    """Decoding under a budget as index work: rows (every, layout, draw) over `tokens` tokens, or at least one pass.

    The cache starts dense at its budget. Every `every` tokens random ones leave, so that it is at its budget again, and
    it is compacted. `share`: what copies read and write, over what attention reads of the cache. copies_ratio: copies
    over those of a repack in the same rounds.
    """
    rows = []
    for every in cadences:
        span = max(tokens, every)
        passes, alive = span // every, budget + (np.arange(1, span + 1) % every).mean()
        for draw in range(draws):
            copied = {layout: _copied(every, passes, layout, budget, block_size, draw) for layout in ("repack", "fill")}
            for layout, copies in copied.items():
                share, ratio = 2 * copies / (passes * every) / alive, copies / (copied["repack"] or np.nan)
                cell = {"every": every, "layout": layout, "draw": draw, "share": share, "copies_ratio": ratio}
                rows.append(cell | {"copies_per_pass": copies / passes})
    return pd.DataFrame(rows)


def _copied(every: int, passes: int, layout: str, budget: int, block_size: int, seed: int) -> int:
    """Slots that move in so many passes."""
    random = np.random.default_rng(seed)
    ledger, number = dense(budget, block_size, passes * every + block_size)
    for _ in range(passes):
        ledger.append(number, every)
        evict_to(ledger, number, budget, random)
        ledger.compact(number, layout)
    return ledger.copied


# ---- patterns that policies make


def arising(
    loaded: Loaded, ids: list[int], kept: Sequence[float], policies: Sequence[str], block_size: int = 16,
    granularities: Sequence[str] = GRANULARITIES, regime: Regime = Prefill(),  # noqa: B008
) -> pd.DataFrame:  # fmt: skip
    """`reclaim` of what each policy keeps of a prompt: rows (policy, granularity, kept). regime: when it evicts."""
    named = [
        (cell | {"kept": share}, c)
        for share in kept
        for cell, c in cells(policies, granularities, round(share * len(ids)), regime)
    ]
    return _reclaimed(loaded, ids, named, block_size)


def published(
    loaded: Loaded, ids: list[int], kept: Sequence[float], policies: Sequence[str], block_size: int = 16
) -> pd.DataFrame:
    """`reclaim` of what policies keep with their own heads, windows and layers, after the prefill."""
    named: Cells = [({"policy": label(p), "kept": share}, once(p, share)) for p in policies for share in kept]
    return _reclaimed(loaded, ids, named, block_size)


def _reclaimed(loaded: Loaded, ids: list[int], named: Cells, block_size: int) -> pd.DataFrame:
    """Where a policy raises, its row has the reason in the column `error` and nothing else."""
    keeps = kept_sets(loaded, ids, [c for _, c in named])
    return pd.DataFrame([
        cell | ({"error": error_line(keep)} if isinstance(keep, Exception) else reclaim(keep, block_size))
        for (cell, _), keep in zip(named, keeps, strict=True)
    ])  # fmt: skip


# ---- all studies


def run(loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings) -> dict[str, pd.DataFrame]:
    """Every study's table, by the name that the claims use. Raises InputError for settings that do not suit these
    prompts, this model or these policies."""
    engine.check_shared(loaded.model)
    labels = [label(name) for name in settings.policies]
    if repeated := {name for name in labels if labels.count(name) > 1}:
        raise InputError(f"two of the policies are called {min(repeated)}: give each a title of its own")
    for name, ids in prompts.items():
        _check_length(name, len(ids), settings, loaded.context)
    studies, block_size = _studies(loaded, prompts, settings), settings.block_size
    times = PerItem("reclamation", "passes", {"all": settings.lengths}, streaming.passes)
    tables = {
        "synthetic": synthetic(seed=settings.seed, block_size=block_size),
        "toy": toy(),
        "traffic": traffic(settings.cadences, settings.budget, block_size=block_size),
        "wall": streaming.wall(),
        "passes": runner.run(times, None, settings).drop(columns="item"),
        "memory": arithmetic.memory(),
    }
    for name, (function, arguments) in studies.items():
        items = dict(islice(prompts.items(), None if name == "arising" else SIZES[settings.profile][name]))
        job = PerItem("reclamation", name, items, function, arguments, alone=name == "latency")
        tables[name] = _without_failed(name, runner.run(job, loaded, settings))
    if settings.quoted:
        problems = quoted.study(data.load_items(settings.quoted), settings.quoted_tokens)
        tables["quoted"] = quoted.table(runner.run(problems, loaded, settings))
    return tables


def _without_failed(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """A study's table without the rows of policies that raised; prints which did."""
    if "error" not in table:
        return table
    for policy, rows in table.dropna(subset="error").groupby("policy"):
        items = rows["item"].unique()
        where = f"{counted(len(items), 'item')}, the first {items[0]}"
        print(f"reclamation/{name}: {policy} is left out of {where}: {rows.error.iloc[0]}")
    return table[table.error.isna()].drop(columns="error").infer_objects()


def _studies(
    loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings
) -> dict[str, tuple[Callable[..., pd.DataFrame], dict[str, Any]]]:
    """The studies with a model: the function that computes each, and its arguments. Policies that cannot run with this
    model are left out. Raises InputError where none is left."""
    policies, shares, block = settings.policies, sorted({min(settings.kept), 0.5}), {"block_size": settings.block_size}
    catalogue = [name for name, p in CATALOGUE.items() if p.frees and not p.shared]
    compressing_once = survivors.published(policies)
    tried = dict.fromkeys([*(catalogue if settings.acceptance == "catalogue" else ()), *compressing_once])
    accepted = runnable(loaded, prompts, list(tried), [settings.capacity])
    at_shares = runnable(loaded, prompts, [name for name in compressing_once if name in accepted], shares)
    varied = [name for name in survivors.varied(policies) if name in POLICIES or name in at_shares]
    if not at_shares or not varied:
        raise InputError(f"policies {', '.join(policies)}: this model can have none of them")
    decode = [name for name in varied if DECODING.name not in find(POLICIES.get(name, (name,))[0]).refuses]
    decoding = {"kept": shares[:1], "policies": decode, "granularities": ["per head"], "regime": DECODING}
    answers = {"budget": settings.capacity, "new_tokens": settings.max_new_tokens}
    chapters = {"policies": [name for name in varied if name in POLICIES], "catalogue": accepted}
    return {
        "arising": (arising, {"kept": settings.kept, "policies": varied} | block),
        **({"decoding": (arising, decoding | block)} if decode else {}),
        "published": (published, {"kept": shares, "policies": at_shares} | block),
        "identity": (acceptance.identity, chapters | answers | block),
        "latency": (latency, {"cadences": settings.timed_cadences, "seed": settings.seed} | block),
        "sharing": (acceptance.sharing, answers | block),
        "sparsity": (sparsity.sparsity, {}),
        "pages": (sparsity.pages, {"kept": shares} | block),
    }


def runnable(
    loaded: Loaded, prompts: Mapping[str, list[int]], policies: Sequence[str], budgets: Sequence[int | float]
) -> list[str]:
    """Those of `policies` that run with this model, these prompts and all of these budgets. For each other one of the
    catalogue a printed line says why not; a reader's own policy that cannot run raises InputError.

    Budgets are checked on the shortest prompt. A trial on its first 128 tokens shows whether what a policy has learned
    fits the model's weights; a reader's own policy is tried on the longest prompt.
    """
    shortest, longest, possible = min(prompts.values(), key=len), max(prompts.values(), key=len), []
    for name in policies:
        try:
            engine.check_conditions(loaded.model, [Prompt(shortest, {})], [once(name, budget) for budget in budgets])
            if not find(name).frees:
                raise InputError("it chooses pages anew for every query and frees nothing")
            [keep] = kept_sets(loaded, longest if is_own(name) else shortest[:128], [once(name, 0.5)])
            if isinstance(keep, Exception):
                raise keep
        except Exception as error:
            refused = isinstance(error, InputError)
            if is_own(name) and not refused:
                message = f"{name} raised {error_line(error)}: mend it, or leave it out of `policies`"
                raise InputError(message) from error
            if is_own(name) or not refused:
                raise
            print(f"{name} is left out: {error}")
        else:
            possible.append(name)
    return possible
