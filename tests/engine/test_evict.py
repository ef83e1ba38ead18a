"""How a policy's functions are put together on the rows of a job."""

import pytest
import torch
from observations import observation

from kvrepro.engine.condition import Condition, Prefill
from kvrepro.engine.evict import EvictionJob, Prompts, across, allocated, score_and_protect, select_tokens, selected
from kvrepro.engine.policy import Policy
from kvrepro.errors import InputError


def job(policy: Policy, parameters: dict, *budgets: int, tokens: int = 20, **settings) -> EvictionJob:
    """A row per budget, their prompts of the same length."""
    conditions = [Condition("own", budget, Prefill(), **settings) for budget in budgets]
    spans = [{"a": [2, 3]}] * len(budgets)
    prompts = Prompts(torch.arange(tokens).expand(len(budgets), -1), spans)
    return EvictionJob(conditions, policy, parameters, list(budgets), prompts)


@pytest.mark.parametrize("score", [lambda o: o.positions.numpy(), lambda o: 1.0, lambda o: None])
def test_scores_that_are_no_tensor_are_refused_by_what_they_are(score):
    with pytest.raises(InputError, match=r"scorer returned (ndarray|float|NoneType), not \[batch, kv_heads, tokens\]"):
        score_and_protect(job(Policy("Mine", "me", score), {}, 10), observation(tokens=20))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"shield": lambda o, scores, budget: torch.ones(3) > 0}, "shield returned a tensor of shape .3,., not .batch"),
        ({"shield": lambda o, scores, budget: scores}, "shield returned numbers of type torch.float32, not torch.bool"),
        ({"allocate": lambda scores, protected, budget: budget}, "allocate returned a tensor of shape .1,., not "),
        ({"allocate": lambda scores, protected, budget: scores[..., 0]}, "allocate returned numbers .*torch.int64"),
        ({"refine": lambda o, scores, counts: (scores, scores)}, "refine returned numbers .*torch.bool"),
        ({"refine": lambda o, scores, counts: (None, o.alive)}, "refine returned NoneType"),
    ],
)
def test_what_a_policys_functions_return_wrongly_is_said_by_the_function(function, message):
    with pytest.raises(InputError, match=f"Mine's {message}"):
        select_tokens(job(Policy("Mine", "me", lambda o: o.positions, **function), {}, 10), observation(tokens=20))


ACROSS = {
    "a shape": (lambda s, n: ([x[..., 1:] for x in s], n), "across .scores. returned a tensor of shape"),
    "complex": (lambda s, n: ([x * 1j for x in s], n), "across .scores. returned numbers of type torch.complex64"),
    "none": (lambda s, n: ([None] * 3, n), "across .scores. returned NoneType"),
    "floats": (lambda s, n: (s, [x.float() for x in n]), "across .counts. returned numbers .*not torch.int64"),
    "over": (lambda s, n: (s, [x * 3 // 2 for x in n]), "counts sum to 90 tokens, more than 6 KV heads .* of 10:"),
}


@pytest.mark.parametrize("way", ACROSS)
def test_what_a_policys_across_returns_wrongly_is_refused(way):
    change, message = ACROSS[way]

    def changed(scores, protected, budget):
        return change(scores, [budget[:, None].expand(s.shape[:2]) for s in scores])

    rows = job(Policy("Mine", "me", lambda o: o.positions, across=changed), {}, 10)
    rows.pending = {n: observation(1, tokens=20, kv_heads=2, layer=n) for n in range(3)}
    with pytest.raises(InputError, match=f"^Mine's {message}"):
        across(rows)


def test_a_policy_may_give_layers_and_heads_unequal_shares_of_its_budget_and_no_more():
    def unequal(scores, protected, budget, o, more=0):
        extra = (4, 0, -4)[o.layer] + more * (o.layer == 2)
        return torch.stack([budget + 3 + extra, budget - 3 + extra], 1)

    for dense, more, total in ((0, 0, None), (0, 1, 62), (1, 4, None), (1, 5, 42)):
        parameters = {"more": more, "dense_layers": dense}
        rows = job(Policy("Mine", "me", lambda o: o.positions, allocate=unequal), parameters, 10)
        seen = [observation(1, tokens=20, kv_heads=2, layer=n) for n in range(3)]
        assert [int(select_tokens(rows, o).sum()) for o in seen[:2]] == [28, 20]
        if total is None:
            assert int(select_tokens(rows, seen[2]).sum()) == 12 + 2 * more
            continue
        heads = 2 * (3 - dense)
        with pytest.raises(
            InputError, match=rf"^Mine's counts sum to {total} tokens, more than {heads} KV heads .* of 10"
        ):
            select_tokens(rows, seen[2])


def test_a_policys_functions_get_what_they_name():
    o = observation(tokens=20, kv_heads=2, dead=4)
    got = {}

    def score(o, weight, budget):
        got["score"] = (weight, budget.tolist())
        return o.positions.float() * weight

    def shield(o, scores, budget, width):
        got["shield"] = width
        return (o.positions >= 0) & (o.positions < width)

    def allocate(scores, protected, budget, o, extra):
        got["allocate"] = (o.seen.tolist(), extra)
        return torch.stack([budget + extra, budget - extra], 1)

    def refine(o, scores, counts, protected, weight):
        got["refine"] = counts.tolist()
        newest = torch.zeros_like(protected)
        newest[:, :, -2] = True
        return -scores, newest

    parameters = {"weight": 3.0, "width": 2, "extra": 1, "unused": None, "recent": 1}
    policy = Policy("P", "s", score, parameters, allocate=allocate, shield=shield, refine=refine)
    rows = job(policy, parameters, 6, 7)
    scores, protected = score_and_protect(rows, o)
    assert scores.dtype == torch.float32
    assert (scores[~o.alive] == -torch.inf).all()
    assert not protected[~o.alive].any()
    assert protected[:, :, -1].all()
    stays = selected(rows, o, scores, protected, allocated(rows, o, scores, protected))
    assert got == {"score": (3.0, [6, 7]), "shield": 2, "allocate": ([20, 20], 1), "refine": [[7, 5], [8, 6]]}
    assert stays.sum(-1).tolist() == [[7, 5], [8, 6]]
    assert stays[:, :, -2:].all()
    assert torch.equal(stays, select_tokens(rows, o))
    first = o.alive.int().argmax(-1)
    assert stays.gather(2, first[..., None]).all()  # refined scores reverse the order


def test_scores_that_a_policy_does_not_ask_for_are_named():
    policy = Policy("Forgetful", "me", lambda o: o.sums["mass"])
    with pytest.raises(InputError, match=r"Forgetful reads sums\['mass'\], which its `needs` do not name"):
        score_and_protect(job(policy, {}, 10, 10), observation(tokens=20))
