"""Without a GPU, Triton's interpreter runs the kernels; it must be asked for before anything imports triton.

`pytest --device cuda tests/test_engine.py ...` runs the engine's tests on a GPU.
"""

import os
from collections.abc import Generator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", action="store_true", help="tests that count something write their tables")
    parser.addoption("--device", default="cpu", help="where the tests' models and tensors live")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_default_device(config.getoption("--device"))
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core, one thread each
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_policies() -> Generator[None, None, None]:
    """What a test adds to a reader's own policies is gone after it."""
    from kvrepro.engine.policy import OWN

    yield
    OWN.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Where ATEN_CPU_CAPABILITY forces another instruction set, torch itself refuses some half-precision products."""
    try:
        yield
    except RuntimeError as error:
        if "pack_vnni2" in str(error) and "ATEN_CPU_CAPABILITY" in os.environ:
            pytest.skip(f"torch refuses this half-precision product here: {str(error).splitlines()[0]}")
        raise
