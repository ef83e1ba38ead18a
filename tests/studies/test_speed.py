import pytest
import torch

from kvrepro.errors import InputError
from studies import speed


def test_an_unknown_model_is_refused_before_anything_is_measured():
    with pytest.raises(InputError, match="unknown model 'Qwen2.5-4B'"):
        speed.main(model=["Qwen2.5-4B"])


def test_every_policy_is_timed_in_its_readings_beside_two_full_caches():
    timed = speed.methods(2048)
    assert list(timed)[:2] == [speed.PLAIN, speed.KEPT]
    assert {condition.policy for condition in list(timed.values())[2:]} == set(speed.POLICIES)
    assert set(timed) - set(speed.methods(32768)) == {"key_diff, as described"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")
def test_a_small_shape_is_timed(tmp_path):
    speed.main(out=tmp_path / "first.csv", model=["Qwen2.5-3B"], tokens=[512], repeats=2)
    assert (tmp_path / "first.csv").read_text().count("\n") > len(speed.POLICIES)
