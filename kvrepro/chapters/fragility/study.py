"""The chapter on DefensiveKV: its settings, and its studies: retained importance over many answers, and the grid of
conditions."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import pandas as pd
from annotated_types import Ge, Lt

from kvrepro.chapters.fragility import retention
from kvrepro.chapters.fragility.retention import DEFAULT, Setting
from kvrepro.engine import policy as catalogue
from kvrepro.engine.cache import GROUP
from kvrepro.engine.condition import Condition, Count, Generation, Prefill, Prompt, ProperShare, Size
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import READINGS, find, is_own
from kvrepro.engine.score.learned import available
from kvrepro.errors import InputError
from kvrepro.experiment import data, measure
from kvrepro.experiment import run as runner
from kvrepro.experiment.answers import prompt_limit, prompt_of
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

WORLD = "tinyworld"
LONG = ("list_all", "summary")
STAND_INS = ("single_fact", "two_hop", "summary", "few_shot", "frequent_words", "variable_tracking")  # for table 1's
DATASETS = ("narrativeqa", "hotpotqa", "gov_report", "trec", "passage_count", "lcc")
LONG_STEPS, LONG_TOKENS = 200, 1000  # a long answer's tokens, at least; shortest prompts of the world that ask for one
BASELINES = ("streaming_llm", "snapkv", "cake", "ada_kv", "critical_ada_kv", "duo_attention")
DEFENSIVE = ("defensive_kv", "layer_defensive_kv")
POLICIES = (*BASELINES, *DEFENSIVE)
PLUG_IN = ("snapkv", "cake", "pyramid_kv", "ada_kv", "critical_kv", "critical_ada_kv", "andpro", "dropkv", "r_kv")
R_KV_DEFENSIVE = "kvrepro/chapters/fragility/policies.py:R_KV"  # R-KV's scorer has no switch for the aggregation
STEPS = {  # of the public code, each changed to what the paper describes: name -> parameter and value
    "top of the mean not first": ("mass", 0.0),
    "norm not divided by its sum": ("share", "none"),
    "rows keep their pooled sums": ("rescale", False),
    "window's tokens not hidden": ("over", "all"),
}
WINDOWS = (16, 32, 64)
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
class Settings(runner.Settings, Setting):
    """Settings of the chapter: its notebook's parameters, and others; those about retained importance are the fields of
    `Setting`."""

    items: str = f"{WORLD}:{','.join(STAND_INS)},needle,needle_multikey"  #: see `data.load_items`
    shares: tuple[ProperShare, ...] = (0.1, 0.2, 0.4, 0.6, 0.8)  #: of the context that is kept
    policies: tuple[str, ...] = POLICIES  #: beside the full cache
    reading: Literal["both", "as_run", "as_described"] = "both"  #: of the defensive methods
    layer: Count | None = None  #: the headline's, from 0 among those that may evict; None: at the depth of figure 1
    tokens: Size = 560  #: of a prompt of the embedded model's world, or of RULER
    long_tokens: Annotated[int, Ge(LONG_TOKENS)] = LONG_TOKENS  #: of one whose answer is long
    answer_tokens: Size = 320  #: of an answer whose steps are looked at, at most
    max_new_tokens: Size = 32  #: of an answer in the quality grid
    protect_frac: Annotated[float, Ge(0), Lt(0.5)] = 0.10  #: of the budget, at each end, behind guards

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.single > self.window:
            raise InputError(f"single {self.single} of {self.window} past queries: count from 1 to the window")

    @property
    def base(self) -> Setting:
        """The settings about retained importance."""
        return Setting(**{f.name: getattr(self, f.name) for f in fields(Setting)})

    @property
    def middle(self) -> float:
        """The share nearest to the paper's fifth, at which every item runs."""
        return min(self.shares, key=lambda share: abs(share - 0.2))

    def size(self, study: str) -> int:
        """How many items a study takes; `n_items`, of the main comparison, caps the others."""
        usual = data.AtMost(SIZES[self.profile][study])
        if self.n_items is None:
            return usual
        return self.n_items if study == "quality" else min(self.n_items, usual)

    def readings(self, policy: str) -> tuple[str, ...]:
        """The readings in which a policy runs: the defensive methods in those asked for, others as in the fork."""
        if policy not in DEFENSIVE:
            return ("as_run",)
        return READINGS if self.reading == "both" else (self.reading,)


# ---------------------------------------------------------------- retained importance


def paper_layer(model: Any) -> int:
    """The layer at the depth of layer 14 of 32, counted among those that hold tokens to evict."""
    return round(14 / 31 * (len(ModelFacts.of(model).evictable) - 1))


def _is_long(item: Item) -> bool:
    """Whether its answer should be long, by its task in the embedded world or by the tokens that it may have."""
    return item.task in LONG or item.new_tokens(0) >= LONG_STEPS


def first_of_each(items: Iterable[Item], count: int) -> list[Item]:
    """The first `count` items of each task."""
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    return [item for of_task in by_task.values() for item in of_task[:count]]


def observed(loaded: Loaded, settings: Settings) -> Answers:
    """The study of answers whose steps are looked at, by the full cache. Computes nothing; raises InputError for items
    that the settings do not fit.

    Of the embedded world's items, its long tasks and those that stand for the datasets of table 1 are taken. Of other
    items, those whose answers may be long (in LongBench: reports, meetings and news), and those of table 1's datasets,
    or of all other tasks if there are none.
    """
    each = settings.size("retained")
    if settings.items.partition(":")[0] == WORLD:
        asked, seed = {"tokens": settings.long_tokens}, settings.seed
        long = [item for task in LONG for item in data.load_items(f"{WORLD}:{task}", 8 * each, seed, **asked)]
        long = [item for item in long if len(loaded.tokenizer.encode(item.answer)) >= LONG_STEPS]
        tasks = [name for name in STAND_INS if name not in LONG]
        short = data.load_items(f"{WORLD}:{','.join(tasks)}", each * len(tasks), seed, settings.tokens)
    else:
        every = _load(loaded, None, settings)
        long, short = ([item for item in every if _is_long(item) == is_long] for is_long in (True, False))
        short = [item for item in short if item.task in DATASETS] or short
    layers = len(ModelFacts.of(loaded.model).evictable)
    if (settings.layer or 0) >= layers:
        raise InputError(f"layer {settings.layer}: {loaded.name} has {layers}, counted from 0")
    chosen = first_of_each(long, each) + first_of_each(short, each)
    study = Answers("fragility", "answers", chosen, [Condition()], settings.answer_tokens, note=tokens_of)

    def check_history(item: Item) -> None:
        prompt, _ = prompt_of(study, loaded, item)
        with data.named(item):
            for s in {s.until: s for s in _settings_for(item, settings.base).values()}.values():
                retention.end_of(prompt, s)

    return replace(study, items=data.usable(chosen, "fragility", check_history))


def tokens_of(item: Item, prompt: Prompt, answer: Generation) -> dict[str, Any]:
    """The note that a row keeps of an answer whose steps are looked at: its tokens."""
    return {"tokens": answer.tokens}


def _load(loaded: Loaded, n_items: int | None, settings: Settings) -> list[Item]:
    room = prompt_limit(loaded, settings.max_new_tokens)
    return data.load_fitting(settings.items, n_items, loaded.tokenizer, room, settings.seed, settings.tokens)


def _settings_for(item: Item, base: Setting) -> dict[str, Setting]:
    """All settings for long answers and for the reader's own items; the base for others."""
    short = not _is_long(item) and item.task in (*STAND_INS, *DATASETS)
    return {DEFAULT: base} if short else retention.variants(base)


def retained(answered: Answers, loaded: Loaded, settings: Settings) -> dict[str, pd.DataFrame]:
    """Tables of retained importance for every answer of the full cache: the `curves` and the `summary` of
    `retention.retained`, with columns item and task; in the summary also `long` (is its task one of those with long
    answers: the world's two, LongBench's three, or else all?) and `headline` (is its layer the headline's?)."""
    rows = run(answered, loaded, settings).set_index("item")
    seen = {}  # by item: it, the limit of its prompt in tokens, and the tokens of the full cache's answer
    for item in answered.items:
        limit, note = int(rows.limit[item.id]), rows.note[item.id]
        if isinstance(note, str):
            seen[item.id] = item, limit, json.loads(note)["tokens"]
    layer = paper_layer(loaded.model) if settings.layer is None else settings.layer
    study = PerItem("fragility", "retained", seen, retained_by_item, {"base": settings.base, "layer": layer})
    tables, tasks = run(study, loaded, settings), {item.id: item.task for item in answered.items}
    curves, summary = (table.assign(task=table["item"].map(tasks)) for table in (tables["curves"], tables["summary"]))
    long = summary.task.isin([*LONG, *data.GROUPS["long"]])
    return {"curves": curves, "summary": summary.assign(long=long | ~long.any(), headline=summary.layer == layer)}


def retained_by_item(
    loaded: Loaded, seen: tuple[Item, int, list[int]], base: Setting, layer: int
) -> dict[str, pd.DataFrame]:
    """Curves and summary of one item, as `retention.retained` has them."""
    item, limit, tokens = seen
    prompt = data.build_prompt(item, loaded.tokenizer, limit)
    curves, summary = retention.retained(loaded.model, prompt, tokens, _settings_for(item, base), layer)
    return {"curves": curves, "summary": summary}


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


def compared(shares: Sequence[float], settings: Settings) -> list[Condition]:
    """The full cache, and each policy at each share. Raises InputError."""
    conditions = [Condition(regime=Prefill(until="question"))]
    for policy, share in itertools.product(settings.policies, shares):
        conditions += [condition(policy, share, reading) for reading in settings.readings(policy)]
    for c in conditions:
        catalogue.Rule.of(c)
    return conditions


def grid(settings: Settings) -> list[Condition]:
    """The chapter's conditions: the main comparison (`compared`) first; then every policy behind guards, and windows,
    plug-ins and 4 bits as in the paper; the reader's own policies have the windows too. Raises InputError.

    The defensive methods run in the given readings, the others as in the authors' fork.
    """
    conditions, at, policies = compared(settings.shares, settings), settings.middle, settings.policies
    windowed = [p for p in policies if p in DEFENSIVE or (is_own(p) and has_window(p))]
    changed: list[tuple[str, float, dict[str, Any]]]
    changed = [(p, at, {"guard": settings.protect_frac}) for p in policies if settings.protect_frac]
    changed += [(policy, at, {"window": window}) for policy in windowed for window in WINDOWS]
    if "defensive_kv" in policies and 0.4 in settings.shares:
        changed += [("defensive_kv", 0.4, {"bits": 4})]
    for policy, share, change in changed:
        conditions += [condition(policy, share, reading, **change) for reading in settings.readings(policy)]
    if set(DEFENSIVE) & set(policies):
        for policy in PLUG_IN:
            conditions += [condition(policy, at), condition(policy, at, aggregate="defensive")]
    if "defensive_kv" in policies and settings.reading != "as_described":
        code = condition("defensive_kv", at)
        conditions += [replace(code, switches=(*code.switches, step)) for step in STEPS.values()]
    return list(dict.fromkeys(conditions))


def parts_of(loaded: Loaded, settings: Settings) -> list[Answers]:
    """The parts of the grid; a condition that an item cannot meet is a row with an error. Raises InputError.

    every: some items in all conditions. middle: the other items in the main comparison, at the share nearest to the
    paper's, and `GUARDED_RIVALS` behind guards there. needles: among these other items, the embedded world's needles,
    at the remaining shares.
    """
    every, at = grid(settings), settings.middle
    all_items = _load(loaded, settings.size("quality"), settings)
    first = {item.id for item in _load(loaded, settings.size("more"), settings)}
    of_world = settings.items.partition(":")[0] == WORLD
    needles = [item for item in all_items if item.task.startswith("needle") and of_world]
    guarded = [c for c in every if c.policy in GUARDED_RIVALS and c.budget == at and c.prefix]
    parts = {
        "every": ([item for item in all_items if item.id in first], every),
        "middle": ([item for item in all_items if item.id not in first], compared([at], settings) + guarded),
        NEEDLES: (
            [item for item in first_of_each(needles, settings.size("needles")) if item.id not in first],
            [c for c in compared(settings.shares, settings) if c.budget != at],
        ),
    }
    possible = {name: (items, _possible(loaded, conditions)) for name, (items, conditions) in parts.items()}
    return [
        Answers("fragility", name, items, conditions, settings.max_new_tokens)
        for name, (items, conditions) in possible.items()
        if items and len(conditions) > 1
    ]


def _possible(loaded: Loaded, conditions: Sequence[Condition]) -> list[Condition]:
    """The conditions that this model can run; what is left out is printed: DuoAttention if its gates were learned for
    another model, and 4 bits if they do not fit the heads."""
    facts = ModelFacts.of(loaded.model)
    outputs = [facts.outputs[n] for n in facts.evictable]  # [heads, dim, hidden]
    possible = []
    for c in conditions:
        if c.policy == "duo_attention" and not available(outputs):
            data.say_once("duo_attention is left out: no gates were learned of this model; run python -m studies.duo")
        elif c.bits and outputs[0].shape[1] % GROUP:
            data.say_once(f"4 bits are left out: groups of {GROUP} numbers share a scale, which heads do not fill")
        else:
            possible.append(c)
    return possible


def answers(parts: Sequence[Answers], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Run the parts of the grid: their rows as `tidy` has them."""
    return tidy(pd.concat([run(part, loaded, settings) for part in parts], ignore_index=True))


def tidy(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `score` (`measure.scores`), `part`, the name of their part of the grid, and `change`, the
    difference from the main comparison: "none", "guards", "window 16", "defensive" (in place of the mean), "4 bits", or
    a step of `STEPS` left out. Baselines get the reading "any". Each item has one row of the full cache.
    """
    switches, other = rows.switches.map(json.loads), rows.policy == R_KV_DEFENSIVE
    window = switches.map(lambda s: s.get("window", 32))
    change = ("window " + window.astype(str)).where(window != 32, "none").mask(rows.prefix > 0, "guards")
    change = change.mask(rows.bits == 4, "4 bits")
    change = change.mask(other | switches.map(lambda s: s.get("aggregate") == "defensive"), "defensive")
    for name, (step, _) in STEPS.items():
        change = change.mask(switches.map(lambda s, step=step: step in s), name)
    tidied = rows.rename(columns={"name": "part"}).assign(score=measure.scores(rows), change=change)
    tidied["reading"] = rows.reading.where(rows.policy.isin(DEFENSIVE), "any")
    tidied["policy"] = rows.policy.where(~other, "r_kv")
    return tidied.drop_duplicates(["item", "policy", "share", "reading", "change"]).reset_index(drop=True)
