"""Every regime against a slow transcription, against Hugging Face, and against itself, in nine architectures."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conditions import flat
from families import hugging_face, watched
from slow_engine import Slow, looked_at, newest
from slow_engine import run as slow_run
from tiny import ARCHITECTURES, architecture, evictable, sliding_of
from tiny import prompts as tiny_prompts
from watched import watched_ends

from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, DecodeCap, Prefill, Prompt
from kvrepro.engine.generate import usable
from kvrepro.engine.policy import Policy
from kvrepro.engine.rows import Extend
from kvrepro.errors import InputError

WINDOW, CAP, NEW = 4, 16, 7
FEW = {"max_new_tokens": 3, "stop_ids": ()}
ONCE_MORE = {"max_new_tokens": 5}  # `cut` evicts from a cap in step 3, and step 4 sees what is left
DECODING = ("decode cap", "per step")


def lopsided(scores, protected, budget, unequal: int = 0):
    """`unequal` tokens more for the first head, as many less for the last."""
    counts = budget[:, None].repeat(1, scores.shape[1])
    counts[:, 0] += unequal
    counts[:, -1] -= unequal
    return counts


SIZES = {"window": WINDOW, "recent": "window"}
TEST_POLICIES = {
    "watched": Policy("Watched", "tests", watched, SIZES),
    "lopsided": Policy("Lopsided", "tests", watched, SIZES | {"unequal": 5}, allocate=lopsided, budget="per head"),
}
DECIDE = {"streaming_llm": newest(4), "watched": looked_at(WINDOW), "lopsided": looked_at(WINDOW, 5)}


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    for name, policy in TEST_POLICIES.items():
        monkeypatch.setitem(CATALOGUE, name, policy)


def answers(model, prompts, conditions, **changes):
    """(generations, ends), `[prompt][condition]`. An end has the logits from which the last token was picked, and per
    layer the positions that each head held."""
    ends = {}

    def note(rows, done):
        for row in done:
            held = {}
            for n, layer in rows.cache.ragged.items():
                alone = layer.rows(torch.tensor([row]))
                held[n] = [head.tolist() for head in alone.positions.split(alone.lengths[0].tolist())]
            ends[rows.tags[row]] = SimpleNamespace(logits=rows.logits[row].clone(), held=held)

    with watched_ends(note):
        given = {"max_new_tokens": NEW, "stop_ids": (), "repeat": (7, 3, 9), **changes}
        generations = engine.generate(model, prompts, conditions, **given)
    return generations, [[ends[i, j] for j in range(len(conditions))] for i in range(len(prompts))]


def cut(regime: str, policy: str = "watched", **changes) -> Condition:
    """A condition that evicts in `regime`."""
    more = {"chunked": {"chunk": 16}, "decode cap": {"interval": 3}}.get(regime, {})
    return flat(policy, regime=regime, **{"budget": CAP, **more, **changes})


REGIMES = ["prefill", "chunked", "offline", "decode cap", "per step"]
MODES = [(r, "") for r in REGIMES] + [("chunked", m) for m in ("budget", "every_chunk")]
UNLIKE = ("mistral", "gemma3", "qwen3_moe", "qwen3_next")  # the engine tells the others from llama by nothing


def by_architecture(cases: list) -> list:
    """(architecture, cases): llama with each case by itself, those unlike it with all."""
    return [*(("llama", [case]) for case in cases), *((a, cases) for a in UNLIKE)]


def assert_same(x: torch.Tensor, y: torch.Tensor, case: str = "", tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` of the largest logit."""
    worst = float((x - y).abs().max()) / max(1.0, float(y.abs().max()))
    assert worst <= tolerance, case


# ---- against Hugging Face


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_eviction_the_engine_is_a_greedy_loop_of_hugging_face(name):
    model, prompts = architecture(name), tiny_prompts(70, 55, 20)
    ours, ends = answers(model, prompts, [Condition(), Condition(regime=DecodeCap())])
    for prompt, row, states in zip(prompts, ours, ends, strict=True):
        tokens, logits = hugging_face(model, prompt, NEW)
        for answer, state in zip(row, states, strict=True):
            assert answer.tokens == tokens
            assert answer.policy_calls == answer.evicted == 0
            assert_same(state.logits, logits[-1], tolerance=3e-5)


# ---- against the slow transcription


CASES = [("llama", p, r, m, None) for p in DECIDE for r, m in MODES]
CASES += [(a, "watched", r, m, None) for a in ("mistral", "gemma3") for r, m in MODES[:-1]]
CASES += [(a, "lopsided", *MODES[-1], None) for a in ARCHITECTURES if a != "llama"]
CASES += [(a, "watched", r, "", 61) for a in ("llama", "mistral", "gemma3", "qwen3_next") for r in REGIMES[:-1]]


@pytest.mark.parametrize(("name", "policy", "regime", "mode", "until"), CASES)
def test_evicted_decoding_equals_the_slow_transcription(name, policy, regime, mode, until):
    """Also where a question, marked in the prompt, is read through what is left."""
    model, [ids] = architecture(name), tiny_prompts(70)
    text = Prompt(ids, {"question": list(range(61, 68))})
    c = cut(regime, policy, **({"when": mode} if mode else {}), **({"until": "question"} if until else {}))
    [[ours]], [[end]] = answers(model, [text], [c])
    slow = Slow(model, ids, sliding_of(name), evictable(name))
    decide = DECIDE[policy]
    if name == "mistral" and policy != "streaming_llm":
        decide = looked_at(WINDOW, 5 if policy == "lopsided" else 0, sliding=32)
    chunk_budget = {"budget": lambda seen: CAP, "every_chunk": lambda seen: CAP}.get(mode)
    given = {"budget": CAP, "new_tokens": NEW, "until": until, "chunk_budget": chunk_budget}
    given |= {"chunk": 16 if regime == "chunked" else None, "every": {"decode cap": 3, "per step": 1}.get(regime)}
    tokens, logits = slow_run(slow, decide, **given)
    assert ours.tokens == tokens
    assert_same(end.logits, logits, tolerance=3e-5)  # recurrent layers read a token otherwise than a text
    if until:
        assert max(ours.kept_positions) == until - 1
    for n in evictable(name):
        expected = [head.nonzero()[:, 0].tolist() for head in slow.held[n]]
        if n in slow.windows:
            reach = slow.length - slow.windows[n]
            expected = [[p for p in head if p > reach] for head in expected]
        assert end.held[n] == expected


# ---- against itself


FIXED = {"window": WINDOW, "recent": WINDOW, "sinks": 2, "kernel": 3, "page": 4, "block": 16}
LEFT_OUT = ("tri_attention", "tri_attention_layer", "duo_attention")  # need files made for one model
POLICIES = [name for name in CATALOGUE if name not in LEFT_OUT]


def small(policy: str, regime: str, **changes) -> Condition:
    """`cut` with windows that fit a tiny prompt."""
    parameters = CATALOGUE[policy].parameters
    fixed = {k: v for k, v in FIXED.items() if k in parameters and parameters[k] not in (0, 1, "window")}
    return cut(regime, policy, switches=tuple(fixed.items()), reading="as_described", **changes)


def unlimited(regime: str, names: list[str]) -> list[Condition]:
    """Budgets that nothing exceeds; pages are chosen anew for every token, of all that is seen by then, so that
    theirs must exceed the prompt, which only a cap may."""
    budget = {"budget": 200 if regime in DECODING else 1.0}
    names = [n for n in names if regime in CATALOGUE[n].regimes and (regime in DECODING or CATALOGUE[n].frees)]
    return [small(n, regime, **budget) for n in names]


@pytest.mark.parametrize(("name", "regimes"), by_architecture(REGIMES))
def test_a_full_budget_is_no_eviction_bit_for_bit(name, regimes):
    model, [prompt] = architecture(name), tiny_prompts(55)
    names = POLICIES if name == "llama" else ["streaming_llm", "ada_kv", "cake"]
    for regime in regimes:
        conditions = [flat(regime=regime, chunk=16), *unlimited(regime, names)]
        if regime == "chunked":  # each by itself: rows of one batch differ in their last bits in a mixture of experts
            calls = [answers(model, [prompt], [c], **ONCE_MORE) for c in conditions]
            row, states = ([call[part][0][0] for call in calls] for part in (0, 1))
        else:
            [row], [states] = answers(model, [prompt], conditions, batch_rows=1, **ONCE_MORE)
        for c, answer, state in zip(conditions[1:], row[1:], states[1:], strict=True):
            assert answer.tokens == row[0].tokens, c.label
            assert torch.equal(state.logits, states[0].logits), c.label
            assert state.held == states[0].held, c.label
            assert (answer.evicted, answer.policy_calls, answer.kept) == (0, 0, row[0].kept), c.label
            assert answer.bytes_full == row[0].bytes_full <= answer.bytes_held, c.label
            assert answer.kept_positions_hash == row[0].kept_positions_hash, c.label


@pytest.mark.parametrize(("name", "regimes"), by_architecture(REGIMES))
def test_rows_of_a_batch_equal_rows_alone_whatever_the_padding(name, regimes):
    model = architecture(name)
    questions = zip(tiny_prompts(70, 33), (65, 30), strict=True)
    texts, conditions = [Prompt(ids, {"question": list(range(at, len(ids)))}) for ids, at in questions], []
    for regime in regimes:
        conditions += [cut(regime, "lopsided"), cut(regime, until="question"), flat(regime=regime, chunk=16)]
        names = POLICIES if name == "llama" else ["scissorhands"]
        conditions += [small(n, regime) for n in names if regime in CATALOGUE[n].regimes]
    many, ends = answers(model, texts, conditions, prompt_rows=2, max_new_tokens=(6, 5))
    assert {len(a.tokens) for a in many[0]} == {6}
    [alone], [others] = answers(model, texts[1:], conditions, batch_rows=1, **ONCE_MORE)  # the shorter, padded above
    for c, a, b, x, y in zip(conditions, many[1], alone, ends[1], others, strict=True):
        assert a.tokens == b.tokens, c.label
        assert x.held == y.held, c.label
        assert (a.kept, a.bytes_full, a.policy_calls) == (b.kept, b.bytes_full, b.policy_calls), c.label
        assert a.kept_positions_hash == b.kept_positions_hash, c.label
        assert_same(x.logits, y.logits, c.label)


# ---- single policies


ARGUMENTS = [
    ({"conditions": ["snapkv"]}, "condition 'snapkv': give a kvrepro.Condition"),
    ({"conditions": [[Condition()]] * 2}, "2 lists of conditions for 1 prompts: give one for each"),
    ({"prompts": ["some text"]}, ".*prompt .some text.: give a list of whole numbers"),
    ({"prompts": None}, "prompt None: give a list of whole numbers"),
    ({"conditions": None}, "condition None: give a kvrepro.Condition"),
    ({"repeat": [7, 10**6]}, "repeat: token id 1000000 outside the model's vocabulary of 120: other tokenizer"),
    ({"prompts": [[5]]}, "prompt of 1 tokens < 2"),
    ({"prompts": [[5, 500]]}, "token id 500 outside the model's vocabulary of 120: other tokenizer"),
    ({"prompts": [[5] * 510]}, "510 prompt .* new tokens > the model's 512 positions"),
    ({"max_new_tokens": [3, 4]}, "2 max_new_tokens for 1 prompts: give a number, or one for each"),
    ({"max_new_tokens": [0]}, "max_new_tokens 0: "),
    ({"stop_ids": "</s>"}, "stop_ids '</s>': give a list of whole numbers"),
    ({"seed": "7"}, "seed '7': "),
    ({"backend": None}, "backend None: "),
    ({"errors": "retrun"}, "errors 'retrun': should be 'raise' or 'return'"),
]


@pytest.mark.parametrize(("given", "message"), ARGUMENTS)
def test_arguments_of_a_wrong_kind_are_refused_in_one_line_before_the_model_runs(given, message, monkeypatch):
    model = usable(architecture("llama"))
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("computed"))
    usual = {"prompts": tiny_prompts(60), "conditions": [Condition("random", 20, Prefill())], "repeat": (7, 3), **FEW}
    with pytest.raises(InputError, match=f"^{message}") as error:
        engine.generate(model, **usual | given)
    assert "\n" not in str(error.value)


def test_arguments_whose_meaning_is_plain_are_taken():
    model, [prompt] = architecture("llama"), tiny_prompts(60)
    c, usual = Condition("kv_zip", 20, Prefill()), {"max_new_tokens": 4, "stop_ids": (), "repeat": (7, 3)}
    [[expected]] = engine.generate(model, [prompt], [c], **usual)
    for prompts in (torch.tensor([prompt]), np.array([prompt])):
        [[answer]] = engine.generate(model, prompts, c, **usual | {"stop_ids": 119, "repeat": torch.tensor([7, 3])})
        assert (answer.tokens, answer.kept) == (expected.tokens, expected.kept)
    [[answer]] = engine.generate(model, [prompt], [c], **usual | {"stop_ids": expected.tokens[1]})
    assert answer.tokens == expected.tokens[:2]


def repeated(model, ids, first):
    """Per layer: attention of the tokens from `first` on, [heads, queries, tokens], and the length of their inputs."""
    lengths: dict[int, torch.Tensor] = {}

    def note(module, args, kwargs):
        lengths[module.layer_idx] = kwargs["hidden_states"][0].norm(dim=-1)

    layers = model.get_decoder().layers
    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        outputs = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    for hook in hooks:
        hook.remove()
    values = [layer.values[0] for layer in cache.layers]
    return [(p[0, :, first:], lengths[n][first:], values[n]) for n, p in enumerate(outputs.attentions)]


@pytest.mark.parametrize("regime", ["prefill", "offline"])
def test_kv_zip_and_its_plus_keep_what_their_formulas_rank_first(regime):
    model, [prompt], ask = architecture("llama"), tiny_prompts(60), [7, 3, 9]
    scores, plain_scores = [], []
    for n, (p, h, values) in enumerate(repeated(model, [*prompt, *ask, *prompt], 63)):
        w = model.get_decoder().layers[n].self_attn.o_proj.weight.view(48, 6, 8)
        norm = torch.stack([(values[head // 3, :60] @ w[:, head].T).norm(dim=-1) for head in range(6)])
        by_query_head = (p[:, :, :60] / h[None, :, None]).amax(1) * norm
        scores.append(by_query_head.view(2, 3, 60).amax(1))
        plain_scores.append(p[:, :, :60].amax(1).view(2, 3, 60).amax(1))
    c = flat("kv_zip_plus", 20, regime=regime)
    settings = {"max_new_tokens": 2, "stop_ids": (), "repeat": ask, "kept_sets": True}
    [[g, plain]] = engine.generate(model, [prompt], [c, flat("kv_zip", 20, regime=regime)], **settings)
    for generation, by_layer in ((g, scores), (plain, plain_scores)):
        ranked = torch.stack(by_layer).cpu()
        ranked[..., :4] = torch.inf
        wanted = torch.zeros(ranked.numel(), dtype=torch.bool)
        wanted[ranked.flatten().topk(20 * 6).indices] = True
        assert torch.equal(torch.stack([torch.from_numpy(s) for s in generation.kept_sets]), wanted.view(3, 2, 60))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_random_draws_anew_for_every_prompt_and_seed_and_never_for_the_batch():
    model, prompts = architecture("llama"), tiny_prompts(60, 60)
    c = [flat("random", 20, regime=regime, interval=2) for regime in ("prefill", "decode cap")]

    def kept(texts, **more):
        return [[g.kept_positions_hash for g in row] for row in engine.generate(model, texts, c, **FEW, **more)]

    first, second = kept(prompts)
    assert first[0] != second[0]
    assert kept(prompts, prompt_rows=2) == [first, second] == [kept([prompt])[0] for prompt in prompts]
    assert kept(prompts, seed=1) != [first, second]
    assert kept(prompts, seed=2**31 + 1) == kept(prompts, seed=1)


# ---- conditions of single prompts, prefixes of several


def said(generations) -> list:
    """Tokens, and what was kept."""
    return [[(g.tokens, g.kept_positions_hash, g.evicted) for g in row] for row in generations]


def test_prompts_may_have_conditions_of_their_own():
    model, prompts = architecture("qwen2"), tiny_prompts(60, 44, 52)
    a, b, c = Condition(), *(Condition("streaming_llm", budget, Prefill()) for budget in (20, 30))
    table = engine.generate(model, prompts, [a, b, c], **FEW)
    generations = engine.generate(model, prompts, [[c, a], [], [b]], **FEW)
    assert said(generations) == said([[table[0][2], table[0][0]], [], [table[2][1]]])


def test_a_row_that_has_read_all_keeps_its_last_queries_while_another_reads_a_token(monkeypatch):
    """Both decode in one batch, where the first prompt's rest of one token is padding to the second row."""
    model, [ids], asked = architecture("qwen2"), tiny_prompts(60), []

    def asking(o):
        asked.append(o.query_positions)
        return o.positions.float()

    monkeypatch.setitem(CATALOGUE, "asking", Policy("Asking", "tests", asking, {"window": 8}))
    conditions = [Condition("asking", 40, DecodeCap(4, until=until)) for until in ("", "last")]
    engine.generate(model, [Prompt(ids, {"last": [59]})], conditions, **FEW | {"max_new_tokens": 6})
    assert asked[-1].tolist() == [list(range(56, 64))] * 2


def test_prefixes_are_read_each_once(monkeypatch):
    """Three prefixes of two requests each: the same answers and the same tokens kept as one by one."""
    model, ids = architecture("qwen2"), tiny_prompts(50, 41, 46, 5, 9)
    halves, asked = {"half": list(range(20))}, [(prefix, ask) for prefix in ids[:3] for ask in ids[3:]]
    texts = [Prompt(a + b, {**halves, "question": list(range(len(a), len(a + b)))}) for a, b in asked]
    conditions = [flat(name, 20, regime="offline", until="question") for name in ("streaming_llm", "watched", "h2o")]
    conditions += [flat("watched", 20, regime="offline", until="question", fair=1.0, spans=("half",))]
    alone = engine.generate(model, texts, conditions, **FEW)
    lengths, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **i: (lengths.append(i["input_ids"].shape), forward(**i))[1])
    generations = engine.generate(model, texts, conditions, **FEW, prompt_rows=2)
    assert said(generations) == said(alone)
    assert sum(batch for batch, width in lengths if width > 40) == 3  # whatever their spans


def test_a_batch_without_memory_costs_its_rows_alone_and_gives_it_back(monkeypatch):
    """The second batch runs out of memory, inside the model's own modules; nobody else collects garbage. When a batch
    begins, the layers of those before it are gone."""
    begun: list[list[weakref.ref[Any]]] = []
    decode, attend = engine.decode, Extend.attend

    def begin(call, rows, stop_ids):
        assert not [layer for layer in sum(begun, []) if layer() is not None]
        begun.append([weakref.ref(layer) for layer in rows.cache.ragged.values()])
        return decode(call, rows, stop_ids)

    def short(self, layer, query, *given):
        if layer == 1 and len(begun) == 2 and query.shape[2] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attend(self, layer, query, *given)

    monkeypatch.setattr(engine, "decode", begin)
    monkeypatch.setattr(Extend, "attend", short)
    prompts = [Prompt(ids, {}, {"question": 30}) for ids in tiny_prompts(40, 40, 40)]
    conditions = [flat(name, 12, regime="prefill", until="question") for name in ("watched", "k_norm")]
    given = {**FEW, "batch_rows": 2}
    gc.disable()
    try:
        answers = engine.generate(architecture("llama"), prompts, conditions, errors="return", **given)
        failed = [[isinstance(answer, torch.OutOfMemoryError) for answer in row] for row in answers]
        assert failed == [[False, True], [False, True], [False, False]]
    finally:
        gc.enable()
