"""What a reader may set in the protection chapter beside its notebook's parameters."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Lt

from kvrepro.engine.condition import PositiveShare, Size
from kvrepro.experiment import run


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the protection chapter."""

    capacities: tuple[Size | PositiveShare, ...] = (128, 256, 512)  #: tokens kept
    reading: Literal["both", "as_run", "as_described"] = "both"  #: the authors' code, or their text
    protect_frac: Annotated[float, Gt(0), Lt(0.5)] = 0.10  #: of the capacity, at each end
    max_new_tokens: Size = 128  #: of an answer
    lengths: tuple[Size, ...] = (500, 1000, 1900, 3800)  #: prompts of the study of lengths, in tokens
