"""Retained importance against loops over the model's own attention; the mixture's closed forms against simulation."""

import io
import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import checkpoint
import few_claims
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from observations import observation

from kvrepro.chapters.fragility import members, policies, retention, study
from kvrepro.chapters.fragility.members import Mixture
from kvrepro.chapters.fragility.retention import Setting
from kvrepro.chapters.fragility.study import DEFENSIVE, POLICIES, Settings
from kvrepro.engine import policy
from kvrepro.engine.condition import Prefill, Prompt
from kvrepro.engine.score import keys, window
from kvrepro.engine.score.window import pooled
from kvrepro.errors import InputError
from kvrepro.experiment import claims, data, judge, models, stats
from kvrepro.experiment.members import Language, Table
from kvrepro.experiment.verdict import Verdicts
from kvrepro.item import Item

IDS = torch.randint(3, 120, (60,), generator=torch.Generator(device="cpu").manual_seed(5), device="cpu").tolist()
PROMPT = Prompt(IDS, {"question": list(range(50, 58))})
ANSWER = [7, 9, 40, 3, 88]
OURS = Setting()
SHORT = Setting(window=8, single=3)
BOOK = claims.load_claims("fragility")
BY_ID = {claim["id"]: claim for claim in BOOK["claims"]}


@pytest.fixture(scope="module")
def eager():
    """Model, its attention [layers][heads, tokens, tokens] by Hugging Face, values and output weights per layer."""
    model = tiny.model("qwen2")
    ids = torch.tensor([[*IDS, *ANSWER[:-1]]])
    with torch.no_grad():
        out = model(ids, output_attentions=True, use_cache=True)
    p = [a[0].double().cpu().numpy() for a in out.attentions]
    v = [layer.values[0].double().cpu().numpy() for layer in out.past_key_values.layers]  # noqa: PD011
    w = [layer.self_attn.o_proj.weight.detach().double().cpu().numpy() for layer in model.model.layers]
    return model, p, v, w


def transcription(p, v, w, rule: str, s, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums [layers, steps, kept and all] and shares of ties [layers] in plain loops: 6 query heads on 2 KV heads of 8
    dimensions."""
    steps = range(len(IDS) - 1, len(IDS) + len(ANSWER) - 1)
    past = range(end - s.window, end)
    sums, tied = np.zeros((len(p), len(steps), 2)), np.zeros(len(p))
    for layer, (attention, values, weight) in enumerate(zip(p, v, w, strict=True)):
        for kv in range(2):
            group = range(3 * kv, 3 * kv + 3)
            norm = {
                h: np.array(
                    [np.abs(weight[:, 8 * h : 8 * h + 8] @ values[kv, i]).sum() for i in range(values.shape[1])]
                )
                for h in group
            }
            importance = {h: attention[h] * norm[h] for h in group}
            ranked = importance if s.prior == "importance" else {h: attention[h] for h in group}
            per_token = []
            for i in range(end):
                if rule == "single":
                    per_token.append(np.mean([ranked[h][past[s.single - 1], i] for h in group]))
                elif rule in ("mean", "mean with prior"):
                    per_token.append(np.mean([ranked[h][t, i] for h in group for t in past]))
                else:
                    per_token.append(max(ranked[h][t, i] for h in group for t in past))
            if rule in ("mean with prior", "defensive"):
                prior = sum(per_token) / end
                per_token = [max(x, prior) for x in per_token]
            if s.prior == "attention":
                per_token = [x * np.mean([norm[h][i] for h in group]) for i, x in enumerate(per_token)]
            order = sorted(range(end), key=lambda i: (i >= end - s.window, per_token[i], i), reverse=True)
            kept, left = order[: int(s.share * end)], order[int(s.share * end) :]
            chosen = [i for i in kept if i < end - s.window]
            tied[layer] += sum(per_token[i] == per_token[left[0]] for i in chosen) / (2 * len(kept))
            for h in group:
                for n, t in enumerate(steps):
                    sums[layer, n] += importance[h][t, kept].sum(), importance[h][t, :end].sum()
    return sums, tied


@pytest.mark.parametrize("changed", [{}, {"until": ""}, {"prior": "attention"}])
def test_shares_equal_a_transcription_in_loops(eager, changed):
    model, p, v, w = eager
    s = replace(SHORT, **changed)
    curves, summary = retention.retained(model, PROMPT, ANSWER, {"default": s}, 1).values()
    for rule in retention.RULES:
        parts, tied = transcription(p, v, w, rule, s, 50 if s.until else 60)
        of_layers = summary[summary.rule == rule].sort_values("layer")
        assert of_layers.tied.to_numpy() == pytest.approx(tied)
        assert tied.any() == ("prior" not in changed and rule in ("mean with prior", "defensive"))
        want = parts[:, :, 0] / parts[:, :, 1]
        assert of_layers.worst.to_numpy() == pytest.approx(want.min(1), abs=2e-5)
        assert of_layers["mean"].to_numpy() == pytest.approx(want.mean(1), abs=2e-5)
        assert of_layers.below.to_numpy() == pytest.approx((want < 0.5).mean(1))
        assert set(of_layers.steps) == {5}
        curve = curves[curves.rule == rule].sort_values("step").retained
        assert curve.to_numpy() == pytest.approx(want[1], abs=2e-5)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_gives_shares_between_0_and_1(name):
    curves, summary = retention.retained(tiny.architecture(name), PROMPT, ANSWER, {"default": SHORT}).values()
    assert curves.retained.between(0, 1 + 1e-5).all()
    assert summary[["worst", "mean", "below", "tied"]].apply(lambda shares: shares.between(0, 1 + 1e-5)).all(axis=None)


def test_keeping_everything_retains_everything_and_later_tokens_count_where_asked(eager):
    settings = {"default": replace(SHORT, share=1.0), "half": SHORT, "later": replace(SHORT, later=True)}
    curves, summary = retention.retained(eager[0], PROMPT, ANSWER, settings).values()
    assert curves.retained.to_numpy() == pytest.approx(1.0, abs=1e-5)
    wide = summary[summary.layer == 0].pivot_table(index="rule", columns="setting", values="mean")
    assert (wide.later > wide.half)[list(retention.RULES[1:])].all()


def test_one_pass_of_many_settings_equals_a_pass_each(eager):
    every = list(retention.variants(SHORT).items())
    many = dict(every[:-4:9] + every[-4:])
    assert [s.single for name, s in every if name.startswith(retention.TOKEN)] == [1, 2, 6, 8]
    together = retention.retained(eager[0], PROMPT, ANSWER, many, 1)["summary"]
    assert set(together[together.layer != 1].setting) == {"default"}
    together = together[together.layer == 1].set_index("setting")
    for name, s in many.items():
        rules = retention.RULES[:1] if name.startswith(retention.TOKEN) else retention.RULES[1:]
        of_setting = together.loc[[name]]
        of_setting = of_setting[of_setting.rule.isin(rules)].reset_index(drop=True)
        alone = retention.retained(eager[0], PROMPT, ANSWER, {"default": s}, 1)["summary"]
        alone = alone[(alone.layer == 1) & alone.rule.isin(rules)].reset_index(drop=True)
        columns = ["rule", "worst", "mean", "below", "tied"]
        pd.testing.assert_frame_equal(of_setting[columns], alone[columns], check_exact=False, rtol=1e-4)


P = torch.rand(2, 3, 8, 40, generator=torch.Generator(device="cpu").manual_seed(1), device="cpu").softmax(-1) ** 6
NORM = 0.5 + torch.rand(2, 3, 40, generator=torch.Generator(device="cpu").manual_seed(2), device="cpu")


def test_the_prior_changes_no_order_above_it_and_ties_all_below():
    largest, defensive = (retention.score(P, NORM, rule, SHORT) for rule in ("max", "defensive"))
    prior = largest.mean(-1, keepdim=True)
    torch.testing.assert_close(defensive, torch.where(largest > prior, largest, prior.expand_as(largest)))
    assert ((largest < prior).sum(-1) > 10).all()


def test_algorithm_2_is_the_catalogues_defensive_kv():
    o = observation(batch=1, kv_heads=2, group=3, window=8, tokens=40, hidden=20)
    expected = window.defensive_kv(o)[0]
    norm = retention.norm_of(o.values[0], o.output)  # noqa: PD011
    s = replace(SHORT, pool="average", prior="attention")
    torch.testing.assert_close(
        retention.score(pooled(o.attention[0], s.pool, retention.KERNEL), norm, "defensive", s),
        expected,
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_norm_against_its_formula():
    values, output = torch.randn(2, 300, 4), torch.randn(6, 4, 5)
    norm = retention.norm_of(values, output)
    assert norm[1, 1, 299] == pytest.approx(float((values[1, 299] @ output[4]).abs().sum()), rel=1e-5)


@given(st.booleans(), st.integers(3, 9))
def test_budget_is_met_and_the_window_stays_where_it_must(forced, tenths):
    s = replace(SHORT, forced=forced, share=tenths / 10)
    scores = torch.ones(6, 40)
    scores[:, 4] = 2.0
    other = torch.rand(6, 40)
    kept, alone = retention.keep(torch.stack([scores, other]), s)
    assert torch.equal(alone, retention.keep(other[None], s)[0])  # a rule does not see the others
    assert int(kept.sum()) == int(alone.sum()) == 6 * int(s.share * 40)
    assert kept[:, 4].all()
    assert kept[:, -8:].all() or not forced
    assert forced or not kept[:, [3, 2]].any()  # the oldest are the last to be chosen


def test_a_history_that_is_missing_or_short_is_refused_before_anything_runs():
    for wrong, message in (({"until": "nowhere"}, "no span 'nowhere'"), ({"window": 30}, "fewer than the 30")):
        with pytest.raises(InputError, match=message):
            retention.retained(None, PROMPT, ANSWER, {"x": replace(SHORT, **wrong)})


def test_combinations_are_all_different_and_named_for_what_they_change():
    for base in (OURS, replace(OURS, norm="none", later=True), replace(OURS, until="evidence")):
        settings = {name: s for name, s in retention.variants(base).items() if s.single == base.single}
        assert settings[retention.DEFAULT] == base
        assert len(set(settings.values())) == len(settings) == 128 + (base.until == "evidence")
        for name, s in settings.items():
            changed = [retention.OPEN[f][v] for f, v in vars(s).items() if v != getattr(base, f)]
            assert set(name.split(", ")) == set(changed or [retention.DEFAULT])


def test_defensive_r_kv_is_r_kv_with_another_aggregation():
    o = observation(batch=1, kv_heads=2, group=3, window=1, tokens=40, hidden=20)
    plain, defensive = keys.r_kv(o, mix=1.0, kernel=1), policies.r_kv(o, mix=1.0, kernel=1)  # one query: mean = largest
    prior = plain.sum(-1, keepdim=True) / 39
    torch.testing.assert_close(defensive[..., :-1], torch.maximum(plain, prior)[..., :-1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policies.r_kv(o, mix=0.0), keys.r_kv(o, mix=0.0), rtol=1e-4, atol=1e-5)


# ---- the mixture

MIXTURES = st.builds(
    Mixture, eps=st.floats(0.002, 0.4), low=st.floats(0.01, 0.3), spike=st.floats(0.3, 0.8), risk=st.floats(0.85, 3)
)


def test_closed_forms_meet_the_simulation():
    x = Mixture(eps=0.05, low=0.2, spike=0.5, risk=1.5)
    rng = np.random.default_rng(3)
    high, u = rng.random((40_000, 128)) < x.eps, rng.random((40_000, 128))
    observed = np.where(high, x.spike + (x.risk - x.spike) * u, x.low * u)
    for m in (1, 4, 32, 128):
        for seen, exact in (
            (observed[:, :m].mean(1), members.bias_of_mean(x)),
            (observed[:, :m].max(1), members.bias_of_max(x, m)),
        ):
            e = stats.interval(x.risk - seen)
            assert abs(e.value - exact) <= 2.2 * (e.high - e.value)


@given(MIXTURES, st.integers(2, 64))
def test_theorems_1_and_2(x, m):
    mean, largest = members.bias_of_mean(x), members.bias_of_max(x, m)
    stay = (1 - x.eps) ** m
    bound = x.risk - stay * x.low / 2 - (1 - stay) * (x.spike + x.risk) / 2
    assert 0 < largest <= bound + 1e-12  # theorem 2's bound on the largest
    assert bound < mean  # and its conclusion
    assert mean > 0  # positive, not "a large negative value"
    assert mean <= x.risk - x.low / 2


ATOMS = st.lists(st.integers(0, 40), min_size=1, max_size=3)


@given(ATOMS, ATOMS, st.integers(1, 9), st.integers(2, 4))
def test_theorem_2_for_any_two_parts_in_whole_numbers(low, above, tenths, m):
    """No uniform parts and no closed form: every sequence of m observations, weighed exactly."""
    high, eps = [41 + x for x in above], Fraction(tenths, 10)
    weights = [(x, (1 - eps) / len(low)) for x in low] + [(x, eps / len(high)) for x in high]
    risk, of_max, of_mean = max(high), Fraction(0), Fraction(0)
    for drawn in itertools.product(weights, repeat=m):
        chance = math.prod(weight for _, weight in drawn)
        of_max += chance * max(x for x, _ in drawn)
        of_mean += chance * Fraction(sum(x for x, _ in drawn), m)
    mu_low, mu_high = Fraction(sum(low), len(low)), Fraction(sum(high), len(high))
    assert of_mean == (1 - eps) * mu_low + eps * mu_high  # theorem 1, whatever m
    stay = (1 - eps) ** m
    assert of_max >= stay * mu_low + (1 - stay) * mu_high  # theorem 2's bound
    assert 0 <= risk - of_max < risk - of_mean


@given(MIXTURES)
def test_limits(x):
    assert members.bias_of_max(x, 1) == pytest.approx(members.bias_of_mean(x))
    assert members.bias_of_max(x, 100_000) < 0.02
    tiny_eps = replace(x, eps=1e-9)
    assert members.bias_of_mean(tiny_eps) == pytest.approx(x.risk - x.low / 2, abs=1e-6)


# ---- the study


def test_grid_has_every_condition_once_and_an_own_policy_its_windows(monkeypatch):
    grid = study.grid(Settings(shares=(0.1, 0.2, 0.4)))
    assert len(set(grid)) == len(grid)
    assert all(c.regime == Prefill(until="question") for c in grid)
    assert {(c.policy, c.budget) for c in grid if c.prefix} == {(policy, 0.2) for policy in POLICIES}
    monkeypatch.setitem(policy.OWN, "mine", replace(policy.find("snapkv"), title="Mine"))
    grid = study.grid(Settings(shares=(0.3,), policies=("mine", "defensive_kv")))
    assert {c.prefix for c in grid if c.policy == "mine"} == {0.0, 0.1}
    assert {dict(c.switches)["window"] for c in grid if c.policy == "mine"} == set(study.WINDOWS)
    assert {c.policy for c in grid} == {"full", "mine", "defensive_kv", *study.PLUG_IN, study.R_KV_DEFENSIVE}
    assert {c.budget for c in grid} == {None, 0.3}


def test_what_the_studies_ask():
    loaded = models.load("small-gqa")
    given = {"items": "tinyworld:two_hop,needle", "n_items": 4, "shares": (0.2,), "policies": ("snapkv",)}
    answered, quality = study.observed(loaded, Settings(**given)), study.parts_of(loaded, Settings(**given))
    assert [(part.name, len(part.items)) for part in quality] == [("every", 4)]
    long = [item for item in answered.items if item.task in study.LONG]
    assert min(len(loaded.tokenizer.encode(item.answer)) for item in long) >= 200
    assert len(answered.items) == 4 * (2 + 5)


def test_claims_about_rivals_behind_guards_rest_on_all_items(monkeypatch):
    """C10 compares these three, and twelve items miss their rare gains: the other items run them behind guards too."""
    monkeypatch.setitem(study.SIZES, "quick", {"quality": 4, "more": 2, "needles": 2, "retained": 2})
    settings = Settings(items="tinyworld:two_hop,needle", shares=(0.2, 0.4))
    parts = {part.name: part for part in study.parts_of(models.load("small-gqa"), settings)}
    assert {name: len(part.items) for name, part in parts.items()} == {"every": 2, "middle": 2, study.NEEDLES: 1}
    guarded = [c for c in parts["middle"].conditions if c.prefix]
    assert {(c.policy, c.budget) for c in guarded} == {(name, 0.2) for name in study.GUARDED_RIVALS}
    assert set(guarded) <= set(parts["every"].conditions)  # so that both parts give the same comparison


def synthetic(items: int = 42) -> pd.DataFrame:
    """A grid's rows: the full cache right, critical_ada_kv losing 0.4, the defensive ones 0.1 and 0.05 (as_run 0.3)."""
    rows = []
    losses = {"defensive_kv": 0.1, "layer_defensive_kv": 0.05, "critical_ada_kv": 0.4}
    for c, change in study.grid(Settings(shares=(0.1, 0.2, 0.4))).items():
        for i in range(items):
            loss = 0.0 if c.policy == "full" else losses.get(c.policy, 0.5)
            loss = 0.3 if c.policy in DEFENSIVE and c.reading == "as_run" else loss
            value = 0.9 - loss + 0.01 * (i % 3) * (c.policy != "full")
            row = {"part": "every", "change": change, "item": f"i{i}", "task": "needle", "score": value}
            policy = "r_kv" if c.policy == study.R_KV_DEFENSIVE else c.policy
            rows.append(c.columns() | row | {"policy": policy, "reading": c.reading if policy in DEFENSIVE else "any"})
    return pd.DataFrame(rows).drop_duplicates(["item", "policy", "share", "reading", "change"])


WHOLE = SimpleNamespace(name="m", model=tiny.model("qwen2"))  # without experts


def verdicts(rows: pd.DataFrame | None = None, loaded=WHOLE) -> pd.DataFrame:
    """Verdicts on a grid's rows, or on nothing."""
    return Verdicts("fragility", loaded, Settings()).of({} if rows is None else {"quality": rows})


def members_of(claim_id: str, reading: str, tables: dict[str, pd.DataFrame]) -> list:
    """The members of one claim in one reading."""
    tidied = members.tidied(tables, WHOLE, Settings())
    language = Language(BOOK, {name: Table(rows) for name, rows in tidied.items()}, members)
    return language.members(BY_ID[claim_id], reading)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A folder of timings, empty."""
    monkeypatch.setattr(members, "GPU", tmp_path)
    return tmp_path


@few_claims.only("C1", "C2", "C2b", "C2d", "C2f", "C4", "C4b")
def test_verdicts_from_rows_of_known_size():
    frame = verdicts(synthetic(items=96)).set_index(["claim", "reading"])
    assert frame.loc[("C2", "as_described"), "verdict"] == "reproduced"
    assert frame.loc[("C2b", "as_described"), "verdict"] == "reproduced"  # 0.4 / 0.1
    assert frame.loc[("C2b", "as_described"), "ours"] == pytest.approx((0.4 - 0.01) / (0.1 - 0.01), rel=1e-6)
    assert frame.loc[("C2b", "as_run"), "members"].startswith("1 fails")  # 0.4 / 0.3
    assert frame.loc[("C2d", "as_run"), "ours"] == pytest.approx(100 * 0.29 / 0.9)
    assert frame.loc[("C2f", "any"), "verdict"] == "reproduced"
    assert frame.loc[("C1", "any"), "verdict"] == "not testable here"
    assert frame.loc[("C4b", "as_run"), "verdict"] == "not testable here"  # no multi-key needle among the tasks
    assert frame.columns[:2].tolist() == ["statement", "paper"]


def test_scoring_times_are_compared_at_the_longest_context(gpu):
    mean, largest = members.SCORING_MEAN, members.SCORING_MAX
    timed = [(mean, 100, 5.0), (largest, 100, 50.0), (mean, 400, 20.0), (largest, 400, 22.0), (largest, 900, 1.0)]
    rows = [
        {"kernel": "window_scores", "variant": name, "tokens": tokens, "p20_us": 0.9 * us, "p50_us": us, "p80_us": us}
        for name, tokens, us in timed
    ]
    pd.DataFrame(rows).to_csv(gpu / "kernels.csv")
    [(_, label, *ratio, runs)] = members.scoring()
    assert (label, ratio, runs) == ("400 tokens", pytest.approx([1.1, 0.99, 1.1 / 0.9]), None)


def test_costs_are_ratios_of_what_was_timed(gpu):
    table = f"""
        part|method|share|tokens|batch|seconds|peak_gib
        prefill|Ada-KV|0.2|100|1|2.0|10
        prefill|{members.DEFENSIVE_PLAIN}|0.2|100|1|3.0|10
        prefill|{claims.KEPT}|1.0|100|1|2.0|20
        prefill|{claims.PLAIN}|1.0|100|1|2.0|40
        decode|{claims.PLAIN}|1.0|100|1|0.4|40
        decode|{claims.PLAIN}|1.0|100|4|0.5|80
        decode|{claims.KEPT}|1.0|100|1|0.2|40
        decode|{claims.KEPT}|1.0|100|2|0.2|80
        decode|20% kept|0.2|100|1|0.1|30
        decode|20% kept|0.2|100|16|0.25|80
        decode|20% kept|0.2|50|1|9.0|1
    """.replace("  ", "")
    frame = pd.read_csv(io.StringIO(table), sep="|")
    frame = frame.assign(model=members.MODEL, low=0.9 * frame.seconds, high=1.1 * frame.seconds, runs=3)
    frame.to_csv(gpu / "models.csv")
    ratios = {(measure, label.split("'")[0]): numbers for measure, label, *numbers in members.costs()}
    for measure, value in (("decode_ratio", 4), ("throughput_ratio", 8)):
        assert ratios[measure, "transformers"] == pytest.approx([value, 0.9 * value, value / 0.9, 3])
        assert ratios[f"{measure}_of_steps", "transformers"][1:3] == pytest.approx([9 / 11 * value, 11 / 9 * value])
        assert ratios[measure, "this engine"][0] == pytest.approx({4: 2, 8: 6.4}[value])
    peaks = [value for measure, _, value, *_ in members.costs() if measure == "peak_ratio"]
    assert peaks == pytest.approx([0.75, 0.75, 0.25, 0.5])  # decoding, prefill


def test_first_tokens_are_compared_in_one_engine_and_once_is_no_interval(gpu):
    table = """
        method|backend|tokens|seconds|low|high|runs
        defensive_kv, as run|triton|100|3.0|2.9|3.3|8
        critical_kv, as run|triton|100|2.0|1.9|2.1|7
        defensive_kv, as run|torch|100|9.0|8.0|9.5|6
        defensive_kv, as run|triton|400|5.0|5.0|5.0|1
        critical_kv, as run|triton|400|4.0|3.9|4.1|6
        critical_kv, as described|torch|1|1.0|1.0|1|6
    """.replace("  ", "")
    frame = pd.read_csv(io.StringIO(table), sep="|")
    frame.assign(part="first", model="any", share=0.2).to_csv(gpu / "first_token.csv")
    short, long = members.first_tokens()
    assert [short[1], long[1]] == ["any, 100 tokens, authors' code", "any, 400 tokens, authors' code"]
    assert short[2:] == pytest.approx((1.5, 2.9 / 2.1, 3.3 / 1.9, 7))
    assert (long[2], long[5]) == (1.25, 1)
    assert np.isnan(long[3:5]).all()


def test_wins_count_a_task_once_and_a_tie_as_half():
    rows = synthetic(items=9)
    rows["task"] = rows["item"].map(lambda item: f"t{int(item[1:]) % 3}")
    worse = (rows.policy == "defensive_kv") & (rows.task == "t0")
    even = (rows.policy == "defensive_kv") & (rows.task == "t1")
    rival = rows[(rows.policy == "critical_ada_kv") & (rows.share == 0.2) & (rows.change == "none")]
    rows.loc[worse, "score"] = 0.0
    rows.loc[even, "score"] = rows["item"].map(rival.set_index("item").score)[even]
    first, second = members_of("C2g", "as_described", {"quality": rows})
    assert dict(first.what.data.a) == {"t0": 0.0, "t1": 0.5, "t2": 1.0}
    assert (second.what.data.a == 1).all()


@few_claims.only("C12")
def test_experts_are_known_by_the_configuration_and_asked_for_where_there_are_none():
    assert not members.has_experts(WHOLE.model)
    experts = SimpleNamespace(name="m", model=tiny.architecture("qwen3_moe"))
    assert members.has_experts(experts.model)
    with_experts = verdicts(synthetic(), experts).set_index(["claim", "reading"])
    without = verdicts(synthetic()).set_index(["claim", "reading"])
    assert with_experts.loc[("C12", "as_described"), "verdict"] == "reproduced"
    assert "Qwen3-30B-A3B" in without.loc[("C12", "as_described"), "note"]


@few_claims.only("C11", "C11b", "C11c")
def test_theorems_are_judged_case_by_case(monkeypatch):
    judged = verdicts().set_index("claim")
    assert judged.verdict[["C11", "C11b", "C11c"]].tolist() == ["reproduced", "reproduced", "not reproduced"]
    broken = members.bias_of_mean(Mixture())
    monkeypatch.setattr(members, "bias_of_max", lambda x, m: broken)
    assert verdicts().set_index("claim").verdict["C11b"] == "not reproduced"


def test_the_largest_gain_is_larger_than_each_other():
    rows = synthetic()
    rows["task"] = [("niah_multikey_2", "frequent_words")[int(item[1:]) % 2] for item in rows["item"]]
    better = rows.policy.isin(DEFENSIVE) & (rows.task == "niah_multikey_2")
    shares = {}
    for name, more in (("alike", 0.0), ("larger", 0.2)):
        changed = {"quality": rows.assign(score=rows.score + more * better)}
        of_claim = [member for member in members_of("C4b", "as_described", changed) if isinstance(member, judge.Member)]
        assert [member.label for member in of_claim] == [
            f"{policy}, niah_multikey_2, frequent_words" for policy in DEFENSIVE
        ]
        judged = judge.judge(BY_ID["C4b"], of_claim)
        shares[name] = {case.state for case in judged}
    assert shares["larger"] == {"holds"}
    assert "holds" not in shares["alike"]


def test_an_own_policy_is_judged_beside_the_papers(monkeypatch):
    rows = synthetic(items=12)
    monkeypatch.setitem(policy.OWN, "mine", replace(policy.find("snapkv"), title="Mine"))
    of_own = rows[(rows.policy == "defensive_kv") & (rows.reading == "as_described")]
    of_own = of_own.assign(policy="mine", reading="any")
    frame, before = verdicts(pd.concat([rows, of_own])), verdicts(rows)
    assert [*dict.fromkeys(before.claim)] == [*BY_ID]  # whatever was run
    pd.testing.assert_frame_equal(frame[: len(before)], before)
    added = frame[len(before) :].set_index("claim")
    named = "C2 C2g C2h C3 C4 C4b C4c C4d C4e C4f C6 C6b C7 C10 C10b".split()
    assert set(added.index) == {f"{name} Mine" for name in named}
    assert (added.reading == "any").all()
    assert added.statement.str.match("Asked of Mine: (?!Asked of)").all()
    assert not added.decided_by.str.contains(":").any()
    assert added.loc["C2 Mine", "verdict"] == "reproduced"
    assert added.loc["C2 Mine", "ours"] == pytest.approx(0.3, abs=0.02)
    assert added.loc["C6 Mine", "ours"] == pytest.approx(0)
    monkeypatch.setitem(policy.OWN, "mine", replace(policy.find("k_norm"), title="Mine"))
    bare = verdicts(pd.concat([rows, of_own[of_own.change.isin(["none", "guards"])]]))
    windowless = bare[bare.note.str.startswith("it looks at no window")]
    assert set(windowless.claim) == {"C6 Mine", "C6b Mine", "C10b Mine"}


def test_a_claims_members_are_the_tasks_or_the_layers(eager):
    """Twelve copies of an answer, jittered."""
    one = retention.retained(eager[0], PROMPT, ANSWER, retention.variants(SHORT), 1)["summary"]
    copies = [
        one.assign(
            item=f"i{i}", task="list_all" if i % 2 else "summary", worst=(one.worst * (1 + 0.01 * i)).clip(upper=1)
        )
        for i in range(12)
    ]
    summary = pd.concat(copies, ignore_index=True).assign(long=True, headline=lambda t: t.layer == 1)
    tables = {"retained": summary, "quality": synthetic()}
    asked = ("C1", "C1b", "C1k", "C1m", "C1n", "C1p", "C1q", "C6b", "C7b")
    found = {i: members_of(i, "as_run" if i in ("C6b", "C7b") else "any", tables) for i in asked}
    labels = {i: [member.label for member in of_claim] for i, of_claim in found.items()}
    assert labels["C1"] == ["summary", "list_all"]
    assert labels["C1b"] == ["layer 0", "layer 1", "layer 2"]
    assert labels["C1k"][:2] == ["token 1, summary", "token 1, list_all"]
    assert labels["C1q"] == ["summary", "list_all"]
    assert labels["C6b"][0] == "defensive_kv, window 16"
    assert labels["C7b"] == ["share 0.1", "share 0.2"]
    apart = {"C1": "defensive - mean", "C1m": "max - mean", "C1n": "defensive - max", "C1p": "mean with prior - mean"}
    for setting, of_claims in (("default", apart), ("prior before the norm", {"C1q": "defensive - mean"})):
        wide = summary[summary.headline & (summary.setting == setting) & (summary.task == "summary")]
        wide = wide.pivot_table(index="item", columns="rule", values="worst")
        for claim, difference in of_claims.items():
            a, b = difference.split(" - ")
            assert found[claim][0].what.estimate().value == pytest.approx((wide[a] - wide[b]).mean())


def test_long_answers_are_looked_at_where_items_may_have_them():
    def items(task, new):
        return [Item(f"{task}-{i}", task, (), "a", meta={"max_new_tokens": new} if new else {}) for i in range(9)]

    pool = [*items("gov_report", 512), *items("trec", 64), *items("mine", 300), *items("notes", None)]
    few = study.first_of_each(pool, 2)
    assert [item.id for item in few[:3]] == ["gov_report-0", "gov_report-1", "trec-0"]
    assert len(few) == 8


def test_items_without_a_history_are_not_looked_at_and_have_rows_with_an_error(tmp_path, capsys):
    turns = [{"role": "user", "content": "The red door is open. " * 60 + "Which door is open?"}]
    end = len(turns[0]["content"])
    spans = [{"name": "question", "message": 0, "start": end - 19, "end": end}]
    rows = [{"id": name, "messages": turns, "answer": "red"} for name in ("whole", "bare")]
    brief = {"id": "brief", "context": "The red door is open.", "question": "Which door?", "answer": "red"}
    items, alone = tmp_path / "own.jsonl", tmp_path / "alone.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in (rows[0] | {"spans": spans}, rows[1], brief)))
    alone.write_text(json.dumps(rows[1]) + "\n")
    loaded, why = models.load("tiny-gqa"), "item bare: the prompt has no span 'question'"
    given = {"shares": (0.2,), "policies": ("snapkv",), "max_new_tokens": 2, "results": tmp_path, "progress": False}
    settings = Settings(items=str(items), n_items=3, **given)
    assert [item.id for item in study.observed(loaded, settings).items] == ["whole"]
    assert f"fragility: 2 of 3 items left out, the first because: {why}" in capsys.readouterr().out
    rows = study.answers(study.parts_of(loaded, settings), loaded, settings)
    assert rows.groupby("item").error.count().to_dict() == {"bare": 3, "brief": 2, "whole": 0}
    assert rows.score.isna().tolist() == rows.error.notna().tolist()
    with pytest.raises(InputError, match=f"^{why}: it has none"):
        study.observed(loaded, Settings(items=str(alone), **given))


def test_both_studies_run_on_a_checkpoint_of_ones_own(tmp_path, capsys):
    data.say_once.cache_clear()
    rows = [
        {"context": f"Ship {i} brought {i * 7} crates of tea to the harbour. " * 12, "answer": f"{i * 7} crates"}
        | {"question": f"What did ship {i} bring?", "domain": "harbour"}
        for i in range(2)
    ]
    items = tmp_path / "own.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = models.load(str(checkpoint.save(tmp_path / "small", [row["context"] for row in rows])))
    given = {"answer_tokens": 4, "max_new_tokens": 4, "shares": (0.4,), "reading": "as_described"}
    settings = Settings(results=tmp_path, progress=False, items=str(items), n_items=2, **given)
    answered, parts = study.observed(loaded, settings), study.parts_of(loaded, settings)
    tables, grid = study.retained(answered, loaded, settings), study.answers(parts, loaded, settings)
    summary = tables["summary"]
    assert summary["item"].nunique() == 2
    assert summary.long.all()  # no task has long answers
    assert len(set(summary[summary.headline].layer)) == 1
    printed = capsys.readouterr().out
    assert "duo_attention is left out" in printed
    assert "4 bits are left out" in printed
    main = grid[grid.change == "none"]
    assert set(main.policy) == {"full", *POLICIES, *study.PLUG_IN} - {"duo_attention"}
    assert (grid[grid.change == "guards"].groupby("policy").size() == 2).all()
    frame = Verdicts("fragility", loaded, settings).of({"retained": summary, "quality": grid})
    assert set(frame[frame.claim.str.match("C1[a-q]?$|C2")].verdict) == {"not testable here"}
