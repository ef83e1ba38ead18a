"""Scorers that have a kernel, against plain PyTorch in float32: dead slots, gaps, missing queries, whole prompts."""

from dataclasses import replace

import pytest
import torch
from kernels_run import DEVICE
from observations import observation

from kvrepro.engine.attention import Softmax
from kvrepro.engine.catalogue import CATALOGUE, WINDOWS
from kvrepro.engine.evict import call
from kvrepro.engine.policy import named

# (policy, reading) for every scorer and its own parameters: policies that score alike are one case
CASES: dict[tuple, tuple[str, str]] = {}
for name in (*WINDOWS, "tova"):
    for reading in CATALOGUE[name].readings:
        scorer = CATALOGUE[name].score
        of_scorer = named(scorer, CATALOGUE[name].reading(reading))
        CASES.setdefault((scorer, *of_scorer.items()), (name, reading))
OBSERVED = {
    "whole": dict(group=2, window=4, tokens=37),
    "ragged": dict(group=3, window=5, tokens=29, dead=6, gaps=3),
    "one query": dict(group=1, window=1, tokens=12, gaps=2),
    "short": dict(group=2, window=6, tokens=9, dead=4, missing=4),
}


def seen_by(kind):
    shape = dict(OBSERVED[kind])
    missing = shape.pop("missing", 0)
    o = observation(2, 2, dim=16, hidden=20, seed=3, **shape)
    at = o.query_positions.clone()
    at[0, :missing] = -1  # the first row has fewer queries than the window
    return replace(
        o, **{k: v.to(DEVICE) for k, v in vars(replace(o, query_positions=at)).items() if isinstance(v, torch.Tensor)}
    )


def with_forward_results(o):
    """The observation with the log-sum-exp and outputs of a prompt's forward pass."""
    logits = torch.einsum("bgrwd,bgnd->bgrwn", o.queries.unflatten(1, (2, -1)), o.keys) * o.scaling
    lse = logits.masked_fill(~o.visible[:, :, None], -torch.inf).logsumexp(-1).flatten(1, 2)
    return replace(o, log_sums=lse, window_outputs=o.outputs.flatten(1, 2))


def ranked(o, scores):
    """Scores that rank: where differences count, relative to the largest."""
    scores = scores.masked_fill(~o.alive, 0.0)
    return scores / scores.abs().amax().clamp(min=1e-30)


@pytest.mark.parametrize("kind", OBSERVED)
@pytest.mark.parametrize(("name", "reading"), CASES.values())
def test_scores_are_those_of_plain_pytorch(name, reading, kind):
    policy, plain = CATALOGUE[name], seen_by(kind)
    parameters = policy.reading(reading) | {"asked": torch.tensor([6.0, 6.0], device=plain.keys.device)}
    truth = call(policy.score, plain, parameters=parameters)
    for o in (plain, with_forward_results(plain)):
        ours = call(policy.score, replace(o, backend="triton"), parameters=parameters)
        close = {"atol": 2e-2, "rtol": 2e-2} if parameters.get("round_p") else {"atol": 2e-5, "rtol": 1e-3}
        torch.testing.assert_close(ranked(o, ours), ranked(o, truth), **close)


NO_KERNEL = {
    "a sliding window": dict(sliding=20),
    "queries that see their own span": dict(span_local=True, span_of=(torch.arange(37) > 12).long().expand(2, -1)),
    "another softmax": dict(softmax=Softmax(0.25, softcap=2.0)),
}


@pytest.mark.parametrize("what", NO_KERNEL)
@pytest.mark.parametrize(("name", "reading"), CASES.values())
def test_what_no_kernel_knows_is_scored_by_plain_pytorch(name, reading, what):
    """Also where a pass's log-sum-exp is at hand; without it the scores would be others."""
    policy, free = CATALOGUE[name], with_forward_results(seen_by("whole"))
    fields = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in NO_KERNEL[what].items()}
    plain = replace(free, **fields)
    parameters = policy.reading(reading) | {"asked": torch.tensor([6.0, 6.0], device=plain.keys.device)}
    truth, ours, ignored = (
        ranked(o, call(policy.score, o, parameters=parameters)) for o in (plain, replace(plain, backend="triton"), free)
    )
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    assert (truth - ignored).abs().max() > 1e-3
