"""Settings of the leakage chapter, beside its notebook's parameters."""

from dataclasses import dataclass
from typing import Annotated, Literal

from kvrepro.engine.allowed import Number, Size
from kvrepro.experiment import run
from kvrepro.experiment.data import MOST_MADE

Made = Annotated[int, Number(1, MOST_MADE, whole=True)]  # a number of prompts


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the leakage chapter; the profile decides those that are None."""

    max_new_tokens: Size | None = None  #: of an answer; None: 128, in the full profile the paper's 1,280
    wording: Literal["paper", "ours"] | None = (
        None  #: of the defense for `items="ifeval"`; None: the paper's if at hand
    )
    compare: str = ""  #: a second checkpoint, for figures and verdicts of both
    singles: Made | None = None  #: system prompts without a defense, with one rule
    several: Made | None = None  #: system prompts without a defense, with two to five rules
    examples: Made | None = None  #: system prompts of labelled examples
    words: Literal[1000, 2000, 3000] = 1000  #: of TREC's contexts, from so many to a thousand more: the paper's classes
    marks: Made | None = None  #: system prompts whose spans are marked in other ways, or that lack the preamble
    timed: Size | None = None  #: requests whose time is taken
    repeats: Size | None = None  #: of each time that is taken
