import pytest

from kvrepro.errors import InputError
from studies import speed


@pytest.mark.parametrize("given", [{"part": ["prefil"]}, {"part": [], "model": ["Qwen2.5-4B"]}])
def test_an_unknown_part_or_model_is_refused_before_anything_is_measured(given):
    with pytest.raises(InputError, match=": should be "):
        speed.main(**given)
