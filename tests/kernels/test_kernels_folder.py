"""transformers imports any module named `kernels` that it finds, so the folder of that name must not look like one."""

import importlib.util

from kvrepro.paths import ROOT


def test_the_folder_of_kernels_is_no_package(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None  # a bare folder at most
