"""Checkpoints that would run code, read foreign files or lie about their weights: one clear line."""

import json
import shutil
import struct

import checkpoint
import pytest
from safetensors.torch import load_file, save_file

from kvrepro.errors import InputError
from kvrepro.experiment import models
from kvrepro.experiment.data import build_prompt
from kvrepro.item import Item

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("hub") / "whole")


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def config(**changes):
    def damage(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def header(change):
    """The weights with another header in front of the same bytes."""

    def damage(folder):
        raw = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        entries = json.loads(raw[8 : 8 + size])
        entries["model.norm.weight"].update(change)
        text = json.dumps(entries).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    return damage


def index(file):
    """The weights under another name, and an index in place of the single file that names `file`, too."""

    def damage(folder):
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        for place in (folder / "part.bin", folder.parent / "part.safetensors", folder / "sub" / "part.safetensors"):
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(b"")
        (folder / models.INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": file}}))

    return damage


def changed(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def removed(name):
    return lambda folder: (folder / name).unlink()


def one_tensor_less(folder):
    weights = load_file(folder / WEIGHTS)
    weights.pop("model.norm.weight")
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def half(raw):
    return raw[: len(raw) // 2]


REFUSED = {  # before weights are read
    "code beside the model": (config(auto_map={"AutoModelForCausalLM": "modeling_x.X"}), "remote code"),
    "kernels of the hub": (config(attn_implementation="owner/kernel"), "remote code"),
    "an adapter": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "an adapter"),
    "weights elsewhere": (config(transformers_weights="sub/model.safetensors"), "weights from 'sub/model.safetensors'"),
    **{
        f"an index of {file}": (index(file), rf"weights from {file!r}: keep")
        for file in ("part.bin", "../part.safetensors", "/tmp/part.safetensors", "sub/part.safetensors", 3)
    },
    "no tokenizer": (
        removed("tokenizer.json"),
        r"there is no tokenizer \(tokenizer.json, .*: give the folder of a whole",
    ),
    "an unreadable configuration": (changed("config.json", half), "cannot be loaded"),
}
FAILS = {  # with what safetensors, tokenizers or transformers say
    "an unknown family": config(model_type="nosuch"),
    "other heads than its weights": config(num_key_value_heads=1),
    "offsets beyond the file": header({"data_offsets": [0, 10**12]}),
    "another shape": header({"shape": [7]}),
    "a header of exabytes": changed(WEIGHTS, lambda raw: struct.pack("<Q", 2**63) + raw[8:]),
    "a pickle": changed(WEIGHTS, lambda raw: b"\x80\x04cos\nsystem\n"),
    "weights as a pickle": lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
    "half of the weights": changed(WEIGHTS, half),
    "a tensor less": one_tensor_less,
    "no configuration": removed("config.json"),
    "half of the tokenizer": changed("tokenizer.json", half),
    "a broken tokenizer": changed("tokenizer.json", lambda raw: b"{}"),
}


@pytest.mark.parametrize("name", [*REFUSED, *FAILS])
def test_a_hostile_checkpoint_is_one_line(copy, name, monkeypatch):
    damage, message = REFUSED.get(name) or (FAILS[name], "^copy in .*copy cannot be loaded: ")
    damage(copy)
    if name in REFUSED:
        monkeypatch.setattr(
            "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("weights were read")
        )
    with pytest.raises(InputError, match=message) as error:
        models.load(str(copy))
    assert "\n" not in str(error.value)


OUT = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a shell": "{{ cycler.__init__.__globals__.os.system('touch reached') }}",
    "a file": "{% include '/etc/passwd' %}",
    "the messages": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", OUT)
def test_a_template_that_reaches_out_reaches_nothing(copy, name, monkeypatch):
    """Jinja's sandbox refuses it."""
    (copy / "chat_template.jinja").write_text(OUT[name])
    monkeypatch.chdir(copy)
    loaded = models.load(str(copy))
    with pytest.raises(InputError, match="refuses the messages") as error:
        build_prompt(Item("x", "t", ({"role": "user", "content": "red"},), ""), loaded.tokenizer, 500)
    assert "\n" not in str(error.value)
    assert not (copy / "reached").exists()
