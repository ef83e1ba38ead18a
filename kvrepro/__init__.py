"""KV-cache eviction: one engine for every policy, every regime and every statistic of the papers under study.

`import kvrepro as kv` gives the names below. Each is loaded when it is first used, so that the import itself is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from kvrepro.engine.condition import Chunked, Condition, DecodeCap, Generation, Offline, PerStep, Prefill, SharedCap
    from kvrepro.engine.generate import generate
    from kvrepro.engine.hf import compress, evicting, load_prefix
    from kvrepro.experiment.data import build_prompt, load_items
    from kvrepro.experiment.measure import token_f1
    from kvrepro.experiment.models import load, stop_ids
    from kvrepro.experiment.run import Answers, PerItem, Settings, run
    from kvrepro.item import Item

    __version__: str

__all__ = [
    "Answers", "Chunked", "Condition", "DecodeCap", "Generation", "Item", "Offline", "PerItem", "PerStep", "Prefill",
    "Settings", "SharedCap", "build_prompt", "compress", "evicting", "generate", "load", "load_items", "load_prefix",
    "policies", "run", "stop_ids", "token_f1",
]  # fmt: skip
_NAMES = {  # by the module that defines them
    "engine.condition": "Chunked Condition DecodeCap Generation Offline PerStep Prefill SharedCap",
    "engine.generate": "generate",
    "engine.hf": "compress evicting load_prefix",
    "experiment.data": "build_prompt load_items",
    "experiment.measure": "token_f1",
    "experiment.models": "load stop_ids",
    "experiment.run": "Answers PerItem Settings run",
    "item": "Item",
}
_HOMES = {name: f"kvrepro.{module}" for module, names in _NAMES.items() for name in names.split()}


def policies() -> "pd.DataFrame":
    """The catalogue as a table, one row per policy: what it keeps, its source, regimes, budget and readings."""
    import pandas as pd

    from kvrepro.engine import catalogue

    return pd.DataFrame(catalogue.table()).set_index("name")


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # takes longer to import than all that a command needs to begin

        return version("kvrepro")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrepro' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
