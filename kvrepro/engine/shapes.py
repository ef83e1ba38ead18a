"""Names for tensor shapes, and for the models of transformers.

Axes: `batch` rows that decode together, `heads` query heads, `kv_heads` key/value heads (1 where one decision serves
all), `group` query heads of one KV head, `window` the last queries, `tokens` cache slots (true positions live in
`Observation.positions`), `dim` the width of a head.
"""

from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel as PreTrainedModel  # for other modules
else:
    PreTrainedModel = Any  # its import takes seconds

Query = Float[Tensor, "batch heads queries dim"]
KeyValue = Float[Tensor, "batch kv_heads tokens dim"]
Scores = Float[Tensor, "batch kv_heads tokens"]  # large = keep, always
Mask = Bool[Tensor, "batch kv_heads tokens"]
Positions = Int[Tensor, "batch kv_heads tokens"]
WindowPositions = Int[Tensor, "batch window"]
Probabilities = Float[Tensor, "batch kv_heads group window tokens"]
Counts = Int[Tensor, "batch kv_heads"]
Parts = Int[Tensor, "batch kv_heads spans"]  # tokens of a head's budget per prompt span
TokenFloats = Float[Tensor, "batch tokens"]
TokenInts = Int[Tensor, "batch tokens"]
TokenMask = Bool[Tensor, "batch tokens"]
RowInts = Int[Tensor, " batch"]
RowFloats = Float[Tensor, " batch"]
