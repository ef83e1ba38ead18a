"""Settings of the chapter on DefensiveKV, beside its notebook's parameters."""

from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import Ge, Lt

from kvrepro.chapters.fragility.retention import Setting
from kvrepro.engine.allowed import Size
from kvrepro.errors import InputError
from kvrepro.experiment import run

STEPS_OF_LONG = 200  # a long answer's tokens, at least
LONG_TOKENS = 1000  # shortest prompts in which the world's long tasks have so many


@dataclass(frozen=True)
class Settings(run.Settings, Setting):
    """Settings of the chapter; those about retained importance are the fields of `retention.Setting`."""

    tokens: Size = 560  #: of a prompt of the embedded model's world, or of RULER
    long_tokens: Size = LONG_TOKENS  #: of one whose answer is long
    answer_tokens: Size = 320  #: of an answer whose steps are looked at, at most
    max_new_tokens: Size = 32  #: of an answer in the quality grid
    protect_frac: Annotated[float, Ge(0), Lt(0.5)] = 0.10  #: of the budget, at each end, behind guards

    def __post_init__(self) -> None:
        super().__post_init__()
        Setting.__post_init__(self)
        if self.long_tokens < LONG_TOKENS:
            needed = f"answers of {STEPS_OF_LONG} steps need prompts of {LONG_TOKENS}"
            raise InputError(f"long_tokens {self.long_tokens}: {needed}")

    @property
    def base(self) -> Setting:
        """The settings about retained importance."""
        return Setting(**{f.name: getattr(self, f.name) for f in fields(Setting)})
