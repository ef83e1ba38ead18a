"""The chapter's studies: which cells are run on which system prompts, and their rows.

rows = chapter(loaded, plan)  # one stored row per (item, cell); a cell that an item cannot meet has an error
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from kvrepro.chapters.leakage import prompts
from kvrepro.chapters.leakage.cells import DEBIAS, LIBRARY, Cell, cells
from kvrepro.chapters.leakage.english import english, trec
from kvrepro.chapters.leakage.plan import ChapterPlan
from kvrepro.chapters.leakage.prompts import ORDERS, prompt
from kvrepro.chapters.leakage.scores import survivors
from kvrepro.chapters.leakage.settings import Settings
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.regime import Offline
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment import run as runs
from kvrepro.experiment.answers import met_by
from kvrepro.experiment.claims import READINGS
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem
from kvrepro.item import Item

WAYS = ("rules", "sentences", "turns")
WORDINGS = {  # of the defense, the preamble and the request to leak
    "embedded": "as the embedded model was trained with them", "paper": "as in the paper's public code",
    "ours": "in our words, not the paper's", "own": "as in the items' file",
}  # fmt: skip
StudyPart = tuple[Sequence[Item], Sequence[Cell]]


def run(
    loaded: Loaded, parts: Mapping[str, StudyPart], settings: Settings, tokens: int = 128, name: str = "answers"
) -> dict[str, pd.DataFrame]:
    """One row per item and cell of each part; a cell that an item cannot meet has an `error`. tokens: of an answer, at
    most. All parts are one study, so that their rows decode together.

    Columns: those of the store; policy, ratio, variant and reading of the cell; system, order, request, rules, marks
    and wording of the item; `note` says what survived of each part in each layer (`scores.keep_rates`). Raises
    InputError for items without a system turn and for unknown policies.
    """
    grids = {part: list(dict.fromkeys(grid)) for part, (_, grid) in parts.items()}
    items = [item for part_items, _ in parts.values() for item in part_items]
    conditions = [
        [cell.on(item, text) for cell in grids[part]]
        for part, (part_items, _) in parts.items()
        for item, text in ((item, prompt(loaded, item)) for item in part_items)
    ]
    study = Answers("leakage", name, items, conditions, tokens, prompt=prompt, note=survivors, gaps=True, together=2)
    rows = runs.run(study, loaded, settings)
    rows_by_part, start, of_item = {}, 0, iter(conditions)
    for part, (part_items, _) in parts.items():
        places: list[int] = []
        for item_conditions in itertools.islice(of_item, len(part_items)):
            distinct = list(dict.fromkeys(item_conditions))  # cells of equal conditions share rows
            places += [start + distinct.index(condition) for condition in item_conditions]
            start += len(distinct)
        columns = pd.DataFrame([_columns(item, cell) for item in part_items for cell in grids[part]])
        rows_by_part[part] = rows.iloc[places].reset_index(drop=True).assign(**columns)
    return rows_by_part


def _columns(item: Item, cell: Cell) -> dict[str, Any]:
    """The columns of a row that describe its cell and item."""
    columns = {name: item.meta[name] for name in ("system", "order", "request", "rules")}
    columns |= {"marks": item.meta.get("marks", "hand"), "wording": item.meta.get("wording", "embedded")}
    return {"ratio": cell.ratio, "variant": cell.variant, "reading": cell.reading} | columns


def timing(
    loaded: Loaded, items: Sequence[Item], grid: Sequence[Cell], settings: Settings, *, repeats: int, tokens: int = 8
) -> pd.DataFrame:
    """Seconds to compress a system turn and read the request (compress), and per 100 decoded tokens (decode).

    Cells run one after the other, on one prompt at a time, `repeats` times after one run to warm up. Columns item,
    policy, variant, repeat, compress, decode. A cell whose budget an item cannot meet has no rows for it.
    """
    given = [(cell.policy, cell.variant, cell.condition) for cell in dict.fromkeys(grid)]
    parameters = {"cells": given, "tokens": tokens, "repeats": repeats}
    return runs.run(PerItem("leakage", "timing", items, seconds, parameters, alone=True), loaded, settings)


def seconds(
    loaded: Loaded, item: Item, cells: Sequence[tuple[str, str, Condition]], tokens: int, repeats: int
) -> pd.DataFrame:
    """`timing` of one item."""
    text, rows = prompt(loaded, item), []
    met = met_by(loaded, text, [condition for *_, condition in cells])
    for repeat in range(repeats + 1):
        for name, variant, condition in cells:
            if condition not in met:
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
    unasked: pd.DataFrame  # answers to the requests of the main study without their system prompt

    @property
    def file(self) -> str:
        """The model's name, fit for a file's name."""
        return re.sub(r"[^\w.-]+", "-", self.model).strip("-")

    @property
    def wording(self) -> str:
        """The origin of the words around the directives."""
        return " and ".join(WORDINGS[name] for name in self.main.wording.unique())

    @property
    def rows(self) -> pd.DataFrame:
        """The rows of all answers."""
        frames = [self.main, self.alone, self.bare, self.examples, self.marks[self.marks.marks != "hand"]]
        return pd.concat(frames, ignore_index=True)

    def of(self, rows: pd.DataFrame, **where: str) -> list[Item]:
        """The items of some rows, of these those whose meta has the values `where`."""
        names = set(rows.item)
        return [item for item in self.items if item.id in names and where.items() <= item.meta.items()]


def chapter(loaded: Loaded, plan: ChapterPlan) -> ChapterRows:
    """All studies, in both readings. The paper's five policies and the reader's own take part in every study, with
    every variant at many ratios; the others run what they can at one ratio."""
    sizes, settings = plan.sizes, plan.settings
    secret = _systems(plan, sizes.systems)
    if plan.n_items is not None and (available := len({item.meta["system"] for item in secret})) < plan.n_items:
        raise InputError(f"n_items is {plan.n_items}, but {plan.items} has {available} system prompts: ask for no more")
    half, ends = sizes.varied[len(sizes.varied) // 2], sizes.varied[::2]
    undefended, bare = _undefended(plan), _systems(plan, sizes.marks, ("normal",), preamble=False)
    grids = _main_grids(plan)
    ordered = {order: [item for item in secret if item.meta["order"] == order] for order in ORDERS}
    main: dict[str, StudyPart] = {order: (ordered[order], grids[order]) for order in ORDERS}
    rest: dict[str, StudyPart] = {
        "alone": (undefended, cells(plan.main, ends, readings=READINGS)),
        "bare": (bare, cells(plan.main, [half])),
    }
    marks, labelled = _other_marks(plan, secret), _examples(loaded, plan, ends)
    together = plan.items == "tinyworld"  # TREC's prompts are long: batches of their own
    rows = run(loaded, main | rest | marks | (labelled if together else {}), settings, sizes.tokens)
    if labelled and not together:
        rows |= run(loaded, labelled, settings, sizes.tokens, "examples")

    timed_items = [item for item in secret if item.meta["request"] == "follow"][: sizes.timed]
    timed_cells = cells(["h2o"], [half], ("default", "whitelist", "fair", "debias 0.4"))[1:]
    timed = timing(loaded, timed_items, timed_cells, settings, repeats=sizes.repeats)
    unasked = Answers("leakage", "unasked", main["normal"][0], [Condition()], sizes.tokens, prompt=request_alone)

    def all_of(parts: Mapping[str, StudyPart]) -> pd.DataFrame:
        return pd.concat([rows[name] for name in parts] or [pd.DataFrame(columns=["item"])], ignore_index=True)

    hand_marked = _hand_marked(plan, rows["normal"], marks)
    marked = pd.concat([hand_marked, all_of(marks)], ignore_index=True)
    items = [item for part_items, _ in (main | rest | marks | labelled).values() for item in part_items]
    parts = (all_of(main), rows["alone"], rows["bare"], all_of(labelled), marked, timed)
    return ChapterRows(loaded.name, items, *parts, runs.run(unasked, loaded, settings))


def request_alone(loaded: Loaded, item: Item) -> Prompt:
    """An item's prompt without its system turn, as if a policy had kept nothing of that turn."""
    return data.build_prompt(replace(item, messages=item.messages[1:], spans=()), loaded.tokenizer, loaded.context)


def compared(loaded: Loaded, plan: ChapterPlan) -> ChapterRows | None:
    """All studies with the second checkpoint, `settings.compare`; None if there is none."""
    settings = plan.settings
    if not settings.compare:
        return None
    second = models.load(settings.compare, settings.device, settings.dtype, settings.enable_thinking)
    if second.name == loaded.name:
        raise InputError(f"compare is {settings.compare!r}, the model itself: name another checkpoint")
    return chapter(second, plan)


def _systems(plan: ChapterPlan, n: int, orders: Sequence[str] = ORDERS, preamble: bool = True) -> list[Item]:
    if plan.items == "tinyworld":
        return prompts.systems(n, plan.settings.seed, orders, preamble)
    return english(plan.items, n, plan.settings.seed, orders, preamble, plan.wording)


def _main_grids(plan: ChapterPlan) -> dict[str, list[Cell]]:
    """The cells of each order: all policies without a cure, and the cures; some cures with the defense first only."""
    sizes, every, main = plan.sizes, plan.policies, plan.main
    others = [name for name in every if name not in main]
    first = ["streaming_llm"] if "streaming_llm" in every else every[:1]  # whose dial is run at every ratio
    grid = cells(every, sizes.ratios, readings=READINGS) + cells(main, sizes.varied, ("fair",))
    grid += cells(first, sizes.dial, ("fair", *DEBIAS))
    normal = cells(main, sizes.varied, ("whitelist", "fair", "ends"), READINGS)
    normal += cells(others, sizes.rest, ("whitelist", "fair", "ends"), READINGS)
    normal += cells([name for name in every if name not in first], sizes.rest, DEBIAS[1::2])
    normal += cells(main, sizes.rest, ("opening",)) + cells(main, sizes.varied[:1], ("whole",))
    return {"normal": grid + normal, "flipped": grid + cells(main, sizes.rest, ("whitelist", "ends"))}


def _undefended(plan: ChapterPlan) -> list[Item]:
    """The requests `follow` of system prompts without a defense: `singles` with one rule, `several` with more."""
    sizes = plan.sizes
    if plan.items != "tinyworld":
        kinds = _systems(plan, sizes.singles, ("alone",))
        return [item for item in kinds if item.meta["request"] == "follow"]
    most = {"single": 2 * sizes.singles, "multi": 2 * sizes.several}
    return [
        item
        for item in _systems(plan, max(most.values()), ("alone",))
        if item.meta["request"] == "follow" and item.meta["system"] < most[item.meta["rules"]]
    ]


def _examples(loaded: Loaded, plan: ChapterPlan, ends: Sequence[float]) -> dict[str, StudyPart]:
    """Labelled examples in both orders: all policies at the highest ratio, the dial of the paper's two at all."""
    labelled = _labelled(loaded, plan)
    pair = [name for name in plan.main if name in LIBRARY]
    parts: dict[str, StudyPart] = {}
    for order in ORDERS if labelled else ():
        of_order = [item for item in labelled if item.meta["order"] == order]
        grid = cells(pair or plan.main, ends[-1:], ("default", "fair"))
        if order == "normal":
            grid += cells(plan.main, ends[-1:], ("default", "fair"))
            grid += cells(pair, ends, ("default", "fair", *DEBIAS))
        parts[f"examples-{order}"] = of_order, grid
    return parts


def _labelled(loaded: Loaded, plan: ChapterPlan) -> list[Item]:
    """The embedded world's labelled examples, or those of TREC's that fit the model. If the data set is
    missing, there are none, and this is printed."""
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
        print(f"leakage: {len(long)} sets of labelled examples are too long for the model: left out")
    return [item for item in drawn if item.meta["system"] not in long]


def _fits(loaded: Loaded, item: Item, tokens: int) -> bool:
    """Whether the model's context holds an item's prompt and `tokens` more, all of which it rotates alike."""
    try:
        text = prompt(loaded, item)
        engine.check_conditions(loaded.model, [text], [Condition(regime=Offline(until="request"))], tokens)
        return len(text.ids) + tokens <= loaded.context
    except InputError:
        return False


def _marked_ratios(plan: ChapterPlan) -> tuple[float, ...]:
    """The ratios at which marks other than those by hand are run."""
    varied = plan.sizes.varied
    return varied[: 1 + len(varied) // 2][-2:]


def _other_marks(plan: ChapterPlan, secret: Sequence[Item]) -> dict[str, StudyPart]:
    """Fair shares over spans that are not marked by hand."""
    numbers = list(dict.fromkeys(item.meta["system"] for item in secret))[: plan.sizes.marks]
    chosen = [item for item in secret if item.meta["order"] == "normal" and item.meta["system"] in numbers]
    parts: dict[str, StudyPart] = {}
    for how in WAYS if plan.items == "tinyworld" else WAYS[1:]:
        marked_items = prompts.marked(chosen, how)
        parts[f"marks-{how}"] = marked_items, cells(plan.main, _marked_ratios(plan), ("fair",), spans=())[1:]
    return parts


def _hand_marked(plan: ChapterPlan, main: pd.DataFrame, marks: Mapping[str, StudyPart]) -> pd.DataFrame:
    """Rows of the main study with the prompts and cells of `marks`, whose spans are marked by hand."""
    chosen = {item.id.partition("|")[0] for part_items, _ in marks.values() for item in part_items}
    same = (main.variant == "fair") & (main.reading == "as_described") & main.ratio.isin(_marked_ratios(plan))
    return main[same & main.policy.isin(plan.main) & main.item.isin(chosen)]
