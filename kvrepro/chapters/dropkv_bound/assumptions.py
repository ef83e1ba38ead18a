"""How well the two assumptions hold on the pools of a prompt's triples, many triples at once on the model's device."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound, cone
from kvrepro.chapters.dropkv_bound.settings import Sampling, pool_name
from kvrepro.chapters.dropkv_bound.triples import Layer


def evenly(count: int, take: int) -> list[int]:
    """`take` of the numbers 0 ... count - 1, or all, ascending and without a period: those whose multiples of the
    golden ratio have the least fractions. So triples in order are taken evenly from layers, heads and positions."""
    fraction = np.arange(count) * (math.sqrt(5) - 1) / 2 % 1
    return sorted(fraction.argsort(kind="stable")[:take].tolist())


class Query(NamedTuple):
    """What the assumptions ask of one triple, on the model's device."""

    where: dict[str, int]
    p: Float[Tensor, " tokens"]
    a: Float[Tensor, " dim"]
    v: Float[Tensor, "all_tokens dim"]  # of the whole prompt, as a cache holds them


def queries(layer: Layer, position: int, heads: Iterable[int]) -> list[Query]:
    """The triples of some query heads of a layer at one position."""
    p, a = layer.attention(position)[:, -1].clone(), layer.outputs(position)[:, -1].clone()
    where = {"layer": layer.number, "position": position}
    return [Query(where | {"head": h}, p[h], a[h], layer.value[h // layer.group]) for h in heads]


def table(of_position: Sequence[Query], s: Sampling) -> pd.DataFrame:
    """A row for each pool and triple of one query position, as in `study.Study.assumptions`.

    At most `cone.BYTES` of residuals are computed at once.
    """
    frames, home = [], of_position[0].p.device  # the layers of a large model lie on several
    for size in s.pools:
        keys = [bound.pool(query.p, size, s.window) for query in of_position]
        together = max(1, cone.BYTES // (8 * len(keys[0]) * len(of_position[0].a)))
        for i in range(0, len(keys), together):
            batch = list(zip(of_position[i : i + together], keys[i : i + together], strict=True))
            p = torch.stack([query.p[pool].to(home) for query, pool in batch])
            r = torch.stack([(query.a - query.v[pool].double()).to(home) for query, pool in batch])
            of_batch = pd.DataFrame([query.where for query, _ in batch])
            frames.append(of_batch.assign(pool=pool_name(size), pool_size=p.shape[1], **_columns(p, r, s.steps)))
    return pd.concat(frames)


def _columns(p: Tensor, r: Tensor, steps: int) -> dict[str, np.ndarray]:
    """p [triples, pool] and r [triples, pool, dim] of pools."""
    cones = cone.cone(r, steps=steps)
    columns = {"eps": p.amax(1), "c_low": cones.low, "c_high": cones.high}
    return {name: column.cpu().numpy() for name, column in columns.items()}
