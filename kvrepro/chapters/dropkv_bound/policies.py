"""DropKV with budgets that follow its scores, which its paper names as future work. Not published policies: ours.

Used by file, as any policy of a reader's own: `Condition(policy="kvrepro/chapters/dropkv_bound/policies.py:PER_HEAD",
...)`.
"""

from dataclasses import replace

from kvrepro.engine import allocate
from kvrepro.engine.catalogue import WINDOWS

PER_HEAD = replace(
    WINDOWS["dropkv"],
    title="DropKV, adaptive heads",
    parameters={**WINDOWS["dropkv"].parameters, "floor": 0.0},
    allocate=allocate.adaptive,
    budget="per head",
)
PER_LAYER = replace(WINDOWS["dropkv"], title="DropKV, adaptive layers", across=allocate.joint_layers, budget="joint")
