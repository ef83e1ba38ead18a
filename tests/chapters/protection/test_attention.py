"""Statistics of attention that is never stored, against attention that is."""

import pytest
import torch
from tiny import model as tiny_model
from tiny import prompts as tiny_prompts
from transformers import DynamicCache

from kvrepro.chapters.protection.attention import DecodeAttention, PromptAttention
from kvrepro.engine.attention import installed


def full_attention(model, prompt: list[int]) -> torch.Tensor:
    """Hugging Face's eager probabilities, [layers, heads, queries, tokens]."""
    return torch.stack(model(torch.tensor([prompt]), output_attentions=True).attentions)[:, 0]


@pytest.mark.parametrize("n", [2, 63, 111, 300])
@pytest.mark.parametrize("block", [1, 17, 256])
@torch.no_grad()
def test_column_statistics_equal_those_of_the_full_matrix(n, block):
    model, [prompt] = tiny_model(), tiny_prompts(n)
    p = full_attention(model, prompt)
    seen = PromptAttention(sums=True, groups=True, keep_queries=5, block=block)
    with installed(model):
        logits = model(torch.tensor([prompt]), kvrepro=seen).logits
    torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits, atol=2e-5, rtol=2e-5)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(seen.column_max, p.amax(2), **close)
    torch.testing.assert_close(seen.column_sum, p.sum(2), **close)
    torch.testing.assert_close(seen.group_max, p.unflatten(1, (2, 3)).mean(2).amax(2), **close)
    torch.testing.assert_close(seen.window, p[:, :, -5:], **close)
    torch.testing.assert_close(seen.last, p[:, :, -1], **close)


@pytest.mark.parametrize(("reduce", "head_map"), [("max", None), ("max", "first_n_kv"), ("mean", "group_mean"),
                                                  ("max", "group_mean"), ("mean", "first_n_kv")])  # fmt: skip
@torch.no_grad()
def test_decode_statistics_equal_those_of_the_full_matrix(reduce, head_map):
    model, [prompt] = tiny_model(), tiny_prompts(40)
    p = full_attention(model, prompt)[:, :, -1]
    cache = DynamicCache(config=model.config)
    with installed(model):
        model(torch.tensor([prompt[:-1]]), past_key_values=cache, kvrepro=PromptAttention())
        seen = DecodeAttention(torch.ones(1, 1, 40, dtype=torch.bool), model.dtype, 3, reduce, head_map)
        model(torch.tensor([prompt[-1:]]), past_key_values=cache, position_ids=torch.tensor([[39]]), kvrepro=seen)
    layers_and_heads = p.amax((0, 1)) if reduce == "max" else p.mean((0, 1))
    torch.testing.assert_close(seen.attention[0], layers_and_heads, atol=1e-5, rtol=1e-5)
    if head_map is None:
        assert seen.per_head is None
    else:
        heads = p[:, :2] if head_map == "first_n_kv" else p.unflatten(1, (2, 3)).mean(2)
        expected = heads.amax(0) if reduce == "max" else heads.mean(0)
        torch.testing.assert_close(seen.per_head[0], expected, atol=1e-5, rtol=1e-5)


def test_hidden_slots_get_no_attention_from_their_head():
    visible = torch.ones(2, 2, 9, dtype=torch.bool)
    visible[0, 1, 3:] = False
    seen = DecodeAttention(visible, torch.float32, 1, "max", "group_mean")
    q, k, v = torch.randn(2, 6, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    out = seen.attend(0, q, k, v, 0.35)
    assert bool((seen.per_head[0, 1, 3:] == 0).all())
    assert bool((seen.per_head[0, 0] > 0).all())
    p = torch.softmax(q[0, 3:, 0] @ k[0, 1, :3].T * 0.35, -1)
    torch.testing.assert_close(out[0, 0, 3:], p @ v[0, 1, :3])


def test_the_model_gets_its_attention_back_even_after_an_error():
    model = tiny_model()
    with pytest.raises(RuntimeError, match="needs model"), installed(model):
        model(torch.tensor([[5, 6]]))
    assert model.config._attn_implementation == "eager"
