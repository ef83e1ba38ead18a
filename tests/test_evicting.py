"""Hugging Face's `generate` inside `evicting`, and prefixes in files: the engine's tokens, and nothing left behind."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from tiny import architecture, model, prompts
from transformers.cache_utils import DynamicCache

import kvrepro as kv
from kvrepro.engine.condition import Prompt
from kvrepro.engine.generate import usable
from kvrepro.engine.policy import Policy, own
from kvrepro.errors import InputError

NEW = 12
CONDITIONS = {
    "full": kv.Condition(),
    "prefill": kv.Condition("tova", 0.3, kv.Prefill()),
    "pages": kv.Condition("quest_pages", 16, kv.Prefill(), switches=(("page", 4),)),
    "offline": kv.Condition("tova", 0.3, kv.Offline()),
    "chunked": kv.Condition("tova", 0.3, kv.Chunked(16, "every_chunk")),
    "decode cap": kv.Condition("h2o", 24, kv.DecodeCap(4)),
    "per step": kv.Condition("tova", 24, kv.PerStep()),
    "shared cap": kv.Condition("lru", 24, kv.SharedCap(), prefix=0.1, suffix=0.1),
    "shared cap, later": kv.Condition("ada_kv_faithful", 24, kv.SharedCap(4)),  # its first reduction waits for step 8
}


def padded(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """As a tokenizer with padding_side="left" gives them."""
    longest = max(map(len, texts))
    rows = [[0] * (longest - len(text)) + text for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def written(network, texts, **options) -> list[list[int]]:
    """What `network.generate` writes after the prompts."""
    given = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False} | options
    tokens = network.generate(**padded(texts), **given)
    return tokens[:, max(map(len, texts)) :].tolist()


def refuses(network, condition, words) -> None:
    """The block is not entered."""
    with pytest.raises(InputError, match=words):
        kv.evicting(network, condition).__enter__()


def engine(network, texts, condition, **options) -> list[list[int]]:
    answers = kv.generate(network, texts, [condition], max_new_tokens=NEW, stop_ids=(), **options)
    return [answer.tokens for [answer] in answers]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("regime", CONDITIONS)
def test_greedy_tokens_are_the_engines(name, regime):
    if regime.startswith("shared cap") and name != "llama":
        pytest.skip("one set of tokens for all layers wants layers that are alike")
    network, condition = architecture(name), CONDITIONS[regime]
    budget = condition.budget
    if name == "mistral" and isinstance(budget, int) and regime != "pages":
        condition = replace(condition, budget=16)
    texts = prompts(70, 41, 70)
    expected = engine(network, texts, condition)
    assert len({tuple(tokens) for tokens in expected}) == 3
    with kv.evicting(network, condition):
        assert written(network, texts) == expected


def test_a_question_that_spans_mark_is_read_through_what_is_left():
    network, texts = architecture("llama"), prompts(70, 50)
    condition = kv.Condition("tova", 0.3, kv.Prefill(until="question"))
    marked = [Prompt(ids, {"question": list(range(len(ids) - 9, len(ids)))}) for ids in texts]
    with kv.evicting(network, condition, spans=lambda ids: {"question": range(len(ids) - 9, len(ids))}):
        assert written(network, texts) == engine(network, marked, condition)


def test_the_cache_that_comes_back_is_small():
    network, texts = architecture("llama"), prompts(70, 41)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "return_dict_in_generate": True}
    full = network.generate(**padded(texts), **options).past_key_values
    whole = sum(t.numel() * t.element_size() for layer in full.layers for t in (layer.keys, layer.values))
    with kv.evicting(network, CONDITIONS["decode cap"]):
        cache = network.generate(**padded(texts), **options).past_key_values
    assert cache.get_seq_length() == 70 + NEW - 1  # the last token was written, not read
    assert cache.kept.shape == (3, 2, 2)
    assert 24 <= int(cache.kept.min()) <= int(cache.kept.max()) < 24 + 4
    assert cache.bytes == sum(layer.bytes for layer in cache.rows.cache.ragged.values())
    assert cache.bytes < 0.4 * whole
    assert cache.rows.evictions.tolist() == [1 + 2, 1 + 2]  # the prompt's eviction, and those after 4 and 8 tokens


def test_sampling_draws_as_outside_where_nothing_leaves():
    network, texts = architecture("llama"), prompts(70, 41)
    options = {"do_sample": True, "top_k": 20, "temperature": 0.8, "num_return_sequences": 3}
    torch.manual_seed(3)
    outside = written(network, texts, **options)
    assert len({tuple(tokens) for tokens in outside}) == 6
    with kv.evicting(network, kv.Condition()):
        torch.manual_seed(3)
        assert written(network, texts, **options) == outside
    with kv.evicting(network, CONDITIONS["shared cap"]):
        torch.manual_seed(3)
        assert written(network, texts, **options) != outside


def test_tokens_are_streamed_and_stopped_as_they_come():
    network, [text], heard = architecture("llama"), prompts(70), Mock()
    stop = {"stopping_criteria": [lambda ids, scores, **rest: torch.tensor([ids.shape[1] >= 70 + 5])]}
    with kv.evicting(network, CONDITIONS["per step"]):
        [tokens] = written(network, [text], streamer=heard, **stop)
    heard.end.assert_called_once()
    assert [t for call in heard.put.call_args_list for t in call.args[0].flatten().tolist()] == text + tokens
    assert tokens == engine(network, [text], CONDITIONS["per step"])[0][:5]


def state(network) -> tuple[set[str], str]:
    """What a block must leave as it was."""
    return set(vars(network)), network.config._attn_implementation


def test_blocks_nest_and_every_call_begins_anew():
    network, texts = architecture("llama"), prompts(70, 41)
    before, outside = state(network), written(network, texts)
    outer, inner = CONDITIONS["prefill"], CONDITIONS["shared cap"]
    with kv.evicting(network, outer):
        first = written(network, texts)
        with kv.evicting(network, inner):
            assert written(network, texts) == engine(network, texts, inner) != first
        assert written(network, texts) == first == engine(network, texts, outer)
        logits = network(torch.tensor(texts[:1])).logits  # left alone
    assert written(network, texts) == outside != first
    torch.testing.assert_close(logits, network(torch.tensor(texts[:1])).logits)
    assert state(network) == before


def test_threads_take_turns_and_leave_the_model_as_it_was():
    network, texts, condition = architecture("llama"), prompts(70, 61, 52, 43), CONDITIONS["decode cap"]
    expected = [engine(network, [text], condition) for text in texts]
    before = state(network)
    with ThreadPoolExecutor(4) as pool, kv.evicting(network, condition):
        assert list(pool.map(lambda text: written(network, [text]), texts)) == expected
        pool.submit(refuses, network, condition, "evicting.* of another thread").result()
        assert written(network, texts[:1]) == expected[0]
    assert state(network) == before


def test_a_copy_made_inside_the_block_does_not_write():
    network = model("llama")
    with kv.evicting(network, CONDITIONS["decode cap"]), pytest.raises(InputError, match="copy it outside"):
        written(copy.deepcopy(network), prompts(70))


@pytest.fixture
def adapted():
    """The tiny model in PEFT with a random adapter."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model("llama"), config).eval()


def test_a_model_with_adapters_evicts_as_its_merged_one(adapted):
    texts, condition = prompts(70, 41), CONDITIONS["decode cap"]
    merged = copy.deepcopy(adapted).merge_and_unload().eval()
    expected, outside = engine(merged, texts, condition), written(adapted, texts)
    assert engine(adapted, texts, condition) == expected != engine(model("llama"), texts, condition)
    with kv.evicting(adapted, condition) as same:
        assert same is adapted
        assert written(adapted, texts) == written(adapted.get_base_model(), texts) == expected
    assert written(adapted, texts) == outside


def test_a_prefix_belongs_to_the_adapters_that_read_it(adapted, tmp_path):
    texts, inner = requests(), adapted.get_base_model()
    path = kv.compress(adapted, texts[-1], CONDITIONS["offline"]).save(tmp_path / "p")
    prefix = kv.load_prefix(path, inner)
    with kv.evicting(adapted, prefix):
        assert written(inner, texts[:1]) == written(adapted, texts[:1])
    with adapted.disable_adapter():
        refuses(adapted, prefix, "adapters or dtype differ.: compress it anew$")
    inner.model.layers[1].self_attn.q_proj.scaling["default"] *= 2
    refuses(adapted, prefix, "adapters or dtype differ.: compress it anew$")


def test_what_a_policy_raises_comes_out_and_leaves_nothing():
    def fails(o):
        raise OSError("full")

    network, texts = model("llama"), prompts(70)
    before = state(network)
    with kv.evicting(network, kv.Condition(own("mine", Policy("Mine", "tests", fails)), 0.5, kv.Prefill())):
        with pytest.raises(OSError, match="full"):
            written(network, texts)
        assert network.config._attn_implementation == "eager"
    assert state(network) == before


REFUSED = {
    "beam_search inside": {"num_beams": 2},
    "beam_sample inside": {"num_beams": 2, "do_sample": True},
    "assisted_generation inside": {"prompt_lookup_num_tokens": 2},
    "past_key_values inside": {"past_key_values": DynamicCache()},
    "cache_implementation inside": {"cache_implementation": "static"},
    "use_cache=False inside": {"use_cache": False},
    "prefill_chunk_size inside": {"prefill_chunk_size": 16},
    "guidance_scale inside": {"guidance_scale": 2.0},
    "position_ids inside": {"position_ids": torch.arange(5, 75)[None]},
    "custom_generate inside": {"custom_generate": "owner/name"},
    "without a regime": {"condition": kv.Condition("tova", 9)},
    "the prompt has no span 'question'": {"condition": kv.Condition("tova", 0.3, kv.Prefill(until="question"))},
    "512 positions": {"max_new_tokens": 500},
    "attention_mask of 69 tokens for 70 token ids": {"attention_mask": torch.tensor([[0] * 5 + [1] * 64])},
    "pad on the left": {"attention_mask": torch.tensor([[1] * 69 + [0]])},
    "inputs_embeds inside": {"inputs_embeds": torch.zeros(1, 70, 48), "input_ids": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line_before_the_model_runs(message, monkeypatch):
    network, given = usable(architecture("llama")), {"max_new_tokens": NEW, **padded(prompts(70)), **REFUSED[message]}
    monkeypatch.setattr(network.model, "forward", lambda *_, **__: pytest.fail("computed"))
    condition = given.pop("condition", CONDITIONS["prefill"])
    with kv.evicting(network, condition), pytest.raises(InputError, match=message) as error:
        network.generate(**given)
    assert "\n" not in str(error.value)


# ---- prefixes


OFFLINE = {
    "prefill": kv.Condition("tova", 0.3, kv.Offline()),
    "ragged": kv.Condition("ada_kv", 0.5, kv.Offline(), switches=(("window", 4), ("recent", 4))),
    "guarded": kv.Condition("k_norm", 30, kv.Offline(), prefix=0.1),
    "full": kv.Condition("full", None, kv.Offline()),
    "repeats": kv.Condition("kv_zip", 0.4, kv.Offline()),
}
REPEAT = {"repeat": (7, 8, 9)}


def requests(end: int = 50) -> list[list[int]]:
    """Prompts that begin with one prefix of `end` tokens; the last one is it."""
    first, *others = prompts(end, 9, 14)
    return [first + other for other in others] + [first]


@pytest.mark.parametrize(
    ("kind", "name"), [*(("llama", name) for name in OFFLINE), ("qwen3_5", "prefill"), ("qwen3_next", "prefill")]
)
def test_a_prefix_from_a_file_gives_the_tokens_of_the_regime(kind, name, tmp_path):
    """With the states of layers that are recurrent in two architectures."""
    network, texts, condition = architecture(kind), requests(), OFFLINE[name]
    marked = [Prompt(ids, {"rest": list(range(50, len(ids)))}) for ids in texts[:-1]]
    regime = replace(condition, regime=kv.Offline(until="rest"))
    expected = engine(network, marked, regime, **REPEAT) + engine(network, texts[-1:], condition, **REPEAT)
    prefix = kv.compress(network, texts[-1], condition, **REPEAT)
    loaded = kv.load_prefix(prefix.save(tmp_path / "manual.safetensors"), network)
    assert (loaded.condition, loaded.ids, loaded.bytes) == (condition, texts[-1], prefix.bytes)
    for compressed in (prefix, loaded):
        with kv.evicting(network, compressed):
            assert [written(network, [text])[0] for text in texts] == expected
            if kind == "llama":
                assert written(network, texts) == expected  # the same again, in one padded batch
                continue
            with pytest.raises(InputError, match="unequal length"):
                written(network, texts)


def test_a_prefix_serves_its_model_and_its_tokens_alone(tmp_path):
    network, texts = model("llama"), requests()
    prefix = kv.compress(network, texts[-1], OFFLINE["prefill"])
    path = prefix.save(tmp_path / "p.safetensors")
    with torch.no_grad():
        network.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    for other in (network, model("llama", torch.bfloat16), architecture("qwen3")):
        refuses(other, prefix, "compress it anew")
        with pytest.raises(InputError, match="compress it anew"):
            kv.load_prefix(path, other)
    same = model("llama")
    with kv.evicting(same, kv.load_prefix(path, same)):
        for other in (texts[0][:3] + [5 + texts[0][3] % 9] + texts[0][4:], texts[0][:20]):
            with pytest.raises(InputError, match="does not begin with the prefix's 50 tokens: .*, before the blank"):
                written(same, [other])


def test_a_damaged_prefix_is_refused_and_so_is_a_place_where_none_can_be(tmp_path):
    """One bit is another, of its tensors or its tokens; the end is lost, or there is no file."""
    network, path = architecture("llama"), tmp_path / "p"
    prefix = kv.compress(network, requests()[-1], OFFLINE["prefill"])
    for file in (tmp_path / "nowhere" / "p", tmp_path):
        with pytest.raises(InputError, match=f"^{file} cannot be written .*: give a file in a folder that is there"):
            prefix.save(file)
    prefix.save(path)
    whole, tokens = path.read_bytes(), b'ids\\": ['
    for place in (-3, whole.index(tokens) + len(tokens)):
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(InputError, match="p is no whole file of Prefix.save, or another model read the prefix"):
            kv.load_prefix(path, network)
    path.write_bytes(whole[:-9])
    for file in (path, tmp_path / "nowhere", tmp_path):
        with pytest.raises(InputError, match=f"^{file} cannot be read .*: give a whole file of Prefix.save"):
            kv.load_prefix(file, network)


def test_files_and_conditions_that_make_no_prefix_are_refused(tmp_path):
    network, [*_, text] = architecture("llama"), requests()
    network.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no whole file of Prefix.save"):
        kv.load_prefix(tmp_path / "model.safetensors", network)
    for condition, message in (
        (CONDITIONS["prefill"], "compressed whole, in the regime Offline"),
        (kv.Condition("quest_pages", 16, kv.Offline()), "by a policy that frees memory"),
        (kv.Condition("tova", 60, kv.Offline()), "nothing leaves"),
    ):
        with pytest.raises(InputError, match=message):
            kv.compress(network, text, condition)
