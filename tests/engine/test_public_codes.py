"""Policies in the reading of the authors' code keep what the methods' public codes keep, in plain formulas."""

from dataclasses import replace

import pytest
import torch
from public_codes import CODES, agreements, cells

from studies import calibrate, parity

ROUNDED = ("dropkv", "k_norm", "r_kv")  # in which the last bit of a sum may choose another token


@pytest.fixture(scope="module", params=[1, 3, 7], ids=lambda group: f"group {group}")
def inputs(request, tmp_path_factory):
    """A random model with so many query heads for each KV head, a prompt, and the file of the model's queries,
    the prompt so long that a fifth of it is no whole number and every rounding counts."""
    model, file = parity.random_model(request.param), tmp_path_factory.mktemp("queries") / "queries.json"
    g = torch.Generator().manual_seed(request.param)
    ids = torch.randint(3, 1000, (800 + 8 * request.param,), generator=g).tolist()
    calibrate.write(file, **calibrate.calibrate(model, [ids]))
    return model, ids, file


def test_policies_as_run_keep_what_the_public_codes_keep(inputs):
    for (pair, share), heads in zip(cells(CODES), agreements(*inputs, cells(CODES)), strict=True):
        equal, tied = sum(common == 1 for common, _ in heads), sum(tied for _, tied in heads)
        assert min(common for common, _ in heads) > 0.98, pair.policy  # one or two tokens of a head
        least = 0.75 if pair.policy in ROUNDED else 1
        assert equal + tied >= least * len(heads), (pair.policy, share)


def test_another_parameter_keeps_other_tokens(inputs):
    others = [(replace(pair, switches=(("mass", 0.0),)), 0.25) for pair in CODES[:2]]
    for heads in agreements(*inputs, others):
        assert any(common < 1 for common, _ in heads)
