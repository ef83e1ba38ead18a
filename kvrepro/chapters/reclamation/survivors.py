"""Who chooses the survivors: policies of the catalogue at four granularities, or another run's choice.

A granularity is an `across` of the policy: what heads and layers do not choose for themselves they choose by their mean
scores. Conditions name these policies as they would name a reader's own, `path/to/this/file.py:NAME`.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from kvrepro.engine.allocate import joint_layers
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy
from kvrepro.engine.regime import Regime
from kvrepro.engine.score.keys import shared_by_layers
from kvrepro.engine.shapes import Counts, Mask, RowInts, Scores
from kvrepro.errors import InputError

POLICIES = {  # of the chapter: the catalogue's, the reading that is meant
    "sinks_recency": ("streaming_llm", "as_described"),  # 4 sinks
    "cumulative": ("h2o_online", "as_described"),  # half the budget for the newest
    "window": ("snapkv", "as_run"),  # average-pooled over 5
    "redundancy": ("r_kv", "as_described"),
}
WINDOW = 32  # queries that "window" looks at; half of a budget below 64


def per_layer(
    scores: list[Scores], protected: list[Mask], budget: RowInts, summaries: list | None = None
) -> tuple[list[Scores], list[Counts]]:
    """The mean score over a layer's heads, for all of them: they keep the same tokens."""
    means = [s.mean(1, keepdim=True).expand_as(s) for s in scores]
    return means, [budget[:, None].expand(-1, s.shape[1]) for s in scores]


def one_set(
    scores: list[Scores], protected: list[Mask], budget: RowInts, summaries: list | None = None
) -> tuple[list[Scores], list[Counts]]:
    """The mean score over heads and layers: all keep the same tokens."""
    return shared_by_layers(per_layer(scores, protected, budget)[0], protected, budget, [])


ACROSS = {"one set": one_set, "per layer": per_layer, "per head": None, "joint": joint_layers}
JOINT = tuple(ACROSS)
GRANULARITIES = JOINT[:3]
SCORED = [CATALOGUE[name] for name in ("h2o_online", "snapkv", "r_kv")]
h2o_online_one_set, snapkv_one_set, r_kv_one_set = (replace(policy, across=one_set) for policy in SCORED)
h2o_online_per_layer, snapkv_per_layer, r_kv_per_layer = (replace(policy, across=per_layer) for policy in SCORED)
h2o_online_joint, snapkv_joint, r_kv_joint = (replace(policy, across=joint_layers) for policy in SCORED)


def condition(policy: str, granularity: str, budget: int, regime: Regime) -> Condition:
    """One of the chapter's policies at a granularity; positions alone choose one set in any case."""
    if policy not in POLICIES or granularity not in ACROSS:
        raise InputError(f"{policy!r}, {granularity!r}: choose {', '.join(POLICIES)}; {', '.join(JOINT)}")
    name, reading = POLICIES[policy]
    switches = (("window", min(WINDOW, budget // 2)),) if policy == "window" else ()
    if granularity != "per head" and policy != "sinks_recency":
        name = f"kvrepro/chapters/reclamation/survivors.py:{name}_{granularity.replace(' ', '_')}"
    return Condition(name, budget, regime, reading=reading, switches=switches)


def given(o: Observation, survivors: Mapping[int, Tensor]) -> Scores:
    """1 for the tokens that another run kept at this point, 0 for the others. survivors: by tokens seen, bool [layers,
    kv_heads, seen] over true positions."""
    kept = survivors[int(o.seen)][o.layer].to(o.positions.device)
    return kept.gather(1, o.positions[0].clamp(min=0))[None].float()


def as_many(scores: Scores, protected: Mask, budget: RowInts) -> Counts:
    """As many tokens as each head is given."""
    return (scores > 0).sum(-1)


GIVEN = Policy("Another run's survivors", "", given, allocate=as_many)
