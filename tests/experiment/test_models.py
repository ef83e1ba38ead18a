import json
import shutil

import checkpoint
import httpx
import pytest
import torch
from huggingface_hub import HfApi
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


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", models.INDEX])
def test_hash_follows_every_file_that_a_tokenizer_or_the_weights_are_read_from(copy, name):
    before = models.checkpoint_hash(copy)
    (copy / name).write_text("{}")
    assert models.checkpoint_hash(copy) != before


def shard(copy, weight_map):
    """The same weights under another name, and an index in place of the single file."""
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    (copy / models.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_in_the_folder_are_the_same_model(folder, copy):
    weights = load_file(folder / "model.safetensors")
    shard(copy, dict.fromkeys(weights, "part.safetensors"))
    network = models.load(str(copy)).model
    assert torch.equal(network.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "file", ["part.bin", "../part.safetensors", "/tmp/part.safetensors", "sub/part.safetensors", "gone.bin", 3, []]
)
def test_an_index_that_names_other_files_is_refused_before_they_are_read(copy, file, monkeypatch):
    shard(copy, {"a": "part.safetensors", "b": file})
    for place in (copy / "part.bin", copy.parent / "part.safetensors", copy / "sub" / "part.safetensors"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"")
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("weights were read")
    )
    with pytest.raises(InputError, match="index.json names") as error:
        models.load(str(copy))
    assert repr(file) in str(error.value)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize("error", [ConnectionError, httpx.ConnectError])
def test_no_network_is_one_line(monkeypatch, error):
    def fails(*_, **__):
        raise error("no route to host")

    monkeypatch.setattr(HfApi, "list_repo_files", fails)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nonexistent")
    with pytest.raises(InputError, match="cannot reach the hub for 'owner/model'.*connect, or give a folder") as caught:
        models.load("owner/model")
    assert "\n" not in str(caught.value)


def test_a_hub_checkpoint_is_checked_before_its_weights_are_fetched(copy, monkeypatch):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    fetched = []

    def download(model, allow_patterns):
        fetched.append(tuple(allow_patterns))
        return str(copy)

    monkeypatch.setattr(HfApi, "list_repo_files", lambda *_: [p.name for p in copy.iterdir()])
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InputError, match="no .safetensors weights"):
        models.load("owner/model")
    assert fetched == [models.SMALL_FILES]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "cuda:99"}, "torch sees"),
        ({"dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_bad_devices_and_dtypes_are_named(folder, arguments, words):
    with pytest.raises(InputError, match=words):
        models.load(str(folder), **arguments)
