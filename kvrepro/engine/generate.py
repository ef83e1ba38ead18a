"""One call for every regime: prompts x conditions -> generations.

One forward pass of a prompt serves all its conditions; what each keeps decodes together, as rows of one batch.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvrepro.engine.allowed import Size, ensure
from kvrepro.engine.attention import installed
from kvrepro.engine.backend import BACKENDS, obstacle, obstacles
from kvrepro.engine.condition import Condition, Generation
from kvrepro.engine.condition import Prompt as Text
from kvrepro.engine.decode import batch_kind, decode
from kvrepro.engine.evict import REPEATED
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.passes import Call, boundary, check_shared, groups, read
from kvrepro.engine.policy import check, find
from kvrepro.engine.rows import Rows, Tag, joined
from kvrepro.errors import InputError

ERRORS = ("raise", "return")


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int] | Text],
    conditions: Sequence[Condition],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = 64,
    prompt_rows: int = 1,
    backend: str | Sequence[str] = "torch",
    repeat: Sequence[int] = (),
    measure_peak: bool = False,
    kept_sets: bool = False,
    seed: int = 0,
    errors: str = "raise",
) -> list[list[Generation | Exception]]:
    """Greedy generations `[prompt][condition]` of at most `max_new_tokens`.

    prompts: token ids, or `Prompt` where a condition names spans. Rows of any prompt and condition decode in batches of
    up to `batch_rows`; `prompt_rows` prompts pass through the model together, padded on the left.
    backend: "torch"; "triton" on a GPU: attention of whole prompts by torch's fastest that keeps the log-sum-exp, of
    chunks and single tokens, window scores and sums by kernels, a question after the compressed prompt by plain torch;
    what it cannot do, it refuses. "auto": "triton" where `kvrepro.engine.backend` finds that it can and agrees, else
    "torch". Or one of these for each condition. Each generation says which it was.
    repeat: token ids of KVzip's request to repeat the context. measure_peak: measure what the prefill allocates, one
    condition at a time. kept_sets: return who stayed. seed: of policies that draw, whose draws differ between prompts.
    errors: "return" gives, in place of a generation, the exception that a policy raised or that NaN logits caused; the
    other rows go on. Raises InputError, before anything is computed, for what can be known by then.
    """
    _check_call(prompts, max_new_tokens, batch_rows, prompt_rows, errors)
    texts = [p if isinstance(p, Text) else Text(list(p), {}) for p in prompts]
    for text in texts:
        _check_prompt(model, text.ids, max_new_tokens)
    check_conditions(model, texts, conditions, max_new_tokens=max_new_tokens)
    backends = _backends(model, texts, conditions, backend)
    _check_means(conditions, repeat)
    answers: dict[Tag, Generation | Exception] = {}
    for name in dict.fromkeys(backends):
        columns = [j for j, chosen in enumerate(backends) if chosen == name]
        call = Call(
            model, texts, [conditions[j] for j in columns], max_new_tokens, ModelFacts.of(model), list(repeat),
            measure_peak, kept_sets, name, seed, errors == "return",
        )  # fmt: skip
        together = 1 if name == "triton" and backend == "auto" else prompt_rows
        answers |= {(i, columns[j]): answer for (i, j), answer in _answers(call, together, batch_rows, stop_ids)}
    return [[answers[i, j] for j in range(len(conditions))] for i in range(len(texts))]


def _answers(
    call: Call, prompt_rows: int, batch_rows: int, stop_ids: Collection[int]
) -> Iterator[tuple[Tag, Generation | Exception]]:
    """Of every prompt under every condition, in the order in which they end."""
    waiting: dict[tuple[Any, ...], list[Rows]] = {}
    with installed(call.model):
        for row in _rows(call, prompt_rows):
            kind = batch_kind(row)
            waiting.setdefault(kind, []).append(row)
            if len(waiting[kind]) >= batch_rows or row.conditions[0].bits is not None:
                yield from decode(call, joined(waiting.pop(kind)), stop_ids)
        for batch in waiting.values():
            yield from decode(call, joined(batch), stop_ids)
    yield from call.failed.items()


def _rows(call: Call, prompt_rows: int) -> Iterator[Rows]:
    """Every prompt under every condition after its prefill, a row each, in as many bits as its condition asks for."""
    for first in range(0, len(call.texts), prompt_rows):
        members = list(range(first, min(first + prompt_rows, len(call.texts))))
        for columns in groups(call, members):
            for rows in read(call, members, columns):
                for number in range(len(rows)):
                    row = rows if len(rows) == 1 else rows.take([number])
                    if row.conditions[0].bits is not None:
                        row.cache.quantise(row.conditions[0].bits)
                    yield row


# ---- what can be known before anything is computed


def check_conditions(
    model: PreTrainedModel, texts: Sequence[Text], conditions: Sequence[Condition], max_new_tokens: int = 1
) -> None:
    """Raise InputError for a condition that one of the prompts cannot meet."""
    facts = ModelFacts.of(model)
    for c in conditions:
        check(c)
    for text in texts:
        for c in conditions:
            if c.policy != "full" and find(c.policy).shared:
                check_shared(model, len(text.ids), max_new_tokens)
            end = boundary(text, c)
            check(c, facts.held(end), [at - end for at in whitelisted(text, c) if at < end])


def whitelisted(text: Text, c: Condition) -> set[int]:
    """Positions that `c` protects by name."""
    return {at for name in c.whitelist for at in text.spans[name]}


def _check_call(prompts: Sequence[Any], max_new_tokens: int, batch_rows: int, prompt_rows: int, errors: str) -> None:
    if any(isinstance(p, int) for p in prompts):
        raise InputError(f"prompts {list(prompts)[:3]}: give a list of prompts, each a list of token ids")
    ensure(Size, batch_rows=batch_rows, max_new_tokens=max_new_tokens, prompt_rows=prompt_rows)
    ensure(ERRORS, errors=errors)


def _check_prompt(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise InputError if the model cannot continue `prompt`."""
    config, n = model.config.get_text_config(), len(prompt)
    if n < 2:
        raise InputError(f"prompt of {n} tokens < 2: give a text to continue")
    if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
        strange = min(prompt) if min(prompt) < 0 else max(prompt)
        raise InputError(f"token id {strange} outside the model's vocabulary of {config.vocab_size}: other tokenizer?")
    if n + max_new_tokens > config.max_position_embeddings:
        asked = f"{n} prompt + {max_new_tokens} new tokens"
        raise InputError(f"{asked} > the model's {config.max_position_embeddings} positions: shorten one")


def _check_means(conditions: Sequence[Condition], repeat: Sequence[int]) -> None:
    """Raise InputError for a policy that the request to repeat does not serve."""
    for c in conditions:
        if c.policy != "full" and REPEATED.intersection(find(c.policy).needs) and not repeat:
            raise InputError(f"{c.policy} repeats the context: give `repeat`, token ids of the request to do so")


def _backends(
    model: PreTrainedModel, texts: Sequence[Text], conditions: Sequence[Condition], backend: str | Sequence[str]
) -> list[str]:
    """Who computes each condition. Raises InputError for what the Triton backend does not do: it never falls back."""
    asked = [backend] * len(conditions) if isinstance(backend, str) else list(backend)
    if len(asked) != len(conditions):
        raise InputError(f"{len(asked)} backends for {len(conditions)} conditions: give one for all, or one for each")
    for name in asked:
        ensure(BACKENDS, backend=name)
    found = dict.fromkeys(range(len(asked)))
    if "auto" in asked:
        found |= dict(enumerate(obstacles(model, texts[0].ids if texts else [], conditions)))
    for name, c in zip(asked, conditions, strict=True):
        if name == "triton" and (why := obstacle(model, c)):
            raise InputError(f"backend triton: {why} ({c.label}): use backend torch, or auto")
    return [("torch" if found[j] else "triton") if name == "auto" else name for j, name in enumerate(asked)]
