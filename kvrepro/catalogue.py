"""The published policies, with their sources and defaults, in both readings where paper and public code differ."""

from kvrepro.policy import Policy
from kvrepro.score import keys, position

CATALOGUE: dict[str, Policy] = {
    # ---- position, keys, cumulative attention, heads
    "streaming_llm": Policy("StreamingLLM", "Xiao et al. 2023, section 3.2", position.streaming_llm, {"sinks": 4}),
    "k_norm": Policy("K-norm", "Devoto et al. 2024", keys.k_norm),
    # ---- windows: indicator x aggregator x pooling
}
