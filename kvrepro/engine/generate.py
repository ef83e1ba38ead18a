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

from kvrepro.engine.allowed import Size, ensure, pythonic, whole_numbers
from kvrepro.engine.attention import alone, installed
from kvrepro.engine.backend import BACKENDS, obstacle, obstacles
from kvrepro.engine.condition import Chunked, Condition, Generation, Prompt, SharedCap
from kvrepro.engine.decode import batch_kinds, decode, evicts_again
from kvrepro.engine.facts import ModelFacts, ensure_one_rotation, refused
from kvrepro.engine.passes import Call, boundary, check_shared, planned, read, room_taken
from kvrepro.engine.policy import Rule, find
from kvrepro.engine.rows import Rows, Tag, joined
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError, first_line

ERRORS = ("raise", "return")
USUAL_ROWS, MOST_ROWS = 128, 2048  # rows that decode together, on a CPU and on a GPU
CPU_ROOM = float(2**31)  # bytes of caches that wait to decode
MOST_PROMPTS, PASS_TOKENS = 64, 2**16  # prompts and tokens that pass through the model together on a GPU
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
    ensure(ERRORS, errors=errors)
    ensure(bool, kept_sets=kept_sets)
    stops = whole_numbers("stop_ids", stop_ids)
    texts = [p if isinstance(p, Prompt) else Prompt(p, {}) for p in prompts]  # type: ignore[arg-type]
    listed: Any = [c if isinstance(c, Condition) else _listed(c) for c in _listed(conditions)]
    _, wanted = _columns(listed, len(texts))
    options = {"kept_sets": kept_sets, "isolate": errors == "return"}
    answers: dict[Tag, Generation | Exception] = {}
    for call, columns in calls(model, texts, listed, new, repeat, backend, seed=seed, **options):
        place = {j: column for column, j in enumerate(columns)}
        columns_by_prompt = [[place[j] for j in asked_columns if j in place] for asked_columns in wanted]
        finished = _answers(call, columns_by_prompt, prompt_rows, batch_rows, stops)
        answers |= {(i, columns[j]): answer for (i, j), answer in finished}
    return [[answers[i, j] for j in asked_columns] for i, asked_columns in enumerate(wanted)]


def calls(
    model: PreTrainedModel, texts: list[Prompt], conditions: Conditions, new: list[int], repeat: Sequence[int],
    backend: str | Mapping[Condition, str], seed: int, **options: Any,
) -> list[tuple[Call, list[int]]]:  # fmt: skip
    """Split the work of `generate` into calls with one backend and one view of the model each, with the numbers of
    their conditions. options: more fields of `Call`. Raises InputError for wrong input before anything is computed."""
    model, asked, seed = usable(model), whole_numbers("repeat", repeat), pythonic(seed)
    ensure(int, seed=seed)
    for text, most_new in zip(texts, new, strict=True):
        check_prompt(model, text.ids, most_new)
    check_tokens(model, asked)
    facts = ModelFacts.of(model)
    check_conditions(model, texts, conditions, new, facts)
    every, _ = _columns(conditions, len(texts))
    backends = _backends(model, facts, every, backend)
    for c in every:
        if c.policy != "full" and find(c.policy).repeated and not asked:
            raise InputError(f"{c.policy} repeats the context: give `repeat`, token ids of the request to do so")
    capped = [isinstance(c.regime, SharedCap) for c in every]
    one_set = bool(facts.sliding) and any(capped)  # then these and the full cache treat sliding layers like all others
    columns_by_kind: dict[tuple[bool, str], list[int]] = {}
    for j, c in enumerate(every):
        kind = one_set and (c.policy == "full" or capped[j]), backends[j]
        columns_by_kind.setdefault(kind, []).append(j)
    views = {False: facts, True: ModelFacts.of(model, one_set=True) if one_set else facts}
    given = []
    for (view, name), columns in columns_by_kind.items():
        some = [every[j] for j in columns]
        call = Call(model, texts, some, new, views[view], asked, backend=name, seed=seed, **options)
        given.append((call, columns))
    return given


def _answers(
    call: Call,
    wanted: Sequence[Sequence[int]],
    prompt_rows: int | None,
    batch_rows: int | None,
    stop_ids: Collection[int],
) -> Iterator[tuple[Tag, Generation | Exception]]:
    """The generation, or the exception, of every prompt under every condition of a call."""
    room = room_of(call.device) if batch_rows is None else math.inf
    most = batch_rows or (MOST_ROWS if call.device.type == "cuda" else USUAL_ROWS)
    with installed(call.model):
        for batch in batches(call, _rows(call, wanted, prompt_rows, room), most, room):
            left = {tag for rows in batch for tag in rows.tags}
            with _short_of_memory(call, left):
                for tag, answer in decode(call, joined(batch), stop_ids):
                    left.discard(tag)
                    yield tag, answer
    yield from call.failed.items()


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


def room_of(device: torch.device) -> float:
    """Bytes for the caches of rows that wait to decode. On a GPU two fifths of the free memory, since the rows of a
    pass and the computation itself come on top; on a CPU a constant, so that batches do not depend on the machine."""
    if device.type != "cuda":
        return CPU_ROOM
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch's allocator
    return 0.4 * float(torch.cuda.mem_get_info(device)[0] + cached)


def batches(call: Call, rows: Iterable[Rows], most: int, room: float = math.inf) -> Iterator[list[Rows]]:
    """Batches of rows of equal kind, up to `most` rows, in the order they come. When `room` bytes are full
    (`room_taken`), all that wait are handed out; rows that evict again decode last, since an eviction copies their
    caches, and by then the others have left. Rows in few bits are quantised here, and each is a batch of its own."""
    waiting: dict[tuple[Any, ...], list[Rows]] = {}
    for block in rows:
        held = sum(room_taken(call, r) for parts in waiting.values() for r in parts)
        for kind in sorted(waiting, key=evicts_again) if held + room_taken(call, block) > room else ():
            yield waiting.pop(kind)
        for kind, numbers in _alike(block, call.backend).items():
            packed = block.conditions[numbers[0]].bits is not None
            while numbers:
                free = (1 if packed else most) - sum(map(len, waiting.get(kind, ())))
                part = block if len(numbers) == len(block) <= free else block.take(numbers[:free])
                numbers = numbers[free:]
                if packed:
                    part.cache.quantise()
                waiting.setdefault(kind, []).append(part)
                if len(part) == free:
                    yield waiting.pop(kind)
        del block, part  # the next pass needs the room
    for kind in sorted(waiting, key=evicts_again):
        yield waiting.pop(kind)


def _alike(rows: Rows, backend: str) -> dict[tuple[Any, ...], list[int]]:
    """The numbers of the rows of each kind (`batch_kinds`)."""
    numbers: dict[tuple[Any, ...], list[int]] = {}
    for number, kind in enumerate(batch_kinds(rows, backend)):
        numbers.setdefault(kind, []).append(number)
    return numbers


def conditions_by_prompt(conditions: Conditions, prompts: int) -> list[list[Condition]]:
    """The conditions of each prompt. Raises InputError for another number of lists than prompts."""
    given = _listed(conditions)
    if all(isinstance(c, Condition) for c in given):
        return [given] * prompts
    by_prompt = [_listed(prompt_conditions) for prompt_conditions in given]
    for c in itertools.chain.from_iterable(by_prompt):
        if not isinstance(c, Condition):
            raise InputError(f"condition {c!r:.60}: give a kvrepro.Condition")
    if len(by_prompt) != prompts:
        raise InputError(f"{len(by_prompt)} lists of conditions for {prompts} prompts: give one for each")
    return by_prompt


def _listed(given: Any) -> list[Any]:
    """Several as a list, and one alone in a list."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def new_tokens(given: int | Sequence[int], prompts: int) -> list[int]:
    """The most tokens of each prompt's answer. Raises InputError for another number of counts than prompts."""
    given = pythonic(given)
    counts: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * prompts
    if len(counts) != prompts:
        raise InputError(f"{len(counts)} max_new_tokens for {prompts} prompts: give a number, or one for each")
    for count in given if isinstance(given, list | tuple) else [given]:
        ensure(Size, max_new_tokens=count)
    return counts


def _columns(conditions: Conditions, prompts: int) -> tuple[list[Condition], list[list[int]]]:
    """(all conditions, each once; the numbers of those that each prompt has)."""
    by_prompt = conditions_by_prompt(conditions, prompts)
    if by_prompt and all(prompt_conditions is by_prompt[0] for prompt_conditions in by_prompt):
        return by_prompt[0], [list(range(len(by_prompt[0])))] * prompts
    columns = {c: j for j, c in enumerate(dict.fromkeys(itertools.chain.from_iterable(by_prompt)))}
    return list(columns), [[columns[c] for c in prompt_conditions] for prompt_conditions in by_prompt]


def _rows(
    call: Call, wanted: Sequence[Sequence[int]], prompt_rows: int | None, room: float = math.inf
) -> Iterator[Rows]:
    """Rows of every prompt and condition after its prefill. Neighbouring prompts pass through the model together under
    the conditions that they share; what does not fit half of the room is spread over several passes."""
    together = prompt_rows or (1 if call.device.type == "cpu" else MOST_PROMPTS)
    lengths = [len(text.ids) for text in call.texts]
    for block in blocks(range(len(wanted)), lengths, together, PASS_TOKENS):
        for members, columns in planned(call, block, wanted, room / 2):
            rows_read: list[Rows] = []
            with _short_of_memory(call, itertools.product(members, columns)):
                rows_read = read(call, members, columns)
            yield from rows_read


def blocks(members: Sequence[int], lengths: Sequence[int], together: int, tokens: float) -> list[list[int]]:
    """Neighbouring prompts, at most `together` and, padded to the longest, `tokens` tokens unless there is one."""
    parts: list[list[int]] = []
    longest = 0
    for i in members:
        longest = max(longest, lengths[i])
        if not parts or len(parts[-1]) == together or (len(parts[-1]) + 1) * longest > tokens:
            parts.append([])
            longest = lengths[i]
        parts[-1].append(i)
    return parts


# ---- checks before anything is computed


def check_conditions(
    model: PreTrainedModel, texts: Sequence[Prompt], conditions: Conditions, max_new_tokens: int | Sequence[int] = 1,
    facts: ModelFacts | None = None,
) -> None:  # fmt: skip
    """Raise InputError for a condition that one of its prompts cannot meet. facts: this model's, if known."""
    facts, by_prompt = facts or ModelFacts.of(model), conditions_by_prompt(conditions, len(texts))
    rules = {c: Rule.of(c) for c in dict.fromkeys(itertools.chain.from_iterable(by_prompt))}
    if any(rule is not None and rule.policy.shared for rule in rules.values()):
        check_shared(model)
    for text, prompt_conditions in zip(texts, by_prompt, strict=True):
        for c in prompt_conditions:
            check_met(facts, text, c, rules[c])
    _check_rotation(model, texts, by_prompt, new_tokens(max_new_tokens, len(texts)))


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


def _check_rotation(
    model: PreTrainedModel, texts: Sequence[Prompt], by_prompt: Sequence[Sequence[Condition]], new: Sequence[int]
) -> None:
    """Raise InputError if the model would rotate keys differently in the shorter passes than in the longer ones."""
    pairs = [(text, c) for text, prompt_conditions in zip(texts, by_prompt, strict=True) for c in prompt_conditions]
    parts = [min(boundary(text, c), getattr(c.regime, "chunk", len(text.ids))) for text, c in pairs]
    if parts:
        longest = max(len(text.ids) + most_new - 1 for text, most_new in zip(texts, new, strict=True))
        description = f"passes of {min(parts)} to {longest} tokens"
        ensure_one_rotation(model, min(parts), longest, description, "let every prompt and chunk be longer")


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


def _backends(
    model: PreTrainedModel, facts: ModelFacts, conditions: Sequence[Condition], backend: str | Mapping[Condition, str]
) -> list[str]:
    """The backend of each condition. Raises InputError for a condition that was given to the Triton backend and that it
    cannot compute: it never falls back."""
    requested: list[Any] = [backend.get(c) if isinstance(backend, Mapping) else backend for c in conditions]
    for name in requested:
        ensure(BACKENDS, backend=name)
    reasons: list[str | None] = [None] * len(requested)
    if "auto" in requested:
        reasons = obstacles(model, conditions)
    for name, c in zip(requested, conditions, strict=True):
        if name == "triton" and (why := obstacle(model, c, facts)):
            raise InputError(f"backend triton: {why} ({c.label}): use backend torch, or auto")
    chosen = ["torch" if why else "triton" for why in reasons]
    return [choice if name == "auto" else name for name, choice in zip(requested, chosen, strict=True)]


def let_go(error: BaseException) -> None:
    """Free what the frames of an error's traceback hold, caches for instance. If it is an out-of-memory error, also
    collect garbage, since frames of the model's modules refer to each other."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    if isinstance(error, torch.OutOfMemoryError):
        gc.collect()
        torch.cuda.empty_cache()


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
        raise refused(
            inner, f"weights are offloaded ({absent} for one)", "load all of it onto one device, or onto GPUs"
        )
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
