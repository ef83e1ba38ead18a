"""Common parts of the benchmarks: shapes, random inputs, and a table of times and their floors."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kvrepro_kernels.bench.timing import copy_bandwidth, matmul_rate, quantiles, scratch_mib

Row = dict[str, Any]
LLAMA = (32, 8, 128)  # query heads, KV heads, dims: Llama-3.1-8B and Mistral-7B
QWEN = (28, 4, 128)  # Qwen2.5-7B
BF16 = torch.bfloat16
RULE = ("indicator", "aggregate", "reduction")
TWO_PASSES = "perturbation, two passes, three kernels"
UNEQUAL = "unequal lengths, tail 64"


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in float64."""
    return tuple(x.double() for x in tensors)


def each(call: Callable[..., object], inputs: Iterable[Sequence[Any]], **settings: Any) -> list[Callable[[], object]]:
    """The call on every input set."""
    return [partial(call, *x, **settings) for x in inputs]


def sets_of(bytes_each: float) -> range:
    """A range over input sets, so many that together they exceed the second-level cache several times."""
    return range(max(1, min(24, round(6e8 / bytes_each))))


class Bench:
    """Collects rows of times. First it measures the two ceilings, copy bandwidth and matrix rate."""

    def __init__(self, date: str) -> None:
        self.bandwidth, self.rate = copy_bandwidth(), matmul_rate()
        self.rows: list[Row] = []
        self.common = dict(dtype="bfloat16", device=torch.cuda.get_device_name(), date=date)
        self.common |= dict(torch=torch.__version__, triton=version("triton"))

    def add(
        self,
        kernel: str,
        variant: str,
        shape: str,
        tokens: int,
        batch: int,
        calls: Sequence[Callable[[], object]],
        *,
        moved: float = 0.0,
        operations: float = 0.0,
        reference: float | None = None,
        graph: bool = True,
        replays: int = 40,
    ) -> float:
        """Time `calls` (one per input set), keep a row, return the median."""
        low, middle, high = quantiles(calls, replays, graph)
        floor = max(moved / self.bandwidth, operations / self.rate) * 1e6
        speedup = reference / middle if reference else None
        row: Row = dict(kernel=kernel, variant=variant, shape=shape, tokens=tokens, batch=batch, **self.common)
        row |= dict(p20_us=low, p50_us=middle, p80_us=high, floor_us=floor, fraction_of_floor=floor / middle)
        row |= dict(reference_p50_us=reference, speedup=speedup, scratch_mib=scratch_mib(calls[0]))
        self.rows.append(row)
        line = f"{kernel:18}{variant:40}{shape:10}{tokens:>7} x{batch:<3}{middle:>10.1f} us"
        print(f"{line} {floor / middle:5.2f} of floor" + (f" {speedup:6.2f}x" if speedup else ""), flush=True)
        return middle

    def find(self, kernel: str, variant: str, tokens: int, batch: int = 1, shape: str = "32/8/128") -> Row:
        wanted = (kernel, variant, tokens, batch, shape)
        return next(r for r in self.rows if (r["kernel"], r["variant"], r["tokens"], r["batch"], r["shape"]) == wanted)
