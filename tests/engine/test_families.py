"""What the engine can do with each family of models: data/families.csv holds the results of
tests/helpers/families.py."""

import families
import pytest
import torch

from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Chunked, Condition, Prefill, Prompt
from kvrepro.errors import InputError

QUICK = ("GPT-2", "Gemma 2", "Nemotron-H")
NAMES = [
    pytest.param(name, marks=() if name in QUICK or row["loads"] != "yes" else pytest.mark.slow)
    for name, row in families.read().items()
]
FEW = {"max_new_tokens": 4, "stop_ids": ()}


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_is_found(name, tmp_path):
    assert families.row(name, tmp_path / "model") == families.read()[name]


def test_every_family_has_a_row_and_does_what_it_is_asked_or_says_why_not():
    table = families.read()
    assert list(table) == list(families.FAMILIES)
    for row in table.values():
        cells = {row[column] for column in ("loads", *families.CHECKS)}
        assert cells <= {"yes", "no", "–"}
        assert ("no" in cells) == bool(row["why not"])


# ---- what the checks rest on


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS"])
def test_the_reference_is_the_model_itself_where_nothing_is_hidden(name):
    model, ids = families.build(name), families.prompt(40)
    logits = families.reference(model, ids).read(40)
    torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0, -1], atol=1e-4, rtol=1e-4)


# ---- refusals


@pytest.mark.parametrize(
    ("prompts", "condition", "refused"),
    [
        ([50], Condition(), False),
        ([62], Condition(), True),
        ([70, 90], Condition(), False),
        ([50, 70], Condition(), True),
        ([90], Condition("streaming_llm", 8, Chunked(16)), True),
        ([90], Condition("streaming_llm", 8, Prefill(until="question")), True),
    ],
)
def test_a_rotation_that_changes_with_length_is_never_mixed(prompts, condition, refused):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    model = families.build("Phi-3", rope_parameters=rope | factors, original_max_position_embeddings=64)
    texts = [Prompt(families.prompt(n), {"question": list(range(n // 2, n))}) for n in prompts]
    if refused:
        with pytest.raises(InputError, match="this model rotates keys otherwise beyond 64"):
            engine.generate(model, texts, [condition], **FEW)
        return
    for text, [answer] in zip(texts, engine.generate(model, texts, [condition], prompt_rows=2, **FEW), strict=True):
        tokens, _ = families.hugging_face(model, text.ids, 4)
        assert answer.tokens == tokens
