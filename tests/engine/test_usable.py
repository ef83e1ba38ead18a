"""A model is usable or refused in one line, whoever made it and in whatever mode it is."""

import copy

import families
import pytest
import torch
import transformers
from optimum.quanto import freeze, qint8, quantize
from tiny import model, prompts

import kvrepro as kv
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import usable
from kvrepro.errors import InputError

H2O = kv.Condition("h2o", 20, kv.Prefill())
SHAPE = {k: v for k, v in families.SHAPE.items() if k != "head_dim"}


def answered(network, condition=H2O):
    """The tokens by `kv.generate`, and by the model's own `generate` inside `kv.evicting`."""
    [ids] = prompts(60)
    [[answer]] = kv.generate(network, [ids], [condition], max_new_tokens=6, stop_ids=())
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    options |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 60).long()}
    with kv.evicting(network, condition):
        own = network.generate(**options)
    return answer.tokens, own[0, 60:].tolist()


def refused(network, message):
    [ids] = prompts(60)
    for use in (
        lambda: kv.generate(network, [ids], [kv.Condition()], max_new_tokens=2, stop_ids=()),
        lambda: kv.evicting(network, kv.Condition()).__enter__(),
        lambda: kv.compress(network, ids, kv.Condition("tova", 0.3, kv.Offline())),
    ):
        with pytest.raises(InputError, match=message) as error:
            use()
        assert "\n" not in str(error.value)


def test_dropout_of_a_model_in_training_changes_nothing_and_the_mode_comes_back():
    network = families.build("GPT-2", embd_pdrop=0.5, resid_pdrop=0.5)
    expected = answered(network)
    training = families.build("GPT-2", embd_pdrop=0.5, resid_pdrop=0.5).train()
    training.transformer.h[1].eval()  # frozen by its owner
    modes = [part.training for part in training.modules()]
    assert expected == (expected[0],) * 2 == answered(training) == answered(training)
    assert [part.training for part in training.modules()] == modes
    assert len(set(modes)) == 2


def test_quantised_weights_are_taken_where_they_can_be_read_and_else_refused():
    network, [ids] = model("llama"), prompts(60)
    quantize(network, weights=qint8)
    freeze(network)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones(1, 60)}
    expected = network.generate(input_ids=torch.tensor([ids]), **options)[0, 60:].tolist()
    assert answered(network, kv.Condition()) == (expected, expected)
    packed = torch.ao.quantization.quantize_dynamic(model("llama"), {torch.nn.Linear})
    refused(packed, "^cannot evict from a llama model: its weights are quantised; take a family of")


def with_virtual_tokens():
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    network = peft.get_peft_model(model("llama"), config)
    with network.disable_adapter():
        usable(network)  # without virtual tokens the engine drives it
    return network


def other_logits():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.DiffLlamaConfig(**SHAPE)).eval()


NOT_CAUSAL, OTHER = "give a causal language model", r"it gives other logits in an engine.* \(.*% differ\)"
REFUSED = {
    "what load gave": (lambda: kv.load("tiny-gqa"), f"^model of type Loaded: {NOT_CAUSAL}"),
    "no head": (lambda: model("llama").model, f"^model of type LlamaModel: {NOT_CAUSAL}"),
    "virtual tokens": (with_virtual_tokens, f"^cannot evict from a llama model: {OTHER}"),
    "another attention": (other_logits, f"^cannot evict from a diffllama model: {OTHER}"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_models_that_the_engine_cannot_drive_are_refused_each_time(make, message):
    network = make()
    for _ in range(2):
        refused(network, message)


# ---- the projection of an attention's output is the one that the model applies


@pytest.mark.parametrize(("name", "target"), [("Llama", "o_proj"), ("GPT-2", "c_proj")])
def test_an_adapter_counts_in_the_output_projection(name, target):
    """Also in training mode, where it has dropout. GPT-2's has a bias, which is no part of the weights."""
    peft, plain = pytest.importorskip("peft"), ModelFacts.of(families.build(name))
    torch.manual_seed(1)
    given = {"r": 4, "init_lora_weights": False, "lora_dropout": 0.5, "fan_in_fan_out": name == "GPT-2"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[target], **given)
    network = peft.get_peft_model(families.build(name), config).train()
    theirs = ModelFacts.of(copy.deepcopy(network).merge_and_unload().eval())
    for layer, output in ModelFacts.of(network).outputs.items():
        torch.testing.assert_close(output, theirs.outputs[layer], rtol=1e-5, atol=1e-5)
        assert (output - plain.outputs[layer]).abs().max() > 0.01
    assert network.training
    with network.disable_adapter():
        torch.testing.assert_close(ModelFacts.of(network).outputs[0], plain.outputs[0], rtol=1e-5, atol=1e-5)
