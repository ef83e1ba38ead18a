"""How well the two assumptions hold on the pools of a prompt's triples, many triples at once on the model's device."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound, cone
from kvrepro.chapters.dropkv_bound.settings import Sampling, pool_name
from kvrepro.chapters.dropkv_bound.triples import Layer

MU_AT = 0.1  # c at which the pool's mass outside the cone is reported


def evenly(count: int, take: int) -> list[int]:
    """`take` of the numbers 0 ... count - 1, or all, ascending and without a period: those whose multiples of the
    golden ratio have the least fractions. So triples in order are taken evenly from layers, heads and positions."""
    fraction = np.arange(count) * (math.sqrt(5) - 1) / 2 % 1
    return sorted(fraction.argsort(kind="stable")[:take].tolist())


class Triples:
    """The triples of one query position, gathered layer by layer during a pass and studied together after it."""

    def __init__(self, position: int, s: Sampling, of_triples: int):
        self.position, self.s, self.of_triples = position, s, of_triples  # of_triples: how many the prompt has
        # of each layer: its number, head numbers, p, a, values, and the KV head of each head
        self.held: list[tuple[int, list[int], Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, layer: Layer, heads: Sequence[int]) -> None:
        """Add some heads of the next layer. Its values stay in memory as a cache would hold them, not per head."""
        if heads:
            head_numbers = torch.tensor(list(heads), device=layer.value.device)
            p, a = (
                tensor[head_numbers, -1] for tensor in (layer.attention(self.position), layer.outputs(self.position))
            )
            self.held.append((layer.number, list(heads), p, a, layer.value, head_numbers // layer.group))

    def frame(self) -> pd.DataFrame:
        """A row for each triple and pool, as in `study.Study.assumptions`."""
        return pd.concat([self._pool(size, *batch) for size in self.s.pools for batch in self._batches(size)])

    def _batches(self, size: float | int) -> Iterator[tuple[list[dict[str, int]], Tensor, Tensor]]:
        """Batches of at most `cone.BYTES` of r: where the triples lie, p [triples, pool] and r [triples, pool, dim]."""
        where: list[dict[str, int]] = []
        parts: list[tuple[Tensor, Tensor]] = []
        for number, heads, p, a, value, shared in self.held:
            keys = bound.pool(p, size, self.s.window)
            home = self.held[0][2].device  # the layers of a large model lie on several
            r = (a[:, None] - value[shared[:, None], keys].double()).to(home)
            if parts and (len(where) + len(heads)) * r[0].nbytes > cone.BYTES:
                yield where, *(torch.cat(part) for part in zip(*parts, strict=True))
                where, parts = [], []
            where += [{"layer": number, "head": head, "position": self.position} for head in heads]
            parts.append((p.gather(1, keys).to(home), r))
        if parts:
            yield where, *(torch.cat(part) for part in zip(*parts, strict=True))

    def _pool(self, size: float | int, where: list[dict[str, int]], p: Tensor, r: Tensor) -> pd.DataFrame:
        cones, count = cone.cone(r, steps=self.s.steps), p.shape[1]
        evicted = bound.smallest(bound.single_cost(p, r), count // 2)
        proxy = bound.joint_cost(p, r, evicted)
        robust = bound.robust(p, r, cones, proxy, count // 2)
        at = torch.full_like(p[:, :1], MU_AT)
        mu = torch.stack([bound.outside(p, r, u, at)[:, 0] for u in bound.directions(p, r, cones)]).amin(0)
        columns = {"eps": p.amax(1), "c_low": cones.low, "c_high": cones.high}
        columns |= {"mu_share": mu / (p * r.norm(dim=-1)).sum(1), "guarantee": proxy / robust}
        rows = pd.DataFrame(where).assign(tokens=self.position + 1, of_triples=self.of_triples, pool=pool_name(size))
        return rows.assign(pool_size=count, **{name: column.cpu().numpy() for name, column in columns.items()})
