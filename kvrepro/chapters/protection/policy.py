"""The harness's policies as data, and the one function that reduces its cache to a capacity."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvrepro.chapters.protection import allocate, guard, score
from kvrepro.chapters.protection.observe import Observation
from kvrepro.chapters.protection.reading import AS_DESCRIBED, READINGS
from kvrepro.chapters.protection.selection import drop_lowest, position_rank, tie_key, top_per_head
from kvrepro.engine.condition import Condition
from kvrepro.engine.shapes import Mask, RowInts, Scores, TokenMask
from kvrepro.errors import InputError

ARTIFACT = "protection artifact 496739f"


@dataclass(frozen=True)
class Policy:
    """How one method decides: `score` ranks, `ties` orders equals (then by position), `shield` exempts tokens on the
    method's own account, and `allocate`, if set, gives each KV head its own choice."""

    title: str
    source: str
    score: Callable[[Observation], Scores]
    ties: tuple[str, ...] = ("last_access",)
    shield: Callable[[Observation, RowInts], TokenMask] = guard.nothing
    shielded: int = 0  # tokens that `shield` needs at least
    allocate: Callable | None = None
    regimes: tuple[str, ...] = ("decode cap",)

    @property
    def budget(self) -> str:
        if self.allocate is None:
            return "tokens, one set for all heads and layers"
        return "tokens per KV head, union trimmed to capacity"

    @property
    def formula(self) -> str:
        """What the policy keeps: the first sentence of its scorer, and its shield."""
        ranks = (self.score.__doc__ or "").strip().split("\n")[0].split(". ")[0].rstrip(".")
        return f"{self.shielded} sinks and a window, then {ranks}" if self.shielded else ranks

    @property
    def readings(self) -> str:
        return ", ".join(READINGS)  # every policy so far has both


POLICIES: dict[str, Policy] = {
    "lru": Policy("LRU", ARTIFACT, score.lru, ties=("inserted",)),
    "h2o": Policy("H2O", f"Zhang et al. 2023, simplified in {ARTIFACT}", score.h2o, ties=("last_access", "inserted")),
    "snapkv": Policy("SnapKV", f"Li et al. 2024, simplified in {ARTIFACT}", score.snapkv),
    "streaming_llm": Policy(
        "StreamingLLM (SLW)",
        f"Xiao et al. 2023, after the prompt in {ARTIFACT}",
        score.lru,
        ties=("inserted",),
        shield=guard.sinks_and_window,
        shielded=4,
    ),
    "ada_kv": Policy("Ada-KV", f"Feng et al. 2024, simplified in {ARTIFACT}", score.ada_kv),
    "quest": Policy("QUEST", f"Tang et al. 2024, simplified in {ARTIFACT}", score.current),
    "random": Policy("Random", ARTIFACT, score.random, ties=()),
    "h2o_faithful": Policy(
        "H2O-faithful", f"Zhang et al. 2023, as in {ARTIFACT}", score.cumulative, ties=("last_access", "inserted")
    ),
    "snapkv_faithful": Policy("SnapKV-faithful", f"Li et al. 2024, as in {ARTIFACT}", score.prefill),
    "ada_kv_faithful": Policy(
        "Ada-KV-faithful", f"Feng et al. 2024, as in {ARTIFACT}", score.head_cumulative, allocate=allocate.by_entropy
    ),
    "quest_faithful": Policy(
        "QUEST-faithful", f"Tang et al. 2024, as in {ARTIFACT}", score.head_current, allocate=allocate.every_head
    ),
}
# A row of `kvrepro.engine.policy.table`: no policy of a condition, since it learns from one prompt to the next.
CREDIT = (
    "online_credit",
    "Online credit estimator, version 2",
    "beta rank_credit + (1 - beta) rank_LRU: a guess of how much a token will be missed, learned while decoding",
    f"protection paper, section 8; {ARTIFACT}; python -m kvrepro.chapters.protection.credit",
    "harness",
    "tokens, one set for all heads and layers",
    "attention and log-probabilities of every step",
    ", ".join(READINGS),
)
PROTECTION_SEVEN = ("lru", "h2o", "snapkv", "streaming_llm", "ada_kv", "quest", "random")  # the paper's Table 3


def refuse_credit(name: str) -> None:
    """Raise InputError for a name that means the credit estimator."""
    if "credit" in name and ":" not in name:
        raise InputError(
            f"{name} is no policy of a condition, it learns while decoding: call "
            "kvrepro.chapters.protection.credit.run, or python -m kvrepro.chapters.protection.credit"
        )


def check(condition: Condition, prompt_tokens: int | None = None) -> None:
    """Raise InputError if `condition` cannot be met (on a prompt of that length, if one is given)."""
    c, reading = condition, condition.resolved()
    if c.execution not in ("physical", "masked"):
        raise InputError(f"unknown execution {c.execution!r}: choose physical or masked")
    if c.suffix_mode not in ("dynamic", "static"):
        raise InputError(f"unknown suffix_mode {c.suffix_mode!r}: choose dynamic or static")
    if c.policy == "full":
        if c.capacity is not None or c.prefix or c.suffix:
            given = f"capacity {c.capacity}, guards {c.prefix}/{c.suffix}"
            raise InputError(f"policy full keeps every token, got {given}: drop them")
        return
    refuse_credit(c.policy)
    if c.policy not in POLICIES:
        raise InputError(f"unknown policy {c.policy!r}: choose one of full, {', '.join(POLICIES)}")
    policy = POLICIES[c.policy]
    if not all(isinstance(size, int) and size >= 1 for size in (c.capacity, c.interval)):
        raise InputError(f"capacity {c.capacity!r}, interval {c.interval!r} for {c.policy}: whole numbers, at least 1")
    if not (0 <= c.prefix < 1 and 0 <= c.suffix < 1):
        raise InputError(f"guards {c.prefix}/{c.suffix}: fractions of the capacity between 0 and 1")
    prefix, suffix = c.guards()
    needed = prefix + suffix
    parts = f"{prefix} prefix + {suffix} suffix"
    if policy.allocate is not None:
        needed, parts = needed + 1, parts + " + 1 chosen by each head"
    if policy.shielded:
        needed, parts = max(needed, policy.shielded + 1), parts + f", or {policy.shielded} sinks + 1 recent"
    if c.capacity < needed:
        raise InputError(
            f"budget {c.capacity} < {needed} protected tokens ({parts}): raise the capacity or lower the guards"
        )
    if prompt_tokens is not None and prompt_tokens < prefix + suffix:
        raise InputError(
            f"prompt of {prompt_tokens} tokens < {prefix + suffix} protected tokens ({parts}): "
            "use a longer prompt or lower the guards"
        )
    if c.suffix_mode == "static" and policy.allocate is None and reading.static_suffix == "per_head_only":
        raise InputError(
            f"suffix_mode static with {c.policy}: as run it exists for per-head policies only; "
            "set the switch static_suffix to anywhere"
        )
    if reading.empty_suffix == "keeps_newest" and reading.guardrail == "honours" and prefix and not suffix:
        raise InputError(
            "switches empty_suffix = keeps_newest and guardrail = honours: everything is protected and nothing can "
            "leave; change one of the two"
        )


@dataclass(frozen=True)
class Limits:
    """What the rows of one reduction must meet; `static_suffix` pins the suffix to the prompt's end."""

    capacity: RowInts
    prefix: RowInts
    suffix: RowInts
    static_suffix: bool = False

    @classmethod
    def of(cls, conditions: list[Condition], device: torch.device) -> "Limits":
        rows = torch.tensor([[c.capacity, *c.guards()] for c in conditions], device=device)
        return cls(*rows.unbind(1), static_suffix=conditions[0].suffix_mode == "static")


def reduce(policy: Policy, o: Observation, limits: Limits) -> Mask:
    """What every row keeps so that at most `capacity` tokens remain: bool `[batch, 1 or kv_heads, tokens]`.

    Rows at or below their capacity keep all that is alive. Protection protocol, sections 4 to 7.
    """
    if policy.allocate is not None:
        return _reduce_per_head(policy, o, limits)
    excess = (o.alive.sum(1) - limits.capacity).clamp(min=0)
    protected = guard.ends(o, limits.prefix, limits.suffix, limits.static_suffix)
    evictable = o.alive & ~protected
    if o.reading.empty_suffix == "keeps_newest":  # an empty suffix slice protects every token
        evictable = evictable & ~((limits.prefix > 0) & (limits.suffix == 0))[:, None]
    o = replace(o, evictable=evictable, excess=excess)

    scores = policy.score(o)[:, 0]
    free = evictable & ~policy.shield(o, limits.capacity)
    keep = o.alive & ~drop_lowest(free, (scores, tie_key(o, policy.ties)), excess)

    trim = keep & ~protected if o.reading.guardrail == "honours" else keep
    by_age = tie_key(replace(o, reading=AS_DESCRIBED), ("last_access", "inserted"))  # by number in either reading
    overflow = (keep.sum(1) - limits.capacity).clamp(min=0)
    return (keep & ~drop_lowest(trim, (by_age,), overflow))[:, None]


def _reduce_per_head(policy: Policy, o: Observation, limits: Limits) -> Mask:
    """Each head keeps the protected tokens and its own best; their union is trimmed to the capacity: tokens that the
    fewest heads chose leave first, ties by the signal summed over heads."""
    protected = guard.ends(o, limits.prefix, limits.suffix, limits.static_suffix)
    evictable = o.alive & ~protected
    scores = policy.score(o)
    budget = torch.minimum(limits.capacity - protected.sum(1), evictable.sum(1))
    counts = policy.allocate(scores, evictable, budget)
    ties = position_rank(o.positions, o.reading.tie_break)
    heads = top_per_head(scores, evictable, counts, ties) | protected[:, None]

    votes = heads.sum(1)
    firm = protected
    if limits.static_suffix and o.reading.trim_guard == "dynamic":
        firm = guard.ends(o, limits.prefix, limits.suffix)
    overflow = (votes.count_nonzero(1) - limits.capacity).clamp(min=0)
    dropped = drop_lowest((votes > 0) & ~firm, (votes, scores.sum(1), ties), overflow)
    within = o.alive.sum(1) <= limits.capacity
    return torch.where(within[:, None, None], o.alive[:, None], heads & ~dropped[:, None])
