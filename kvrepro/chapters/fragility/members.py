"""What the claims about DefensiveKV are tested on: shares and scores by item, theorems, and timings on a GPU."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility.mixture import theorems
from kvrepro.chapters.fragility.retention import DEFAULT, TOKEN
from kvrepro.chapters.fragility.settings import DEFENSIVE
from kvrepro.chapters.fragility.study import NEEDLES, has_window, scores
from kvrepro.chapters.fragility.timings import CONTRASTS
from kvrepro.engine.policy import READINGS, find, is_own
from kvrepro.experiment import claims, history, judge
from kvrepro.experiment.judge import Facts, Member, NotTestable, Sample, Unpaired
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Settings
from kvrepro.experiment.stats import ANY, UNIT

SHARES = {"mean": UNIT, "difference": (-1.0, 1.0)}  # least and greatest possible contrast of shares
WITH_FULL = ("loss", "loss_ratio", "spread", "difference_of_ceiling")  # contrasts that need the full cache's scores
LISTED = ("C10b",)  # claims about all methods with a window that list the methods


def has_experts(model: Any) -> bool:
    """Whether the model is a mixture of experts."""
    config = model.config.get_text_config()
    return any((getattr(config, f"num_{kind}experts", 0) or 0) > 1 for kind in ("", "local_", "routed_"))


def _of_retained(claim: Mapping, sets: Mapping, summary: pd.DataFrame) -> list[Member]:
    over, column = claim["over"], claim["column"]
    rows = summary if "layer" in over else summary[summary.headline]
    chosen = rows.setting.isin(over.get("setting", [DEFAULT]))
    rows = rows[rows.setting.str.startswith(TOKEN) if "token" in over else chosen]
    tasks = sets[over.get("task") or over["pooled"]]
    rows = rows[rows.task.isin(tasks)] if rows.task.isin(tasks).any() else rows
    tested = []
    groups = ["setting", "layer", *(["task"] if "task" in over else [])]
    for (setting, layer, *task), group in rows.groupby(groups, sort=False):
        wide = group.pivot_table(index="item", columns="rule", values=column)
        frame = pd.DataFrame({side: wide[cell["rule"]] for side, cell in claim["cells"].items()})
        label = ", ".join([*([] if setting == DEFAULT else [setting]), *task]) or f"layer {layer}"
        bounds, limits = UNIT if column == "below" else None, SHARES.get(claim["contrast"], ANY)
        sample = Sample(frame, claim["contrast"], each=float(group.steps.mean()), bounds=bounds, limits=limits)
        tested.append(Member(label, sample))
    if not tested:
        raise NotTestable(claim.get("needs", "not run"))
    return tested


def _cells(claim: Mapping, sets: Mapping) -> list[dict]:
    """Policy, share and window of each member, as far as the claim varies them."""
    over = {name: values for name, values in claim.get("over", {}).items() if name in ("policy", "share", "window")}
    lists = [sets[values] if isinstance(values, str) else values for values in over.values()]
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*lists)]


def _title(policy: str) -> str:
    """The policy's name in the claims table: its title if it is the reader's own, whose name is a file."""
    return find(policy).title if is_own(policy) else policy


def _answered(claim: Mapping, varied: Mapping, rows: pd.DataFrame, reading: str) -> pd.DataFrame:
    """Scores by item, in the columns that the contrast needs: a, b, full; for a spread one per value of its axis."""
    [(axis, values)] = claim.get("across", {"": [None]}).items()
    columns = {}
    for (side, of_side), value in itertools.product(claim["cells"].items(), values):
        cell = {**varied, **of_side} | ({axis: value} if axis else {})
        columns[f"{axis} {value}" if axis else side] = scores(rows, cell, reading)
    if claim["contrast"] in WITH_FULL:
        columns["full"] = scores(rows, {"policy": "full"})
    return pd.DataFrame(columns)


def _of_quality(claim: Mapping, sets: Mapping, rows: pd.DataFrame, reading: str) -> list[Member | NotTestable]:
    rows, over = rows if claim.get("needles") else rows[rows.part != NEEDLES], claim.get("over", {})
    full = rows[rows.policy == "full"]
    judge.answers_enough(full.score, full.get("error"))
    if claim["contrast"] == "lead":
        return _leads(claim, sets, rows, reading)
    tasks = [(task, [task]) for task in over.get("task", [])] or [("", sets.get(over.get("pooled", ""), []))]
    tested: list[Member | NotTestable] = []
    for varied, (task, group) in itertools.product(_cells(claim, sets), tasks):
        share, window = (f"{varied['share']:.0%}" if "share" in varied else ""), varied.get("window", "")
        names = [_title(varied.get("policy", "")), task, share, window and f"window {window}"]
        label = ", ".join(filter(None, names)) or "all"
        try:
            frame = _answered(claim, varied, rows, reading)
            frame = frame[frame.index.isin(rows[rows.task.isin(group)].item)] if group else frame
            if frame.dropna().empty:
                needs = f": {claim['needs']}" if "needs" in claim else ""
                raise NotTestable(f"no item of {', '.join(group) or 'any task'} has a value in every condition{needs}")
            if claim["contrast"] == "spread":
                tested.append(judge.pairs(frame.drop(columns="full"), label, ceiling=frame.full))
            elif claim["contrast"] == "wins":
                tested.append(Member(label, Sample(_task_wins(frame, rows))))
            else:
                tested.append(Member(label, Sample(frame, claim["contrast"])))
        except NotTestable as reason:
            tested.append(reason)
    return tested


def _task_wins(frame: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per task; column a: 1 where a's mean score is above b's, 0 where it is below, a half where they tie."""
    task = rows.drop_duplicates("item").set_index("item").task
    gain = (frame.a - frame.b).dropna().groupby(task).mean().round(9)
    return pd.DataFrame({"a": (1 + np.sign(gain)) / 2})


def _leads(claim: Mapping, sets: Mapping, rows: pd.DataFrame, reading: str) -> list[Member | NotTestable]:
    """Gain of a over b on one task minus that on each other task of the set; unpaired, since the items differ."""
    task = rows.drop_duplicates("item").set_index("item").task
    tested: list[Member | NotTestable] = []
    for cell in _cells(claim, sets):
        frame = _answered(claim, cell, rows, reading)
        gains = dict(list((frame.a - frame.b).dropna().groupby(task)))
        leading = [name for name in claim["tasks"] if name in gains]
        others = [name for name in sets[claim["others"]] if name in gains and name not in leading]
        if not leading or not others:
            raise NotTestable(f"items of {' or '.join(claim['tasks'])} and of another task are needed")
        tested += [
            Member(f"{_title(cell['policy'])}, {name} over {other}", Unpaired(gains[name], gains[other]))
            for name, other in itertools.product(leading, others)
        ]
    return tested


def members(
    claim: Mapping, sets: Mapping, tables: Mapping[str, pd.DataFrame], reading: str, experts: bool = False
) -> list[Member | NotTestable]:
    """What a claim is tested on in one reading. tables: of the studies `retained` (its summary) and `quality`; experts:
    is the model a mixture of experts?"""
    study, contrast = claim["study"], claim["contrast"]
    if study == "theory":
        return [Member("all", Facts(theorems()[contrast]))]
    if study == "gpu":
        return [Member(label, measured) for label, measured in CONTRASTS[contrast][0]().items()]
    if claim.get("experts") and not experts:
        raise NotTestable(claim["needs"])
    if study not in tables:
        raise NotTestable("not run")
    if study == "retained":
        return list(_of_retained(claim, sets, tables[study]))
    return _of_quality(claim, sets, tables[study], reading)


def _of_own(book: Mapping, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """General claims, for each of the reader's own policies; those about windows only for policies with a window."""
    general = [claim for claim in book["claims"] if not claim.get("experts")]
    general += [claim | {"over": {"policy": "defensive"}} for claim in general if claim["id"] in LISTED]
    needs_window = [c["id"] for c in general if "window" in c.get("over", {}) or "across" in c or c["id"] in LISTED]
    of_own = claims.claims_on_own(general, rows.policy)
    return [c for c in of_own if has_window(c["over"]["policy"][0]) or c["id"].split(" ")[0] not in needs_window]


def verdicts(book: Mapping, tables: Mapping[str, pd.DataFrame], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Verdict of every claim of a book (`judge.verdicts`), one per reading for claims about answers of the defensive
    methods. General claims are also tested on the reader's own policies. tables: as in `members`."""
    sets, rows = book["sets"], tables.get("quality", pd.DataFrame({"policy": [], "reading": []}))
    run_in = [reading for reading in READINGS if reading in set(rows.reading)] or ["any"]

    def readings(claim: Mapping) -> list[str]:
        named = {cell.get("policy") for cell in claim.get("cells", {}).values()}
        named |= {cell.get("policy") for cell in _cells(claim, sets)}
        return run_in if claim["study"] == "quality" and named & set(DEFENSIVE) else ["any"]

    frame = history.verdicts(
        book["claims"], lambda claim, reading: members(claim, sets, tables, reading, has_experts(loaded.model)),
        readings, own=_of_own(book, rows), model=loaded.name, profile=settings.profile,
    )  # fmt: skip
    timed = {c["id"]: CONTRASTS[c["contrast"]][1] for c in book["claims"] if c["study"] == "gpu"}
    return claims.timed(frame, timed)
