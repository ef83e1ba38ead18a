"""The studies of the chapter on DefensiveKV: retained importance over many answers, and the grid of conditions."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility import retention
from kvrepro.chapters.fragility.retention import DEFAULT, Setting
from kvrepro.chapters.fragility.settings import STEPS_OF_LONG, Settings
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import find, is_own
from kvrepro.engine.quantise import GROUP
from kvrepro.engine.regime import Prefill
from kvrepro.engine.rule import check as policy_check
from kvrepro.engine.score.learned import available
from kvrepro.errors import InputError
from kvrepro.experiment import claims, controls, data, longbench, measure, stats
from kvrepro.experiment.answers import able, check, prompt_limit, unmet
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

LONG = ("list_all", "summary")
NAMES = {  # the paper's dataset -> the world's task that stands in for it, and its name in LongBench
    "NarrativeQA": ("single_fact", "narrativeqa"), "HotpotQA": ("two_hop", "hotpotqa"),
    "GovReport": ("summary", "gov_report"), "TREC": ("few_shot", "trec"),
    "PassageCount": ("frequent_words", "passage_count"), "LCC": ("variable_tracking", "lcc"),
}  # fmt: skip
TABLE_1, DATASETS = ({dataset: names[i] for dataset, names in NAMES.items()} for i in range(2))
BASELINES = ("streaming_llm", "snapkv", "cake", "ada_kv", "critical_ada_kv", "duo_attention")
DEFENSIVE = ("defensive_kv", "layer_defensive_kv")
POLICIES = (*BASELINES, *DEFENSIVE)
PLUG_IN = ("snapkv", "cake", "pyramid_kv", "ada_kv", "critical_kv", "critical_ada_kv", "andpro", "dropkv", "r_kv")
R_KV_DEFENSIVE = "kvrepro/chapters/fragility/policies.py:R_KV"  # R-KV's scorer has no switch for the aggregation
STEPS = {  # of the public code, each changed to what the paper describes: name -> parameter and value
    "no first mass": ("mass", 0.0),
    "norm not shared": ("share", "none"),
    "rows not rescaled": ("rescale", False),
    "window counted": ("over", "all"),
}
OWN_PAPERS = ("snapkv", "cake", "ada_kv", "critical_kv", "critical_ada_kv")
WINDOWS = (16, 32, 64)
DUO = {"sinks": 16, "recent": 32}  # an eighth of its own 128 and 256: these prompts are short
MIDDLE = 0.2  # the share of the extra studies, the paper's
GUARDED = (0.1, MIDDLE, 0.4)  # shares at which every policy runs behind guards too
GUARDED_RIVALS = (*DEFENSIVE, "critical_ada_kv")  # compared behind guards on all items: twelve miss their rare gains
READINGS = claims.READINGS
NEEDLES = "needles"  # the part of the grid with further needles, which have their own figure and enter no pooled mean


class Size(NamedTuple):
    """Numbers of items."""

    quality: int  # in the main comparison
    more: int  # of these, in all other conditions
    needles: int  # per needle task, at every share
    long: int  # per task with long answers, in the study of retained importance
    short: int  # per other task, in that study


SIZES = {  # a claim on two cases needs seven items (`stats.fewest`)
    "quick": Size(data.AtMost(96), data.AtMost(12), 6, 7, 7),
    "full": Size(data.AtMost(400), data.AtMost(128), 48, 48, 48),
}


def declare(
    loaded: Loaded, items: str, n_items: int | None, settings: Settings, *,
    shares: list[float], policies: list[str], reading: str,
) -> tuple[Answers, list[Answers]]:  # fmt: skip
    """The chapter's studies: answers whose steps are looked at, and the parts of the grid. Computes nothing; raises
    InputError for what cannot be run. n_items: size of the main comparison; caps the other sizes."""
    sizes = SIZES[settings.profile]
    sizes = sizes if n_items is None else Size(n_items, *(min(n_items, count) for count in sizes[1:]))
    answered = observed(loaded, items, sizes, settings)
    parts = parts_of(loaded, items, sizes, settings, shares, policies, reading)
    return answered, [met(Answers("fragility", *part, settings.max_new_tokens), loaded) for part in parts]


def results(
    answered: Answers, quality: Sequence[Answers], loaded: Loaded, settings: Settings
) -> tuple["Retained", pd.DataFrame]:
    """Run the studies: retained importance, and the tidied rows of the grid (`tidy`)."""
    shares = retained_by(answered, loaded, settings)
    return shares, tidy(pd.concat([run(study, loaded, settings) for study in quality], ignore_index=True))


def without_cache(quality: Sequence[Answers], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Controls of the grid's items: answers without a cache (`controls.of_items`), with `score` as in the grid."""
    items = list({item.id: item for study in quality for item in study.items}.values())
    answers = controls.of_items("fragility", items, loaded, settings, settings.max_new_tokens)
    return answers.assign(score=measure.scores(answers))


# ---------------------------------------------------------------- retained importance


@dataclass
class Retained:
    """summary, and the base setting's curves, as `retention.retained` returns them, with columns item and task."""

    curves: pd.DataFrame
    summary: pd.DataFrame
    layer: int  # the setting's, or that at the depth of the paper's figure 1

    @property
    def long_tasks(self) -> list[str]:
        """Tasks with answers long enough to have a worst step: the world's two, LongBench's three, or else all."""
        tasks = list(self.summary.task.unique())
        return [task for task in tasks if task in (*LONG, *longbench.GROUPS["long"])] or tasks

    @property
    def long(self) -> pd.DataFrame:
        """The summary of the long answers."""
        return self.summary[self.summary.task.isin(self.long_tasks)]

    @property
    def headline(self) -> pd.DataFrame:
        """All answers in the base setting, at the headline's layer, its heads together."""
        s = self.summary
        return s[(s.setting == DEFAULT) & (s.layer == self.layer) & (s["head"] == -1)]


def paper_layer(model: Any) -> int:
    """The layer at the depth of layer 14 of 32, counted among those that hold tokens to evict."""
    return round(14 / 31 * (len(ModelFacts.of(model).evictable) - 1))


def has_experts(model: Any) -> bool:
    """Whether the model is a mixture of experts."""
    config = model.config.get_text_config()
    return any((getattr(config, f"num_{kind}experts", 0) or 0) > 1 for kind in ("", "local_", "routed_"))


def _is_long(item: Item) -> bool:
    """Whether its answer should be long, by its task in the embedded world or by the tokens that it may have."""
    return item.task in LONG or item.new_tokens(0) >= STEPS_OF_LONG


def _world(items: str) -> bool:
    return items == "tinyworld" or items.startswith("tinyworld:")


def _long_items(loaded: Loaded, count: int, settings: Settings) -> list[Item]:
    """The first `count` items of each long task whose answers have `STEPS_OF_LONG` tokens. Raises InputError."""
    if settings.answer_tokens < STEPS_OF_LONG:
        raise InputError(f"answer_tokens {settings.answer_tokens} cuts answers of {STEPS_OF_LONG} steps and more")
    items = []
    for task in LONG:
        drawn = data.load_items(f"tinyworld:{task}", 8 * count, settings.seed, settings.long_tokens)
        long = [item for item in drawn if len(loaded.tokenizer.encode(item.answer)) >= STEPS_OF_LONG]
        if len(long) < count:
            raise InputError(f"{len(long)} of {len(drawn)} answers of {task} are long, {count} asked: another seed")
        items += long[:count]
    return items


def observed(loaded: Loaded, items: str, sizes: Size, settings: Settings) -> Answers:
    """The study of answers whose steps are looked at, by the full cache. Computes nothing; raises InputError for items
    that the settings do not fit.

    items: of the embedded world ("tinyworld..."), its long tasks and those that stand for the datasets of table 1 are
    taken. Of other items, those whose answers may be long (in LongBench: reports, meetings and news), and those of
    table 1's datasets, or of all other tasks if there are none; if no answer is long, as many items as of one task.
    """
    if _world(items):
        short = [name for name in TABLE_1.values() if name not in LONG]
        chosen = _long_items(loaded, sizes.long, settings)
        named, count = f"tinyworld:{','.join(short)}", sizes.short * len(short)
        chosen += data.load_items(named, count, settings.seed, settings.tokens)
    else:
        chosen = _observed_elsewhere(_load(loaded, items, None, settings), sizes, settings.seed)
    facts, base = ModelFacts.of(loaded.model), settings.base
    for name, count in (("layer", len(facts.evictable)), ("head", len(facts.outputs[facts.evictable[0]]))):
        if (getattr(base, name) or 0) >= count:
            raise InputError(f"{name} {getattr(base, name)}: {loaded.name} has {count}, counted from 0")
    study = Answers("fragility", "answers", chosen, [Condition()], settings.answer_tokens, note=tokens_of)

    def check_history(item: Item) -> None:
        [prompt] = check(replace(study, items=[item]), loaded)
        with data.named(item):
            for end in {s.until: s for s in _settings_for(item, base).values()}.values():
                retention.end_of(prompt, end)

    return replace(study, items=data.usable(chosen, "fragility", check_history))


def tokens_of(item: Item, prompt: Prompt, answer: Generation) -> dict[str, Any]:
    """The note that a row keeps of an answer whose steps are looked at: its tokens."""
    return {"tokens": answer.tokens}


def _load(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> list[Item]:
    """Items as in `data.load_fitting`, without those that have no question to compress what comes before."""
    room = prompt_limit(loaded, settings.max_new_tokens)
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed, settings.tokens)
    full = Condition(regime=Prefill(until="question"))
    return able(Answers("fragility", "every", fitting, [full], settings.max_new_tokens), loaded)


def _observed_elsewhere(items: Sequence[Item], sizes: Size, seed: int) -> list[Item]:
    """The items of `observed`, where they are not the embedded world's."""
    long, short = ([item for item in items if _is_long(item) == is_long] for is_long in (True, False))
    if not long:
        return data.balanced(short, min(sizes.long, len(short)), seed)
    short = [item for item in short if item.task in DATASETS.values()] or short
    chosen = []
    for pool, count in ((long, sizes.long), (short, sizes.short)):
        wanted = count * len({item.task for item in pool})
        chosen += data.balanced(pool, min(wanted, len(pool)), seed)
    return chosen


def _settings_for(item: Item, base: Setting) -> dict[str, Setting]:
    """All settings for long answers and for the reader's own items; the base for others."""
    if not _is_long(item) and item.task in (*TABLE_1.values(), *DATASETS.values()):
        return {DEFAULT: base}
    return retention.variants(base) | retention.specifications(base) | retention.singles(base)


@dataclass(frozen=True)
class Answered:
    """An item, the limit of its prompt in tokens, and the tokens of the full cache's answer."""

    item: Item
    limit: int
    tokens: list[int]

    @property
    def task(self) -> str:
        return self.item.task


def retained_by(answered: Answers, loaded: Loaded, settings: Settings) -> Retained:
    """Let the full cache answer, and look at each answer in one more pass. A dry run generates nothing: there the
    item's right answer, cut to the length that it may have, takes the place of one that is not stored."""
    rows = run(answered, loaded, settings).set_index("item")
    seen = {}
    for item in answered.items:
        note, limit = rows.note[item.id], int(rows.limit[item.id])
        if isinstance(note, str):
            seen[item.id] = Answered(item, limit, json.loads(note)["tokens"])
        elif settings.dry_run:
            most = item.new_tokens(answered.max_new_tokens)
            seen[item.id] = Answered(item, limit, loaded.tokenizer.encode(item.answer)[:most])
    layer = paper_layer(loaded.model) if settings.layer is None else settings.layer
    study = PerItem("fragility", "retained", seen, retained_by_item, {"base": settings.base, "layer": layer})
    return Retained(**run(study, loaded, settings), layer=layer)


def retained_by_item(loaded: Loaded, item: Answered, base: Setting, layer: int) -> dict[str, pd.DataFrame]:
    """Curves (base setting) and summary of one item, as `retention.retained` has them."""
    prompt = data.build_prompt(item.item, loaded.tokenizer, item.limit)
    curves, summary = retention.retained(loaded.model, prompt, item.tokens, _settings_for(item.item, base), layer)
    return {"curves": curves[curves.setting == DEFAULT], "summary": summary}


def headlines(r: Retained) -> pd.DataFrame:
    """Where the paper's headline may have been measured: rows of the long answers, with a column `where`.

    Each setting at the headline's layer; the base setting also over all layers together, and at the layer and at the
    query head with the lowest worst step.
    """
    s = r.long
    base = s[s.setting == DEFAULT]
    moved = s[(s.layer == r.layer) & (s["head"] == -1) & ~s.setting.str.startswith(("#", retention.TOKEN))]

    def lowest(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.loc[rows.groupby(["item", "rule"]).worst.idxmin()]

    parts = [
        moved.assign(where=moved.setting.replace(DEFAULT, "our default")),
        base[base.layer == -1].assign(where="our default, all layers together"),
        lowest(base[(base.layer >= 0) & (base["head"] == -1)]).assign(where="our default, worst layer"),
        lowest(base[base["head"] >= 0]).assign(where="our default, worst query head"),
    ]
    return pd.concat(parts, ignore_index=True)


def by_part(r: Retained) -> pd.DataFrame:
    """What each part of defensive aggregation changes at the worst step of the long answers, at the headline's layer.

    Columns setting, part (of `retention.CHANGES`), value, low, high, n.
    """
    rows = r.long[(r.long.layer == r.layer) & (r.long["head"] == -1)]
    tables = []
    for part, sides in retention.CHANGES.items():
        of_rule, against = (rows[rows.rule == rule] for rule in sides)
        table = stats.contrasts(of_rule, against, "setting", "worst", on=["item", "setting"], bounds=None)
        tables.append(table.assign(part=part))
    return pd.concat(tables, ignore_index=True)


def printed(tasks: Iterable[str] = ()) -> pd.DataFrame:
    """The paper's worst steps by mean and defensive aggregation. Columns where, dataset, task, rule, value, low, high.

    task: the dataset's name in LongBench if that is among `tasks`, else the task that stands in for it.
    """
    named = TABLE_1 | {dataset: name for dataset, name in DATASETS.items() if name in set(tasks)}
    files = ("defensivekv_text_numbers.csv", "defensivekv_t01_worstcase.csv")
    f = pd.concat([claims.published(file) for file in files])
    rules = {"Mean aggregation": "mean", "Defensive aggregation": "defensive"}
    f = f[f.metric.eq("worst-case retained importance") & f.method.isin(rules)]
    where = f.table.map({"1": "paper, table 1", "fig1": "paper, figure 1, layer 14"}).fillna("paper, figure 3")
    f = f.assign(where=where, dataset=f.task, task=f.task.map(named), rule=f.method.map(rules))
    f = f.assign(value=f.value.astype(float), low=np.nan, high=np.nan)
    return f[["where", "dataset", "task", "rule", "value", "low", "high"]]


# ---------------------------------------------------------------- quality


def has_window(policy: str) -> bool:
    """Whether the policy looks at a window of past queries."""
    return "window" in {**find(policy).parameters, **find(policy).as_run}


def windowed(policies: Sequence[str]) -> list[str]:
    """The policies that also run with other windows: the defensive methods, and the reader's own with a window."""
    return [p for p in policies if p in DEFENSIVE or (is_own(p) and has_window(p))]


def condition(
    policy: str, share: float, reading: str = "as_run", guard: float = 0.0, bits: int | None = None, **switches: object
) -> Condition:
    """Compress the prompt before its question, with the paper's window of 32 past queries for every method."""
    switches = ({"window": 32} if has_window(policy) else {}) | switches | (DUO if policy == "duo_attention" else {})
    if policy == "r_kv" and switches.pop("aggregate", "own") == "defensive":
        policy = R_KV_DEFENSIVE
    return Condition(
        policy, share, Prefill(until="question"), prefix=guard, suffix=guard, reading=reading, bits=bits,
        switches=tuple(switches.items()),
    )  # fmt: skip


def middle(shares: Sequence[float]) -> float:
    """The share nearest to the paper's fifth, at which every item runs."""
    return min(shares, key=lambda share: abs(share - MIDDLE))


def grid(
    shares: Sequence[float], policies: Sequence[str] = POLICIES, reading: str = "both", guard: float = 0.10
) -> list[Condition]:
    """The chapter's conditions: the main comparison (`compared`) first; then every policy behind guards, and windows,
    plug-ins and 4 bits as in the paper; the reader's own policies have the windows too. Raises InputError.

    The defensive methods run in the given readings, the others as in the authors' fork.
    """
    conditions, at = compared(shares, policies, reading), middle(shares)

    def add(policy: str, share: float, **more: Any) -> None:
        conditions.extend(condition(policy, share, reading=stated, **more) for stated in _readings(policy, reading))

    for policy, share in itertools.product(policies, [s for s in shares if (s in GUARDED or s == at) and guard]):
        add(policy, share, guard=guard)
    for policy, window in itertools.product(windowed(policies), WINDOWS):
        add(policy, at, window=window)
    if set(DEFENSIVE) & set(policies):
        for policy in PLUG_IN:
            conditions += [condition(policy, at), condition(policy, at, aggregate="defensive")]
    if "defensive_kv" in policies and reading != "as_described":
        code = condition("defensive_kv", at)
        conditions += [replace(code, switches=(*code.switches, step)) for step in STEPS.values()]
    if "defensive_kv" in policies and 0.4 in shares:
        add("defensive_kv", 0.4, bits=4)
    return list(dict.fromkeys(conditions))


def compared(shares: Sequence[float], policies: Sequence[str], reading: str) -> list[Condition]:
    """The full cache, and each policy at each share. Raises InputError."""
    conditions = [Condition(regime=Prefill(until="question"))]
    for policy, share in itertools.product(policies, shares):
        conditions += [condition(policy, share, reading=stated) for stated in _readings(policy, reading)]
    for c in conditions:
        policy_check(c)
    return conditions


def _readings(policy: str, reading: str) -> tuple[str, ...]:
    return ("as_run",) if policy not in DEFENSIVE else READINGS if reading == "both" else (reading,)


def parts_of(
    loaded: Loaded, items: str, sizes: Size, settings: Settings, shares: list[float], policies: list[str], reading: str
) -> list[tuple[str, list[Item], list[Condition]]]:
    """The parts of the grid: (name, items, conditions). Raises InputError.

    every: some items in all conditions; with the full profile also under the baselines as their own papers describe
    them, with their windows and poolings. middle: the other items in the main comparison, at the share nearest to the
    paper's, and `GUARDED_RIVALS` behind guards there. needles: among these other items, the embedded world's needles,
    at the remaining shares.
    """
    at, every = middle(shares), _possible(loaded, grid(shares, policies, reading, settings.protect_frac))
    if {c.policy for c in every} == {"full"}:
        raise InputError(f"policies {list(policies)}: none is left for this model")
    policies = [p for p in policies if any(c.policy == p for c in every)]
    if settings.profile == "full":
        every += [Condition(policy, at, Prefill(until="question"), reading="as_described") for policy in OWN_PAPERS]
    all_items = _load(loaded, items, sizes.quality, settings)
    first = {item.id for item in _load(loaded, items, sizes.more, settings)}
    rest = [item for item in all_items if item.id not in first]
    needle_items = []
    for task in sorted({item.task for item in all_items if item.task.startswith("needle") and _world(items)}):
        needle_items += [item for item in all_items if item.task == task][: sizes.needles]
    needle_conditions = [c for c in compared(shares, policies, reading) if c.budget != at]
    guarded = [c for c in every if c.policy in GUARDED_RIVALS and c.budget == at and c.prefix]
    parts = [
        ("every", [item for item in all_items if item.id in first], every),
        ("middle", rest, compared([at], policies, reading) + guarded),
        (NEEDLES, [item for item in needle_items if item.id not in first], needle_conditions),
    ]
    return [part for part in parts if part[1] and len(part[2]) > 1]


def met(study: Answers, loaded: Loaded) -> Answers:
    """The study without the conditions that single items cannot meet, such as small shares of short prompts; prints how
    many are left out. Raises InputError where no policy is left."""
    conditions: list[Condition] = list(study.conditions)  # type: ignore[arg-type]
    prompts = check(replace(study, gaps=True), loaded)
    missing = unmet(loaded, prompts, conditions, [range(len(conditions))] * len(prompts))
    if missing:
        (i, j), why = next(iter(missing.items()))
        count = len(prompts) * (len(conditions) - 1)  # every item can have the full cache
        if len(missing) == count:
            with data.named(study.items[i]):
                raise why
        what = f"{len(missing)} of {count} answers are left out, the first {study.items[i].id}, {conditions[j].label}"
        print(f"fragility/{study.name}: {what}: {why}")
        by_item = [[c for j, c in enumerate(conditions) if (i, j) not in missing] for i in range(len(prompts))]
        study = replace(study, conditions=by_item)
    check(study, loaded)
    return study


def _possible(loaded: Loaded, conditions: Sequence[Condition]) -> list[Condition]:
    """The conditions that this model can run; what is left out is printed: DuoAttention if its gates were learned for
    another model, and 4 bits if they do not fit the heads."""
    shape = loaded.model.config.get_text_config()
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    duo = [c for c in conditions if c.policy == "duo_attention"]
    facts = ModelFacts.of(loaded.model)
    if duo and not available([facts.outputs[n] for n in facts.evictable]):
        print("duo_attention is left out: no gates were learned of this model; run python -m studies.duo")
        conditions = [c for c in conditions if c not in duo]
    if dim % GROUP and any(c.bits for c in conditions):
        print(f"4 bits are left out: groups of {GROUP} share a scale, heads have {dim} dimensions")
        conditions = [c for c in conditions if c.bits is None]
    return list(conditions)


UNCHANGED = "none"  # the main comparison: nothing is changed


def tidy(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `score` (`measure.scores`) and `change`, the difference from the main comparison ("none" if there
    is none). Baselines get the reading "any". Each item has one row of the full cache.

    change: "guards", "window 16", "defensive" (in place of the mean), "4 bits", a step of `STEPS` left out, or "own
    paper", a baseline as its own paper describes it.
    """
    switches, other = rows.switches.map(json.loads), rows.policy == R_KV_DEFENSIVE
    defensive = rows.policy.isin(DEFENSIVE)
    window = switches.map(lambda s: s.get("window", 32))
    changes = {  # of these, a condition has one
        "own paper": ~defensive & (rows.reading == "as_described"),
        "4 bits": rows.bits == 4,
        "defensive": other | switches.map(lambda s: s.get("aggregate") == "defensive"),
        "guards": rows.prefix > 0,
    } | {name: switches.map(lambda s, step=step: step in s) for name, (step, _) in STEPS.items()}
    change = ("window " + window.astype(str)).where(window != 32, UNCHANGED)
    for name, changed in changes.items():
        change = change.mask(changed, name)
    tidied = rows.assign(
        score=measure.scores(rows),
        policy=rows.policy.where(~other, "r_kv"),
        reading=rows.reading.where(defensive, "any"),
        change=change,
        part=rows.get("name", "every"),
    )
    return tidied.drop_duplicates(["item", "policy", "share", "reading", "change"]).reset_index(drop=True)


def scores(rows: pd.DataFrame, cell: Mapping[str, Any], reading: str = "as_run") -> pd.Series:
    """The score of one condition, by item. cell: policy, share, and at most one of window, aggregate, guard, bits.

    Raises `NotTestable` for a condition that was not run, or that failed on every item.
    """
    if cell["policy"] == "full":
        of_cell = rows[rows.policy == "full"].drop_duplicates("item")
    else:
        names = {"guard": "guards", "bits": "4 bits", "aggregate": "defensive"}
        window = UNCHANGED if cell.get("window", 32) == 32 else f"window {cell['window']}"
        change = next((change for name, change in names.items() if name in cell), window)
        keep = (rows.policy == cell["policy"]) & np.isclose(rows["share"], cell["share"]) & (rows.change == change)
        if "guard" in cell:
            keep &= np.isclose(rows.prefix, cell["guard"])
        of_cell = rows[keep & (rows.reading == (reading if cell["policy"] in DEFENSIVE else "any"))]
    if of_cell.empty:
        raise NotTestable("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
    if "error" in of_cell and of_cell.error.notna().all():
        raise NotTestable(f"all {len(of_cell)} items of {cell['policy']} failed: {of_cell.error.iloc[0]}")
    return measure.scores(of_cell.set_index("item"))


def without_needles(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without the further needles, which have their own figure: items are then balanced over tasks."""
    return rows[rows.part != NEEDLES]


def readings_of(rows: pd.DataFrame) -> list[str]:
    """The readings in which defensive methods were run."""
    return [reading for reading in READINGS if (rows[rows.policy.isin(DEFENSIVE)].reading == reading).any()]
