"""Statistics of a model's queries before rotation, which `python -m kvrepro.tools.calibrate` measures for TriAttention.

And by what a file that was learned of one model is refused for another.
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

EMBEDDED = "data/models/*-queries.json"  # from the project's folder: of these the file that was made from the model


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
def reading(path: str, what: str, remedy: str) -> Iterator[Path]:
    """The file at `path`, from the project's folder on; InputError where none is there, or holds something else."""
    file = ROOT / path  # an absolute path stays as it is
    try:
        yield file
    except FileNotFoundError:
        raise InputError(f"no {what} at {file}: {remedy}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} holds no {what} ({error}): {remedy}") from None


def sampled(outputs: Sequence[Tensor]) -> Float[Tensor, "layers weights"]:
    """By what a model is known again, whatever its dtype: eight weights of each layer's output projection."""
    return torch.stack([output[0, 0, :8].float().cpu() for output in outputs])


def rounded(numbers: list[Any] | float) -> list[Any] | float:
    """Five significant digits, which a file holds."""
    return [rounded(x) for x in numbers] if isinstance(numbers, list) else float(f"{numbers:.5g}")


def is_of(sample: Float[Tensor, "layers weights"], found: Float[Tensor, "layers weights"]) -> bool:
    """Whether both are `sampled` of one model. A half-precision copy is the same model; a model tuned without its
    output projections passes as well."""
    return sample.shape == found.shape and bool(torch.allclose(sample.cpu(), found, rtol=0.01, atol=1e-6))


def ensure_model(path: str, sample: Float[Tensor, "layers weights"], outputs: Sequence[Tensor], remedy: str) -> None:
    """Raise InputError where a file's `sample` is not that of these output projections [heads, dim, hidden]."""
    sample, found = sample.cpu(), sampled(outputs)
    if not is_of(sample, found):
        at = (sample - found).abs().argmax()
        pair = f"{float(sample.flatten()[at]):.4g} there, {float(found.flatten()[at]):.4g} here"
        raise InputError(f"{path} was made from other weights, {pair}: {remedy}")


def made_from(
    path: str, sample: Callable[[str], Tensor | None], outputs: Sequence[Tensor], remedy: str, first: int = 0
) -> str:
    """`path`; where it holds a *, the one of its files whose `sample` is that of the output projections
    [heads, dim, hidden] of the layers from `first` on. Raises InputError where none is."""
    if "*" not in path:
        return path
    found = sampled(outputs) if outputs else torch.zeros(0)
    for file in sorted(map(str, ROOT.glob(path))):
        held = sample(file)
        if held is not None and is_of(held[first : first + len(found)], found):
            return file
    raise InputError(f"none of {path} was made from this model: {remedy}")


def fitting(
    path: str, read: Callable[[str], Any], wanted: tuple[int, ...], axes: str, outputs: Sequence[Tensor], remedy: str,
    first: int = 0,
) -> Any:  # fmt: skip
    """What `read` gives of the file that `made_from` names, of the wanted shape, whose `axes` an error names, and with
    the model's `sample`, where it has one. Raises InputError for a file of another model."""
    file = made_from(path, lambda one: read(one).sample, outputs, remedy, first)
    known = read(file)
    if known.shape != wanted:
        made, here = (" x ".join(map(str, shape)) for shape in (known.shape, wanted))
        raise InputError(f"{file} is made for {made} {axes}, the model has {here}: {remedy}")
    if outputs and known.sample is not None and file == path:  # what a pattern finds was found by its sample
        ensure_model(file, known.sample[first : first + len(outputs)], outputs, remedy)
    return known


def pairs(x: Tensor, rotated: int) -> Complex[Tensor, "..."]:
    """The last axis [dim] as complex numbers [dim / 2]: the `rotated` first elements pair with each other, half against
    half, and so do those that the model leaves unrotated. float32."""
    parts = [part.float().unflatten(-1, (2, -1)) for part in (x[..., :rotated], x[..., rotated:]) if part.shape[-1]]
    return torch.complex(*(torch.cat([part[..., side, :] for part in parts], -1) for side in (0, 1)))


def frequencies(inverse_frequencies: Tensor, dim: int) -> Tensor:
    """Radians per position of each pair, float64 [dim / 2]; 0 for those left unrotated."""
    return torch.nn.functional.pad(inverse_frequencies.double(), (0, dim // 2 - len(inverse_frequencies)))


@lru_cache(maxsize=32)
def load(path: str) -> Queries:
    """A file that this module wrote; relative paths start at the project's folder. Raises InputError."""
    with reading(path, "query statistics", "write them with python -m kvrepro.tools.calibrate") as file:
        read = json.loads(file.read_text())
        mean = torch.complex(torch.tensor(read["mean_real"]), torch.tensor(read["mean_imaginary"]))
        return Queries(read["model"], mean, torch.tensor(read["length"]), torch.tensor(read["sample"]))
