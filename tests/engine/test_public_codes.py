"""Policies in the reading of the authors' code keep what the methods' public codes keep, in plain formulas."""

import public_codes
import pytest
import torch
from public_codes import CODES, CodePair

from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.generate import generate
from kvrepro.engine.regime import Prefill
from studies import calibrate, parity

ROUNDED = ("cake", "dropkv", "k_norm", "r_kv")  # in which the last bit of a sum may choose another token


def agreements(model, ids, queries, pair: CodePair, share: float) -> list[tuple[float, bool]]:
    """(Share in common, differs by ties alone) of each head. queries: the file of TriAttention's statistics."""
    calibration = (("calibration", str(queries)),) if pair.policy.startswith("tri_") else ()
    when = Prefill(fair=1.0, spans=("first", "second")) if pair.fair else Prefill()
    condition = Condition(pair.policy, share, when, switches=pair.switches + calibration)
    prompt = Prompt(ids, public_codes.spans(len(ids)))
    [[ours]] = generate(model, [prompt], [condition], max_new_tokens=1, stop_ids=frozenset(), kept_sets=True)
    theirs = pair.code(public_codes.layers_of(model, ids, str(queries)), share)
    sets = [(torch.as_tensor(a), *b) for a, b in zip(ours.kept_sets, theirs, strict=True)]
    budget = CATALOGUE[pair.policy].budget
    if budget == "joint":  # the layers compete: compared as one
        a, b, scores = zip(*sets, strict=True)
        sets = [(torch.cat(a), torch.cat(b), torch.cat(scores))]
    heads = []
    for a, b, scores in sets:
        common, tied = parity.agreement(a, b, scores, budget in ("per head", "joint"))
        heads += zip(common.tolist(), tied.tolist(), strict=True)
    return heads


@pytest.fixture(scope="module", params=[1, 3], ids=lambda group: f"group {group}")
def inputs(request, tmp_path_factory):
    """A random model with so many query heads for each KV head, a prompt, and the file of the model's queries.
    Lengths of which a fifth is no whole number, so that every rounding counts."""
    model, file = parity.random_model(request.param), tmp_path_factory.mktemp("queries") / "queries.json"
    ids = torch.randint(3, 1000, (800 + 8 * request.param,), generator=torch.Generator().manual_seed(request.param)).tolist()
    calibrate.write(calibrate.calibrate(model, [ids]), file)
    return model, ids, file


def test_policies_as_run_keep_what_the_public_codes_keep(inputs):
    for pair in CODES:
        for share in (0.25, 0.5) if pair.policy == "andpro" else (0.2, 0.3, 0.5):  # whole chunks
            heads = agreements(*inputs, pair, share)
            equal, tied = sum(common == 1 for common, _ in heads), sum(tied for _, tied in heads)
            assert min(common for common, _ in heads) > 0.98, pair.policy  # one or two tokens of a head
            least = 0.75 if pair.policy in ROUNDED else 1
            assert equal + tied >= least * len(heads), (pair.policy, share)


def test_another_parameter_keeps_other_tokens(inputs):
    for pair in CODES[:2]:
        other = CodePair(pair.policy, pair.code, pair.source, (("mass", 0.0),))
        assert any(common < 1 for common, _ in agreements(*inputs, other, 0.25)), pair.policy
