"""Without a GPU, Triton's interpreter runs the kernels; it must be asked for before anything imports triton.

`pytest --device cuda tests/test_engine.py ...` runs the engine's tests on a GPU.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tests' models and tensors live")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_default_device(config.getoption("--device"))
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core, one thread each
        torch.set_num_threads(1)
