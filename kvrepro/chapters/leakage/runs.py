"""The chapter's studies: which cells are run on which system prompts, and their rows.

found = chapter(loaded, plan)  # one stored row per (item, cell), a cell that an item cannot meet with its error
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from kvrepro.chapters.leakage import prompts
from kvrepro.chapters.leakage.cells import DEBIAS, LIBRARY, Cell, Room, cells
from kvrepro.chapters.leakage.english import english, trec
from kvrepro.chapters.leakage.plan import ChapterPlan
from kvrepro.chapters.leakage.prompts import ORDERS, prompt
from kvrepro.chapters.leakage.scores import survivors
from kvrepro.chapters.leakage.settings import Settings
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment import run as runs
from kvrepro.experiment.answers import unmet
from kvrepro.experiment.claims import READINGS
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem
from kvrepro.item import Item

WAYS = ("hand", "rules", "sentences", "turns")
WORDINGS = {  # of the defense, the preamble and the request to leak
    "embedded": "as the embedded model was trained with them", "paper": "as in the paper's public code",
    "ours": "in our words, not the paper's", "own": "as in the items' file",
}  # fmt: skip
StudyPart = tuple[Sequence[Item], Sequence[Cell]]


def run(
    loaded: Loaded, parts: Mapping[str, StudyPart], settings: Settings, tokens: int = 128, name: str = "answers"
) -> dict[str, pd.DataFrame]:
    """One row per item and cell of each part, all in one study, so that the rows of all parts decode together; a cell
    that an item cannot meet is a row with its `error`. tokens: of an answer, at most.

    Columns: those of the store, and policy, ratio, variant, reading of the cell, and system, order, request, rules,
    marks and wording of the item; `note` holds what survived of each part in each layer (`scores.keep_rates`). Raises
    InputError for items without system turn and policies that are not known.
    """
    grids = {part: list(dict.fromkeys(grid)) for part, (_, grid) in parts.items()}
    given = {part: [cell.condition for cell in grid] for part, grid in grids.items()}
    items = [item for some, _ in parts.values() for item in some]
    conditions = [given[part] for part, (some, _) in parts.items() for _ in some]
    study = Answers("leakage", name, items, conditions, tokens, prompt=prompt, note=survivors, gaps=True, together=2)
    rows = runs.run(study, loaded, settings)
    found, first = {}, 0
    for part, (some, _) in parts.items():
        once = list(dict.fromkeys(given[part]))  # cells of equal conditions share rows
        mine = rows.iloc[[first + i * len(once) + once.index(c) for i in range(len(some)) for c in given[part]]]
        columns = pd.DataFrame([_columns(item, cell) for item in some for cell in grids[part]], index=mine.index)
        found[part] = mine.assign(**columns).reset_index(drop=True)
        first += len(some) * len(once)
    return found


def _columns(item: Item, cell: Cell) -> dict[str, Any]:
    """What a row says of its cell and its item, beside the condition."""
    of = {name: item.meta[name] for name in ("system", "order", "request", "rules")}
    of |= {"marks": item.meta.get("marks", "hand"), "wording": item.meta.get("wording", "embedded")}
    return {"ratio": cell.ratio, "variant": cell.variant, "reading": cell.reading} | of


def timing(
    loaded: Loaded, items: Sequence[Item], grid: Sequence[Cell], settings: Settings, *, repeats: int, tokens: int = 8
) -> pd.DataFrame:
    """Seconds to compress a system turn and read the request, and per 100 decoded tokens: each cell by itself, one
    prompt at a time, `repeats` times in turn after one run to warm up. Columns item, policy, variant, repeat,
    compress, decode; a cell whose budget an item cannot meet has no rows of it."""
    given = [(cell.policy, cell.variant, cell.condition) for cell in dict.fromkeys(grid)]
    parameters = {"cells": given, "tokens": tokens, "repeats": repeats}
    return runs.run(PerItem("leakage", "timing", items, seconds, parameters, alone=True), loaded, settings)


def seconds(
    loaded: Loaded, item: Item, cells: Sequence[tuple[str, str, Condition]], tokens: int, repeats: int
) -> pd.DataFrame:
    """Of one item."""
    text, rows = prompt(loaded, item), []
    gaps = unmet(loaded, [text], [condition for *_, condition in cells], [range(len(cells))])
    for repeat in range(repeats + 1):
        for j, (name, variant, condition) in enumerate(cells):
            if (0, j) in gaps:
                continue
            [[answer]] = engine.generate(loaded.model, [text], [condition], max_new_tokens=tokens, stop_ids=())
            times = {"compress": answer.prefill_seconds, "decode": 100 * answer.decode_seconds / tokens}
            rows.append({"policy": name, "variant": variant, "repeat": repeat} | times)
    frame = pd.DataFrame(rows, columns=["policy", "variant", "repeat", "compress", "decode"])
    return frame[frame.repeat > 0]


# ---- the chapter


@dataclass(frozen=True)
class ChapterRows:
    """Rows of all the chapter's studies with one model, and their items."""

    model: str
    items: list[Item]
    main: pd.DataFrame  # both orders
    alone: pd.DataFrame  # without a defense
    bare: pd.DataFrame  # without the preamble
    examples: pd.DataFrame  # labelled examples; empty where these items have none
    marks: pd.DataFrame  # fair shares over spans marked in different ways
    timing: pd.DataFrame
    unasked: pd.DataFrame  # the requests of the main study without their system prompt

    @property
    def file(self) -> str:
        """The model's name as part of a file's."""
        return re.sub(r"[^\w.-]+", "-", self.model).strip("-")

    @property
    def wording(self) -> str:
        """Whose words surround the directives."""
        return " and ".join(WORDINGS[name] for name in self.main.wording.unique())

    @property
    def rows(self) -> pd.DataFrame:
        """All that was answered."""
        frames = [self.main, self.alone, self.bare, self.examples, self.marks[self.marks.marks != "hand"]]
        return pd.concat(frames, ignore_index=True)

    def of(self, rows: pd.DataFrame, **where: str) -> list[Item]:
        """The items of some rows, those whose meta says so."""
        names = set(rows.item)
        return [
            item
            for item in self.items
            if item.id in names and all(item.meta[name] == value for name, value in where.items())
        ]


def chapter(loaded: Loaded, plan: ChapterPlan) -> ChapterRows:
    """All studies, in both readings. The paper's five policies and a reader's own get every variant at many ratios and
    take part in every study; any other one gets what it can meet at one ratio."""
    sizes, settings = plan.sizes, plan.settings
    secret = _drawn(plan, sizes.systems)
    if plan.n_items is not None and (most := len({item.meta["system"] for item in secret})) < plan.n_items:
        raise InputError(f"n_items is {plan.n_items}, but {plan.items} has {most} system prompts: ask for no more")
    room = Room.of(loaded, secret, plan.items)
    half, ends = sizes.varied[len(sizes.varied) // 2], sizes.varied[::2]
    plain, nude = _plain(plan), _drawn(plan, sizes.marks, ("normal",), preamble=False)
    grids = _main_grids(plan, room)
    ordered = {order: [item for item in secret if item.meta["order"] == order] for order in ORDERS}
    main: dict[str, StudyPart] = {order: (ordered[order], grids[order]) for order in ORDERS}
    rest: dict[str, StudyPart] = {
        "alone": (plain, cells(plan.main, ends, readings=READINGS, room=Room.of(loaded, plain, plan.items))),
        "bare": (nude, cells(plan.main, [half], room=Room.of(loaded, nude, plan.items))),
    }
    marks, shots = _marks(loaded, plan, secret), _examples(loaded, plan, ends)
    together = plan.items == "tinyworld"  # TREC's prompts are long: batches of their own
    rows = run(loaded, main | rest | marks | (shots if together else {}), settings, sizes.tokens)
    if shots and not together:
        rows |= run(loaded, shots, settings, sizes.tokens, "examples")

    clocked = [item for item in secret if item.meta["request"] == "follow"][: sizes.timed]
    clock = cells(["h2o"], [half], ("default", "whitelist", "fair", "debias 0.4"), room=room)[1:]
    timed = timing(loaded, clocked, clock, settings, repeats=sizes.repeats)
    silent = Answers("leakage", "unasked", main["normal"][0], [Condition()], sizes.tokens, prompt=request_alone)

    def all_of(parts: Mapping[str, StudyPart]) -> pd.DataFrame:
        return pd.concat([rows[name] for name in parts] or [pd.DataFrame(columns=["item"])], ignore_index=True)

    hand = _by_hand(plan, rows["normal"], marks)
    marked = pd.concat([hand, all_of(marks)], ignore_index=True)
    items = [item for some, _ in (main | rest | marks | shots).values() for item in some]
    parts = (all_of(main), rows["alone"], rows["bare"], all_of(shots), marked, timed)
    return ChapterRows(loaded.name, items, *parts, runs.run(silent, loaded, settings))


def request_alone(loaded: Loaded, item: Item) -> Prompt:
    """An item's prompt without its system turn: what a policy leaves that keeps nothing of it."""
    return data.build_prompt(replace(item, messages=item.messages[1:], spans=()), loaded.tokenizer, loaded.context)


def compared(loaded: Loaded, plan: ChapterPlan) -> ChapterRows | None:
    """All studies with the second checkpoint, `settings.compare`, whose rows stand beside the first one's; None where
    there is none."""
    settings = plan.settings
    if not settings.compare:
        return None
    second = models.load(settings.compare, device=settings.device, dtype=settings.dtype)
    if second.name == loaded.name:
        raise InputError(f"compare is {settings.compare!r}, the model itself: name another checkpoint")
    return chapter(second, plan)


def _drawn(plan: ChapterPlan, n: int, orders: Sequence[str] = ORDERS, preamble: bool = True) -> list[Item]:
    if plan.items == "tinyworld":
        return prompts.systems(n, plan.settings.seed, orders, preamble)
    return english(plan.items, n, plan.settings.seed, orders, preamble, plan.wording)


def _main_grids(plan: ChapterPlan, room: Room) -> dict[str, list[Cell]]:
    """Each order's cells: all policies by default, the cures with the defense first, some of them in either order."""
    sizes, every, main = plan.sizes, plan.policies, plan.main
    others = [name for name in every if name not in main]
    first = ["streaming_llm"] if "streaming_llm" in every else every[:1]  # whose dial is run at every ratio
    grid = cells(every, sizes.ratios, readings=READINGS, room=room) + cells(main, sizes.varied, ("fair",), room=room)
    grid += cells(first, sizes.dial, ("fair", *DEBIAS), room=room)
    normal = cells(main, sizes.varied, ("whitelist", "fair", "ends"), READINGS, room=room)
    normal += cells(others, sizes.rest, ("whitelist", "fair", "ends"), READINGS, room=room)
    normal += cells([name for name in every if name not in first], sizes.rest, DEBIAS[1::2], room=room)
    normal += cells(main, sizes.rest, ("opening",), room=room) + cells(main, sizes.varied[:1], ("whole",), room=room)
    return {"normal": grid + normal, "flipped": grid + cells(main, sizes.rest, ("whitelist", "ends"), room=room)}


def _plain(plan: ChapterPlan) -> list[Item]:
    """Requests that a directive without a defense applies to, so many with one rule and with several."""
    sizes = plan.sizes
    if plan.items != "tinyworld":
        kinds = _drawn(plan, sizes.singles, ("alone",))
        return [item for item in kinds if item.meta["request"] == "follow"]
    most = {"single": 2 * sizes.singles, "multi": 2 * sizes.several}
    return [
        item
        for item in _drawn(plan, max(most.values()), ("alone",))
        if item.meta["request"] == "follow" and item.meta["system"] < most[item.meta["rules"]]
    ]


def _examples(loaded: Loaded, plan: ChapterPlan, ends: Sequence[float]) -> dict[str, StudyPart]:
    """Labelled examples in either order: all policies at the highest ratio, the dial of the paper's two at all."""
    shots = _shots(loaded, plan)
    pair = [name for name in plan.main if name in LIBRARY]
    found: dict[str, StudyPart] = {}
    for order in ORDERS if shots else ():
        these = [item for item in shots if item.meta["order"] == order]
        room = Room.of(loaded, these, plan.items)
        grid = cells(pair or plan.main, ends[-1:], ("default", "fair"), room=room)
        if order == "normal":
            grid += cells(plan.main, ends[-1:], ("default", "fair"), room=room)
            grid += cells(pair, ends, ("default", "fair", *DEBIAS), room=room)
        found[f"examples-{order}"] = these, grid
    return found


def _shots(loaded: Loaded, plan: ChapterPlan) -> list[Item]:
    """The embedded world's labelled examples, or as many of TREC's as the model's context holds; none where the set is
    not at hand, which is printed."""
    n, seed = plan.sizes.examples, plan.settings.seed
    if plan.items == "tinyworld":
        return prompts.examples(n, seed)
    try:
        drawn = trec(n, seed, wording=plan.wording, words=plan.settings.words)
    except InputError as error:
        print(f"leakage: no labelled examples: {error}")
        return []
    long = {item.meta["system"] for item in drawn if not _fits(loaded, item, plan.sizes.tokens)}
    if long:
        print(f"leakage: {len(long)} sets of labelled examples are too long for the model's context: left out")
    return [item for item in drawn if item.meta["system"] not in long]


def _fits(loaded: Loaded, item: Item, tokens: int) -> bool:
    """Whether the model's context holds an item's prompt and so many tokens more."""
    try:
        return len(prompt(loaded, item).ids) + tokens <= loaded.context
    except InputError:
        return False


def _near(plan: ChapterPlan) -> tuple[float, ...]:
    """The ratios at which spans are marked in other ways."""
    varied = plan.sizes.varied
    return varied[: 1 + len(varied) // 2][-2:]


def _marks(loaded: Loaded, plan: ChapterPlan, secret: Sequence[Item]) -> dict[str, StudyPart]:
    """Fair shares over other spans than those marked by hand."""
    some = list(dict.fromkeys(item.meta["system"] for item in secret))[: plan.sizes.marks]
    chosen = [item for item in secret if item.meta["order"] == "normal" and item.meta["system"] in some]
    found: dict[str, StudyPart] = {}
    for way in WAYS[1:] if plan.items == "tinyworld" else WAYS[2:]:
        these = prompts.marked(chosen, way)
        room = Room.of(loaded, these, plan.items)
        found[f"marks-{way}"] = these, cells(plan.main, _near(plan), ("fair",), room=room, spans=())[1:]
    return found


def _by_hand(plan: ChapterPlan, main: pd.DataFrame, marks: Mapping[str, StudyPart]) -> pd.DataFrame:
    """Rows of the main study with the same prompts and cells, their spans marked by hand."""
    chosen = {item.id.partition("|")[0] for some, _ in marks.values() for item in some}
    same = (main.variant == "fair") & (main.reading == "as_described") & main.ratio.isin(_near(plan))
    return main[same & main.policy.isin(plan.main) & main.item.isin(chosen)]
