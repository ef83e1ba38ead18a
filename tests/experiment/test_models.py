import json
import shutil

import checkpoint
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from kvrepro.errors import InputError
from kvrepro.experiment import models, run
from studies import trial


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("hub") / "small-qwen2")


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_loads_a_folder(folder):
    loaded = models.load(str(folder))
    assert (loaded.name, loaded.device, loaded.dtype, loaded.context) == ("small-qwen2", "cpu", "float32", 2048)
    weights = load_file(folder / "model.safetensors")
    assert torch.equal(
        loaded.model.model.layers[0].self_attn.k_proj.weight, weights["model.layers.0.self_attn.k_proj.weight"]
    )
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize(("where", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16"), ("cuda:1", "bfloat16")])
def test_on_a_gpu_a_checkpoint_keeps_its_own_type(where, dtype, tmp_path, monkeypatch):
    folder = trial.checkpoint(tmp_path / "half", "two-layer", checkpoint.TEXTS, 500, dtype="bfloat16")
    monkeypatch.setattr(models, "device_of", lambda device: where)
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, device: self)  # there may be no such device
    for options in ({}, {"dtype": run.Settings().dtype}):
        assert models.load(str(folder), where, **options).dtype == dtype
    assert models.load(str(folder), where, dtype="float16").dtype == "float16"


def test_hash_follows_weights_and_tokenizer_but_not_the_place(folder, copy):
    before = models.checkpoint_hash(folder)
    assert models.checkpoint_hash(copy) == before
    (copy / "README.md").write_text("a card")
    assert models.checkpoint_hash(copy) == before
    edit(copy / "tokenizer_config.json", padding_side="left")
    other = models.checkpoint_hash(copy)
    assert other != before
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert models.checkpoint_hash(copy) not in (before, other)
    for name in ("vocab.json", "merges.txt", "tokenizer.model", models.INDEX):  # what libraries may read, too
        known = models.checkpoint_hash(copy)
        (copy / name).write_text("{}")
        assert models.checkpoint_hash(copy) != known


def test_shards_in_the_folder_are_the_same_model(folder, copy):
    weights = load_file(folder / "model.safetensors")
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    (copy / models.INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, "part.safetensors")})
    )
    network = models.load(str(copy)).model
    assert torch.equal(network.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


def test_stop_ids_are_eos_the_known_marks_and_the_generation_config(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 77]}))
    loaded = models.load(str(copy))
    vocabulary = loaded.tokenizer.get_vocab()
    marks = {vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]}
    assert models.stop_ids(loaded) == marks | {2, 77}


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder", "/no/such", "a b/c"])
def test_unknown_names_say_what_is_known(name):
    with pytest.raises(InputError, match="unknown model .* use small-gqa"):
        models.load(name)


def test_no_network_is_one_line_and_only_harmless_files_are_fetched(monkeypatch):
    fetched = []

    def fails(model, allow_patterns):
        fetched.extend(allow_patterns)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(InputError, match=r"^cannot fetch 'owner/model' from the hub \(no route to host\): check"):
        models.load("owner/model")
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in fetched)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "cuda:99"}, "unknown device 'cuda:99'; there are: auto, cpu"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_bad_devices_and_dtypes_are_named(folder, arguments, words):
    with pytest.raises(InputError, match=words):
        models.load(str(folder), **arguments)
