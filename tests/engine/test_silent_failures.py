"""Failures that other libraries do not report to their users; here they are provoked, and refused or impossible."""

from copy import deepcopy
from functools import cache, partial, wraps

import pytest
import torch
from conditions import flat
from tiny import architecture
from tiny import model as tiny_model
from tiny import prompts as tiny_prompts

from kvrepro.engine import allocate
from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, DecodeCap, Prefill, SharedCap
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy
from kvrepro.errors import InputError

REGIMES = ("prefill", "chunked", "offline", "decode cap", "per step")
NEW = 6


def cut(policy: str = "snapkv", regime: str = "prefill", **changes) -> Condition:
    switches = (("window", 4),) if "window" in CATALOGUE[policy].parameters else ()
    base = {"budget": 20, "chunk": 16, "interval": 2, "reading": "as_described", "switches": switches}
    return flat(policy, regime=regime, **{**base, **changes})


usual_model = cache(tiny_model)


def answers(prompts, conditions, model=None, **changes):
    model = model or usual_model("llama")
    given = {"max_new_tokens": NEW, "stop_ids": (), "repeat": (7, 3), **changes}
    return engine.generate(model, prompts, conditions, **given)


# ---- 1. the kept count is rounded to 0


def test_heads_and_layers_that_keep_nothing_still_answer(monkeypatch):
    """Budgets per head may give a head 0 tokens; it then sees only the new tokens."""

    def starved(scores, protected, budget):
        counts = budget[:, None].repeat(1, scores.shape[1])
        counts[:, 0], counts[:, 1] = 0, 2 * budget
        return counts

    policy = Policy("Starved", "tests", lambda o: o.positions.float(), allocate=starved, budget="per head")
    monkeypatch.setitem(CATALOGUE, "starved", policy)
    conditions = [cut("starved", regime) for regime in REGIMES]
    for a in answers(tiny_prompts(60), conditions, kept_sets=True)[0]:
        assert [layer.sum(1).tolist() for layer in a.kept_sets] == [[0, 40]] * 3


# ---- 2. budgets of 512 and 4096 give equal results, and nobody notices that neither evicted


def test_a_budget_beyond_a_sliding_window_is_refused_or_seen():
    model, prompts = architecture("mistral"), tiny_prompts(60)  # which looks back 32 tokens
    [[g]] = answers(prompts, [cut("streaming_llm", "decode cap", budget=40)], model)
    assert (g.policy_calls, g.evicted) == (0, 0)
    for regime in ("prefill", "chunked"):
        message = r"budget 40 >= 31 tokens to compress: nothing leaves.* slides holds 31 of 60 tokens"
        with pytest.raises(InputError, match=message):
            answers(prompts, [cut("streaming_llm", regime, budget=40)], model)
    for g in answers(prompts, [cut("streaming_llm", regime, budget=0.5) for regime in REGIMES[:4]], model)[0]:
        assert len(g.kept_positions) == 15
        assert g.evicted > 0


# ---- 3. a failed generation is scored as an answer


@pytest.mark.parametrize("condition", [Condition(), Condition("lru", 12, SharedCap())])
def test_logits_that_are_no_numbers_are_no_answer(condition):
    model = tiny_model("llama")
    model.lm_head.weight.data[7, 3] = torch.nan
    with pytest.raises(ArithmeticError, match=f"{condition.label}: NaN at new token 1"):
        answers(tiny_prompts(60), [condition], model)


# ---- 4. a failure that reaches rows which it does not concern


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_scores_that_are_no_numbers_cost_the_rows_of_their_policy_alone(monkeypatch, backend):
    """A GPU is waited for only at the end of the pass, for every way to choose."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is packaged for Linux only")
    ways = {"uniform": {}, "joint": {"allocate": allocate.joint}, "layers": {"across": allocate.joint_layers}}
    for name, fields in ways.items():
        strange = Policy("Mine", "a test", lambda o: o.positions.float() / 0 * 0, **fields)
        monkeypatch.setitem(CATALOGUE, name, strange)
    conditions = [Condition(name, 10, Prefill()) for name in ("k_norm", *ways)]
    model = usual_model("llama", num_hidden_layers=2)
    for prompts in (tiny_prompts(24), tiny_prompts(24, 17)):
        rows = answers(prompts, conditions, model, errors="return", backend=backend, max_new_tokens=2)
        alone = answers(prompts, conditions[:1], model, backend=backend, max_new_tokens=2)
        for row, [healthy] in zip(rows, alone, strict=True):
            assert row[0].tokens == healthy.tokens
            assert all(isinstance(error, InputError) and "scores are NaN" in str(error) for error in row[1:])


def test_a_row_that_failed_leaves_rows_of_its_kind_their_evictions(monkeypatch):
    def fails_at_20(o, budget):
        if 20 in budget.tolist():
            raise ValueError("twenty")
        return o.positions.float()

    monkeypatch.setitem(CATALOGUE, "fails", Policy("Fails", "tests", fails_at_20))
    conditions = [cut("fails", "chunked", budget=budget, when="budget", reading="as_run") for budget in (20, 40)]
    [[error, g]] = answers(tiny_prompts(60), conditions, errors="return")
    assert str(error) == "twenty"
    assert g.kept == [40 + NEW - 1] * 3


def careless(function):
    """The function, which then overwrites everything that it was shown, as a careless one may."""

    def overwrite(value):
        if isinstance(value, Observation):
            overwrite([value.keys, value.values, value.queries, value.positions, value.seen, *value.sums.values()])
        elif isinstance(value, list | tuple):
            list(map(overwrite, value))
        elif value is not None:
            value.fill_(1)

    @wraps(function)
    def writes(*shown, **named):
        returned = deepcopy(function(*shown, **named))
        overwrite([*shown, *named.values()])
        return returned

    return writes


def norm(o):
    return o.keys.float().norm(dim=-1)


def alike(scores, protected, budget, summaries, observations):
    return scores, [allocate.uniform(scores[0], protected[0], budget)] * len(scores)


CARELESS = {
    "of a layer": {
        "score": careless(CATALOGUE["k_norm"].score),  # a wrapper of ours
        "allocate": careless(allocate.uniform),
        "shield": careless(lambda o, scores, budget, guarded: torch.zeros_like(guarded)),
        "refine": careless(lambda o, scores, counts, protected: (scores, torch.zeros_like(protected))),
    },
    "of all layers": {"score": partial(careless(norm)), "across": careless(alike), "summary": careless(lambda o: None)},
}


@pytest.mark.parametrize("part", CARELESS)
@pytest.mark.parametrize("regime", [Prefill(), DecodeCap(4)], ids=lambda r: r.name)
def test_what_a_readers_function_writes_in_place_reaches_no_other_condition(regime, part, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "writes", Policy("Writes", "a reader", **CARELESS[part]))
    others = [Condition(), Condition("k_norm", 24, regime), Condition("h2o", 24, regime)]
    [expected] = answers(tiny_prompts(70), others, kept_sets=True)
    for at in (0, 3):
        mixed = [*others[:at], Condition("writes", 24, regime), *others[at:]]
        generations = answers(tiny_prompts(70), mixed, kept_sets=True)[0]
        careless = generations.pop(at)
        assert careless.kept == expected[2].kept
        for answer, before in zip(generations, expected, strict=True):
            assert (answer.tokens, answer.kept_positions_hash) == (before.tokens, before.kept_positions_hash)
