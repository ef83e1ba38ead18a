"""What a model's shape changes in the chapter's settings."""

import families
import pytest

from kvrepro.chapters.dropkv_bound.settings import Given
from kvrepro.errors import InputError


def test_prompts_and_answers_fit_the_window_of_layers_that_slide(capsys):
    model = families.build("Gemma 3, text", sliding_window=128)
    found = Given(tokens=300, lengths=(50, 300), max_new_tokens=28).within(model)
    assert (found.tokens, found.lengths) == (100, (50, 100))
    assert "prompts of 100 tokens at most, since layers of this model see 128" in capsys.readouterr().out
    small = Given(tokens=90, lengths=(50,), max_new_tokens=28)
    assert small.within(model) is small
    with pytest.raises(InputError, match="see 128 tokens: too few"):
        Given(tokens=300, max_new_tokens=127).within(model)


def test_a_model_without_sliding_layers_changes_nothing():
    settings = Given()
    assert settings.within(families.build("Llama")) is settings
