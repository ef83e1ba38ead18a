"""The online credit estimator against its formulas in plain Python, its run against a slow loop and protected LRU."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from slow_shared import Token, protected
from tiny import model, prompts

from kvrepro.chapters.protection import credit
from kvrepro.chapters.protection.credit import Estimator
from kvrepro.engine.condition import Condition, SharedCap
from kvrepro.engine.generate import generate
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import find

TAUGHT = Estimator((-0.4, -0.2, 0.35, 0.6), 0.1, 20, 0.09, (0.4, 0.5, 0.6, 0.3), (0.1, 0.2, 0.15, 0.05))
BUDGET = torch.tensor([8])


def state(n=12, step=9, seed=1):
    """(observation, uses, evictable) of a row in mid-answer: random uses, ages and attention; four tokens protected."""
    g = torch.Generator().manual_seed(seed)
    entered = torch.randint(0, step, (1, 1, n), generator=g)
    used = (entered + torch.randint(0, 3, (1, 1, n), generator=g)).clamp(max=step)
    latest, largest = torch.rand(2, 1, 1, n, generator=g)
    nothing = torch.zeros(1, 1, n, 0)
    given = {"keys": nothing, "values": nothing, "queries": nothing, "positions": torch.arange(n).view(1, 1, n) * 3}
    given |= {"query_positions": torch.zeros(1, 0), "seen": torch.tensor([3 * n]), "scaling": 1.0, "step": step}
    sums = {"last_use": used, "entered": entered, "latest": latest, "largest": largest}
    o = Observation(layer=0, layers=1, sums=sums, **given)
    evictable = torch.ones(1, n, dtype=torch.bool)
    evictable[0, [0, 1, n - 2, n - 1]] = False
    return o, torch.randint(1, 9, (1, n), generator=g), evictable


def tokens_of(o):
    """Its columns as the slow loop's tokens."""
    columns = (o.sums[name][0, 0].tolist() for name in ("last_use", "entered", "latest", "largest"))
    return [Token(*values, 0.0, 0.0) for values in zip(*columns, strict=True)]


def plain_features(x, uses, t, budget):
    d = math.log(1 + 4 * budget)
    return [min(1, math.log(1 + t - x.L) / d), min(1, math.log(1 + t - x.I) / d), uses / (uses + 4), min(1, x.a)]


def plain_uncertainty(e, f):
    if e.updates < 8:
        return 1.0
    spread = sum((x - m) ** 2 / (v + 1e-4) for x, m, v in zip(f, e.mean, e.variance, strict=True)) / 4
    return math.sqrt(e.error) * (1 + 0.5 * spread)


def plain_scores(e, tokens, uses, pool, t, budget):
    """(keep score of each position of `pool`, beta), positions ordered as decimal strings."""
    f = {i: plain_features(tokens[i], uses[i], t, budget) for i in pool}
    doubt = sum(plain_uncertainty(e, f[i]) for i in pool) / len(pool)
    beta = 0.4 * min(1, (e.updates - 8) / 24) if e.updates >= 8 and doubt <= 0.70 else 0.0

    def value(i):
        strong = uses[i] <= 1 and max(tokens[i].a, tokens[i].M) >= 0.70
        linear = e.bias + sum(w * x for w, x in zip(e.weights, f[i], strict=True))
        return linear - 0.2 * plain_uncertainty(e, f[i]) + 0.25 * strong

    def last_use(i):
        return tokens[i].L, tokens[i].I, str(i)

    by_credit = sorted(pool, key=lambda i: (value(i), *last_use(i)))
    by_use = sorted(pool, key=last_use)
    places = {i: beta * by_credit.index(i) + (1 - beta) * by_use.index(i) for i in pool}
    return {i: place / (len(pool) - 1) for i, place in places.items()}, beta


def test_features_and_uncertainty():
    o, uses, _ = state()
    f = credit.features(o, uses, BUDGET)
    for i, x in enumerate(tokens_of(o)):
        expected = plain_features(x, int(uses[0, i]), 9, 8)
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
    o, uses, evictable = state(n=20, seed=2)
    uses[0, 7], o.sums["largest"][0, 0, 7] = 1, 0.9  # strong though never used again
    o.sums["latest"][0, 0, 8:10] = 0.25  # twins: their last use decides, then their positions, "27" before "9"
    for name in ("entered", "last_use"):
        o.sums[name][0, 0, [3, 9]] = 4
    scores, beta = credit.mixed(estimator, o, uses, BUDGET, evictable)
    at = o.positions[0, 0].tolist()
    tokens, counts = dict(zip(at, tokens_of(o), strict=True)), dict(zip(at, uses[0].tolist(), strict=True))
    pool = [i for i, free in zip(at, evictable[0].tolist(), strict=True) if free]
    expected, expected_beta = plain_scores(estimator, tokens, counts, pool, 9, 8)
    assert float(beta) == pytest.approx(expected_beta)
    for i in pool:
        assert float(scores[0, 0, at.index(i)]) == pytest.approx(expected[i])


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


LRU = Condition("lru", 32, SharedCap(), prefix=0.1, suffix=0.1)
SURE = replace(TAUGHT, updates=400, error=0.01, weights=(5.0, 5.0, -5.0, -5.0), variance=(1.0,) * 4)


def answers(given, estimator=None, tokens=40, condition=LRU):
    return credit.run(model(), given, condition, tokens, [2], estimator)


@torch.no_grad()
def slow_answer(net, prompt, c, e, max_new_tokens=40):
    """(tokens, estimator) by dicts, sorts and a masked full cache, as run."""
    reading, n = SimpleNamespace(**find("lru").reading("as_run")), len(prompt)
    out = net(torch.tensor([prompt]), output_attentions=True, use_cache=True)
    logits, cache, p = out.logits[0, -1], out.past_key_values, torch.stack(out.attentions)[:, 0].amax((0, 1, 2))
    state = {i: Token(0, 0, float(a), float(a), 0.0, 0.0) for i, a in enumerate(p)}
    uses, kept, log_p, events, picked = dict.fromkeys(state, 1), set(state), [], [], []

    def evict(t):
        nonlocal kept
        pool = kept - protected(kept, c, reading, n)
        if len(kept) <= c.budget:
            return
        scores, _ = plain_scores(e, state, uses, pool, t, c.budget)
        gone = sorted(pool, key=lambda i: (scores[i], state[i].I, str(i)))[: len(kept) - c.budget]
        f = [plain_features(state[i], uses[i], t, c.budget) for i in sorted(gone)]
        events.append((len(log_p), f, [state[i].a for i in sorted(gone)]))
        kept = kept - set(gone)

    def learn(estimator, due):
        for at, f, a in due:
            target = credit.targets(torch.tensor(a), log_p[max(0, at - 8) : at], log_p[at : at + 6])
            if target is not None:
                estimator = credit.update(estimator, torch.tensor(f, dtype=torch.float64), target)
        return estimator

    evict(0)
    for t in range(1, max_new_tokens + 1):
        picked.append(int(logits.argmax()))
        log_p.append(float(logits.log_softmax(-1).max()))
        e, events = learn(e, [x for x in events if t - x[0] >= 6]), [x for x in events if t - x[0] < 6]
        if picked[-1] == 2:
            break
        position = n + t - 1
        state[position], uses[position], kept = Token(t, t, 0.0, 0.0, 0.0, 0.0), 1, kept | {position}
        if t % 8 == 0:
            evict(t)
        mask = torch.full((1, 1, 1, position + 1), torch.finfo(torch.float32).min)
        mask[..., sorted(kept)] = 0.0
        given = {"attention_mask": mask, "position_ids": torch.tensor([[position]]), "past_key_values": cache}
        out = net(torch.tensor([picked[-1:]]), output_attentions=True, **given)
        logits, a = out.logits[0, -1], torch.stack(out.attentions)[:, 0, :, 0].amax((0, 1)).tolist()
        for i in kept:
            state[i].a, state[i].M = a[i], max(state[i].M, a[i])
            if a[i] > 0.05 * max(a[j] for j in kept):
                state[i].L, uses[i] = t, uses[i] + 1
    return picked, learn(e, events)


def same(a, b):
    """Equal but for rounding, which grows from lesson to lesson."""
    flat = [[*e.weights, e.bias, e.error, *e.mean, *e.variance] for e in (a, b)]
    return a.updates == b.updates and flat[0] == pytest.approx(flat[1], abs=1e-4)


@pytest.mark.parametrize("estimator", [Estimator(), TAUGHT, SURE])
def test_one_after_the_other_is_the_slow_loop(estimator):
    given = prompts(70, 61, 66)
    ours, learned = answers(given, estimator)
    e = estimator
    for prompt, answer in zip(given, ours, strict=True):
        tokens, e = slow_answer(model(), prompt, LRU, e)
        assert answer.tokens == tokens
    assert same(learned, e)
    assert learned.updates > estimator.updates


@pytest.mark.parametrize("reading", ["as_run", "as_described"])
def test_an_untaught_estimator_answers_as_protected_lru(reading):
    condition = replace(LRU, reading=reading)
    given = prompts(70, 61)
    ours, learned = answers(given, condition=condition)
    theirs = generate(model(), given, [condition], max_new_tokens=40, stop_ids=[2])
    assert learned.updates <= 8
    for answer, [row] in zip(ours, theirs, strict=True):
        for field in ("tokens", "evicted", "policy_calls", "kept_positions"):
            assert getattr(answer, field) == getattr(row, field)


def test_what_one_answer_teaches_serves_the_next():
    given = prompts(70, 61, 66)
    together, learned = answers(given)
    e = None
    for prompt, expected in zip(given, together, strict=True):
        [alone], e = answers([prompt], e)
        assert alone.tokens == expected.tokens
    assert same(e, learned)
    assert learned.updates > 0
