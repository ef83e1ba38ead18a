"""The meter against known allocations, and the prefill's peak against the memory that eviction must save."""

import pytest
import torch
from conditions import flat
from observations import observation
from tiny import model as tiny_model
from tiny import prompts as tiny_prompts

from kvrepro.chapters.reclamation.attention import Peak
from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Chunked, Condition
from kvrepro.engine.evict import call
from kvrepro.engine.policy import SUMS
from kvrepro.engine.score import learned

# ---- scorers


@pytest.mark.parametrize("name", [name for name, policy in CATALOGUE.items() if policy.frees and not policy.shared])
def test_no_scorer_s_memory_grows_with_the_square_of_the_tokens(name):
    """At twice the tokens the peak is twice as high, and far from a matrix of tokens x tokens."""
    policy, peaks = CATALOGUE[name], []
    parameters = policy.reading("as_described")
    files = [key for key, value in parameters.items() if "*" in str(value)]
    parameters |= {file: str(parameters[file]).replace("*", "tiny-gqa") for file in files}
    for tokens in (512, 1024):
        sums = {name: torch.rand(1, 6 if "per_norm" in name else 2, tokens) for name in SUMS}
        more = {"sums": sums, "inverse_frequencies": 10_000 ** -(torch.arange(0, 64, 2) / 64)}
        more["output"] = torch.randn(6, 64, 384)
        for file in files:  # which is known by the weights of its model
            more["output"][0, 0, :8] = learned.load(parameters[file])["sample"][1]
        o = observation(1, 2, 3, parameters.get("window", 0), tokens, 64, layer=1, layers=8, **more)
        with Peak() as peak:
            call(policy.score, o, parameters=parameters)
        peaks.append(peak.bytes)
    assert peaks[1] < 2.2 * peaks[0] + 2**10


# ---- prefill

LAYERS, TOKENS, SHARE = 8, 800, 0.1
LAYER_BYTES = 2 * 2 * 8 * TOKENS * 4  # keys and values of one layer: 2 KV heads of 8 numbers


def test_the_peak_of_a_prompt_falls_by_what_is_evicted_before_its_end():
    """Layer by layer, it falls by what the earlier layers lost; not where layers wait for each other. In chunks, it
    falls where each is evicted."""
    model, window = tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=1024), (("window", 8),)

    def peak(condition: Condition) -> int:
        with Peak() as measured:
            engine.generate(model, tiny_prompts(TOKENS), [condition], max_new_tokens=1, stop_ids=())
        return measured.bytes

    def cut(policy: str, regime: str = "prefill", **changes) -> int:
        return peak(flat(policy, SHARE, regime=regime, reading="as_described", **changes))

    full, in_chunks = peak(Condition()), peak(Condition(regime=Chunked(chunk=100)))
    lost = (1 - SHARE) * (LAYERS - 1) * LAYER_BYTES
    given = [("streaming_llm", {}), ("streaming_llm", {"regime": "offline"})]
    given += [(policy, {"switches": window}) for policy in ("snapkv", "ada_kv")]
    for policy, more in given:
        assert 0.9 * lost < full - cut(policy, **more) < 1.3 * lost, policy
    for policy in ("cake", "layer_defensive_kv"):
        assert 0.95 * full < cut(policy, switches=window) < full + 4 * LAYER_BYTES, policy  # one layer's scores
    assert in_chunks - cut("streaming_llm", "chunked", chunk=100, when="every_chunk") > lost
    assert cut("streaming_llm", "chunked", chunk=100) > 0.9 * in_chunks
