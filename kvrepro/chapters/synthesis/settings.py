"""What a reader may set in the synthesis beside its notebook's parameters."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from kvrepro.engine.condition import Odd, ProperShare, Size
from kvrepro.experiment import run


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the synthesis."""

    family: tuple[str, ...] | None = None  #: models beside `model`; None: for an embedded one the profile's, else none
    measure: Literal["score", "rest_f1"] = "score"  #: of answers; "rest_f1": without the first word
    cells: Annotated[int, Ge(8)] | None = None  #: None: the profile's; below 48 no shares of variance
    tokens: Size = 1900  #: of a prompt, in the model's own tokenizer, at most
    kept: tuple[ProperShare, ...] = (0.05, 0.1, 0.2)  #: shares of the compressed tokens that stay
    guarded: Annotated[float, Gt(0), Lt(0.5)] = 0.1  #: of the budget, at each end
    parts: Annotated[int, Ge(2)] = 4  #: of a prompt, each with its share of the budget under a quota
    window: Size = 16  #: last queries that the scorers of a window observe
    kernel: Odd = 5  #: tokens that are pooled
    interval: Size = 8  #: generated tokens between two evictions under a cap
    answer_words: Size = 24  #: an answer is read and judged as far as that
    block_size: Size = 16  #: tokens of a block of the paged cache
    draws: Annotated[int, Ge(1), Le(100_000)] = 1000  #: resamples of items for intervals of shares
