"""R-KV with defensive aggregation, which is not published: appendix J's plug-in on a scorer that has no such switch.

Used by file, as any policy of a reader's own: `Condition(policy="kvrepro/chapters/fragility/policies.py:R_KV", ...)`.
"""

from dataclasses import replace

from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Odd, Share
from kvrepro.engine.observe import Observation
from kvrepro.engine.score.keys import Alone, Cosine, likeness, past_attention
from kvrepro.engine.score.window import How, windowed
from kvrepro.engine.shapes import Scores


def r_kv(
    o: Observation, mix: Share = 0.1, kernel: Odd = 7, threshold: Cosine = 0.5, alone: Alone = "nothing"
) -> Scores:
    """Z_j = mix I_j - (1 - mix) S_j as `score.keys.r_kv` has it, I by defensive aggregation: each query's attention
    max-pooled over `kernel` tokens, the largest over the window, no less than the head's mean of it."""
    importance = windowed(o, past_attention, How("defensive", "max", kernel))
    return mix * importance - (1 - mix) * likeness(o, threshold, alone)


R_KV = replace(CATALOGUE["r_kv"], title="R-KV, defensive", score=r_kv, code="")
