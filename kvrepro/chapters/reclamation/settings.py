"""What a reader may set in the reclamation chapter; the first three are parameters of its notebook."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from kvrepro.chapters.reclamation.survivors import POLICIES, PUBLISHED
from kvrepro.engine.condition import ProperShare, Size
from kvrepro.errors import InputError
from kvrepro.experiment import run
from kvrepro.paths import WORK


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the reclamation chapter."""

    policies: tuple[str, ...] = (*POLICIES, *PUBLISHED)  #: who evicts: the chapter's, the catalogue's, or one's own
    kept: tuple[ProperShare, ...] = (0.1, 0.25, 0.5, 0.9)  #: of the prompt
    block_size: Size = 16  #: tokens
    prompt_tokens: Size = 900  #: of each prompt, at most
    capacity: Size = 128  #: tokens kept while answers are generated
    max_new_tokens: Size = 6  #: of an answer
    acceptance: Literal["catalogue", "policies"] = "catalogue"  #: whom the acceptance test tries beside `policies`
    cadences: tuple[Size, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  #: tokens between two passes
    timed_cadences: tuple[Size, ...] = (1, 2, 8, 32, 128, 512)  #: with real decoding; twice as long fits the context
    budget: Annotated[int, Ge(16)] = 2048  #: tokens, for cadences without a model
    lengths: tuple[Size, ...] = (512, 1024, 2048)  #: prompts for which the extra pass over the keys is timed, in tokens
    quoted: str = ""  #: a .jsonl of AIME's problems, for what the guide quotes (`quoted.NEEDS`)
    quoted_tokens: Size = 32_768  #: of an answer to these

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quoted and not (WORK / self.quoted).is_file():
            raise InputError(f"quoted {self.quoted!r}: no such file, give a .jsonl")
