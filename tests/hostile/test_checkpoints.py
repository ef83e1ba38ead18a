"""Checkpoints that would run code, lie about their size or come to no end: one clear line, and no weights are read."""

import json
import os
import shutil
import struct
import time

import checkpoint
import pytest
from safetensors.torch import load_file, save_file

from kvrepro.errors import InputError
from kvrepro.experiment import models


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
    """model.safetensors with another header in front of the same bytes."""

    def damage(folder):
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        entries = json.loads(raw[8 : 8 + size])
        text = change(entries)
        text = text if isinstance(text, bytes) else json.dumps(entries).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    return damage


def tensor(**changes):
    return header(lambda entries: entries["model.norm.weight"].update(changes))


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def removed(name):
    return lambda folder: (folder / name).unlink()


def renamed(name, other):
    return lambda folder: (folder / name).rename(folder / other)


def halved(name):
    def damage(folder):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return damage


def linked(name, target):
    def damage(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return damage


def length(claimed):
    def damage(folder):
        file = folder / "model.safetensors"
        file.write_bytes(struct.pack("<Q", claimed) + file.read_bytes()[8:])

    return damage


def fifo(folder):
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def not_a_number(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def sparse(folder):
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(10**12)


LOOPS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "much memory": "{% set x = 'a' * 10**11 %}{{ x }}",
    "loops over long turns": "{% if messages[0].content|length > 100 %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}x",
    "calls itself": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}
DAMAGES = {
    "other heads than its weights": (config(num_key_value_heads=1), "cannot be loaded|weights lack"),
    "layers without a type": (config(num_hidden_layers=3), "cannot be built from its config.json .*layer_types"),
    "an unknown family": (config(model_type="nosuch"), "config.json"),
    "kernels of the hub": (config(attn_implementation="owner/kernel"), "remote code"),
    "deep JSON": (text("config.json", "[" * 10**5), "not JSON"),
    "offsets beyond the file": (tensor(data_offsets=[0, 10**12]), "cannot be loaded"),
    "another shape": (tensor(shape=[7]), "cannot be loaded"),
    "no JSON in the header": (header(lambda entries: b"{" * 100), "cannot be loaded"),
    "a header of exabytes": (length(2**63), "cannot be loaded"),
    "a pickle": (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n"), "cannot be loaded"),
    "a link to nothing": (linked("model.safetensors", "/no/such/file"), "no regular file"),
    "a link to zeros": (linked("tokenizer.json", "/dev/zero"), "no regular file"),
    "a pipe": (fifo, "no regular file"),
    "a tokenizer of terabytes": (sparse, "more than"),
    "a broken tokenizer": (text("tokenizer.json", "{}"), "cannot be loaded"),
    "a template by lot": (text("chat_template.jinja", "{{ range(10**5) | random }}"), "something else each time"),
    "a template without syntax": (text("chat_template.jinja", "{% for %}"), "four turns .Expected an expression"),
    **{name: (text("chat_template.jinja", template), "chat template .*: mend") for name, template in LOOPS.items()},
    "weights elsewhere": (config(transformers_weights="sub/model.safetensors"), "'sub/model.safetensors', which"),
    "an adapter": (text("adapter_config.json", '{"base_model_name_or_path": "/elsewhere"}'), "an adapter"),
    "weights of another name": (renamed("model.safetensors", "weights.safetensors"), "from 'model.safetensors', which"),
    "weights as a pickle": (renamed("model.safetensors", "pytorch_model.bin"), "no .safetensors weights"),
    "no weights": (removed("model.safetensors"), "no .safetensors"),
    "code beside the model": (config(auto_map={"AutoModelForCausalLM": "modeling_x.X"}), "remote code"),
    "no tokenizer": (removed("tokenizer.json"), "no tokenizer"),
    "no template": (removed("chat_template.jinja"), "no chat template"),
    "no configuration": (removed("config.json"), "config.json is missing"),
    "half of the weights": (halved("model.safetensors"), "cannot be loaded"),
    "half of the tokenizer": (halved("tokenizer.json"), "cannot be loaded"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_hostile_checkpoint_is_one_line(copy, name, monkeypatch):
    damage, message = DAMAGES[name]
    damage(copy)
    monkeypatch.setattr(models, "TALK_SECONDS", 1)
    if "cannot be loaded" not in message:  # by safetensors or transformers, which read no weights then
        monkeypatch.setattr(
            "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("weights were read")
        )
    began = time.monotonic()
    with pytest.raises(InputError, match=message) as error:
        models.load(str(copy))
    assert "\n" not in str(error.value)
    assert str(error.value).count("copy")
    assert time.monotonic() - began < 20


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
    with pytest.raises(InputError, match="its chat template fails") as error:
        models.load(str(copy))
    assert "\n" not in str(error.value)
    assert not (copy / "reached").exists()


def test_weights_that_are_no_numbers_are_one_line(copy):
    not_a_number(copy)
    with pytest.raises(InputError, match="weights of model.norm.weight are NaN or infinite"):
        models.load(str(copy))
