"""The chapters' functions that close over something, in a module that imports no more than it needs: another process
imports it, too."""

import importlib
import inspect
import pkgutil

from kvrepro import chapters
from kvrepro.experiment.fingerprint import of


def closed_over() -> dict[str, str]:
    """Hashes of all functions of the chapters that close over something."""
    keys = {}
    for info in pkgutil.walk_packages(chapters.__path__, "kvrepro.chapters."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == info.name and value.__closure__:
                keys[f"{info.name}.{name}"] = of(value)
    return keys
