"""What the engine reads off a model: the projection of an attention's output is the one that the model applies."""

import copy

import families
import pytest
import torch

import kvrepro as kv
from kvrepro.engine.facts import ModelFacts

CONDITIONS = [
    kv.Condition(name, 24, kv.Prefill(), switches=(("window", 8),)) for name in ("critical_kv", "defensive_kv")
]


def adapted(name: str, target: str):
    """A family's model with an adapter on one projection, in training mode, where it has dropout."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    given = {"r": 4, "init_lora_weights": False, "lora_dropout": 0.5, "fan_in_fan_out": name == "GPT-2"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[target], **given)
    return peft.get_peft_model(families.build(name), config).train()


@pytest.mark.parametrize(("name", "target"), [("Llama", "o_proj"), ("GPT-2", "c_proj")])
def test_an_adapter_counts_in_the_output_projection(name, target):
    """GPT-2's has a bias, which is no part of the weights."""
    network, plain = adapted(name, target), ModelFacts.of(families.build(name))
    merged = copy.deepcopy(network).merge_and_unload().eval()
    ours, theirs = ModelFacts.of(network), ModelFacts.of(merged)
    for layer, output in ours.outputs.items():
        torch.testing.assert_close(output, theirs.outputs[layer], rtol=1e-5, atol=1e-5)
        assert (output - plain.outputs[layer]).abs().max() > 0.01
    assert network.training
    with network.disable_adapter():
        torch.testing.assert_close(ModelFacts.of(network).outputs[0], plain.outputs[0], rtol=1e-5, atol=1e-5)
    texts = [families.prompt(60)]
    kept = [
        [g.kept_positions_hash for g in kv.generate(m, texts, CONDITIONS, max_new_tokens=1, stop_ids=())[0]]
        for m in (network, merged, families.build(name))
    ]
    assert kept[0] == kept[1]
    assert all(a != b for a, b in zip(kept[0], kept[2], strict=True))
