"""What a reader may set in the protection chapter beside its notebook's parameters."""

from dataclasses import dataclass
from typing import Annotated

from kvrepro.engine.allowed import Number, Size
from kvrepro.experiment import run


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the protection chapter."""

    protect_frac: Annotated[float, Number(0, 0.5, above=True, below=True)] = 0.10  #: of the capacity, at each end
    max_new_tokens: Size = 128  #: of an answer
    lengths: tuple[Size, ...] = (500, 1000, 1900, 3800)  #: prompts of the study of lengths, in tokens
    places: tuple[Size, ...] = (700, 980, 1020, 1400)  #: prompts of the study of the question's place, in tokens
