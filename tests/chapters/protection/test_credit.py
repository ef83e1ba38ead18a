"""The online credit estimator against its formulas in plain Python, and its run against protected LRU's."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import after_prefill, model, prompts

from kvrepro.chapters.protection import credit
from kvrepro.chapters.protection.credit import Estimator
from kvrepro.chapters.protection.harness import generate
from kvrepro.engine.condition import Condition
from kvrepro.errors import InputError
from kvrepro.experiment import models

TAUGHT = Estimator((-0.4, -0.2, 0.35, 0.6), 0.1, 20, 0.09, (0.4, 0.5, 0.6, 0.3), (0.1, 0.2, 0.15, 0.05))


def state(n=12, step=9, seed=1):
    """A row in mid-answer: random uses, ages and attention; four tokens protected, one dead."""
    g = torch.Generator().manual_seed(seed)
    o = after_prefill(n, Condition("lru", 8, reading="as_described"))
    inserted = torch.randint(0, step, (1, n), generator=g)
    alive = torch.ones(1, n, dtype=torch.bool)
    alive[0, 5] = False
    evictable = alive.clone()
    evictable[0, [0, 1, n - 2, n - 1]] = False
    used = (inserted + torch.randint(0, 3, (1, n), generator=g)).clamp(max=step)
    o = replace(
        o, step=step, inserted=inserted, last_access=used,
        current=torch.rand(1, n, generator=g), peak=torch.rand(1, n, generator=g), alive=alive, evictable=evictable,
        excess=torch.tensor([3]),
    )  # fmt: skip
    return o, torch.randint(1, 9, (1, n), generator=g)


def plain_features(o, uses, capacity, i):
    d = math.log(1 + 4 * capacity)
    idle, age = (math.log(1 + o.step - int(when[0, i])) / d for when in (o.last_access, o.inserted))
    count = int(uses[0, i])
    return [min(1, idle), min(1, age), count / (count + 4), min(1, float(o.current[0, i]))]


def plain_uncertainty(e, f):
    if e.updates < 8:
        return 1.0
    spread = sum((x - m) ** 2 / (v + 1e-4) for x, m, v in zip(f, e.mean, e.variance, strict=True)) / 4
    return math.sqrt(e.error) * (1 + 0.5 * spread)


def test_features_and_uncertainty():
    o, uses = state()
    f = credit.features(o, uses, torch.tensor([8]))
    for i in range(12):
        expected = plain_features(o, uses, 8, i)
        assert f[0, i].tolist() == pytest.approx(expected)
        assert float(credit.uncertainty(TAUGHT, f)[0, i]) == pytest.approx(plain_uncertainty(TAUGHT, expected))
    assert credit.uncertainty(replace(TAUGHT, updates=7), f).unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("updates", "doubt", "expected"),
    [(0, 0.1, 0), (7, 0.1, 0), (8, 0.1, 0), (20, 0.1, 0.2), (32, 0.1, 0.4), (500, 0.7, 0.4), (500, 0.71, 0)],
)
def test_blend(updates, doubt, expected):
    beta = credit.blend(Estimator(updates=updates), torch.tensor([doubt], dtype=torch.float64))
    assert float(beta) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", [Estimator(), TAUGHT, replace(TAUGHT, updates=400), replace(TAUGHT, error=4.0)])
def test_keep_scores_blend_two_rankings(estimator):
    o, uses = state(n=20, seed=2)
    uses[0, 7], o.peak[0, 7] = 1, 0.9  # strong though never used again
    scores, beta = credit.mixed(estimator, o, uses, torch.tensor([8]))
    candidates = [i for i in range(20) if o.evictable[0, i]]
    f = {i: plain_features(o, uses, 8, i) for i in candidates}
    doubt = sum(plain_uncertainty(estimator, f[i]) for i in candidates) / len(candidates)
    open_ = estimator.updates >= 8 and doubt <= 0.70
    expected_beta = 0.4 * min(1, (estimator.updates - 8) / 24) if open_ else 0.0
    assert float(beta) == pytest.approx(expected_beta)

    def value(i):
        linear = estimator.bias + sum(w * x for w, x in zip(estimator.weights, f[i], strict=True))
        strong = int(uses[0, i]) <= 1 and max(float(o.current[0, i]), float(o.peak[0, i])) >= 0.70
        return linear - 0.2 * plain_uncertainty(estimator, f[i]) + 0.25 * strong

    def last_use(i):
        return int(o.last_access[0, i]), int(o.inserted[0, i]), i

    by_credit = sorted(candidates, key=lambda i: (value(i), *last_use(i)))
    by_use = sorted(candidates, key=last_use)
    for i in candidates:
        expected = expected_beta * by_credit.index(i) + (1 - expected_beta) * by_use.index(i)
        assert float(scores[0, 0, i]) == pytest.approx(expected / (len(candidates) - 1))


def test_targets_share_the_fall_by_attention():
    blamed = credit.targets(torch.tensor([0.1, 0.3]), [-1.0, -2.0], [-2.0, -3.0, -4.0])
    assert blamed.tolist() == pytest.approx([1.5 * 0.25, 1.5 * 0.75])
    assert credit.targets(torch.zeros(4), [-1.0], [-3.0]).tolist() == pytest.approx([0.5] * 4)
    assert credit.targets(torch.ones(2), [-1.0], [-0.5]).tolist() == pytest.approx([-0.25] * 2)  # better without them
    assert credit.targets(torch.ones(2), [-1.0], [-1.0029]) is None
    assert credit.targets(torch.ones(2), [], [-1.0]) is None
    assert credit.targets(torch.ones(2), [-1.0], []) is None


def test_update_takes_one_step_per_token_and_counts_one_event():
    f = torch.tensor([[0.2, 0.4, 0.5, 0.1], [0.9, 0.8, 0.2, 1.0]], dtype=torch.float64)
    new = credit.update(TAUGHT, f, torch.tensor([0.05, 9.0], dtype=torch.float64))
    theta = torch.tensor([*TAUGHT.weights, TAUGHT.bias], dtype=torch.float64)
    rows, rate = torch.cat([f, torch.ones(2, 1)], 1), 0.08 / math.sqrt(21)
    first = 0.05 - theta @ rows[0]
    theta = theta + rate * first * rows[0]
    theta = theta + rate * 1.0 * rows[1]  # an error of about 8 is clipped
    assert [*new.weights, new.bias] == pytest.approx(theta.tolist())
    assert new.error == pytest.approx(0.92 * TAUGHT.error + 0.08 * (float(first) ** 2 + 1) / 2)
    for k in range(4):
        mean = 0.95 * TAUGHT.mean[k] + 0.05 * float(f[:, k].mean())
        spread = sum((x - mean) ** 2 for x in f[:, k].tolist()) / 2
        assert new.mean[k] == pytest.approx(mean)
        assert new.variance[k] == pytest.approx(0.95 * TAUGHT.variance[k] + 0.05 * spread)
    assert new.updates == 21


def test_learning_the_same_lesson_shrinks_its_error():
    f = torch.rand(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    e = Estimator()
    for _ in range(500):
        e = credit.update(e, f, torch.full((3,), 0.2, dtype=torch.float64))
    before, after = (float((credit.credit(x, f) - 0.2).square().mean()) for x in (Estimator(), e))
    assert after < before / 10


LRU = Condition("lru", 32, 0.1, 0.1)


def answers(given, estimator=None, tokens=40, condition=LRU):
    return credit.run(model(), given, condition, max_new_tokens=tokens, stop_ids=[2], estimator=estimator)


@pytest.mark.parametrize("reading", ["as_run", "as_described"])
def test_an_untaught_estimator_answers_as_protected_lru(reading):
    condition = replace(LRU, reading=reading)
    given = prompts(70, 61)
    ours, learned = answers(given, condition=condition)
    theirs = generate(model(), given, [condition], max_new_tokens=40, stop_ids=[2])
    for mine, [row] in zip(ours, theirs, strict=True):
        assert learned.updates < 9
        assert mine.gate_open_count == 0
        assert mine.tokens == row.tokens
        assert mine.eviction_count == row.evicted
        assert mine.policy_call_count == row.policy_calls == mine.gate_fallback_count


def test_a_confident_estimator_opens_the_gate_and_is_heard():
    sure = replace(TAUGHT, updates=400, error=0.01, weights=(5.0, 5.0, -5.0, -5.0), variance=(1.0,) * 4)
    given = prompts(70, 61)
    ours, learned = answers(given, sure)
    assert sum(a.gate_open_count for a in ours) > 0
    assert learned.updates > 400
    kept = generate(model(), given, [LRU], max_new_tokens=40, stop_ids=[2])
    assert any(a.tokens != row[0].tokens for a, row in zip(ours, kept, strict=True))


def test_what_one_answer_teaches_serves_the_next():
    given = prompts(70, 61, 66)
    together, learned = answers(given)
    e = None
    for prompt, expected in zip(given, together, strict=True):
        [alone], e = answers([prompt], e)
        assert alone == expected
    assert e == learned
    assert learned.updates > 0
    assert learned != Estimator()


def test_step_zero_teaches_nothing_and_an_answer_of_one_token_neither():
    [answer], e = answers(prompts(70), tokens=5)
    assert answer.policy_call_count == 1
    assert e == Estimator()


def test_it_blends_with_lru_alone():
    with pytest.raises(InputError, match="blends with lru, got 'h2o'"):
        answers(prompts(70), condition=Condition("h2o", 32))


def test_the_shipped_estimator_is_the_embedded_models(tmp_path):
    read = json.loads((models.ROOT / credit.EMBEDDED).read_text())
    assert read["model"] == models.checkpoint_hash(models.EMBEDDED)
    e = credit.load()
    assert e.updates > 0
    assert e.weights != Estimator().weights
    with pytest.raises(InputError, match="no estimator at"):
        credit.load(tmp_path / "none.json")
    Path(tmp_path / "bad.json").write_text("[]")
    with pytest.raises(InputError, match="holds no estimator"):
        credit.load(tmp_path / "bad.json")
