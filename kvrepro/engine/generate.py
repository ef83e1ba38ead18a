"""One call for every regime: prompts x conditions -> generations.

One forward pass of a prompt serves all its conditions. Afterwards each condition's cache is a row of a batch, and the
rows decode together.
"""

import gc
import itertools
import math
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch.nn import Module
from transformers import GenerationMixin

from kvrepro.engine.attention import alone, installed
from kvrepro.engine.backend import BACKENDS, obstacle, obstacles
from kvrepro.engine.batches import MOST_ROWS, USUAL_ROWS, batches, passes, room_of
from kvrepro.engine.condition import (
    Chunked,
    Condition,
    Generation,
    Prompt,
    SharedCap,
    Size,
    ensure,
    pythonic,
    whole_numbers,
)
from kvrepro.engine.decode import decode
from kvrepro.engine.facts import ATTENDING, ModelFacts, ensure_one_rotation, layer_types, refused
from kvrepro.engine.policy import Rule, find
from kvrepro.engine.prefill import boundary, read
from kvrepro.engine.rows import Call, Rows, Tag
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError, first_line

Conditions: TypeAlias = Sequence[Condition] | Sequence[Sequence[Condition]]  # for all prompts, or a list for each


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int] | Prompt],
    conditions: Condition | Conditions,
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int] | int,
    batch_rows: int | None = None,
    prompt_rows: int | None = None,
    backend: str | Mapping[Condition, str] = "auto",
    repeat: Sequence[int] = (),
    kept_sets: bool = False,
    seed: int = 0,
    errors: str = "raise",
) -> list[list[Generation | Exception]]:
    """Greedy generations `[prompt][condition]` of at most `max_new_tokens`, a number for all prompts or one for each.

    model: a causal language model of transformers or PEFT (`kvrepro.engine.generate`), which computes as in evaluation.
    prompts: token ids, or `Prompt` where a condition names spans. conditions: for all prompts, or a list for each. Rows
    of any prompt and condition decode in batches of up to `batch_rows` (None: on a CPU 128, or as many as 2 GiB hold,
    on a GPU as many as two fifths of its free memory hold). `prompt_rows` neighbouring prompts pass through the model
    together, padded on the left, with at most 65,536 tokens in all unless there is one (None: one on a CPU, 64 on a
    GPU).
    backend: "auto": "triton" where it can compute a condition on a GPU, else "torch"; "torch",
    plain PyTorch; "triton", which refuses what kernels cannot do (`kvrepro.engine.backend`); or one of these by
    condition. Each generation names its backend.
    repeat: token ids of KVzip's request to repeat the context. kept_sets: return which tokens stayed. seed: for
    policies that draw; draws differ between prompts. errors: "return" gives, in place of a generation, the exception
    that a policy raised or that NaN logits caused; the other rows go on. Raises InputError for wrong input before
    anything is computed.
    """
    if not isinstance(prompts, Sized) or any(isinstance(p, int) for p in prompts):
        raise InputError(f"prompts {prompts!r:.60}: give a list of prompts, each a list of token ids")
    new = new_tokens(max_new_tokens, len(prompts))
    ensure(Size | None, batch_rows=batch_rows, prompt_rows=prompt_rows)
    ensure(("raise", "return"), errors=errors)
    ensure(bool, kept_sets=kept_sets)
    stops = whole_numbers("stop_ids", stop_ids)
    texts = [p if isinstance(p, Prompt) else Prompt(p, {}) for p in prompts]  # type: ignore[arg-type]
    by_prompt = conditions_by_prompt(conditions, len(texts))
    answers: dict[tuple[int, Condition], Generation | Exception] = {}
    for call in calls(model, texts, by_prompt, new, repeat, backend, seed, isolate=errors == "return"):
        call.kept_sets = kept_sets
        room = room_of(call.device) if batch_rows is None else math.inf
        most = batch_rows or (MOST_ROWS if call.device.type == "cuda" else USUAL_ROWS)
        with installed(call.model):
            for batch in batches(call, _rows(call, by_prompt, prompt_rows, room / 2), most, room):
                left = {tag for rows in batch for tag in rows.tags}
                with _short_of_memory(call, left):
                    for (i, j), answer in decode(call, Rows.joined(batch), stops):
                        left.discard((i, j))
                        answers[i, call.conditions[j]] = answer
        answers |= {(i, call.conditions[j]): error for (i, j), error in call.failed.items()}
    return [[answers[i, c] for c in listed] for i, listed in enumerate(by_prompt)]


def _rows(call: Call, by_prompt: list[list[Condition]], prompt_rows: int | None, room: float) -> Iterator[Rows]:
    """The rows of a call after their prompts' passes, each of which takes at most `room` bytes."""
    column = {c: j for j, c in enumerate(call.conditions)}
    wanted = [[column[c] for c in listed if c in column] for listed in by_prompt]
    for members, columns in passes(call, wanted, prompt_rows, room):
        blocks: list[Rows] = []
        with _short_of_memory(call, itertools.product(members, columns)):
            blocks = read(call, members, columns)
        yield from blocks


def calls(
    model: PreTrainedModel,
    texts: list[Prompt],
    by_prompt: list[list[Condition]],
    new: list[int],
    repeat: Sequence[int],
    backend: str | Mapping[Condition, str],
    seed: int,
    isolate: bool = False,
) -> list[Call]:
    """Split the work of `generate` into calls with one backend and one view of the model each. Raises InputError for
    wrong input before anything is computed."""
    model, request, seed = usable(model), whole_numbers("repeat", repeat), pythonic(seed)
    ensure(int, seed=seed)
    for text, most_new in zip(texts, new, strict=True):
        check_prompt(model, text.ids, most_new)
    check_tokens(model, request)
    facts = ModelFacts.of(model)
    check_conditions(model, texts, by_prompt, new, facts)
    every = list(dict.fromkeys(itertools.chain.from_iterable(by_prompt)))
    for c in every:
        if c.policy != "full" and find(c.policy).repeated and not request:
            raise InputError(f"{c.policy} repeats the context: give `repeat`, token ids of the request to do so")
    capped = {c for c in every if isinstance(c.regime, SharedCap)}
    one_set = bool(facts.sliding) and bool(capped)  # then these and the full cache treat sliding layers like all others
    views = {False: facts, True: ModelFacts.of(model, one_set=True) if one_set else facts}
    conditions_by_kind: dict[tuple[bool, str], list[Condition]] = {}
    for c, name in zip(every, _backends(model, facts, every, backend), strict=True):
        kind = one_set and (c.policy == "full" or c in capped), name
        conditions_by_kind.setdefault(kind, []).append(c)
    return [
        Call(model, texts, some, new, views[view], request, backend=name, seed=seed, isolate=isolate)
        for (view, name), some in conditions_by_kind.items()
    ]


@contextmanager
def _short_of_memory(call: Call, tags: Iterable[Tag]) -> Iterator[None]:
    """If memory does not suffice for a batch or a pass, the rows with these `tags` fail, and the others go on."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not call.isolate:
            raise
        call.failed = dict.fromkeys(tags, error) | call.failed
        let_go(error)


def let_go(error: BaseException) -> None:
    """Free what the frames of an error's traceback hold, caches for instance. If it is an out-of-memory error, also
    collect garbage, since frames of the model's modules refer to each other."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    if isinstance(error, torch.OutOfMemoryError):
        gc.collect()
        torch.cuda.empty_cache()


# ---- checks before anything is computed


def conditions_by_prompt(conditions: Any, prompts: int) -> list[list[Condition]]:
    """The conditions of each prompt. Raises InputError for another number of lists than prompts."""

    def listed(given: Any) -> list[Any]:
        return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]

    several = listed(conditions)
    if all(isinstance(c, Condition) for c in several):
        return [several] * prompts
    by_prompt = [listed(each) for each in several]
    for c in itertools.chain.from_iterable(by_prompt):
        if not isinstance(c, Condition):
            raise InputError(f"condition {c!r:.60}: give a kvrepro.Condition")
    if len(by_prompt) != prompts:
        raise InputError(f"{len(by_prompt)} lists of conditions for {prompts} prompts: give one for each")
    return by_prompt


def new_tokens(given: int | Sequence[int], prompts: int) -> list[int]:
    """The most tokens of each prompt's answer. Raises InputError for another number of counts than prompts."""
    given = pythonic(given)
    counts: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * prompts
    if len(counts) != prompts:
        raise InputError(f"{len(counts)} max_new_tokens for {prompts} prompts: give a number, or one for each")
    for count in given if isinstance(given, list | tuple) else [given]:
        ensure(Size, max_new_tokens=count)
    return counts


def check_conditions(
    model: PreTrainedModel,
    texts: Sequence[Prompt],
    conditions: Conditions,
    max_new_tokens: int | Sequence[int] = 1,
    facts: ModelFacts | None = None,
) -> None:
    """Raise InputError for a condition that one of its prompts cannot meet, also where the model would rotate keys
    differently in the shorter passes than in the longer ones. facts: this model's, if known."""
    facts, by_prompt = facts or ModelFacts.of(model), conditions_by_prompt(conditions, len(texts))
    rules = {c: Rule.of(c) for c in dict.fromkeys(itertools.chain.from_iterable(by_prompt))}
    if any(rule is not None and rule.policy.shared for rule in rules.values()):
        check_shared(model)
    pairs = [(text, c) for text, prompt_conditions in zip(texts, by_prompt, strict=True) for c in prompt_conditions]
    for text, c in pairs:
        check_met(facts, text, c, rules[c])
    parts = [min(boundary(text, c), getattr(c.regime, "chunk", len(text.ids))) for text, c in pairs]
    if parts:
        new = new_tokens(max_new_tokens, len(texts))
        longest = max(len(text.ids) + most_new - 1 for text, most_new in zip(texts, new, strict=True))
        description = f"passes of {min(parts)} to {longest} tokens"
        ensure_one_rotation(model, min(parts), longest, description, "let every prompt and chunk be longer")


def check_met(facts: ModelFacts, text: Prompt, c: Condition, rule: Rule | None) -> None:
    """Raise InputError if the prompt cannot meet `c`, of which `rule` is the rule."""
    end = boundary(text, c)
    held = facts.held(end)
    try:
        if rule is not None:
            rule.ensure_met(held, [at - end for name in c.whitelist for at in text.spans[name] if at < end])
    except InputError as error:
        if held == end:
            raise
        raise InputError(f"{error} (a layer whose window slides holds {held} of {end} tokens)") from None


def check_prompt(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise InputError if the model cannot continue `prompt`."""
    config, n = model.config.get_text_config(), len(prompt)
    if n < 2:
        raise InputError(f"prompt of {n} tokens < 2: give a text to continue")
    check_tokens(model, prompt)
    most = getattr(config, "max_position_embeddings", None)  # some families have no end
    if most is not None and n + max_new_tokens > most:
        raise InputError(f"{n} prompt + {max_new_tokens} new tokens > the model's {most} positions: shorten one")


def check_tokens(model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Raise InputError for a token id that the model does not have."""
    size = model.config.get_text_config().vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        outside = min(ids) if min(ids) < 0 else max(ids)
        raise InputError(f"token id {outside} outside the model's vocabulary of {size}: other tokenizer?")


def check_shared(model: PreTrainedModel) -> None:
    """Raise InputError for a model in which one set of tokens cannot serve all layers."""
    check_attention_only(model)
    counts = sorted(set(ModelFacts.of(model).kv_heads.values()))
    if len(counts) > 1:
        named = " and ".join(map(str, counts))
        raise InputError(f"layers have {named} KV heads: one set of tokens for all needs equally many in each")


def check_attention_only(model: PreTrainedModel) -> None:
    """Raise InputError for a model with layers that hold no keys and values, or a recurrent state beside them."""
    if unsuitable := ", ".join(sorted(set(layer_types(model.config.get_text_config())) - ATTENDING)):
        raise InputError(f"layers of type {unsuitable} hold no tokens to evict: use an attention-only model")


def _backends(
    model: PreTrainedModel, facts: ModelFacts, conditions: Sequence[Condition], backend: str | Mapping[Condition, str]
) -> list[str]:
    """The backend of each condition. Raises InputError for a condition that was given to the Triton backend and that it
    cannot compute: it never falls back."""
    requested: list[Any] = [backend.get(c) if isinstance(backend, Mapping) else backend for c in conditions]
    for name, c in zip(requested, conditions, strict=True):
        ensure(BACKENDS, backend=name)
        if name == "triton" and (why := obstacle(model, c, facts)):
            raise InputError(f"backend triton: {why} ({c.label}): use backend torch, or auto")
    if "auto" not in requested:
        return requested
    chosen = ["torch" if why else "triton" for why in obstacles(model, conditions)]
    return [choice if name == "auto" else name for name, choice in zip(requested, chosen, strict=True)]


# ---- models


PROBE = 16  # tokens
DIFFERENT = {torch.float32: 1e-3}  # greatest |difference| / |logits| of the engine; 0.2 in types that round coarsely
_agreed: WeakSet[Module] = WeakSet()  # models whose logits the engine gives


def usable(model: Any) -> PreTrainedModel:
    """The transformers model inside `model`: inside a PEFT or a compiled model, or itself.

    Raises InputError for a model that the engine cannot drive: no causal language model, virtual tokens, offloaded or
    quantised weights, an unknown family. Before the first use of a model, the engine keeps all of 16 tokens and must
    give the model's own logits, both when it reads them as a whole and when it reads them in two parts.
    """
    model = getattr(model, "_orig_mod", model)
    inner = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    if not (isinstance(inner, GenerationMixin) and isinstance(inner, Module)):
        raise InputError(f"model of type {type(inner).__name__}: give a causal language model, kv.load().model for one")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise refused(inner, f"its adapter {model.active_adapter!r} puts virtual tokens before a prompt")
    if absent := next((name for name, weights in inner.named_parameters() if weights.is_meta), None):
        way_out = "load all of it onto one device, or onto GPUs"
        raise refused(inner, f"weights are offloaded ({absent} for one)", way_out)
    if model not in _agreed:
        with alone(inner):
            _ensure_own_logits(model, inner, ModelFacts.of(inner))
    return inner


@torch.inference_mode()
def _ensure_own_logits(model: Module, inner: PreTrainedModel, facts: ModelFacts) -> None:
    """Raise InputError unless the engine gives the logits of `model`."""
    ids = [i % inner.config.get_text_config().vocab_size for i in range(100, 100 + PROBE)]
    seen = []
    try:  # compiled code would take long, and is not used
        own = model._call_impl(input_ids=torch.tensor([ids], device=inner.device), use_cache=False).logits[0, -1]
        for c in (Condition(), Condition("streaming_llm", 1.0, Chunked(PROBE // 2))):
            with installed(inner):
                [rows] = read(Call(inner, [Prompt(ids, {})], [c], [1], facts), [0], [0])
            seen.append(rows.logits[0])
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a family that nobody has tried
        raise refused(inner, f"it does not run in the engine ({first_line(error)})") from error
    if not own.isfinite().all():  # nothing to compare with; rows say at which token
        return
    for logits, how in zip(seen, ("", " that reads in parts"), strict=True):
        difference = float((logits.float() - own.float()).norm() / own.float().norm())
        if not difference <= DIFFERENT.get(own.dtype, 0.2):
            raise refused(inner, f"it gives other logits in an engine{how} ({100 * difference:.2g}% differ)")
    _agreed.update((model, inner))
