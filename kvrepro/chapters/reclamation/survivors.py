"""Who chooses the survivors: a policy of the catalogue or one of a reader at four granularities, or another run.

A granularity is an `across` of the policy: what heads and layers do not choose for themselves they choose by their mean
scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kvrepro.engine.allocate import joint_layers, one_set, per_layer
from kvrepro.engine.allowed import ensure
from kvrepro.engine.condition import Condition
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy, find, is_own, own
from kvrepro.engine.regime import Regime
from kvrepro.engine.shapes import Counts, Mask, RowInts, Scores

POLICIES = {  # of the chapter: the catalogue's, the reading that is meant
    "sinks_recency": ("streaming_llm", "as_described"),  # 4 sinks
    "cumulative": ("h2o_online", "as_described"),  # half the budget for the newest
    "window": ("snapkv", "as_run"),  # average-pooled over 5
    "redundancy": ("r_kv", "as_described"),
}
PUBLISHED = ("streaming_llm", "tri_attention", "tova", "h2o_online", "snapkv", "ada_kv", "r_kv", "k_norm")
WINDOW = 32  # queries that "window" looks at; half of a budget below 64
# An eighth of DuoAttention's own 128 and 256, as prompts are: it protects them in every head, whatever the budget.
SWITCHES = {"duo_attention": (("sinks", 16), ("recent", 32))}


ACROSS = {"one set": one_set, "per layer": per_layer, "per head": None, "joint": joint_layers}
JOINT = tuple(ACROSS)
GRANULARITIES = JOINT[:3]


def condition(policy: str, granularity: str, budget: int | float, regime: Regime) -> Condition:
    """A policy (`POLICIES`, the catalogue's or a reader's own) at a granularity. "per head" is as it was published;
    positions alone choose one set in any case."""
    ensure(JOINT, granularity=granularity)
    name, reading = POLICIES.get(policy, (policy, "as_described"))
    switches = (("window", min(WINDOW, int(budget) // 2)),) if policy == "window" else SWITCHES.get(name, ())
    if granularity != "per head" and policy != "sinks_recency":
        name = own(f"{name}, {granularity}", replace(find(name), across=ACROSS[granularity]))
    return Condition(name, budget, regime, reading=reading, switches=switches)


def label(policy: str) -> str:
    """A policy's name in tables: the chapter's for its own, else the title."""
    return policy if policy in POLICIES else find(policy).title


def varied(policies: Sequence[str]) -> list[str]:
    """Those that choose at every granularity: the chapter's and a reader's own; where there are none, all."""
    return [name for name in policies if name in POLICIES or is_own(name)] or list(policies)


def published(policies: Sequence[str]) -> list[str]:
    """Those that choose as they were published: the catalogue's and a reader's own; where there are none, the policies
    that the chapter's come from."""
    return [name for name in policies if name not in POLICIES] or [POLICIES[name][0] for name in policies]


def given(o: Observation, survivors: Mapping[int, Tensor]) -> Scores:
    """1 for the tokens that another run kept at this point, 0 for the others. survivors: by tokens seen, bool [layers,
    kv_heads, seen] over true positions."""
    [seen] = set(o.seen.tolist())
    kept = survivors[seen][o.layer].to(o.positions.device)
    return kept.expand(len(o.positions), -1, -1).gather(2, o.positions.clamp(min=0)).float()


def as_many(scores: Scores, protected: Mask, budget: RowInts) -> Counts:
    """As many tokens as each head is given."""
    return (scores > 0).sum(-1)


GIVEN = Policy("Another run's survivors", "", given, allocate=as_many)
