"""From evicted tokens to freed blocks: the studies of the reclamation chapter, each a tidy table.

`synthetic`, `toy` and `traffic` need only a ledger, no model; `arising` asks the engine which tokens of a prompt stay.
`run` makes all tables, with those of `acceptance` and `attention`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from annotated_types import Ge

from kvrepro.chapters.reclamation import acceptance, attention, survivors
from kvrepro.chapters.reclamation.paged import LAYOUTS, Entry, Ledger, evict_to
from kvrepro.chapters.reclamation.survivors import POLICIES, Cells, cells, kept_sets
from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Chunked, Condition, DecodeCap, Prefill, ProperShare, Regime, Size, ensure
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import find, is_own
from kvrepro.errors import InputError, counted, error_line
from kvrepro.experiment import claims, data
from kvrepro.experiment import run as runner
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem
from kvrepro.item import Item

PROMPTS = (24, 48)  # in the quick and the full profile; each study takes the first of them
DECODING = Chunked(16, "budget")  # a prompt is read as if its tokens were generated, and evicts every 16 of them


@dataclass(frozen=True)
class Settings(runner.Settings):
    """Settings of the reclamation chapter; the first three are parameters of its notebook."""

    policies: tuple[str, ...] = (*POLICIES, *survivors.PUBLISHED)  #: the chapter's, the catalogue's, or one's own
    kept: tuple[ProperShare, ...] = (0.1, 0.25, 0.5, 0.9)  #: of the prompt
    block_size: Size = 16  #: tokens
    prompt_tokens: Size = 900  #: of each prompt, at most
    capacity: Size = 128  #: tokens kept while answers are generated
    max_new_tokens: Size = 6  #: of an answer
    acceptance: Literal["catalogue", "policies"] = "catalogue"  #: whom the acceptance test tries beside `policies`
    cadences: tuple[Size, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  #: tokens between two passes
    timed_cadences: tuple[Size, ...] = (1, 2, 8, 32, 128, 512)  #: with real decoding; twice as long fits the context
    budget: Annotated[int, Ge(16)] = 2048  #: tokens, for cadences without a model
    lengths: tuple[Size, ...] = (512, 1024, 2048)  #: prompts for which the extra pass over the keys is timed, in tokens
    quoted: str = ""  #: a .jsonl of AIME's problems, for what the guide quotes (`quoted_answers`)
    quoted_tokens: Size = 32_768  #: of an answer to these

    def ensure_runs(self, policy: str) -> None:
        """Raise InputError for a policy that cannot choose the survivors of a prompt."""
        super().ensure_runs(POLICIES.get(policy, (policy,))[0])


def prompts(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> dict[str, list[int]]:
    """Token ids by item, of `n_items` prompts (None: as many as the profile says). Messages without a passage to cut
    may fill the model's context, but no prompt is longer than a window that all layers have, since budgets are shares
    of what they hold. Prompts of which nothing would leave are left out."""
    ensure(Size | None, n_items=n_items)
    after = max(acceptance.timed(settings.timed_cadences), settings.max_new_tokens)
    room = ModelFacts.of(loaded.model).held(loaded.context - after)
    tokens = min(settings.prompt_tokens, room)
    if tokens < settings.prompt_tokens:
        print(f"reclamation: prompts of {tokens:,} tokens at most, for which this model's layers and context have room")
    count = n_items or data.AtMost(PROMPTS[settings.profile == "full"])
    fitting, ids = data.load_fitting(items, count, loaded.tokenizer, tokens, settings.seed, room=room), {}

    def check(item: Item) -> None:
        ids[item.id] = data.build_prompt(item, loaded.tokenizer, room if item.context is None else tokens).ids
        if (n := len(ids[item.id])) <= max(settings.capacity, 2 * settings.block_size):
            raise InputError(f"of the {n} tokens of item {item.id} none leaves: lower capacity, block_size")

    return {item.id: ids[item.id] for item in data.usable(fitting, "reclamation", check)}


def reclaim(keep: np.ndarray, block_size: int = 16) -> dict[str, float]:
    """What a survivor set `[..., tokens]` gives back, as one row. freed_*: blocks freed by eviction alone ("plain") or
    with a compaction. share_*: freed_* over all blocks; "packed" if each head packs its own survivors into the first of
    the request's blocks, so that the fullest head decides; "own" if each head had a block table of its own. copies_*:
    slots that move; copies_ratio: those of hole filling over those of a repack. shortfall: share of tokens evicted per
    head, less share of blocks freed by a repack. times_smaller: blocks over those that a repack leaves."""
    keep = keep[(None,) * (3 - keep.ndim)]
    held, blocks = keep.sum(-1), -(-keep.shape[-1] // block_size)  # held [layers, kv_heads]
    row: dict[str, float] = {"tokens": keep.shape[-1], "blocks": blocks, "evicted": 1 - float(keep.mean())}
    for name, layout in zip(("plain", "repack", "fill"), LAYOUTS, strict=True):
        ledger, _ = compacted(keep, layout, block_size)
        row[f"freed_{name}"], row[f"copies_{name}"] = ledger.freed, ledger.copied
    row["share_plain"], row["share_repack"] = row["freed_plain"] / blocks, row["freed_repack"] / blocks
    row["share_packed"] = (blocks - -(-int(held.max()) // block_size)) / blocks
    row["share_own"] = 1 - float(np.ceil(held / block_size).mean()) / blocks
    row["shortfall"] = row["evicted"] - row["share_repack"]
    row["times_smaller"] = blocks / (blocks - row["freed_repack"] or np.nan)
    row["copies_ratio"] = row["copies_fill"] / (row["copies_repack"] or np.nan)
    return row


def compacted(keep: np.ndarray, layout: str, block_size: int = 16) -> tuple[Ledger, Entry]:
    """A ledger after an eviction and a compaction by `layout`, and the sequence in it."""
    ledger = Ledger(-(-keep.shape[-1] // block_size), block_size)
    sequence = ledger.new(keep.shape[-1])
    ledger.evict(sequence, keep)
    ledger.compact(sequence, layout)
    return ledger, sequence


# ---- patterns made by hand


def decoded(tokens: int, budget: int, random: np.random.Generator) -> np.ndarray:
    """Survivors of decoding under a budget, bool [tokens]: each new token takes the place of one drawn at random. A
    token of age t is alive with probability exp(-t / budget), so that on average budget / b * (1 + 1/2 + ... + 1/b)
    blocks of b tokens hold some."""
    place = np.append(np.arange(budget), random.integers(budget, size=tokens - budget))  # into which each token goes
    _, age = np.unique(place[::-1], return_index=True)  # of the newest token in each place
    return np.isin(np.arange(tokens), tokens - 1 - age)


def synthetic(tokens: int = 16_000, block_size: int = 16, draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """`reclaim` of survivor sets, the guide's three and others that evict about as much: `draws` times (column `draw`)
    if a set is random, else once."""
    rows, position = [], np.arange(tokens)
    for draw in range(draws):
        random = np.random.default_rng([seed, draw])
        runs = np.repeat(random.random(-(-tokens // 64)) < 0.1, 64)[:tokens]
        patterns = {
            "every 10th": position % 10 == 0,
            "one per block": position % block_size == 0,
            "one aligned block evicted": position // block_size != 2,
            "one random of ten": position % 10 == random.integers(0, 10, -(-tokens // 10))[position // 10],
            "random 10%": random.random(tokens) < 0.1,
            "random 20%": random.random(tokens) < 0.2,
            "runs of 64": runs,
            "sinks and recency": (position < 4) | (position >= tokens - tokens // 10 + 4),
            "random 10% per head, 8 heads": random.random((1, 8, tokens)) < 0.1,
            "random victims while decoding": decoded(tokens, tokens // 10, random),
        }
        for name, keep in patterns.items():
            if draw == 0 or "random" in name or "runs" in name:
                rows.append({"pattern": name, "block_size": block_size, "draw": draw, **reclaim(keep, block_size)})
    return pd.DataFrame(rows)


def toy() -> pd.DataFrame:
    """`reclaim` of the guide's example: 24 tokens in blocks of 4, of which four are evicted."""
    return pd.DataFrame([reclaim(np.isin(np.arange(24), [2, 9, 13, 21], invert=True), 4)])


def traffic(
    cadences: Sequence[int], budget: int = 2048, tokens: int = 512, block_size: int = 16, draws: int = 6
) -> pd.DataFrame:
    """Decoding under a budget as index work: rows (every, layout, draw) over `tokens` tokens, or at least one pass. The
    cache starts dense at its budget, to which it returns by losing random tokens at every pass. `share`: what copies
    read and write, over what attention reads of the cache. copies_ratio: copies over those of a repack."""
    rows = []
    for every, draw in product(cadences, range(draws)):
        span, repacked = max(tokens, every), np.nan
        passes, alive = span // every, budget + (np.arange(1, span + 1) % every).mean()
        for layout in ("repack", "fill"):
            random = np.random.default_rng(draw)
            ledger = Ledger(-(-(budget + passes * every) // block_size) + 1, block_size)
            sequence = ledger.new(budget)
            for _ in range(passes):
                ledger.append(sequence, every)
                evict_to(ledger, sequence, budget, random)
                ledger.compact(sequence, layout)
            repacked = (ledger.copied or np.nan) if layout == "repack" else repacked
            row = {"every": every, "layout": layout, "draw": draw, "copies_ratio": ledger.copied / repacked}
            rows.append(row | {"share": 2 * ledger.copied / (passes * every) / alive})
    return pd.DataFrame(rows)


# ---- patterns that policies make


def arising(
    loaded: Loaded,
    ids: list[int],
    kept: Sequence[float],
    policies: Sequence[str],
    block_size: int = 16,
    granularities: Sequence[str] = survivors.GRANULARITIES,
    regime: Regime = Prefill(),  # noqa: B008
) -> pd.DataFrame:
    """`reclaim` of what each policy keeps of a prompt: rows (policy, granularity, kept), or where it raises, `error`.
    granularities: without, policies are as published, with their own heads, windows and layers. regime: when they
    evict."""
    named: Cells = []
    for share in kept:
        budget = round(share * len(ids)) if granularities else share
        named += [(cell | {"kept": share}, c) for cell, c in cells(policies, granularities, budget, regime)]
    rows = []
    for (cell, _), keep in zip(named, kept_sets(loaded, ids, [c for _, c in named]), strict=True):
        found = {"error": error_line(keep)} if isinstance(keep, Exception) else reclaim(keep, block_size)
        rows.append(cell | found)
    return pd.DataFrame(rows)


# ---- all studies


def run(loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings) -> dict[str, pd.DataFrame]:
    """Every study's table, by the name that the claims use. What a policy cannot do is left out, and printed. Raises
    InputError where one set of tokens cannot serve all layers of the model, or a study has nothing left."""
    engine.check_shared(loaded.model)
    times = PerItem("reclamation", "passes", {"all": settings.lengths}, attention.passes)
    tables = {
        "synthetic": synthetic(seed=settings.seed, block_size=settings.block_size),
        "toy": toy(),
        "traffic": traffic(settings.cadences, settings.budget, block_size=settings.block_size),
        "wall": attention.wall(),
        "passes": runner.run(times, None, settings).drop(columns="item"),
        "memory": memory(),
    }
    shares, block = sorted({min(settings.kept), 0.5}), {"block_size": settings.block_size}
    # The chapter's and a reader's own at every granularity, or if there are none of these, all; the catalogue's and a
    # reader's own as published, or those from which the chapter's come.
    varied = [p for p in settings.policies if p in POLICIES or is_own(p)] or list(settings.policies)
    whole = [p for p in settings.policies if p not in POLICIES] or [POLICIES[p][0] for p in settings.policies]
    catalogue = [name for name, p in CATALOGUE.items() if p.frees and not p.shared]
    accepted = list(dict.fromkeys([*(catalogue if settings.acceptance == "catalogue" else ()), *whole]))
    decode = [name for name in varied if DECODING.name not in find(POLICIES.get(name, (name,))[0]).refuses]
    decoding = {"kept": shares[:1], "policies": decode, "granularities": ["per head"], "regime": DECODING}
    answers = block | {"budget": settings.capacity, "new_tokens": settings.max_new_tokens}
    chapters = {"policies": [name for name in varied if name in POLICIES], "catalogue": accepted}
    timing = {"cadences": settings.timed_cadences, "seed": settings.seed}
    # prompts in the quick and the full profile (a claim on two cases needs seven, `stats.fewest`), function, arguments
    studies: dict[str, tuple[tuple[int, int], Callable[..., pd.DataFrame], dict[str, Any]]] = {
        "arising": (PROMPTS, arising, block | {"kept": settings.kept, "policies": varied}),
        "decoding": ((12, 24), arising, block | decoding),
        "published": ((6, 48), arising, block | {"kept": shares, "policies": whole, "granularities": ()}),
        "identity": ((7, 24), acceptance.identity, answers | chapters),
        "latency": ((7, 24), acceptance.latency, block | timing),
        "sharing": ((3, 24), acceptance.sharing, answers),
        "sparsity": (PROMPTS, attention.sparsity, {}),
        "pages": ((3, 24), attention.pages, block | {"kept": shares}),
    }
    for name, (sizes, function, arguments) in studies.items():
        items = dict(islice(prompts.items(), None if name == "arising" else sizes[settings.profile == "full"]))
        if arguments.get("policies", ["any"]) or name == "identity":
            job = PerItem("reclamation", name, items, function, arguments, alone=name == "latency")
            tables[name] = _without_failed(name, runner.run(job, loaded, settings))
    if settings.quoted:
        study = quoted_answers(data.load_items(settings.quoted), settings.quoted_tokens)
        tables["quoted"] = quoted_table(runner.run(study, loaded, settings))
    return tables


def _without_failed(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """A study's table without the rows of policies that raised; prints which did. Raises InputError if all did."""
    if "error" not in table:
        return table
    failed = table.error.notna()
    for policy, rows in table[failed].groupby("policy"):
        where = f"{counted(rows['item'].nunique(), 'item')}, the first {rows['item'].iloc[0]}"
        print(f"reclamation/{name}: {policy} is left out of {where}: {rows.error.iloc[0]}")
    if failed.all():
        raise InputError(f"{name}: none of the policies can be run: {table.error.iloc[0]}")
    return table[~failed].drop(columns="error").infer_objects()


# ---------------------------------------------------------------- what rests on large models

# query heads for each KV head; from the models' published configurations
GQA = {"Qwen3-8B": 4, "Qwen3-32B": 8, "Llama-3.1-8B": 4, "Llama-3.1-70B": 8, "Qwen2.5-3B": 8, "Qwen2.5-14B": 5}
PARAMETERS, LAYERS, KV_HEADS, DIM = 32.8e9, 64, 8, 128  # of Qwen3-32B
ENDS = 2 * 151_936 * 5_120  # weights of its embeddings and its output layer, which are two matrices
GROUP = 128  # weights that share a scale of 16 bits and a zero of four. Source: AWQ, Lin et al. 2024


def memory() -> pd.DataFrame:
    """Rows (check, model, value). "smaller by GQA": the cache if there were as many KV heads as query heads, over the
    model's. "tokens in <memory>": tokens that fit beside Qwen3-32B's weights at four bits, with nothing else in memory.
    Either all weights have four bits, or as in checkpoints the embeddings and the output layer have 16, and the others
    have scales and zeros."""
    rows = [("smaller by GQA", model, float(times)) for model, times in GQA.items()]
    weights = {"": 2 * ENDS + (PARAMETERS - ENDS) * (4 + 20 / GROUP) / 8}
    weights[", four bits for every weight"] = PARAMETERS / 2
    for variant, held in weights.items():
        for name, room in (("24 x 10^9 bytes", 24e9), ("24 x 2^30 bytes", 24 * 2**30)):
            tokens = (room - held) // (2 * 2 * LAYERS * KV_HEADS * DIM)  # bytes of a token's keys and values
            rows.append((f"tokens in {name}{variant}", "Qwen3-32B", tokens))
    return pd.DataFrame(rows, columns=["check", "model", "value"])


# ---- what the guide quotes from elsewhere

BUDGETS = (("snapkv", 2048), ("r_kv", 2048), ("tri_attention", 2048), ("tri_attention", 3072))
QUOTED = {"full": "Full attention", "snapkv": "SnapKV", "r_kv": "R-KV", "tri_attention": "TriAttention"}


def quoted_answers(items: Sequence[Item], tokens: int) -> Answers:
    """Every problem with the full cache and under each of `BUDGETS`, to which it evicts every 128 generated tokens.

    items: of a .jsonl of problems whose `task` is "AIME 2024" or "AIME 2025" and whose answer is a number:
    options={"quoted": "aime.jsonl"} with Qwen/Qwen3-8B on a GPU, and room for long answers.
    """
    conditions = [Condition(), *(Condition(name, budget, DecodeCap(128)) for name, budget in BUDGETS)]
    return Answers("reclamation", "quoted", items, conditions, max_new_tokens=tokens)


def solved(prediction: str, answer: str) -> float:
    """1 where the boxed number, or else the last one, is the answer."""
    numbers = re.findall(r"\\boxed\{\s*(-?[\d,]+)", prediction) or re.findall(r"-?\d[\d,]*", prediction)
    return float(bool(numbers) and numbers[-1].replace(",", "").lstrip("0") == answer.strip().lstrip("0"))


def quoted_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows (item, task, policy, budget): solved, 0 or 1; beyond_print, solved less the printed accuracy; lost, solved
    with the full cache less solved here; faster, tokens per second over those of the full cache; smaller, bytes of the
    full cache at the end of the answer over those held here."""
    right = [solved(prediction or "", answer) for prediction, answer in zip(rows.prediction, rows.answer, strict=True)]
    problems = rows[["item", "task", "bytes_held"]].assign(policy=rows.policy.map(QUOTED), solved=right)
    problems = problems.assign(budget=rows.capacity.fillna(0), speed=rows.n_generated / rows.decode_seconds)
    printed = claims.published("guide003_numbers.csv").query("metric == 'accuracy %'")
    printed = printed.assign(budget=printed.budget.str.extract(r"^(\d+)")[0].fillna("0").astype(float))
    printed = printed.assign(share=printed.value.astype(float) / 100).set_index(["task", "method", "budget"]).share
    cells = pd.MultiIndex.from_frame(problems[["task", "policy", "budget"]])
    full = problems[problems.policy == QUOTED["full"]].set_index("item")
    return problems.assign(
        beyond_print=problems.solved - printed.reindex(cells).to_numpy(),
        lost=problems["item"].map(full.solved) - problems.solved,
        faster=problems.speed / problems["item"].map(full.speed),
        smaller=problems["item"].map(full.bytes_held) / problems.bytes_held,
    )
