"""KV-cache eviction: one engine for every policy, every regime and every statistic of the papers under study.

`import kvrepro as kv` gives the names below. Each is loaded when it is first used, so that the import itself is fast.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from kvrepro.engine.condition import Condition as Condition
    from kvrepro.engine.condition import Generation as Generation
    from kvrepro.engine.generate import generate as generate
    from kvrepro.engine.regime import Chunked as Chunked
    from kvrepro.engine.regime import DecodeCap as DecodeCap
    from kvrepro.engine.regime import Offline as Offline
    from kvrepro.engine.regime import PerStep as PerStep
    from kvrepro.engine.regime import Prefill as Prefill
    from kvrepro.engine.regime import SharedCap as SharedCap
    from kvrepro.experiment.data import build_prompt as build_prompt
    from kvrepro.experiment.data import load_items as load_items
    from kvrepro.experiment.measure import token_f1 as token_f1
    from kvrepro.experiment.models import load as load
    from kvrepro.experiment.models import stop_ids as stop_ids
    from kvrepro.experiment.run import Answers as Answers
    from kvrepro.experiment.run import PerItem as PerItem
    from kvrepro.experiment.run import Settings as Settings
    from kvrepro.experiment.run import run as run
    from kvrepro.item import Item as Item

    __version__: str

_HOMES = {  # name: the module that defines it
    "Answers": "kvrepro.experiment.run",
    "Condition": "kvrepro.engine.condition",
    **dict.fromkeys(("Chunked", "DecodeCap", "Offline", "PerStep", "Prefill", "SharedCap"), "kvrepro.engine.regime"),
    "Generation": "kvrepro.engine.condition",
    "Item": "kvrepro.item",
    "PerItem": "kvrepro.experiment.run",
    "Settings": "kvrepro.experiment.run",
    "build_prompt": "kvrepro.experiment.data",
    "generate": "kvrepro.engine.generate",
    "load": "kvrepro.experiment.models",
    "load_items": "kvrepro.experiment.data",
    "run": "kvrepro.experiment.run",
    "stop_ids": "kvrepro.experiment.models",
    "token_f1": "kvrepro.experiment.measure",
}
__all__ = [*_HOMES, "policies"]  # noqa: PLE0604


def policies() -> "pd.DataFrame":
    """The catalogue as a table, one row per policy: what it keeps, its source, regimes, budget and readings."""
    import pandas as pd

    from kvrepro.engine import policy

    return pd.DataFrame(policy.table()).set_index("name")


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("kvrepro")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrepro' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
