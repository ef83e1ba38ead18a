"""DropKV against its peers on answers: the question visible, the prompt reduced once, 5 to 30% of it kept.

Every method looks through the last 8 queries and pools over 11 tokens, where it does either (DropKV, section 5).
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import pandas as pd

from kvrepro.chapters.dropkv_bound.settings import Settings
from kvrepro.engine.condition import Condition, Prefill
from kvrepro.engine.policy import check, find, is_own
from kvrepro.experiment import data, measure
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, run
from kvrepro.item import Item

PEERS = ("snapkv", "pyramid_kv", "streaming_llm", "key_diff", "cake", "critical_kv", "andpro")
POOLED = "AnDPro, max pooling"  # with the pooling that the others have
BY_LENGTH = ("snapkv", "andpro")  # and a reader's own policies
RETRIEVAL = "tinyworld:needle,needle_multikey,needle_multivalue,needle_multiquery,variable_tracking,frequent_words"
MEASURE = "score"


def peers_of(policies: Sequence[str]) -> list[str]:
    """The policies to compare with DropKV, each once. Raises InputError for a name that is not a policy's."""
    peers = [name for name in dict.fromkeys(policies) if name not in ("full", "dropkv")]
    for name in peers:
        find(name)  # raises
    return peers


def condition(policy: str, share: float, settings: Settings, **switches: object) -> Condition:
    """Keep `share` of the prompt, with the window and kernel of DropKV's paper; `switches` add to these."""
    parameters = find(policy).parameters
    of_paper = {name: getattr(settings, name) for name in ("window", "kernel") if name in parameters}
    all_switches = tuple(sorted((of_paper | switches).items()))
    return Condition(policy, share, Prefill(), reading="as_described", switches=all_switches)


def grid(settings: Settings, peers: Sequence[str] = PEERS) -> dict[str, list[Condition]]:
    """Conditions by their name in tables: the full cache, DropKV and its peers at every share, and `POOLED` at the
    smallest."""
    names = ("dropkv", *peers)
    conditions = {name: [condition(name, share, settings) for share in settings.shares] for name in names}
    pooled = condition("andpro", settings.least, settings, pool="max")
    return {"full": [Condition()]} | conditions | {POOLED: [pooled]}


def answers(
    loaded: Loaded, items: Sequence[Item], by_length: Mapping[int, Sequence[Item]], peers: Sequence[str],
    settings: Settings,
) -> pd.DataFrame:  # fmt: skip
    """Rows of `run` with `method` (its name in tables), `length` and `score` (`measure.scores`).

    `items`, cut to `settings.tokens`, are answered under the whole grid; those of each other length
    (`study.questions_by_length`) under DropKV, SnapKV, AnDPro and the reader's own policies at the smallest share.
    Raises InputError before the run for a condition that cannot be met.
    """
    whole, planned = grid(settings, peers), []
    few = ["full", "dropkv", *(name for name in peers if name in BY_LENGTH or is_own(name))]
    least = {name: sorted(whole[name], key=lambda c: c.budget or 1)[:1] for name in few}
    for length, questions in {**by_length, settings.tokens: items}.items():
        cut = any(item.context is not None for item in questions)
        if questions is not items and not cut and {item.id for item in questions} <= {item.id for item in items}:
            continue  # messages cannot be cut: the same prompts are answered at `settings.tokens`
        part = whole if questions is items else least
        names = [name for name, conditions in part.items() for _ in conditions]
        conditions = list(chain(*part.values()))
        shortest = min(len(data.build_prompt(item, loaded.tokenizer, length).ids) for item in questions)
        for c in conditions:
            check(c, shortest)
        limit = length if cut else None
        study = Answers("dropkv_bound", f"quality-{length}", questions, conditions, settings.max_new_tokens, limit)
        planned.append((study, names * len(questions), length))
    parts = [run(study, loaded, settings).assign(method=names, length=n) for study, names, n in planned]
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(share=rows["share"].astype(float).fillna(1.0), score=measure.scores(rows))


def main(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the prompt length at which all methods were run."""
    return rows[rows.length == rows.groupby("length").method.nunique().idxmax()]


def pair(rows: pd.DataFrame, against: str, share: float) -> pd.DataFrame:
    """Score of DropKV (a) and of another method, or "full" (b), at a share, by item that has both."""
    sides, rows = {}, main(rows)
    for name, method, side_share in (("a", "dropkv", share), ("b", against, 1.0 if against == "full" else share)):
        of_side = rows[(rows.method == method) & (rows["share"] == side_share)]
        if of_side.empty:
            raise NotTestable(f"not run: {method} at {side_share:.0%}")
        sides[name] = of_side.set_index("item")[MEASURE]
    return pd.DataFrame(sides).dropna()
