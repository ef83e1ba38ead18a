"""Where kernels run in tests, and in which precisions. Without triton, a module that imports this is skipped."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is packaged for Linux only")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def ascending(counts: list[int], below: int, seed: int = 0) -> torch.Tensor:
    """Random ascending numbers [rows, most], counts[i] of them in row i, -1 behind."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((len(counts), max(counts)), -1)
    for row, count in zip(rows, counts, strict=True):
        row[:count] = torch.randperm(below, generator=generator)[:count].sort().values
    return rows.to(DEVICE)
