"""How a policy's functions are put together on the rows of a job."""

import pytest
import torch
from observations import observation

from kvrepro.engine.condition import Condition, DecodeCap, Prefill, Prompt
from kvrepro.engine.evict import EvictionJob, Prompts, across, select_tokens
from kvrepro.engine.policy import Policy
from kvrepro.errors import InputError


def job(policy: Policy, parameters: dict, *budgets: int, tokens: int = 20, **settings) -> EvictionJob:
    """A row per budget, their prompts of the same length."""
    conditions = [Condition("own", budget, Prefill(), **settings) for budget in budgets]
    spans = [{"a": [2, 3]}] * len(budgets)
    prompts = Prompts(torch.arange(tokens).expand(len(budgets), -1), spans)
    return EvictionJob(conditions, policy, parameters, list(budgets), prompts)


RETURNED = [  # by a reader's function, and what is said of it
    ({"score": lambda o: o.positions.numpy()}, "scorer returned ndarray, not torch.float32 .1, 2, 20."),
    ({"shield": lambda o, scores, budget: torch.ones(3) > 0}, "shield returned torch.bool .3,., not torch.bool .1, 2"),
    (
        {"allocate": lambda scores, protected, budget: budget},
        "allocate returned torch.int64 .1,., not torch.int64 .1, 2",
    ),
    ({"allocate": lambda scores, protected, budget: scores[..., 0]}, "allocate returned torch.float32"),
    ({"refine": lambda o, scores, counts: (scores, scores)}, "refine returned torch.float32"),
]
RETURNED_FOR_ALL_LAYERS = [
    (lambda s, n: ([x[..., 1:] for x in s], n), "across .scores. returned torch.float32 .1, 2, 19., not"),
    (lambda s, n: (s, [x.float() for x in n]), "across .counts. returned torch.float32"),
    (lambda s, n: (s, [x * 3 // 2 for x in n]), "counts sum to .90. tokens, more than 6 KV heads .* of .10.:"),
]


@pytest.mark.parametrize(("function", "message"), RETURNED)
def test_what_a_policys_functions_return_wrongly_is_said_by_the_function(function, message):
    policy = Policy("Mine", "me", **{"score": lambda o: o.positions, **function})
    with pytest.raises(InputError, match=f"Mine's {message}"):
        select_tokens(job(policy, {}, 10), observation(1, tokens=20))


@pytest.mark.parametrize(("change", "message"), RETURNED_FOR_ALL_LAYERS)
def test_what_a_policys_across_returns_wrongly_is_refused(change, message):
    def changed(scores, protected, budget):
        return change(scores, [budget[:, None].expand(s.shape[:2]) for s in scores])

    rows = job(Policy("Mine", "me", lambda o: o.positions, across=changed), {}, 10)
    rows.pending = {n: observation(1, tokens=20, kv_heads=2, layer=n) for n in range(3)}
    with pytest.raises(InputError, match=f"^Mine's {message}"):
        across(rows)


def test_a_policy_may_give_layers_and_heads_unequal_shares_of_its_budget_and_no_more():
    def unequal(scores, protected, budget, o, more):
        extra = (4, 0, more - 4)[o.layer]
        return torch.stack([budget + 3 + extra, budget - 3 + extra], 1)

    policy = Policy("Mine", "me", lambda o: o.positions, allocate=unequal)
    seen = [observation(1, tokens=20, kv_heads=2, layer=n) for n in range(3)]
    fair, unfair = job(policy, {"more": 0}, 10), job(policy, {"more": 1}, 10)
    assert [int(select_tokens(fair, o).sum()) for o in seen] == [28, 20, 12]
    with pytest.raises(InputError, match=r"sum to .62. tokens, more than 6 KV heads .* of .10."):
        [select_tokens(unfair, o) for o in seen]


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
    stays = select_tokens(rows, o)
    assert got == {"score": (3.0, [6, 7]), "shield": 2, "allocate": ([20, 20], 1), "refine": [[7, 5], [8, 6]]}
    assert stays.sum(-1).tolist() == [[7, 5], [8, 6]]
    assert stays[:, :, -2:].all()
    first = o.alive.int().argmax(-1)
    assert stays.gather(2, first[..., None]).all()  # refined scores reverse the order


def test_a_share_is_asked_of_the_compressed_tokens_at_later_evictions_too():
    """0.13 of 100 tokens are 13; of the whole prompt of 104 they would be 13.52, a token more in two heads."""
    c, prompts = Condition("own", 0.13, DecodeCap()), Prompts(torch.arange(100)[None], [{}], ends=[100])
    first = EvictionJob([c], Policy("Mine", "me", lambda o: o.positions), {}, [13], prompts)
    later = EvictionJob.joined([first.row(0)], [Prompt(list(range(104)), {})], prompts.positions.device)
    assert first.asked.tolist() == later.asked.tolist() == [13.0]
