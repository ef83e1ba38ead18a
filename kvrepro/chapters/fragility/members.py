"""The rows that the claims about DefensiveKV choose from (`kvrepro.experiment.members`), and what these compute."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility import contrasts
from kvrepro.chapters.fragility.retention import TOKEN
from kvrepro.chapters.fragility.study import DATASETS, DEFENSIVE, STAND_INS, has_window
from kvrepro.engine.policy import is_own
from kvrepro.experiment import judge
from kvrepro.experiment.judge import NotTestable, Sample
from kvrepro.experiment.members import Case

WINDOW = 32  # past queries, where a row does not say otherwise


def has_experts(model: Any) -> bool:
    """Whether the model is a mixture of experts."""
    config = model.config.get_text_config()
    return any((getattr(config, f"num_{kind}experts", 0) or 0) > 1 for kind in ("", "local_", "routed_"))


def tidied(tables: Mapping[str, pd.DataFrame], loaded: Any, settings: Any) -> dict[str, pd.DataFrame]:
    """The tables that claims choose from: `retained` (its summary) and `quality` as far as they were run; `gpu`, the
    stored timings, and `theory`, every case of what appendix C proves."""
    run = {"gpu": contrasts.timings(), "theory": contrasts.theorems()}
    if "retained" in tables:
        summary = tables["retained"]
        six = summary.task.isin([*STAND_INS, *DATASETS])
        run["retained"] = summary.assign(six=six | ~six.any(), token=summary.setting.str.startswith(TOKEN))
    if "quality" in tables:
        run["quality"] = _of_quality(tables["quality"]).assign(experts=has_experts(loaded.model))
    return run


def _of_quality(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `window`, no change of the window among the changes. The full cache has no condition, and
    policies other than the defensive ones no reading."""
    windows = rows.change.str.extract(r"^window (\d+)$")[0]
    change = rows.change.mask(windows.notna(), "none").mask(rows.policy == "full")
    reading = rows.reading.where(rows.policy.isin(DEFENSIVE))
    window = windows.fillna(WINDOW).astype(float).mask(rows.policy == "full")
    return rows.assign(change=change, window=window, reading=reading)


# ---------------------------------------------------------------- what a claim needs


def check_answers(case: Case) -> None:
    """The model answers with its full cache, over all tasks."""
    full = case.table.fitting({"policy": "full", "part": case.claim["filter"].get("part")})
    judge.answers_enough(full.score, full.get("error"))


def check_experts(case: Case) -> None:
    """The model is a mixture of experts."""
    if not case.table.rows.experts.all():
        raise NotTestable("not a mixture of experts")


def check_window(case: Case) -> None:
    """A policy of the reader's own looks at a window of past queries."""
    policy = case.claim["filter"].get("policy", "")
    if is_own(policy) and not has_window(policy):
        raise NotTestable("it looks at no window of past queries")


REQUIRES = {"answers": check_answers, "experts": check_experts, "window": check_window}


# ---------------------------------------------------------------- what a claim computes


def wins(case: Case) -> Sample:
    """A row per task: 1 where a's mean score is above b's, 0 where it is below, a half where they tie."""
    task = case.table.rows.drop_duplicates("item").set_index("item").task
    frame = case.frame()
    gain = (frame.a - frame.b).dropna().groupby(task).mean().round(9)
    return case.sample("mean", pd.DataFrame({"a": (1 + np.sign(gain)) / 2}))


CONTRASTS = {"wins": wins}
