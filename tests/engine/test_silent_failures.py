"""Failures that other libraries do not report to their users; here they are provoked, and refused or impossible."""

from dataclasses import replace
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
from kvrepro.engine.condition import Condition
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy
from kvrepro.engine.regime import DecodeCap, Prefill, SharedCap
from kvrepro.engine.usable import usable
from kvrepro.errors import InputError
from kvrepro.experiment import models

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


# ---- 1. only the first item is compressed


@pytest.mark.parametrize("regime", REGIMES)
def test_every_item_of_every_call_is_compressed(regime):
    model, prompts = tiny_model("llama"), tiny_prompts(60, 50, 60, 55, 50)
    for _ in range(2):
        for row in answers(prompts, [cut("snapkv", regime), cut("streaming_llm", regime)], model, batch_rows=3):
            for g in row:
                assert g.policy_calls >= 1
                last = {"decode cap": 20 + (NEW - 1) % 2, "per step": 20}.get(regime, 20 + NEW - 1)
                assert g.kept == [last] * 3
                assert g.bytes_held < 0.6 * g.bytes_full


def test_nothing_of_one_call_is_left_for_the_next():
    model, prompts = tiny_model("llama"), tiny_prompts(60, 50)
    full = [g.tokens for [g] in answers(prompts, [Condition()], model)]
    answers(prompts, [cut(regime=r) for r in REGIMES], model)
    assert [g.tokens for [g] in answers(prompts, [Condition()], model)] == full
    assert model.config._attn_implementation == "eager"
    assert not model._forward_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- 2. a recent budget of 0 keeps everything, as [-0:] does


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv", "tova", "h2o_online", "scissorhands", "quest"])
def test_nothing_recent_protected_evicts_as_much(policy, regime):
    parameters = CATALOGUE[policy].parameters
    none = tuple((k, v) for k, v in (("recent", 0), ("sinks", 0), ("share", 0.0)) if k in parameters)
    window = (("window", 4),) if parameters.get("window", 1) > 1 else ()
    [[g]] = answers(tiny_prompts(60), [cut(policy, regime, switches=window + none)], kept_sets=True)
    for layer in g.kept_sets:
        assert layer.sum(1).tolist() == [20, 20]
    assert 60 + NEW - 1 - g.evicted <= 20 + NEW - 1


def test_no_queries_are_asked_for_by_0():
    from observations import observation

    o = observation(window=4)
    assert o.last(0).queries.shape[2] == o.last(0).query_positions.shape[1] == 0
    assert o.last(9).queries.shape[2] == 4
    with pytest.raises(InputError, match="window 0 for SnapKV: "):
        answers(tiny_prompts(60), [cut(switches=(("window", 0),))])


# ---- 3. the kept count is rounded to 0


@pytest.mark.parametrize("regime", REGIMES)
def test_a_share_that_keeps_nothing_is_refused(regime):
    with pytest.raises(InputError, match=r"budget 0.01 of 60 tokens keeps 0: raise the share"):
        answers(tiny_prompts(60), [cut("k_norm", regime, budget=0.01)])


def test_a_share_that_keeps_nothing_of_the_first_chunk_is_refused():
    c = cut("k_norm", "chunked", budget=0.05, when="every_chunk")
    with pytest.raises(InputError, match="budget 0.05 of 16 tokens keeps 0: raise the share"):
        answers(tiny_prompts(60), [c])


def test_heads_and_layers_that_keep_nothing_still_answer(monkeypatch):
    """Budgets per head may give a head 0 tokens; it then sees only the new tokens."""

    def starved(scores, protected, budget):
        counts = budget[:, None].repeat(1, scores.shape[1])
        counts[:, 0], counts[:, 1] = 0, 2 * budget
        return counts

    policy = Policy("Starved", "tests", lambda o: o.positions.float(), allocate=starved, budget="per head")
    monkeypatch.setitem(CATALOGUE, "starved", policy)
    conditions = [cut("starved", regime) for regime in REGIMES]
    physical = answers(tiny_prompts(60), conditions, kept_sets=True)[0]
    masked = answers(tiny_prompts(60), [replace(c, execution="masked") for c in conditions], kept_sets=True)[0]
    for a, b in zip(physical, masked, strict=True):
        assert a.tokens == b.tokens
        assert [layer.sum(1).tolist() for layer in a.kept_sets] == [[0, 40]] * 3


# ---- 4. budgets of 512 and 4096 give equal results, and nobody notices that neither evicted


@pytest.mark.parametrize("regime", ["prefill", "chunked", "offline"])
def test_a_budget_that_nothing_exceeds_is_refused(regime):
    for budget in (60, 61, 4096):
        words = f"budget {budget} >= 60 tokens to compress: nothing leaves"
        with pytest.raises(InputError, match=words):
            answers(tiny_prompts(60), [cut(regime=regime, budget=budget)])


@pytest.mark.parametrize("regime", ["prefill", "chunked", "decode cap"])
def test_a_budget_beyond_a_sliding_window_is_refused_or_seen(regime):
    model = architecture("mistral")  # looks back 32 tokens
    if regime == "decode cap":
        [[g]] = answers(tiny_prompts(60), [cut("streaming_llm", regime, budget=40)], model)
        assert (g.policy_calls, g.evicted) == (0, 0)
    else:
        message = r"budget 40 >= 31 tokens to compress: nothing leaves.* slides holds 31 of 60 tokens"
        with pytest.raises(InputError, match=message):
            answers(tiny_prompts(60), [cut("streaming_llm", regime, budget=40)], model)
    [[g]] = answers(tiny_prompts(60), [cut("streaming_llm", regime, budget=0.5)], model)
    assert len(g.kept_positions) == 15
    assert g.evicted > 0


@pytest.mark.parametrize("regime", ["decode cap", "per step"])
def test_a_cap_that_is_never_met_says_so(regime):
    small, large = (cut(regime=regime, budget=budget) for budget in (100, 400))
    [[a, b, c]] = answers(tiny_prompts(60), [small, large, cut(regime=regime)])
    assert a.tokens == b.tokens
    assert (a.policy_calls, a.evicted) == (b.policy_calls, b.evicted) == (0, 0)
    assert c.policy_calls > 0
    assert c.evicted > 0


@pytest.mark.parametrize(
    "policy", [n for n, p in CATALOGUE.items() if p.frees and not p.shared and "duo" not in n and "tri" not in n]
)
def test_every_step_of_the_budget_changes_what_is_kept(policy):
    conditions = [cut(policy, budget=n) for n in (12, 13, 24, 48)]
    row = answers(tiny_prompts(60), conditions)[0]
    assert len({g.kept_positions_hash for g in row}) == 4
    assert [sum(g.kept) for g in row] == sorted(sum(g.kept) for g in row)
    assert row[0].evicted > row[2].evicted > row[3].evicted


# ---- 5. wrong positions after an eviction


@pytest.mark.parametrize("regime", REGIMES)
def test_new_tokens_stand_where_they_would_without_eviction(regime, monkeypatch):
    model, positions = usable(tiny_model("llama")), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **i: (positions.append(i["position_ids"].tolist()), forward(**i))[1])
    answers(tiny_prompts(60), [cut(regime=regime)], model)
    assert [p for [row] in positions for p in row] == list(range(60 + NEW - 1))


# ---- 6. the mask is lost with an attention name that no mask function is registered for


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_do_not_depend_on_a_name(implementation):
    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    prompts = tiny_prompts(60, 30)
    conditions = [Condition(), cut()]
    padded = answers(prompts, conditions, model, prompt_rows=2)
    alone = [answers([p], conditions, model)[0] for p in prompts]
    assert [[g.tokens for g in row] for row in padded] == [[g.tokens for g in row] for row in alone]
    assert model.config._attn_implementation == implementation
    ids = torch.tensor([prompts[0]])
    later = ids.clone()
    later[0, -1] = (ids[0, -1] + 1) % 120
    with torch.no_grad():  # causal: a later token changes nothing earlier
        assert torch.equal(model(ids).logits[0, :-1], model(later).logits[0, :-1])


# ---- 7. keys and values are held for every query head


@pytest.mark.parametrize("regime", REGIMES)
def test_bytes_are_those_of_kv_heads(regime):
    [[full, g]] = answers(tiny_prompts(60), [Condition(), cut("streaming_llm", regime)])
    per_token = 3 * 2 * 2 * 8 * 4  # layers, KV heads (of 6 query heads), keys and values, dim, float32
    assert full.bytes_full == g.bytes_full == (60 + NEW - 1) * per_token
    assert full.bytes_held <= 1.1 * full.bytes_full  # positions weigh much beside heads of 8
    assert g.bytes_held <= 1.1 * g.kept[0] * per_token + 500


# ---- 8. a policy falls back to eager attention


@pytest.mark.parametrize("regime", REGIMES)
def test_no_layer_ever_attends_in_another_way(regime, monkeypatch):
    from transformers.models.llama import modeling_llama

    def forbidden(*_, **__):
        raise AssertionError("eager attention")

    model, prompts = usable(tiny_model("llama")), tiny_prompts(60)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", forbidden)
    names = [p for p in CATALOGUE if regime in CATALOGUE[p].regimes and p[:3] not in ("duo", "tri")]
    conditions = [cut(p, regime) for p in names]
    assert len(answers(prompts, conditions, model)[0]) == len(conditions)
    with pytest.raises(AssertionError, match="eager attention"):
        model(torch.tensor(prompts))


def test_a_backend_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="backend 'flash'"):
        answers(tiny_prompts(60), [cut()], backend="flash")


# ---- 9. template or tokenizer of another model


@pytest.mark.parametrize(("strange", "words"), [(120, "token id 120 outside"), (-1, "token id -1 outside")])
def test_a_foreign_tokenizers_ids_are_refused(strange, words):
    with pytest.raises(InputError, match=f"{words} the model's vocabulary of 120: other tokenizer"):
        answers([tiny_prompts(60)[0], [5] * 30 + [strange] + [7] * 30], [cut()])


def test_a_checkpoint_without_template_or_tokenizer_is_refused(tmp_path):
    import checkpoint

    folder = checkpoint.save(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template"):
        models.load(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        models.load(str(folder))


# ---- 10. a failed generation is scored as an answer


@pytest.mark.parametrize("condition", [Condition(), Condition("lru", 12, SharedCap())])
def test_logits_that_are_no_numbers_are_no_answer(condition):
    model = tiny_model("llama")
    model.lm_head.weight.data[7, 3] = torch.nan
    with pytest.raises(ArithmeticError, match=f"{condition.label}: NaN at new token 1"):
        answers(tiny_prompts(60), [condition], model)


@pytest.mark.parametrize("foreign", [{"until": "question"}, {"fair": 1.0}, {"spans": ("a",)}, {"chunk": 16}])
def test_the_shared_cap_has_no_settings_of_other_regimes(foreign):
    with pytest.raises(TypeError, match=next(iter(foreign))):
        SharedCap(**foreign)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda o: o.values.float().norm(dim=-1).mean(1), "a tensor of shape"),
        (lambda o: None, "returned NoneType"),
        (lambda o: o.attention.mean((2, 3)), "attention without queries"),
    ],
)
def test_a_scorer_of_the_wrong_kind_is_named(monkeypatch, score, words):
    monkeypatch.setitem(CATALOGUE, "mine", Policy("Mine", "a test", score))
    model, [prompt] = tiny_model(), tiny_prompts(40)
    with pytest.raises(InputError, match=words):
        engine.generate(model, [prompt], [Condition("mine", 10, Prefill())], max_new_tokens=2, stop_ids=())


# ---- 11. a failure that reaches rows which it does not concern


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


def half_more(scores, protected, budget):
    return (budget[:, None].expand(scores.shape[:2]) * 3) // 2


def half_more_across(scores, protected, budget):
    return scores, [half_more(s, p, budget) for s, p in zip(scores, protected, strict=True)]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("way", [{"allocate": half_more}, {"across": half_more_across}])
def test_a_policy_that_keeps_more_than_its_budget_costs_its_own_rows(monkeypatch, way, regime):
    monkeypatch.setitem(CATALOGUE, "greedy", Policy("Greedy", "a test", norm, **way))
    conditions = [cut("k_norm", regime, reading="as_described"), cut("greedy", regime)]
    prompts = tiny_prompts(60, 50)
    for row, [healthy] in zip(
        answers(prompts, conditions, errors="return"), answers(prompts, conditions[:1]), strict=True
    ):
        assert row[0].tokens == healthy.tokens
        message = "Greedy's counts sum to 180 tokens, more than 6 KV heads of all layers x its budget of 20: lower them"
        assert (type(row[1]), str(row[1])) == (InputError, message)


def test_a_prefix_that_fails_gives_its_own_error(monkeypatch):
    def fails(o):
        raise ValueError(f"{int(o.seen[0])} tokens")

    monkeypatch.setitem(CATALOGUE, "fails", Policy("Fails", "tests", fails))
    rows = answers(tiny_prompts(60, 50), [cut("fails", "offline", reading="as_run")], errors="return")
    assert [str(error) for [error] in rows] == ["60 tokens", "50 tokens"]


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


def overwrite(*shown):
    """Overwrite everything that a function is shown, as a careless one may."""
    for value in shown:
        if isinstance(value, Observation):
            overwrite(value.keys, value.values, value.queries, value.positions, value.seen, *value.sums.values())
        elif isinstance(value, list):
            overwrite(*value)
        elif value is not None:
            value.fill_(1)


def norm(o):
    return o.keys.float().norm(dim=-1)


@wraps(CATALOGUE["k_norm"].score)
def named_like_ours(o):
    norms = norm(o)
    overwrite(o)
    return norms


def scores_and_writes(o):
    return named_like_ours(o)


def allocates_and_writes(scores, protected, budget, o):
    counts = allocate.uniform(scores, protected, budget).clone()
    overwrite(scores, protected, budget, o)
    return counts


def shields_and_writes(o, scores, budget, guarded):
    overwrite(o, scores, budget, guarded)
    return torch.zeros_like(guarded)


def refines_and_writes(o, scores, counts, protected):
    refined = scores.clone()
    overwrite(o, scores, counts, protected)
    return refined, torch.zeros_like(protected)


def across_and_writes(scores, protected, budget, summaries, observations):
    returned = [s.clone() for s in scores]
    counts = [allocate.uniform(scores[0], protected[0], budget).clone()] * len(scores)
    overwrite(scores, protected, budget, summaries, observations)
    return returned, counts


CARELESS = {
    "score": Policy("Writes", "a reader", scores_and_writes),
    "score, wrapped": Policy("Writes", "a reader", named_like_ours),
    "score, partial": Policy("Writes", "a reader", partial(scores_and_writes)),
    "allocate": Policy("Writes", "a reader", CATALOGUE["k_norm"].score, allocate=allocates_and_writes),
    "shield": Policy("Writes", "a reader", norm, shield=shields_and_writes),
    "refine": Policy("Writes", "a reader", norm, refine=refines_and_writes),
    "across": Policy("Writes", "a reader", norm, across=across_and_writes),
    "summary": Policy("Writes", "a reader", norm, across=across_and_writes, summary=lambda o: overwrite(o)),
}


@cache
def undisturbed(regime):
    """Conditions, and their answers without a careless function among them."""
    conditions = [Condition(), Condition("k_norm", 24, regime), Condition("h2o", 24, regime)]
    [expected] = answers(tiny_prompts(70), conditions, kept_sets=True)
    return conditions, expected


@pytest.mark.parametrize("part", CARELESS)
@pytest.mark.parametrize("regime", [Prefill(), DecodeCap(4)], ids=lambda r: r.name)
def test_what_a_readers_function_writes_in_place_reaches_no_other_condition(regime, part, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "writes", CARELESS[part])
    others, expected = undisturbed(regime)
    for at in (0, 1, 3):
        mixed = [*others[:at], Condition("writes", 24, regime), *others[at:]]
        generations = answers(tiny_prompts(70), mixed, kept_sets=True)[0]
        careless = generations.pop(at)
        assert careless.kept == expected[2].kept
        for answer, before in zip(generations, expected, strict=True):
            assert (answer.tokens, answer.kept_positions_hash) == (before.tokens, before.kept_positions_hash)
