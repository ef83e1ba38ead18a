"""Where kernels run in tests, and in which precisions. Without triton, a module that imports this is skipped."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is packaged for Linux only")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
