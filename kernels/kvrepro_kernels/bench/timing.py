"""Timing on the GPU: graph replays over rotating inputs, so that neither launches nor a warm cache are measured."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def quantiles(
    calls: Sequence[Callable[[], object]], replays: int = 40, graph: bool = True
) -> tuple[float, float, float]:
    """Microseconds of one call at the 20th, 50th and 80th percentile of `replays`, each running every call once.

    calls: the same work on inputs of its own each; give so many that together they exceed the second-level cache.
    graph: capture the calls as one CUDA graph; without it, the host's launch time shows where it is the slower.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in [*calls[:2], calls[0]]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    def run() -> None:
        for call in calls:
            call()

    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    warm = time.monotonic() + 0.1  # clocks settle; the first replays run up to a tenth slower
    while time.monotonic() < warm:
        run()
        torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1000 / len(calls) for start, end in events]
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], statistics.median(times), cuts[7]


def scratch_mib(call: Callable[[], object]) -> float:
    """Memory that a call takes beyond what it returns, MiB, by the allocator's peak."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    returned = torch.cuda.memory_allocated() - before
    del result
    return (peak - before - returned) / 2**20


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second of a large device-to-device copy."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (quantiles([lambda: target.copy_(source)], 20, graph=False)[1] * 1e-6)


def matmul_rate() -> float:
    """Floating-point operations per second of an 8192 x 8192 x 8192 bfloat16 matrix product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (quantiles([lambda: a @ b] * 4, 10)[1] * 1e-6)
