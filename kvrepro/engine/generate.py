"""One call for every regime: prompts x conditions -> generations.

One forward pass of a prompt serves all its conditions. Afterwards each condition's cache is a row of a batch, and the
rows decode together.
"""

import gc
import itertools
import math
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch.nn import Module
from transformers import GenerationMixin

from kvrepro.engine.attention import alone, installed
from kvrepro.engine.backend import choose
from kvrepro.engine.batches import CPU_ROOM, GPU_ROOM, MOST_ROWS, USUAL_ROWS, batches, passes
from kvrepro.engine.condition import Chunked, Condition, Generation, Prompt, SharedCap, Size, ensure, whole_numbers
from kvrepro.engine.decode import decode
from kvrepro.engine.facts import ATTENDING, ModelFacts, ensure_one_rotation, layer_types, refused
from kvrepro.engine.policy import Rule
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
    backend: str = "auto",
    repeat: Sequence[int] = (),
    kept_sets: bool = False,
    seed: int = 0,
    errors: str = "raise",
) -> list[list[Generation | Exception]]:
    """Greedy generations `[prompt][condition]` of at most `max_new_tokens`, a number for all prompts or one for each.

    model: a causal language model of transformers or PEFT (`usable`), which computes as in evaluation. prompts: token
    ids, or `Prompt` where a condition names spans. conditions: for all prompts, or a list for each. batch_rows: rows of
    any prompt and condition that decode together (None: up to 128 in 2 GiB on a CPU, up to 2,048 in two fifths of the
    free memory on a GPU). prompt_rows: neighbouring prompts that pass through the model together, padded on the left,
    with at most 65,536 tokens in all (None: one on a CPU, 64 on a GPU). backend: "torch", plain PyTorch; "triton",
    which refuses what kernels cannot do (`kvrepro.engine.backend`); "auto": triton where it can, on a GPU. repeat:
    token ids of KVzip's request to repeat the context. kept_sets: return which tokens stayed. seed: for policies that
    draw; draws differ between prompts. errors: "return" gives a row's exception, of a policy or NaN logits, or why its
    prompt cannot meet its condition, in place of its generation; the other rows go on. Raises InputError for wrong
    input before anything is computed.
    """
    every = prompts if isinstance(prompts, Iterable) else [prompts]
    texts = [p if isinstance(p, Prompt) else Prompt(p, {}) for p in every]  # type: ignore[arg-type]
    by_prompt, new = conditions_by_prompt(conditions, len(texts)), _new_tokens(max_new_tokens, len(texts))
    ensure(Size | None, batch_rows=batch_rows, prompt_rows=prompt_rows)
    ensure(("raise", "return"), errors=errors)
    stops = whole_numbers("stop_ids", stop_ids)
    answers: dict[tuple[int, Condition], Generation | Exception] = {}

    def read_all(call: Call, room: float) -> Iterator[Rows]:
        column = {c: j for j, c in enumerate(call.conditions)}
        asked = [[column[c] for c in dict.fromkeys(listed) if c in column] for listed in by_prompt]
        wanted = [[j for j in columns if (i, j) not in call.failed] for i, columns in enumerate(asked)]
        for members, columns in passes(call, wanted, prompt_rows, room):
            with _short_of_memory(call, itertools.product(members, columns)):
                yield from read(call, members, columns)

    for call in calls(model, texts, by_prompt, new, repeat, backend, seed, isolate=errors == "return"):
        call.kept_sets = kept_sets
        most, room = USUAL_ROWS, CPU_ROOM
        if call.device.type == "cuda":
            unused = torch.cuda.memory_reserved(call.device) - torch.cuda.memory_allocated(call.device)
            most, room = MOST_ROWS, GPU_ROOM * (torch.cuda.mem_get_info(call.device)[0] + unused)
        if batch_rows is not None:
            most, room = batch_rows, math.inf
        with installed(call.model):
            for batch in batches(call, read_all(call, room / 2), most, room):
                left = {tag for rows in batch for tag in rows.tags}
                with _short_of_memory(call, left):
                    for (i, j), answer in decode(call, Rows.joined(batch), stops):
                        left.discard((i, j))
                        answers[i, call.conditions[j]] = answer
        for (i, j), error in call.failed.items():
            answers.setdefault((i, call.conditions[j]), error)
    return [[answers[i, c] for c in listed] for i, listed in enumerate(by_prompt)]


def calls(
    model: PreTrainedModel,
    texts: list[Prompt],
    by_prompt: list[list[Condition]],
    new: list[int],
    repeat: Sequence[int],
    backend: str,
    seed: int,
    isolate: bool = False,
) -> list[Call]:
    """Split the work of `generate` into calls with one backend and one view of the model each. Raises InputError for
    wrong input before anything is computed."""
    model, request = usable(model), whole_numbers("repeat", repeat)
    ensure(int, seed=seed)
    _ensure_tokens(model, request, "repeat: ")
    facts, every = ModelFacts.of(model), list(dict.fromkeys(itertools.chain.from_iterable(by_prompt)))
    gaps = unmet(model, texts, by_prompt, new)
    capped = [c for c in every if isinstance(c.regime, SharedCap)]
    one_set = bool(facts.sliding and capped)  # then these and the full cache treat sliding layers like all others
    views = {False: facts, True: ModelFacts.of(model, one_set=True) if one_set else facts}
    conditions_by_kind: dict[tuple[bool, str], list[Condition]] = {}
    for c in every:
        rule = Rule.of(c)
        if rule is not None and rule.policy.repeated and not request:
            raise InputError(f"{c.policy} repeats the context: give `repeat`, token ids of the request to do so")
        kind = one_set and (rule is None or c in capped), choose(backend, model, c, facts)
        conditions_by_kind.setdefault(kind, []).append(c)
    of_calls = []
    for (view, name), some in conditions_by_kind.items():
        call = Call(model, texts, some, new, views[view], request, backend=name, seed=seed, isolate=isolate)
        call.fail({(i, some.index(c)): error for (i, c), error in gaps.items() if c in some})
        of_calls.append(call)
    return of_calls


@contextmanager
def _short_of_memory(call: Call, tags: Iterable[Tag]) -> Iterator[None]:
    """If memory does not suffice for a batch or a pass, the rows with these `tags` fail, and the others go on."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        call.fail(dict.fromkeys(tags, error))
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


def conditions_by_prompt(conditions: Condition | Conditions, prompts: int) -> list[list[Condition]]:
    """The conditions of each prompt. Raises InputError for another number of lists than prompts."""
    several: list[Any] = list(conditions) if isinstance(conditions, Iterable) else [conditions]
    by_prompt = [list(each) if isinstance(each, list | tuple) else [each] for each in several]
    for c in itertools.chain.from_iterable(by_prompt):
        if not isinstance(c, Condition):
            raise InputError(f"condition {c!r:.60}: give a kvrepro.Condition")
    if all(isinstance(each, Condition) for each in several):
        return [several] * prompts
    if len(by_prompt) != prompts:
        raise InputError(f"{len(by_prompt)} lists of conditions for {prompts} prompts: give one for each")
    return by_prompt


def _new_tokens(given: int | Sequence[int], prompts: int) -> list[int]:
    counts: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * prompts
    ensure(list[Size], max_new_tokens=counts)
    if len(counts) != prompts:
        raise InputError(f"{len(counts)} max_new_tokens for {prompts} prompts: give a number, or one for each")
    return counts


def unmet(
    model: PreTrainedModel, texts: Sequence[Prompt], by_prompt: Sequence[Sequence[Condition]], new: Sequence[int]
) -> dict[tuple[int, Condition], InputError]:
    """Why prompts, by their numbers, cannot meet conditions. Raises InputError for a prompt that the model cannot
    continue with `new` tokens, for a condition that no prompt can meet, and if shorter and longer passes would rotate
    keys differently."""
    facts, errors = ModelFacts.of(model), dict[tuple[int, Condition], InputError]()
    rules = {c: Rule.of(c) for c in dict.fromkeys(itertools.chain.from_iterable(by_prompt))}
    if any(rule is not None and rule.policy.shared for rule in rules.values()):
        check_shared(model)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)  # some families have no end
    parts, longest = [], 0
    for i, (text, most_new, listed) in enumerate(zip(texts, new, by_prompt, strict=True)):
        n = len(text.ids)
        if n < 2:
            raise InputError(f"prompt of {n} tokens < 2: give a text to continue")
        _ensure_tokens(model, text.ids)
        if context is not None and n + most_new > context:
            raise InputError(f"{n} prompt + {most_new} new tokens > the model's {context} positions: shorten one")
        for c in listed:
            end, rule = 0, rules[c]
            try:
                end = boundary(text, c)
                if rule is not None:
                    whitelist = [at - end for name in c.whitelist for at in text.spans[name] if at < end]
                    rule.ensure_met(facts.held(end), whitelist)
                parts.append(min(end, getattr(c.regime, "chunk", n)))
            except InputError as error:
                held = facts.held(end)
                slides = "" if held == end else f" (a layer whose window slides holds {held} of {end} tokens)"
                errors[i, c] = InputError(f"{error}{slides}")
        longest = max(longest, n + most_new - 1)
    if parts:
        description = f"passes of {min(parts)} to {longest} tokens"
        ensure_one_rotation(model, min(parts), longest, description, "let every prompt and chunk be longer")
    return errors


def _ensure_tokens(model: PreTrainedModel, ids: Sequence[int], whose: str = "") -> None:
    """Raise InputError for a token id that the model does not have."""
    size = model.config.get_text_config().vocab_size
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < size:
            raise InputError(f"{whose}token id {token} outside the model's vocabulary of {size}: other tokenizer?")


def check_shared(model: PreTrainedModel) -> None:
    """Raise InputError for a model in which one set of tokens cannot serve all layers."""
    check_attention_only(model)
    counts = set(ModelFacts.of(model).kv_heads.values())
    if len(counts) > 1:
        raise InputError(f"layers have {counts} KV heads: one set of tokens for all needs equally many in each")


def check_attention_only(model: PreTrainedModel) -> None:
    """Raise InputError for a model with layers that hold no keys and values, or a recurrent state beside them."""
    if unsuitable := ", ".join(sorted(set(layer_types(model.config.get_text_config())) - ATTENDING)):
        raise InputError(f"layers of type {unsuitable} hold no tokens to evict: use an attention-only model")


# ---- models


PROBE = list(range(100, 116))  # token ids
DIFFERENT = {torch.float32: 1e-3}  # greatest |difference| / |logits| of the engine; 0.2 in types that round coarsely
_agreed: WeakSet[Module] = WeakSet()  # models whose logits the engine gives


def usable(model: Any) -> PreTrainedModel:
    """The transformers model inside `model`: inside a PEFT or a compiled model, or itself.

    Raises InputError for a model that the engine cannot drive: no causal language model, virtual tokens, quantised
    weights, an unknown family. Before the first use of a model, the engine keeps all of 16 tokens and must give the
    model's own logits, both when it reads them as a whole and when it reads them in two parts.
    """
    model = getattr(model, "_orig_mod", model)
    inner = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    if not (isinstance(inner, GenerationMixin) and isinstance(inner, Module)):
        raise InputError(f"model of type {type(inner).__name__}: give a causal language model, kv.load().model for one")
    prompting = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)  # can be off
    if prompting or model not in _agreed:
        with alone(inner):
            _ensure_own_logits(model, inner, ModelFacts.of(inner))
        _agreed.update((model, inner))
    return inner


@torch.inference_mode()
def _ensure_own_logits(model: Module, inner: PreTrainedModel, facts: ModelFacts) -> None:
    """Raise InputError unless the engine gives the logits of `model`."""
    ids = [i % inner.config.get_text_config().vocab_size for i in PROBE]
    parts = {"": Condition(), " that reads in parts": Condition("streaming_llm", 1.0, Chunked(len(ids) // 2))}
    try:  # compiled code would take long, and is not used
        own = model._call_impl(input_ids=torch.tensor([ids], device=inner.device), use_cache=False).logits[0, -1]
        for how, c in parts.items():
            with installed(inner):
                [rows] = read(Call(inner, [Prompt(ids, {})], [c], [1], facts), [0], [0])
            difference = float((rows.logits[0].float() - own.float()).norm() / own.float().norm())
            if own.isfinite().all() and not difference <= DIFFERENT.get(own.dtype, 0.2):  # else rows name the token
                raise refused(inner, f"it gives other logits in an engine{how} ({100 * difference:.2g}% differ)")
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a family that nobody has tried
        raise refused(inner, f"it does not run in the engine ({first_line(error)})") from error
