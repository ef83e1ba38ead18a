"""What a model's shape changes in the chapter's settings."""

import families
import pytest

from kvrepro.chapters.dropkv_bound.study import Settings
from kvrepro.errors import InputError


def test_prompts_and_answers_fit_the_window_of_layers_that_slide(capsys):
    model = families.build("Gemma 3, text", sliding_window=128)
    fitted = Settings(tokens=300, lengths=(50, 300), max_new_tokens=28).within(model)
    assert (fitted.tokens, fitted.lengths) == (100, (50, 100))
    assert "prompts of 100 tokens at most, since layers of this model see 128" in capsys.readouterr().out
    small = Settings(tokens=90, lengths=(50,), max_new_tokens=28)
    assert small.within(model) is small
    with pytest.raises(InputError, match="tokens -12"):
        Settings(tokens=300, max_new_tokens=140).within(model)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Gemma 2", "this model caps them or has sinks: take another"),
        ("GPT-OSS", "this model caps them or has sinks: take another"),
        ("LFM2", "layers of type conv hold no tokens to evict: use an attention-only model"),
        ("Qwen3.5", "layers of type linear_attention hold no tokens to evict"),
    ],
)
def test_models_that_the_theory_does_not_hold_of_are_refused_before_anything_runs(family, message):
    with pytest.raises(InputError, match=message):
        Settings(tokens=300, max_new_tokens=28).within(families.build(family))
