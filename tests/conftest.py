"""Without a GPU, Triton's interpreter runs the kernels; it must be asked for before anything imports triton.

`pytest --device cuda tests/engine` runs them on a GPU.
"""

import importlib.util
import os
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("KVREPRO_WORKERS", "1")  # tests of worker processes ask for more

CLONE_ONLY = ("tools/test_build", "studies", "tools/test_own_code")
IN_CLONE = (Path(__file__).parents[1] / "book").is_dir()  # the source archive has neither pages nor workflows
collect_ignore = [] if IN_CLONE else [name if name == "studies" else f"{name}.py" for name in CLONE_ONLY]


def pytest_report_header() -> str:
    return "" if IN_CLONE else f"not in a clone, so left out: {', '.join(CLONE_ONLY)}"


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    import quick_interpreter

    quick_interpreter.patch()


if "MUTANT_UNDER_TEST" in os.environ:  # mutmut: one counterexample is enough, the simplest takes a minute to find
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutants")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="properties alone, with over a million cases; hours")
    parser.addoption("--device", default="cpu", help="where the tests' models and tensors live")


LONG = {f"test_{name}.py" for name in ("pool", "notebook", "package", "family_claims", "trial", "golden")}
NIGHTLY = 300  # times as many cases of each property as in `make test`: more than a million over all


def cases(item: pytest.Item) -> int:
    """Cases that hypothesis tries in a test; 0 for a test without hypothesis."""
    own_settings = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
    return own_settings.max_examples if own_settings else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, so that no process waits for one at the end. With `--nightly`, the properties alone, each with
    many more cases; how many these are is printed."""
    items.sort(key=lambda item: item.path.name not in LONG)
    if not config.getoption("--nightly"):
        return
    items[:] = [item for item in items if cases(item)]
    for function in {item.obj.__wrapped__ if hasattr(item.obj, "__wrapped__") else item.obj for item in items}:
        own_settings = function._hypothesis_internal_use_settings
        more = settings(own_settings, max_examples=NIGHTLY * own_settings.max_examples, deadline=None)
        function._hypothesis_internal_use_settings = more
    print(f"nightly: {len(items)} properties, {sum(map(cases, items)):,} cases")


def pytest_configure(config: pytest.Config) -> None:
    if (device := config.getoption("--device")) != "cpu":  # a default device costs Python time in every call of torch
        torch.set_default_device(device)
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core, one thread each
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _draws(request: pytest.FixtureRequest) -> None:
    """Random tensors are those of the test's name: what passed passes again. With `--nightly` they are new."""
    torch.seed() if request.config.getoption("--nightly") else torch.manual_seed(
        zlib.crc32(request.node.nodeid.encode())
    )


@pytest.fixture(autouse=True)
def _own_policies() -> Generator[None, None, None]:
    """What a test adds to a reader's own policies is gone after it."""
    from kvrepro.engine.policy import OWN

    yield
    OWN.clear()


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The embedded model, where a module has none of its own."""
    from kvrepro.experiment import models

    return models.load()
