"""Settings of the chapter on DropKV's bound, beside its notebook's parameters."""

from dataclasses import dataclass, fields, replace
from typing import Any

from kvrepro.engine.condition import Count, Odd, ProperShare, Size
from kvrepro.engine.facts import ModelFacts, attention_modules
from kvrepro.engine.generate import check_attention_only
from kvrepro.errors import InputError
from kvrepro.experiment import run
from kvrepro.experiment.data import AtMost

PROFILES = {"quick": (16, 2, 150), "full": (300, 4, 600)}  # prompts, query positions, triples for the enumeration


@dataclass(frozen=True)
class Sampling:
    """The settings that decide the rows of a prompt."""

    pools: tuple[Size | ProperShare, ...] = (0.95, 0.5, 256)  #: of lowest attention: share of the keys, or their number
    positions: Size | None = None  #: query positions per prompt, layer and head; None: the profile's
    since: ProperShare = 0.5  #: they lie in the prompt after this share of it
    window: Size = 8  #: final keys outside the pool, and queries that a rule observes
    steps: Count = 6  #: ascents where the cone condition fails
    cones: Size = 2048  #: of a prompt's triples so many, spread evenly, are asked for their cone; fewer: all it has
    seed: int = 0  #: of the items, and of what is drawn from them

    def queries(self, tokens: int) -> list[int]:
        """The positions of the queries of a prompt: evenly spaced, the last token included."""
        assert self.positions is not None  # `Settings.sampling` fills in the profile's number
        step = (1 - self.since) * tokens / self.positions
        return [tokens - 1 - round(step * i) for i in reversed(range(self.positions))]


@dataclass(frozen=True)
class Settings(run.Settings, Sampling):
    """Settings of the chapter on DropKV's bound. The sets of twenty keys come from the first pool."""

    shares: tuple[ProperShare, ...] = (0.05, 0.10, 0.30)  #: of the prompt kept
    tokens: Size = 1900  #: of a prompt, in the model's own tokenizer, at most
    lengths: tuple[Size, ...] = (500, 1900, 3000)  #: for the study of lengths; what cannot be had is left out
    k: Size = 200  #: in 1 - k eps, of figures and tables
    triples: Size | None = None  #: for the enumeration, over all prompts; None: the profile's
    kernel: Odd = 11  #: tokens that are pooled, for the answers
    max_new_tokens: Size = 48  #: of an answer

    def within(self, model: Any) -> "Settings":
        """These settings, with `tokens` and `lengths` lowered (which is printed) so that sliding layers of the model
        see each prompt and answer whole, as the theory assumes.

        Raises InputError for a model to which the theory does not apply: layers without keys, softcapped logits, sinks.
        """
        check_attention_only(model)
        for module in attention_modules(model).values():
            if any(getattr(module, name, None) is not None for name in ("attn_logit_softcapping", "sinks")):
                raise InputError("the bound takes plain logits, but this model caps them or has sinks: take another")
        window = min(ModelFacts.of(model).sliding.values(), default=None)
        if window is None or self.tokens + self.max_new_tokens <= window:
            return self
        tokens = window - self.max_new_tokens
        if tokens <= self.window:
            raise InputError(f"layers of this model see {window} tokens: too few for the bound, take another model")
        print(f"dropkv_bound: prompts of {tokens:,} tokens at most, since layers of this model see {window:,}")
        lengths = tuple(length for length in self.lengths if length < tokens)
        return replace(self, tokens=tokens, lengths=(*lengths, tokens))

    def prompts(self, n_items: int | None) -> int:
        """Number of prompts: `n_items`, or the profile's."""
        return AtMost(PROFILES[self.profile][0]) if n_items is None else n_items

    @property
    def enumerated(self) -> int:
        """Triples that enter the enumeration, over all prompts."""
        return self.triples or PROFILES[self.profile][2]

    @property
    def sampling(self) -> Sampling:
        """The settings that decide the rows, with the profile's numbers filled in."""
        values = {f.name: getattr(self, f.name) for f in fields(Sampling)}
        return Sampling(**values | {"positions": self.positions or PROFILES[self.profile][1]})


def pool_name(size: float | int) -> str:
    """`lowest 95%` or `256 lowest`."""
    return f"{size} lowest" if isinstance(size, int) else f"lowest {size:.0%}"
