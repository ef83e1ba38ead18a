"""Random Observations for the tests of scorers, allocation and selection."""

from dataclasses import replace

import torch

from kvrepro.engine.observe import Observation


def observation(
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    window: int = 4,
    tokens: int = 24,
    dim: int = 8,
    *,
    hidden: int = 12,
    dead: int = 0,
    gaps: int = 0,
    peak: float = 2.0,
    layer: int = 0,
    layers: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields,
) -> Observation:
    """One layer after a prompt. Up to `dead` dead slots in front of each head (finite rubbish in them), the newest
    `window` + 1 tokens always alive; up to `gaps` evicted positions in between, differing per head. `peak` scales the
    queries: 0 is uniform attention, 2 is peaked. Anything else goes to the Observation as it is."""
    g = torch.Generator(device="cpu").manual_seed(seed)
    heads, seen = kv_heads * group, tokens + gaps

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cpu")

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=g, device="cpu"))

    positions = torch.full((batch, kv_heads, tokens), -1)
    for row in positions.view(-1, tokens):
        alive = tokens - below(min(dead, tokens - window - 1) + 1)
        old = torch.randperm(seen - window - 1, generator=g, device="cpu")[: alive - window - 1].sort().values
        row[tokens - alive :] = torch.cat([old, torch.arange(seen - window - 1, seen, device="cpu")])
    there = {
        "keys": normal(batch, kv_heads, tokens, dim).to(dtype),
        "values": normal(batch, kv_heads, tokens, dim).to(dtype),
        "positions": positions,
        "queries": (peak * normal(batch, heads, window, dim)).to(dtype),
        "query_positions": torch.arange(seen - window, seen, device="cpu").expand(batch, -1),
        "seen": torch.full((batch,), seen),
        "output": normal(heads, dim, hidden).to(dtype),
        "seed": seed,
    }
    return Observation(layer=layer, layers=layers, scaling=dim**-0.5, **{**there, **fields})


def other_rubbish(o: Observation, fill: float = 7.0) -> Observation:
    """The same with other rubbish in the dead slots' keys and values: nothing may depend on them."""
    dead = ~o.alive[..., None]
    return replace(o, keys=o.keys.masked_fill(dead, fill), values=o.values.masked_fill(dead, fill))
