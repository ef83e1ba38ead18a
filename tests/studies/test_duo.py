"""Gates learned on a tiny model; statistics of its queries; the files that ship with the project."""

import json
from dataclasses import replace

import pytest
import tiny
import torch
from observations import observation
from transformers import AutoModelForCausalLM

from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.score import keys, learned
from kvrepro.errors import InputError
from kvrepro.experiment import models
from kvrepro.paths import ROOT
from studies import calibrate, duo


def batches(n=6, length=40):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 120, (n, 1, length), generator=g)
    answers = torch.zeros(1, length, dtype=torch.bool)
    answers[:, length // 2 :] = True
    return [(x, answers) for x in ids]


def test_gates_shrink_where_the_answers_do_not_need_them():
    """A window over everything: no gate matters, so all fall together; a narrow one: they part."""
    free, losses = duo.learn(tiny.model(), batches(), sinks=0, recent=40)
    assert max(losses) < 1e-9
    assert float(free.max()) < 0.9
    torch.testing.assert_close(free, free[:1, :1].expand(3, 2), atol=1e-4, rtol=0)
    needed, losses = duo.learn(tiny.model(), batches(), sinks=1, recent=4)
    assert losses[-1] > 1e-6
    assert float(needed.max() - needed.min()) > 0.02
    assert bool(((needed >= 0) & (needed <= 1)).all())


@pytest.mark.parametrize("kind", ["qwen2", "phi3"])
def test_query_statistics_are_those_of_the_projections(kind):
    """Against queries taken before the rotation, from the model's own projection."""
    model = tiny.model(kind)
    prompts = tiny.prompts(20, 33)
    taken = {}

    def note(layer):
        def hook(module, _, out):
            taken.setdefault(layer, []).append(out[0, :, :48].view(-1, 6, 8))

        return hook

    hooks = []
    for layer, block in enumerate(model.get_decoder().layers):
        projection = block.self_attn.q_proj if kind == "qwen2" else block.self_attn.qkv_proj
        hooks.append(projection.register_forward_hook(note(layer)))
    statistics = calibrate.calibrate(model, prompts)
    for hook in hooks:
        hook.remove()
    assert statistics["mean"].shape == (3, 6, 4)
    for layer in range(3):
        q = torch.cat(taken[layer]).double()
        pairs = torch.complex(q[..., :4], q[..., 4:])
        torch.testing.assert_close(statistics["mean"][layer].to(torch.complex128), pairs.mean(0), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(statistics["length"][layer].double(), pairs.abs().mean(0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", list(models.embedded()))
def test_each_embedded_model_finds_the_files_that_were_made_from_it(name):
    folder = models.embedded()[name]
    config, model = json.loads((folder / "config.json").read_text()), AutoModelForCausalLM.from_pretrained(folder)
    facts = ModelFacts.of(model)
    outputs = [facts.outputs[n] for n in facts.evictable]
    layers, kv_heads, q_heads = len(outputs), config["num_key_value_heads"], config["num_attention_heads"]
    half = config["hidden_size"] // q_heads // 2
    wanted = {"queries": (learned.QUERIES, "length", (layers, q_heads, half))}
    if facts.sliding:
        with pytest.raises(InputError, match="not made from this model"):
            learned.fitting(learned.GATES, outputs)
    else:
        wanted["gates"] = (learned.GATES, "gates", (layers, kv_heads))
    for kind, (pattern, numbers_of, shape) in wanted.items():
        file = ROOT / f"data/models/{name}-{kind}.json"
        found = learned.fitting(pattern, outputs)
        assert found is learned.load(str(file))
        assert found[numbers_of].shape == shape
        assert json.loads(file.read_text())["model"] == models.checkpoint_hash(folder)
    queries_file = str(ROOT / f"data/models/{name}-queries.json")
    numbers = learned.load(queries_file)
    mean = torch.complex(numbers["mean_real"], numbers["mean_imaginary"])
    assert mean.shape == (layers, q_heads, half)
    assert bool((numbers["length"] >= mean.abs() - 1e-3).all())  # a mean is no longer than the mean length
    o = observation(kv_heads=kv_heads, group=q_heads // kv_heads, dim=64, layer=2, layers=layers, output=outputs[2])
    o = replace(o, inverse_frequencies=10000.0 ** -(torch.arange(32) / 32))
    assert torch.isfinite(keys.tri_attention(o, queries_file)).all()
    with pytest.raises(InputError, match="not made from this model"):
        keys.tri_attention(replace(o, output=torch.zeros(q_heads, 64, 8)))
