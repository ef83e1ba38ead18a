"""The chapter's studies: which cells are run on which system prompts, and their rows.

found = chapter(loaded, plan)  # one stored row per (item, cell), a cell that an item cannot meet with its error
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvrepro.chapters.leakage import prompts
from kvrepro.chapters.leakage.cells import DEBIAS, LIBRARY, Cell, Room, cells
from kvrepro.chapters.leakage.plan import Plan
from kvrepro.chapters.leakage.prompts import ORDERS, prompt
from kvrepro.chapters.leakage.scores import survivors
from kvrepro.chapters.leakage.settings import Settings
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition
from kvrepro.experiment import run as runs
from kvrepro.experiment.answers import unmet
from kvrepro.experiment.claims import READINGS
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem
from kvrepro.item import Item

WAYS = ("hand", "rules", "sentences", "turns")


def run(loaded: Loaded, items: Sequence[Item], grid: Sequence[Cell], name: str, settings: Settings) -> pd.DataFrame:
    """One row per (item, cell); a cell that an item cannot meet is a row with its `error`.

    Columns: those of the store, and policy, ratio, variant, reading of the cell, and system, order, request, rules and
    marks of the item; `note` holds what survived of each part in each layer (`scores.keep_rates`). Raises InputError
    for items without system turn and policies that are not known.
    """
    grid = list(dict.fromkeys(grid))
    conditions = [cell.condition for cell in grid]
    study = Answers("leakage", name, items, conditions, settings.max_new_tokens, prompt=prompt, note=survivors,
                    gaps=True, together=2)  # fmt: skip
    rows = runs.run(study, loaded, settings)
    once = list(dict.fromkeys(conditions))  # cells of equal conditions share rows
    rows = rows.iloc[[i * len(once) + once.index(c) for i in range(len(items)) for c in conditions]]
    columns = pd.DataFrame([_columns(item, cell) for item in items for cell in grid], index=rows.index)
    return rows.assign(**columns).reset_index(drop=True)


def _columns(item: Item, cell: Cell) -> dict[str, Any]:
    """What a row says of its cell and its item, beside the condition."""
    of = {name: item.meta[name] for name in ("system", "order", "request", "rules")}
    of["marks"] = item.meta.get("marks", "hand")
    return {"ratio": cell.ratio, "variant": cell.variant, "reading": cell.reading} | of


def timing(
    loaded: Loaded, items: Sequence[Item], grid: Sequence[Cell], settings: Settings, *, repeats: int, tokens: int = 8
) -> pd.DataFrame:
    """Seconds to compress a system turn and read the request, and per 100 decoded tokens: each cell by itself, one
    prompt at a time, `repeats` times in turn after one run to warm up. Columns item, policy, variant, repeat,
    compress, decode; a cell whose budget an item cannot meet has no rows of it."""
    given = [(cell.policy, cell.variant, cell.condition) for cell in dict.fromkeys(grid)]
    parameters = {"cells": given, "tokens": tokens, "repeats": repeats}
    found = runs.run(PerItem("leakage", "timing", items, seconds, parameters, alone=True), loaded, settings)
    return found[["item", "policy", "variant", "repeat", "compress", "decode"]]


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
class Found:
    """Rows of all the chapter's studies, with their items."""

    items: list[Item]
    main: pd.DataFrame  # both orders
    alone: pd.DataFrame  # without a defense
    bare: pd.DataFrame  # without the preamble
    examples: pd.DataFrame  # labelled examples; empty where these items have none
    marks: pd.DataFrame  # fair shares over spans marked in different ways
    timing: pd.DataFrame

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


def chapter(loaded: Loaded, plan: Plan) -> Found:
    """All studies, in both readings. The paper's five policies and a reader's own get every variant at many ratios and
    take part in every study; any other one gets what it can meet at one ratio."""
    sizes = plan.sizes
    secret = _drawn(plan, sizes.systems)
    room = Room.of(loaded, secret, plan.items)
    grids = _main_grids(plan, room)
    both = [
        run(
            loaded,
            [item for item in secret if item.meta["order"] == order],
            grids[order],
            f"main-{order}",
            plan.settings,
        )
        for order in ORDERS
    ]
    half, ends = sizes.varied[len(sizes.varied) // 2], sizes.varied[::2]

    plain = _plain(plan)
    grid = cells(plan.main, ends, readings=READINGS, room=Room.of(loaded, plain, plan.items))
    alone = run(loaded, plain, grid, "alone", plan.settings)
    nude = _drawn(plan, sizes.marks, ("normal",), preamble=False)
    grid = cells(plan.main, [half], room=Room.of(loaded, nude, plan.items))
    bare = run(loaded, nude, grid, "bare", plan.settings)
    shots, told = _examples(loaded, plan, ends)
    parts, marks = _marks(loaded, plan, secret, both[0])

    clocked = [item for item in secret if item.meta["request"] == "follow"][: sizes.timed]
    clock = cells(["h2o"], [half], ("default", "whitelist", "fair", "debias 0.4"), room=room)[1:]
    timed = timing(loaded, clocked, clock, plan.settings, repeats=sizes.repeats)
    items = [*secret, *plain, *nude, *shots, *parts]
    return Found(items, pd.concat(both, ignore_index=True), alone, bare, told, marks, timed)


def _drawn(plan: Plan, n: int, orders: Sequence[str] = ORDERS, preamble: bool = True) -> list[Item]:
    draw = prompts.systems if plan.items == "tinyworld" else prompts.ifeval_items
    return draw(n, plan.settings.seed, orders, preamble)


def _main_grids(plan: Plan, room: Room) -> dict[str, list[Cell]]:
    """Each order's cells: all policies by default, the cures with the defense first, some of them in either order."""
    sizes, every, main = plan.sizes, plan.every, plan.main
    others = [name for name in every if name not in main]
    first = ["streaming_llm"] if "streaming_llm" in every else every[:1]  # whose dial is run at every ratio
    grid = cells(every, sizes.ratios, readings=READINGS, room=room) + cells(main, sizes.varied, ("fair",), room=room)
    grid += cells(first, sizes.dial, ("fair", *DEBIAS), room=room)
    normal = cells(main, sizes.varied, ("whitelist", "fair", "ends"), READINGS, room=room)
    normal += cells(others, sizes.rest, ("whitelist", "fair", "ends"), READINGS, room=room)
    normal += cells([name for name in every if name not in first], sizes.rest, DEBIAS[1::2], room=room)
    normal += cells(main, sizes.rest, ("opening",), room=room) + cells(main, sizes.varied[:1], ("whole",), room=room)
    return {"normal": grid + normal, "flipped": grid + cells(main, sizes.rest, ("whitelist", "ends"), room=room)}


def _plain(plan: Plan) -> list[Item]:
    """Requests that a directive without a defense applies to, so many with one rule and with several."""
    sizes = plan.sizes
    if plan.items == "ifeval":
        kinds = _drawn(plan, sizes.singles, ("alone",))
        return [item for item in kinds if item.meta["request"] == "follow"]
    most = {"single": 2 * sizes.singles, "multi": 2 * sizes.several}
    return [
        item
        for item in _drawn(plan, max(most.values()), ("alone",))
        if item.meta["request"] == "follow" and item.meta["system"] < most[item.meta["rules"]]
    ]


def _examples(loaded: Loaded, plan: Plan, ends: Sequence[float]) -> tuple[list[Item], pd.DataFrame]:
    """Labelled examples in either order: all policies at the highest ratio, the dial of the paper's two at all."""
    if plan.items == "ifeval":
        return [], pd.DataFrame(columns=["item"])
    shots, told = prompts.examples(plan.sizes.examples, plan.settings.seed), []
    pair = [name for name in plan.main if name in LIBRARY]
    for order in ORDERS:
        these = [item for item in shots if item.meta["order"] == order]
        room = Room.of(loaded, these)
        grid = cells(pair or plan.main, ends[-1:], ("default", "fair"), room=room)
        if order == "normal":
            grid += cells(plan.main, ends[-1:], ("default", "fair"), room=room)
            grid += cells(pair, ends, ("default", "fair", *DEBIAS), room=room)
        told.append(run(loaded, these, grid, f"examples-{order}", plan.settings))
    return shots, pd.concat(told, ignore_index=True)


def _marks(loaded: Loaded, plan: Plan, secret: Sequence[Item], main: pd.DataFrame) -> tuple[list[Item], pd.DataFrame]:
    """Fair shares over other spans than those marked by hand, whose rows are among the main study's."""
    sizes = plan.sizes
    near = sizes.varied[: 1 + len(sizes.varied) // 2][-2:]
    some = list(dict.fromkeys(item.meta["system"] for item in secret))[: sizes.marks]
    chosen = [item for item in secret if item.meta["order"] == "normal" and item.meta["system"] in some]
    by_hand = main[(main.variant == "fair") & (main.reading == "as_described") & main.ratio.isin(near)]
    rows = [by_hand[by_hand.policy.isin(plan.main) & by_hand.item.isin({item.id for item in chosen})]]
    parts = []
    for way in WAYS[1:] if plan.items == "tinyworld" else WAYS[2:]:
        these = prompts.marked(chosen, way)
        parts += these
        room = Room.of(loaded, these, plan.items)
        grid = cells(plan.main, near, ("fair",), room=room, spans=())[1:]
        rows.append(run(loaded, these, grid, f"marks-{way}", plan.settings))
    return parts, pd.concat(rows, ignore_index=True)
