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
from kvrepro.engine.policy import SUMS, call

# ---- scorers


@pytest.mark.parametrize("name", [name for name, policy in CATALOGUE.items() if policy.frees and not policy.shared])
def test_no_scorer_s_memory_grows_with_the_square_of_the_tokens(name):
    """At twice the tokens the peak is twice as high, and far from a matrix of tokens x tokens."""
    policy, peaks = CATALOGUE[name], []
    parameters = policy.reading("as_described")
    parameters |= {file: str(parameters[file]).replace("*", "tiny-gqa") for file in policy.files}
    for tokens in (512, 1024):
        sums = {name: torch.rand(1, 6 if "per_norm" in name else 2, tokens) for name in SUMS}
        more = {"sums": sums, "inverse_frequencies": 10_000 ** -(torch.arange(0, 64, 2) / 64)}
        more["output"] = None if policy.files else torch.randn(6, 64, 384)  # by which their files' model is known
        o = observation(1, 2, 3, parameters.get("window", 0), tokens, 64, layer=1, layers=8, **more)
        with Peak() as peak:
            call(policy.score, o, parameters=parameters)
        peaks.append(peak.bytes)
    assert peaks[1] < 2.2 * peaks[0] + 2**10


# ---- prefill

LAYERS, TOKENS, SHARE = 8, 800, 0.1
LAYER_BYTES = 2 * 2 * 8 * TOKENS * 4  # keys and values of one layer: 2 KV heads of 8 numbers


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    """Measured peak of a prompt's pass and one token, by condition."""
    model = tiny_model("llama", num_hidden_layers=LAYERS, max_position_embeddings=1024)
    window = (("window", 8),)

    def cut(policy: str, regime: str = "prefill", **changes) -> Condition:
        return flat(policy, SHARE, regime=regime, reading="as_described", **changes)

    conditions = {
        "full": Condition(),
        "position": cut("streaming_llm"),
        "window": cut("snapkv", switches=window),
        "heads": cut("ada_kv", switches=window),
        "offline": cut("streaming_llm", "offline"),
        "layers": cut("cake", switches=window),
        "joint": cut("layer_defensive_kv", switches=window),
        "full in chunks": Condition(regime=Chunked(chunk=100)),
        "late chunks": cut("streaming_llm", "chunked", chunk=100),
        "chunks": cut("streaming_llm", "chunked", chunk=100, when="every_chunk"),
    }
    measured = {}
    for name, condition in conditions.items():
        with Peak() as peak:
            engine.generate(model, tiny_prompts(TOKENS), [condition], max_new_tokens=1, stop_ids=())
        measured[name] = peak.bytes
    return measured


@pytest.mark.parametrize("policy", ["position", "window", "heads", "offline"])
def test_layer_by_layer_the_peak_falls_by_what_the_earlier_layers_lost(peaks, policy):
    lost = (1 - SHARE) * (LAYERS - 1) * LAYER_BYTES
    assert 0.9 * lost < peaks["full"] - peaks[policy] < 1.3 * lost


@pytest.mark.parametrize("policy", ["layers", "joint"])
def test_layers_that_wait_for_each_other_do_not_save_the_peak(peaks, policy):
    assert 0.95 * peaks["full"] < peaks[policy] < peaks["full"] + 4 * LAYER_BYTES  # one layer's scores


def test_chunks_save_the_peak_where_each_is_evicted(peaks):
    assert peaks["full in chunks"] - peaks["chunks"] > (1 - SHARE) * (LAYERS - 1) * LAYER_BYTES
    assert peaks["late chunks"] > 0.9 * peaks["full in chunks"]
