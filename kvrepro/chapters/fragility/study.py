"""The chapter's settings, and its studies: retained importance over many answers, and the grid of conditions."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from kvrepro.chapters.fragility import retention
from kvrepro.chapters.fragility.retention import DEFAULT, Setting
from kvrepro.engine.cache import GROUP
from kvrepro.engine.condition import Condition, Generation, Prefill, Prompt, ProperShare, Size
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import READINGS, Rule, find, is_own
from kvrepro.engine.score.learned import GATES, fitting
from kvrepro.errors import InputError
from kvrepro.experiment import data, measure
from kvrepro.experiment import run as runner
from kvrepro.experiment.answers import prompt_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

WORLD = "tinyworld"
LONG = ("list_all", "summary")
STAND_INS = ("single_fact", "two_hop", "summary", "few_shot", "frequent_words", "variable_tracking")  # for table 1's
DATASETS = ("narrativeqa", "hotpotqa", "gov_report", "trec", "passage_count", "lcc")
DEPTH = 14 / 31  # of the headline's layer, among those that hold tokens to evict: figure 1 is of layer 14 of 32
LONG_STEPS, LONG_TOKENS = 200, 1000  # a long answer's tokens, at least; those of prompts of the world that ask for one
DEFENSIVE = ("defensive_kv", "layer_defensive_kv")
POLICIES = ("streaming_llm", "snapkv", "cake", "ada_kv", "critical_ada_kv", "duo_attention", *DEFENSIVE)
PLUG_IN = ("snapkv", "cake", "pyramid_kv", "ada_kv", "critical_kv", "critical_ada_kv", "andpro", "dropkv", "r_kv")
R_KV_DEFENSIVE = "kvrepro/chapters/fragility/policies.py:R_KV"  # R-KV's scorer has no switch for the aggregation
STEPS = {  # of the public code, each changed to what the paper describes: name -> parameter and value
    "top of the mean not first": ("mass", 0.0),
    "norm not divided by its sum": ("share", "none"),
    "rows keep their pooled sums": ("rescale", False),
    "window's tokens not hidden": ("over", "all"),
}
WINDOWS = (16, 32, 64)  # the paper's own is 32
GUARD = 0.1  # of the budget, at each end
DUO = {"sinks": 16, "recent": 32}  # an eighth of its own 128 and 256: these prompts are short
GUARDED_RIVALS = (*DEFENSIVE, "critical_ada_kv")  # compared behind guards on all items: twelve miss their rare gains
NEEDLES = "needles"  # the part of the grid with further needles, which enters no pooled mean
# Items in the main comparison, of these in all other conditions, per needle task at every share, and per task in the
# study of retained importance; a claim on two cases needs seven (`stats.fewest`).
SIZES = {
    "quick": {"quality": 96, "more": 12, "needles": 6, "retained": 7},
    "full": {"quality": 400, "more": 128, "needles": 48, "retained": 48},
}


@dataclass(frozen=True)
class Settings(runner.Settings):
    """Settings of the chapter: its notebook's parameters, and others."""

    items: str = f"{WORLD}:{','.join(STAND_INS)},needle,needle_multikey"  #: see `data.load_items`
    shares: tuple[ProperShare, ...] = (0.1, 0.2, 0.4, 0.6, 0.8)  #: of the context that is kept
    policies: tuple[str, ...] = POLICIES  #: beside the full cache
    reading: Literal["both", "as_run", "as_described"] = "both"  #: of the defensive methods
    tokens: Size = 560  #: of a prompt of the embedded model's world, or of RULER
    answer_tokens: Size = 320  #: of an answer whose steps are looked at, at most
    max_new_tokens: Size = 32  #: of an answer in the quality grid

    @property
    def middle(self) -> float:
        """The share nearest to the paper's fifth, at which every item runs."""
        return min(self.shares, key=lambda share: abs(share - 0.2))

    def size(self, study: str) -> int:
        """How many items a study takes; `n_items`, of the main comparison, caps the others."""
        usual = data.AtMost(SIZES[self.profile][study])
        asked = self.n_items or usual
        return asked if study == "quality" else min(asked, usual)

    def readings(self, policy: str) -> tuple[str, ...]:
        """The readings in which a policy runs: the defensive methods in those asked for, others as in the fork."""
        asked = READINGS if self.reading == "both" else (self.reading,)
        return asked if policy in DEFENSIVE else ("as_run",)

    def load(self, loaded: Loaded, n_items: int | None) -> list[Item]:
        """So many items whose prompts the model holds beside an answer; None: all."""
        room = prompt_limit(loaded, self.max_new_tokens)
        return data.load_fitting(self.items, n_items, loaded.tokenizer, room, self.seed, self.tokens)


def first_of_each(items: Sequence[Item], count: int) -> list[Item]:
    """The first `count` items of each task."""
    tasks = dict.fromkeys(item.task for item in items)
    return [item for task in tasks for item in [item for item in items if item.task == task][:count]]


# ---------------------------------------------------------------- retained importance


def _is_long(item: Item) -> bool:
    """Whether its answer should be long, by its task in the embedded world or by the tokens that it may have."""
    return item.task in LONG or item.new_tokens(0) >= LONG_STEPS


def observed(loaded: Loaded, settings: Settings) -> Answers:
    """The study of the full cache's answers whose steps are looked at. Raises InputError where no history is enough.

    Of the embedded world's items, its long tasks and the stand-ins are taken. Of other items, those whose answers may
    be long (in LongBench: reports, meetings and news), and those of `DATASETS`, or else of all other tasks.
    """
    each, seed, most = settings.size("retained"), settings.seed, settings.answer_tokens
    if settings.items.partition(":")[0] == WORLD:
        long = [item for task in LONG for item in data.load_items(f"{WORLD}:{task}", 8 * each, seed, LONG_TOKENS)]
        long = [item for item in long if len(loaded.tokenizer.encode(item.answer)) >= LONG_STEPS]
        tasks = [name for name in STAND_INS if name not in LONG]
        short = data.load_items(f"{WORLD}:{','.join(tasks)}", each * len(tasks), seed, settings.tokens)
    else:
        every = settings.load(loaded, None)
        long, short = ([item for item in every if _is_long(item) == is_long] for is_long in (True, False))
        short = [item for item in short if item.task in DATASETS] or short

    def check_history(item: Item) -> None:
        prompt = data.build_prompt(item, loaded.tokenizer, prompt_limit(loaded, max(most, item.new_tokens(0))))
        with data.named(item):
            retention.end_of(prompt, Setting())

    chosen = data.usable(first_of_each(long, each) + first_of_each(short, each), "fragility", check_history)
    return Answers("fragility", "answers", chosen, [Condition()], most, note=tokens_of)


def tokens_of(item: Item, prompt: Prompt, answer: Generation) -> dict[str, Any]:
    """The note that a row keeps of an answer whose steps are looked at: its tokens."""
    return {"tokens": answer.tokens}


def retained(answered: Answers, loaded: Loaded, settings: Settings) -> dict[str, pd.DataFrame]:
    """The `curves` and the `summary` of `retention.retained` for every answer of the full cache, with columns item and
    task; in the summary also `long` (is its task one of those with long answers, or are there none?) and `headline` (is
    its layer the headline's?)."""
    rows, seen = run(answered, loaded, settings).set_index("item"), []
    for item in answered.items:  # with their prompt's limit, and the tokens of the full cache's answer
        if isinstance(note := rows.note[item.id], str):
            seen.append(replace(item, meta=item.meta | {"limit": int(rows.limit[item.id])} | json.loads(note)))
    layer = round(DEPTH * (len(ModelFacts.of(loaded.model).evictable) - 1))
    tables = run(PerItem("fragility", "retained", seen, retained_by_item, {"layer": layer}), loaded, settings)
    summary = tables["summary"]
    long = summary.task.isin([*LONG, *data.GROUPS["long"]])
    return tables | {"summary": summary.assign(long=long | ~long.any(), headline=summary.layer == layer)}


def retained_by_item(loaded: Loaded, item: Item, layer: int) -> dict[str, pd.DataFrame]:
    """`retention.retained` of one item, in all settings if it has a long answer or is the reader's own."""
    prompt = data.build_prompt(item, loaded.tokenizer, item.meta["limit"])
    short = not _is_long(item) and item.task in (*STAND_INS, *DATASETS)
    settings = {DEFAULT: Setting()} if short else retention.variants()
    return retention.retained(loaded.model, prompt, item.meta["tokens"], settings, layer)


# ---------------------------------------------------------------- quality


def has_window(policy: str) -> bool:
    """Whether the policy looks at a window of past queries."""
    return "window" in {**find(policy).parameters, **find(policy).as_run}


def condition(
    policy: str, share: float, reading: str = "as_run", guard: float = 0.0, bits: int | None = None, **switches: object
) -> Condition:
    """Compress the prompt before its question, with the paper's window of 32 past queries for every method."""
    switches = ({"window": 32} if has_window(policy) else {}) | switches | (DUO if policy == "duo_attention" else {})
    if policy == "r_kv" and switches.pop("aggregate", "own") == "defensive":
        policy = R_KV_DEFENSIVE
    given, until = tuple(switches.items()), Prefill(until="question")
    return Condition(policy, share, until, prefix=guard, suffix=guard, reading=reading, bits=bits, switches=given)


def grid(settings: Settings) -> dict[Condition, str]:
    """The chapter's conditions, each with its change from the main comparison. Raises InputError.

    "none": the full cache, each policy at each share, and plug-ins as they are. At the middle share: "guards" for every
    policy; "window 16" and the like for the defensive methods and a reader's own; "defensive" plug-ins, in place of the
    mean; a step of `STEPS` left out; and "4 bits" at two fifths, as in the paper.
    """
    at, policies = settings.middle, settings.policies
    changed: list[Any] = [(policy, share, "none", {}) for policy, share in itertools.product(policies, settings.shares)]
    changed += [(policy, at, "guards", {"guard": GUARD}) for policy in policies]
    windowed = [policy for policy in policies if policy in DEFENSIVE or (is_own(policy) and has_window(policy))]
    changed += [(policy, at, f"window {w}", {"window": w}) for policy in windowed for w in WINDOWS]
    if "defensive_kv" in policies and 0.4 in settings.shares:
        changed += [("defensive_kv", 0.4, "4 bits", {"bits": 4})]
    for policy in PLUG_IN if set(DEFENSIVE) & set(policies) else ():
        changed += [(policy, at, "none", {}), (policy, at, "defensive", {"aggregate": "defensive"})]
    found = {Condition(regime=Prefill(until="question")): "none"}
    for policy, share, change, given in changed:
        for reading in settings.readings(policy):
            found.setdefault(condition(policy, share, reading, **given), change)
    if "defensive_kv" in policies and settings.reading != "as_described":
        code = condition("defensive_kv", at)
        found |= {replace(code, switches=(*code.switches, step)): name for name, step in STEPS.items()}
    for c in found:
        Rule.of(c)
    return found


def parts_of(loaded: Loaded, settings: Settings) -> list[Answers]:
    """The parts of the grid; a condition that an item cannot meet is a row with an error. Raises InputError.

    every: some items in all conditions. middle: the other items in the main comparison, at the share nearest to the
    paper's, and `GUARDED_RIVALS` behind guards there. needles: of these other items, needles at the remaining shares.
    What this model cannot run is left out, which is printed: DuoAttention without gates that were learned for it, and 4
    bits if they do not fit the heads.
    """
    at, facts, every = settings.middle, ModelFacts.of(loaded.model), grid(settings)
    outputs = [facts.outputs[n] for n in facts.evictable]  # [heads, dim, hidden]
    if "duo_attention" in settings.policies:
        try:
            fitting(GATES, outputs)
        except InputError as error:
            data.say_once(f"duo_attention is left out: {error}")
            every = {c: change for c, change in every.items() if c.policy != "duo_attention"}
    if "4 bits" in every.values() and outputs[0].shape[1] % GROUP:
        data.say_once(f"4 bits are left out: groups of {GROUP} numbers share a scale, which heads do not fill")
        every = {c: change for c, change in every.items() if not c.bits}
    main = [c for c, change in every.items() if change == "none" and c.policy in ("full", *settings.policies)]
    guarded = [c for c in every if c.policy in GUARDED_RIVALS and c.budget == at and c.prefix]
    items = settings.load(loaded, settings.size("quality"))
    first = {item.id for item in settings.load(loaded, settings.size("more"))}
    others = [item for item in items if item.id not in first]
    needles = first_of_each([item for item in items if item.task.startswith("needle")], settings.size("needles"))
    parts = [
        ("every", [item for item in items if item.id in first], list(every)),
        ("middle", others, [c for c in main if c.budget in (None, at)] + guarded),
        (NEEDLES, [item for item in needles if item.id not in first], [c for c in main if c.budget != at]),
    ]
    parts = [part for part in parts if part[1] and len(part[2]) > 1]
    return [Answers("fragility", *part, settings.max_new_tokens) for part in parts]


def answers(parts: Sequence[Answers], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Run the parts of the grid: rows with `part`, the name of their part, `change`, as `grid` has it, and `score`
    (`measure.scores`). Baselines get the reading "any", and each item has one row of the full cache."""
    changes: dict[Any, str] = grid(settings)
    of_parts = []
    for part in parts:
        change = [changes[c] for c in part.conditions] * len(part.items)
        of_parts.append(run(part, loaded, settings).rename(columns={"name": "part"}).assign(change=change))
    rows = pd.concat(of_parts, ignore_index=True)
    reading = rows.reading.where(rows.policy.isin(DEFENSIVE), "any")
    policy = rows.policy.replace(R_KV_DEFENSIVE, "r_kv")
    rows = rows.assign(score=measure.scores(rows), reading=reading, policy=policy)
    return rows.drop_duplicates(["item", "policy", "share", "reading", "change"]).reset_index(drop=True)
