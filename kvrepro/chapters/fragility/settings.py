"""Settings of the chapter on DefensiveKV, beside its notebook's parameters."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from kvrepro.engine.condition import Count, Odd, PositiveShare, ProperShare, Size, ensure_fields
from kvrepro.engine.policy import READINGS
from kvrepro.errors import InputError
from kvrepro.experiment import run

STEPS_OF_LONG = 200  # a long answer's tokens, at least
LONG_TOKENS = 1000  # shortest prompts in which the world's long tasks have so many
BASELINES = ("streaming_llm", "snapkv", "cake", "ada_kv", "critical_ada_kv", "duo_attention")
DEFENSIVE = ("defensive_kv", "layer_defensive_kv")
POLICIES = (*BASELINES, *DEFENSIVE)


@dataclass(frozen=True)
class Setting:
    """The choices that figures 1 and 3 and table 1 leave open. The defaults are ours. Raises InputError."""

    until: str = "question"  #: the history ends before this part of the prompt; "": with the prompt
    window: Size = 32  #: past queries: the last ones of the history
    single: Size = 16  #: which of them stands alone, counted from 1
    share: PositiveShare = 0.5  #: of the history that stays
    norm: Literal["l1", "none"] = "l1"  #: of v W_O; "none": attention alone
    pool: Literal["none", "average"] = "none"  #: of each past query's attention, over `kernel` tokens
    kernel: Odd = 5  #: tokens
    joined: bool = True  #: the query heads of a KV head choose together; False: each keeps tokens of its own
    forced: bool = True  #: the past queries' own tokens stay
    prior: Literal["importance", "attention"] = "importance"  #: what the prior bounds; attention: norm last
    ties: Literal["newest", "oldest"] = "newest"  #: who stays among equals, which the prior makes of half of the tokens
    later: bool = False  #: question and generated tokens, which nothing evicts, count: above and below the line

    def __post_init__(self) -> None:
        ensure_fields(self)
        if self.single > self.window:
            raise InputError(f"single {self.single} of {self.window} past queries: count from 1 to the window")


@dataclass(frozen=True)
class Settings(run.Settings, Setting):
    """Settings of the chapter; those about retained importance are the fields of `Setting`."""

    shares: tuple[ProperShare, ...] = (0.1, 0.2, 0.4, 0.6, 0.8)  #: of the context that is kept
    policies: tuple[str, ...] = POLICIES  #: beside the full cache
    reading: Literal["both", "as_run", "as_described"] = "both"  #: of the defensive methods
    layer: Count | None = None  #: the headline's, from 0 among those that may evict; None: at the depth of figure 1
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

    @property
    def middle(self) -> float:
        """The share nearest to the paper's fifth, at which every item runs."""
        return min(self.shares, key=lambda share: abs(share - 0.2))

    def readings(self, policy: str) -> tuple[str, ...]:
        """The readings in which a policy runs: the defensive methods in those asked for, others as in the fork."""
        if policy not in DEFENSIVE:
            return ("as_run",)
        return READINGS if self.reading == "both" else (self.reading,)
