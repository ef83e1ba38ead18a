"""Statistics of a model's queries before rotation, which `python -m studies.calibrate` measures for TriAttention;
and the check that a file made from one model is not used with another.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from kvrepro.errors import InputError
from kvrepro.paths import ROOT

EMBEDDED = "data/models/*-queries.json"  # in the project's folder: the one of these files that was made from the model


@dataclass(frozen=True)
class Queries:
    """Statistics of a model's queries before their rotation."""

    model: str  # hash of the checkpoint
    mean: Complex[Tensor, "layers heads frequencies"]
    length: Float[Tensor, "layers heads frequencies"]
    sample: Float[Tensor, "layers weights"]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mean.shape)


@contextmanager
def reading(path: str, content: str, remedy: str) -> Iterator[Path]:
    """The file at `path`, relative to the project's folder. Raises InputError if it is missing, or if the block raises
    an error because the file does not hold the `content`."""
    file = ROOT / path  # an absolute path stays as it is
    try:
        yield file
    except FileNotFoundError:
        raise InputError(f"no {content} at {file}: {remedy}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} holds no {content} ({error}): {remedy}") from None


def sampled(outputs: Sequence[Tensor]) -> Float[Tensor, "layers weights"]:
    """Eight weights of each layer's output projection, which identify a model in any dtype."""
    return torch.stack([output[0, 0, :8].float().cpu() for output in outputs])


def rounded(numbers: list[Any] | float) -> list[Any] | float:
    """Numbers rounded to five significant digits, for a file."""
    return [rounded(x) for x in numbers] if isinstance(numbers, list) else float(f"{numbers:.5g}")


def is_of(sample: Float[Tensor, "layers weights"], other: Float[Tensor, "layers weights"]) -> bool:
    """Whether both are `sampled` from one model. A half-precision copy counts as the same model, and so does a model
    that was tuned without changing its output projections."""
    return bool(sample.shape == other.shape and torch.allclose(sample.cpu(), other, rtol=0.01, atol=1e-6))


def made_from(
    path: str, sample: Callable[[str], Tensor | None], outputs: Sequence[Tensor], remedy: str, first: int = 0
) -> str:
    """`path`, or if it is a pattern with *, the matching file whose `sample` agrees with the output projections
    [heads, dim, hidden] of the layers from `first` on. Raises InputError if there is none."""
    if "*" not in path:
        return path
    wanted = sampled(outputs) if outputs else torch.zeros(0)
    for file in sorted(map(str, ROOT.glob(path))):
        held = sample(file)
        if held is not None and is_of(held[first : first + len(wanted)], wanted):
            return file
    raise InputError(f"none of {path} was made from this model: {remedy}")


def fitting(
    path: str, read: Callable[[str], Any], wanted: tuple[int, ...], axes: str, outputs: Sequence[Tensor], remedy: str,
    first: int = 0,
) -> Any:  # fmt: skip
    """The content that `read` returns for the file that `made_from` names. Raises InputError unless it has the wanted
    shape (the message names its `axes`) and, if it has a `sample`, the model's."""
    file = made_from(path, lambda name: read(name).sample, outputs, remedy, first)
    content = read(file)
    if content.shape != wanted:
        shape_of_file, shape_of_model = (" x ".join(map(str, shape)) for shape in (content.shape, wanted))
        raise InputError(f"{file} is made for {shape_of_file} {axes}, the model has {shape_of_model}: {remedy}")
    if outputs and content.sample is not None:
        sample, expected = content.sample[first : first + len(outputs)].cpu(), sampled(outputs)
        if not is_of(sample, expected):
            at = (sample - expected).abs().argmax()
            pair = f"{float(sample.flatten()[at]):.4g} there, {float(expected.flatten()[at]):.4g} here"
            raise InputError(f"{file} was made from other weights, {pair}: {remedy}")
    return content


def pairs(x: Tensor, rotated: int) -> Complex[Tensor, "..."]:
    """The last axis [dim] as complex numbers [dim / 2]: the `rotated` first elements form pairs, one from each of their
    halves, and so do the elements that the model leaves unrotated. complex64."""
    parts = [part.float().unflatten(-1, (2, -1)) for part in (x[..., :rotated], x[..., rotated:]) if part.shape[-1]]
    return torch.complex(*(torch.cat([part[..., side, :] for part in parts], -1) for side in (0, 1)))


def frequencies(inverse_frequencies: Tensor, dim: int) -> Tensor:
    """Radians per position of each pair, float64 [dim / 2]; 0 for those left unrotated."""
    return torch.nn.functional.pad(inverse_frequencies.double(), (0, dim // 2 - len(inverse_frequencies)))


@lru_cache(maxsize=32)
def load(path: str) -> Queries:
    """The statistics in a file of `studies.calibrate`; relative paths start at the project's folder. Raises
    InputError for a missing file and for any other content."""
    with reading(path, "query statistics", "write them with python -m studies.calibrate") as file:
        read = json.loads(file.read_text())
        mean = torch.complex(torch.tensor(read["mean_real"]), torch.tensor(read["mean_imaginary"]))
        return Queries(read["model"], mean, torch.tensor(read["length"]), torch.tensor(read["sample"]))
