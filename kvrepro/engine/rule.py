"""A rule is a condition together with its policy and parameters; what cannot work is refused before anything runs."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrepro.engine import guard
from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import Parameters, Policy, find, named
from kvrepro.engine.regime import REGIMES, Chunked, SharedCap
from kvrepro.engine.shared import SLW_SINKS
from kvrepro.errors import InputError

GIVEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # arguments of each function; what it may also name
    "score": (("o",), ("budget", "asked", "guarded", "draws")),
    "shield": (("o", "scores", "budget"), ("guarded",)),
    "allocate": (("scores", "protected", "budget"), ("o", "asked")),
    "across": (("scores", "protected", "budget"), ("asked", "observations", "summaries")),
    "summary": (("o",), ()),
    "refine": (("o", "scores", "counts"), ("protected",)),
}


@dataclass(frozen=True)
class Rule:
    """A condition, its policy, and the policy's parameters in the condition's reading and with its switches."""

    condition: Condition
    policy: Policy
    parameters: dict[str, Any]

    @classmethod
    def of(cls, c: Condition) -> "Rule | None":
        """The rule of a condition; None for the full cache. Raises InputError for one that no prompt can meet."""
        if c.policy == "full":
            if c.fair is not None or c != Condition(regime=c.regime, bits=c.bits):
                raise InputError(f"policy full keeps every token, got {replace(c, policy='(full)').label!r}: drop it")
            return None
        policy = find(c.policy)
        parameters = policy.reading(c.reading, c.switches)
        _ensure_callable(c.policy, policy, parameters)
        _ensure_consistent(c, policy, parameters)
        rule = cls(c, policy, parameters)
        if policy.shared:
            rule._ensure_shared()
        return rule

    def ensure_met(self, tokens: int, whitelist: Sequence[int] = ()) -> None:
        """Raise InputError if a prompt cannot meet the condition. tokens: how many tokens of the prompt's compressed
        part a layer holds. whitelist: the protected ones among them, counted from their end: -1 is the last."""
        if self.policy.shared:
            prefix, suffix = guarded(self.condition, budget_of(self.condition, 0), self.parameters)
            if tokens < prefix + suffix:
                problem = f"prompt of {tokens} tokens < {prefix + suffix} protected tokens"
                raise InputError(f"{problem}: use a longer prompt, or protect less")
            return
        c, p = self.condition, self.parameters
        at_once = c.every is None
        if at_once and isinstance(c.budget, int) and c.budget >= tokens:
            problem = "nothing leaves; lower it, or say 1.0" if self.policy.frees else "every page is read; lower it"
            raise InputError(f"budget {c.budget} >= {tokens} tokens to compress: {problem}")
        steps = [tokens]
        if isinstance(c.regime, Chunked) and c.regime.when == "every_chunk":
            steps.append(min(c.regime.chunk, tokens))
        for seen in steps:
            budget = budget_of(c, seen)
            if budget < 1:
                raise InputError(f"budget {c.budget} of {seen} tokens keeps {budget}: raise the share")
            prefix, suffix = guarded(c, budget, p)
            sinks, recent = int(p.get("sinks", 0)), int(p.get("recent", 0))
            first, last = max(prefix, sinks), max(suffix, recent)
            apart = len({at for at in whitelist if seen == tokens and first <= seen + at < seen - last})
            needed = first + last + apart
            if budget < (min(needed, seen) if at_once else needed):  # later evictions also protect tokens yet to come
                parts = {"prefix": prefix, "suffix": suffix, "sinks": sinks, "recent": recent, "whitelist": apart}
                words = " + ".join(f"{count} {name}" for name, count in parts.items() if count)
                after = "" if seen == tokens else f" after the first chunk of {seen}"
                problem = f"budget {budget} < {needed} protected tokens ({words}){after}"
                raise InputError(f"{problem}: raise the budget of {c.policy}, or protect less")

    def _ensure_shared(self) -> None:
        """Raise InputError for settings that `SharedCap` does not have, and for guards that leave nothing to choose."""
        c, policy, p = self.condition, self.policy, self.parameters
        for name, value in {"whitelist": c.whitelist, "bits": c.bits}.items():
            if value:
                raise InputError(f"{name} {value!r} in regime {SharedCap.name!r}, which has none: leave it out")
        if isinstance(c.budget, float):
            problem = f"budget {c.budget!r} in regime {SharedCap.name!r}, which takes no share"
            raise InputError(f"{problem}: give {c.policy} a number of tokens, such as 256")
        budget = budget_of(c, 0)
        prefix, suffix = guarded(c, budget, p)
        needed, parts = prefix + suffix, f"{prefix} prefix + {suffix} suffix"
        if policy.per_head:
            needed, parts = needed + 1, parts + " + 1 chosen by each head"
        if policy.shield is not None:
            needed, parts = max(needed, SLW_SINKS + 1), parts + f", or {SLW_SINKS} sinks + 1 recent"
        if budget < needed:
            problem = f"budget {budget} < {needed} protected tokens ({parts})"
            raise InputError(f"{problem}: raise the budget of {c.policy}, or protect less")
        if c.static_suffix and not policy.per_head and p["static_suffix"] == "per_head_only":
            problem = "as run it exists for per-head policies only; set the switch static_suffix to anywhere"
            raise InputError(f"static_suffix with {c.policy}: {problem}")
        if p["empty_suffix"] == "keeps_newest" and p["guardrail"] == "honours" and prefix and not suffix:
            problem = "everything is protected and nothing can leave; change one of the two"
            raise InputError(f"switches empty_suffix = keeps_newest and guardrail = honours: {problem}")


def check(condition: Condition, prompt_tokens: int | None = None, whitelist: Sequence[int] = ()) -> None:
    """Raise InputError if no prompt can meet `condition`, or if one of `prompt_tokens` tokens cannot."""
    rule = Rule.of(condition)
    if rule is not None and prompt_tokens is not None:
        rule.ensure_met(prompt_tokens, whitelist)


def _ensure_consistent(c: Condition, policy: Policy, parameters: Parameters) -> None:
    """Raise InputError for settings of a condition that do not go together."""
    if c.prefix + c.suffix > 1:
        raise InputError(f"prefix {c.prefix:g} + suffix {c.suffix:g} guard more than the whole budget: lower one")
    if c.static_suffix and not c.suffix:
        raise InputError(f"static_suffix for {c.policy} without a suffix: give one, such as suffix=0.1, or drop it")
    if c.regime is None:
        kind = REGIMES[policy.regimes[0]].__name__
        raise InputError(f"{c.policy} without a regime: name one, {kind}() for instance")
    if c.regime.name not in policy.regimes:
        apart = "it chooses one set of tokens for all layers" if policy.shared else "it chooses for each layer"
        why, names = policy.refuses.get(c.regime.name, apart), ", ".join(policy.regimes)
        raise InputError(f"{c.policy} cannot run in regime {c.regime.name!r}: {why}; take {names}")
    if c.budget is None:
        raise InputError(f"budget None for {c.policy}: give a number of tokens, or a share such as 0.2")
    if c.spans and c.fair is None:
        raise InputError(f"spans {c.spans} for {c.policy} without fair, which alone counts them: fair=1, or no spans")
    if c.bits is not None and c.execution == "masked":
        raise InputError(f"bits {c.bits} for {c.policy}, whose masked tokens stay in memory: execution physical")
    if c.fair is not None and c.fair < 1 and (policy.across is not None or parameters.get("ramps")):
        why = "whose ramps set no quota" if parameters.get("ramps") else "whose budgets wait for every layer"
        raise InputError(f"fair {c.fair:g} for {c.policy}, {why}: fair 1, or none")
    if not policy.frees and (c.prefix or c.suffix or c.whitelist or c.fair is not None or c.execution == "masked"):
        raise InputError(f"{c.policy} chooses pages anew for every query and keeps all: no guards, quotas or masks")


def _ensure_callable(name: str, policy: Policy, parameters: Parameters) -> None:
    """Raise InputError for a function of a policy that the engine could not call."""
    for role, (arguments, more) in GIVEN.items():
        function = getattr(policy, role)
        if function is None and role != "score":
            continue
        try:
            given = named(function, {**parameters, **dict.fromkeys(more)})
            inspect.signature(function).bind(*arguments, **given)
        except (TypeError, ValueError) as error:
            problem = f"policy {name!r}: its {role} cannot be called with {', '.join(arguments)}"
            raise InputError(f"{problem} ({error}): what else it asks for stands in `parameters`") from None


def budget_of(c: Condition, tokens: int) -> int:
    """Tokens per KV head that `c` keeps of `tokens`: its budget, a share of them rounded down."""
    if c.policy == "full" or c.budget is None:
        return tokens
    return math.floor(c.budget * tokens + 1e-9) if isinstance(c.budget, float) else c.budget


def guarded(c: Condition, budget: int, parameters: Parameters) -> tuple[int, int]:
    """Tokens that the condition guards at the start and at the end of `budget`."""
    rounding = str(parameters.get("n_prot", "floor" if c.reading == "as_run" else "ceil"))
    prefix, suffix = (guard.protected_count(side, budget, rounding) for side in (c.prefix, c.suffix))
    return prefix, suffix
