"""Ada-KV with equal budgets for all heads, which the artifact calls native. Used by file, as a reader's own policy."""

from dataclasses import replace

from kvrepro.engine import shared
from kvrepro.engine.catalogue import SHARED

ADA_KV_NATIVE = replace(SHARED["ada_kv_faithful"], title="Ada-KV-native", allocate=shared.every_head)
