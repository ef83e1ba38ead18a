"""Conditions from flat settings, for tests that go through all regimes."""

from dataclasses import fields, replace

from kvrepro.engine.condition import REGIMES, Condition
from kvrepro.engine.policy import Rule

NAMES = {f.name for regime in REGIMES.values() for f in fields(regime)}


def flat(policy: str = "full", budget=None, *, regime: str, **settings) -> Condition:
    """`settings` of the condition and of whatever regime; what the regime named here does not have is left out."""
    kind = REGIMES[regime]
    own = {f.name for f in fields(kind)}
    given = {k: v for k, v in settings.items() if k in own}
    rest = {k: v for k, v in settings.items() if k not in NAMES}
    return Condition(policy, budget, kind(**given), **rest)


def other(c: Condition, **changes) -> Condition:
    """The same with other settings of its regime, or of itself; a `regime` by name keeps what both have."""
    kind = REGIMES[changes.pop("regime", c.regime.name)]
    own = {f.name for f in fields(kind)}
    regime_settings = {f.name: getattr(c.regime, f.name) for f in fields(c.regime) if f.name in own}
    regime_settings |= {k: changes.pop(k) for k in list(changes) if k in own}
    return replace(c, regime=kind(**regime_settings), **{k: v for k, v in changes.items() if k not in NAMES})


def check(c: Condition, tokens: int, whitelist: tuple[int, ...] = ()) -> None:
    """Raise InputError if a prompt of so many tokens cannot meet the condition."""
    if rule := Rule.of(c):
        rule.ensure_met(tokens, whitelist)
