"""The choices on which the protection paper and its artifact differ, one named switch each.

`AS_RUN` is what the artifact's code does, `AS_DESCRIBED` what the paper's text says. A `Condition` names one of the two
and may override single switches. Source: artifact commit 496739f against the paper's sections 3, 7 and 10, Table 19.
"""

from dataclasses import dataclass, field, fields

from kvrepro.errors import InputError


def switch(as_run: object, as_described: object, means: str, also: tuple = ()):
    """A dataclass field that knows both readings, the values it takes, and what it decides."""
    allowed = tuple(dict.fromkeys((as_run, as_described, *also)))
    return field(default=as_run, metadata={"as_described": as_described, "allowed": allowed, "means": means})


@dataclass(frozen=True)
class Reading:
    """Named switches; the defaults are the artifact's behaviour."""

    tie_break: str = switch("string", "integer", "order among equals: decimal string of the position, or its number")
    guardrail: str = switch("ignores", "honours", "does the last trim to capacity respect protected tokens?")
    n_prot: str = switch("floor", "ceil", "rounding of fraction x capacity, at least 4")
    empty_suffix: str = switch(
        "keeps_newest", "right", "a prefix without a suffix: everything counts as protected and the newest stay, or not"
    )
    first_reduction: int = switch(0, 0, "step of the first reduction, policies with one set for all heads", also=(8,))
    per_head_first_reduction: int = switch(8, 0, "step of the first reduction, per-head policies")
    score_reduce: str = switch(
        "max", "mean", "attention: maxima over layers, heads, queries, or means summed over queries"
    )
    head_map: str = switch("first_n_kv", "group_mean", "a KV head's attention: query head of its number, or group mean")
    static_suffix: str = switch("per_head_only", "anywhere", "where a suffix fixed at the prompt's end exists")
    trim_guard: str = switch(
        "dynamic", "same", "suffix that the per-head union's trim spares: newest, or the policy's own"
    )
    random_seed: str = switch("per_item", "by_prompt", "seed 42 anew for every item, or mixed with the prompt")
    snapkv_bonus: str = switch("peak", "current", "SnapKV's second term: largest attention so far, or the latest")
    slw_window: str = switch("last_access", "position", "StreamingLLM's window: last used tokens, or newest tokens")


AS_RUN = Reading()
AS_DESCRIBED = Reading(**{f.name: f.metadata["as_described"] for f in fields(Reading)})
READINGS = {"as_run": AS_RUN, "as_described": AS_DESCRIBED}


def resolve(name: str, switches: tuple[tuple[str, object], ...] = ()) -> Reading:
    """The reading called `name` with single switches overridden. Raises InputError for what it does not know."""
    if name not in READINGS:
        raise InputError(f"unknown reading {name!r}: choose one of {', '.join(READINGS)}")
    known = {f.name: f.metadata["allowed"] for f in fields(Reading)}
    for key, value in switches:
        if key not in known:
            raise InputError(f"unknown switch {key!r}: choose one of {', '.join(known)}")
        if value not in known[key]:
            raise InputError(f"switch {key} = {value!r}: choose one of {', '.join(map(str, known[key]))}")
    return Reading(**{**vars(READINGS[name]), **dict(switches)})
