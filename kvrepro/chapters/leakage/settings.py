"""Settings of the leakage chapter, beside its notebook's parameters."""

from dataclasses import dataclass
from typing import Literal

from kvrepro.engine.allowed import Size
from kvrepro.experiment import run


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the leakage chapter; the profile decides those that are None."""

    max_new_tokens: Size | None = None  #: of an answer; None: 128, in the full profile the paper's 1,280
    wording: Literal["paper", "ours"] | None = (
        None  #: of the defense for `items="ifeval"`; None: the paper's if at hand
    )
    compare: str = ""  #: a second checkpoint, for figures and verdicts of both
    words: Literal[1000, 2000, 3000] = 1000  #: of TREC's contexts, from so many to a thousand more: the paper's classes
