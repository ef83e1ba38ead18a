"""Policies put together from parts: any scorer with any split of the budget; scorers of a window also with any
aggregator and pooling.

They are named by file, as a reader's own: `Condition("kvrepro/chapters/synthesis/policies.py:ATTENTION_UNIFORM", 0.1,
Prefill(), switches=(("aggregate", "max"), ("pool", "average")))`. They protect nothing; the condition says what is
protected, so that guards can be crossed with everything else.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from kvrepro.engine import allocate
from kvrepro.engine.policy import Policy
from kvrepro.engine.score import cumulative, keys, window
from kvrepro.engine.shapes import Scores

OF_WINDOW: dict[str, window.Indicator] = {  # a number for each query of the window, to be aggregated and pooled
    "attention": window.attention,
    "attention x value": window.attention_norm,
    "perturbation": window.perturbation,
}
SCORERS: dict[str, Callable[..., Scores]] = {
    "position": keys.streaming_llm,
    "random": keys.random,
    "key norm": keys.k_norm,
    "key difference": keys.key_diff,
    "attention of all": cumulative.h2o,
    **{name: partial(window.windowed, importance=indicator) for name, indicator in OF_WINDOW.items()},
}
SPLITS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "per head": {"allocate": allocate.joint, "budget": "per head"},  # heads of a layer compete
    "joint": {"across": allocate.joint_layers, "budget": "joint"},  # all heads of all layers compete
    "one set": {"across": allocate.one_set},  # the same tokens for all heads and layers
}
NAMES = {pair: " ".join(pair).replace(" ", "_").upper() for pair in itertools.product(SCORERS, SPLITS)}

for (scorer, split), name in NAMES.items():
    parameters: dict[str, object] = {"window": 16}
    if scorer in OF_WINDOW:
        parameters |= {"aggregate": "mean", "pool": "none", "kernel": 5, "over": "all"}
    needs = ("mass",) if scorer == "attention of all" else ()
    title = f"Composed: {scorer}, {split}"
    globals()[name] = Policy(title, "this chapter", SCORERS[scorer], parameters, needs=needs, **SPLITS[split])
