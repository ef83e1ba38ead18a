"""Hugging Face's own `generate` on a cache that evicts: `with evicting(model, condition): model.generate(...)`.

Hugging Face's loop picks tokens, streams and stops; the engine runs each forward pass. It reads the prompts as
`kvrepro.engine.passes` does, and each generated token as `kvrepro.engine.decode` does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper, wraps
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvrepro.engine.allowed import ensure, whole_numbers
from kvrepro.engine.attention import installed, with_methods
from kvrepro.engine.backend import BACKENDS
from kvrepro.engine.cache import EngineCache
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.decode import Steps
from kvrepro.engine.generate import calls
from kvrepro.engine.passes import Call, boundary, read
from kvrepro.engine.prefix import Prefix, ensure_same, recurrent
from kvrepro.engine.rows import Rows, joined
from kvrepro.engine.rule import check
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.engine.usable import usable
from kvrepro.errors import InputError

Spans = Callable[[list[int]], Mapping[str, Iterable[int]]]
SERVED = {"attention_mask", "position_ids", "logits_to_keep", "use_cache"}  # model arguments allowed beside input_ids
MODES = ("greedy_search", "sample")


@contextmanager
def evicting(
    model: PreTrainedModel, condition: Condition | Prefix, *, spans: Spans | None = None, repeat: Sequence[int] = (),
    backend: str = "auto", seed: int = 0,
) -> Iterator[PreTrainedModel]:  # fmt: skip
    """Inside the block `model.generate`, and whatever calls it, a pipeline for instance, evicts by `condition`.

    Greedy tokens, without a penalty, are those of `kvrepro.generate`; sampling, streaming and prompts padded on the
    left work as usual, and `return_dict_in_generate=True` returns the `EvictedCache`. A direct call `model(...)` does
    not evict. Calls from several threads wait for each other. The compiled code of a `torch.compile` model is not used.
    A copy of the model that is made inside the block, between calls, does not evict.

    condition: in any regime, or a `Prefix` that all prompts begin with. spans: a function from the token ids of a
    prompt to the positions of each span that the condition names. repeat, backend, seed: as in `kvrepro.generate`.
    Raises InputError for a condition that cannot be met, for a model that the engine cannot drive, and inside the block
    of another thread. `generate` raises it, before anything is computed, for beams, assistants, other caches, padding
    on the right, and input without token ids.
    """
    given, model = model, usable(model)
    prefix, c = (condition, condition.condition) if isinstance(condition, Prefix) else (None, condition)
    if not isinstance(c, Condition):
        raise InputError(f"condition {condition!r}: give a kvrepro.Condition, or a Prefix")
    check(c)
    ensure(BACKENDS, backend=backend)
    if prefix is not None:
        ensure_same(prefix.model, model)
    elif spans is not None and not callable(spans):
        raise InputError(f"spans {spans!r:.60}: give a function that says where they are")
    elif spans is None and (names := sorted({*c.whitelist, *c.spans, c.until} - {""})):
        raise InputError(f"{c.label} needs the span {names[0]!r}: give spans=, a function that says where it is")
    _ensure_own_thread(model)

    def begin(texts: list[list[int]], max_new_tokens: int) -> tuple[Call, Rows]:
        marked = [Prompt(ids, {} if spans is None else _places(spans(ids))) for ids in texts]
        if c.bits is not None and len(texts) > 1:
            raise InputError(f"{len(texts)} prompts in {c.bits} bits: give one at a time")
        condition_to_read = c if prefix is None else Condition()  # a prefix is compressed already
        new = [max_new_tokens] * len(marked)
        [(call, _)] = calls(model, marked, [condition_to_read], new, repeat, backend, seed=seed)
        ends = [boundary(text, c) if prefix is None else len(prefix.ids) for text in marked]
        unread = {len(text.ids) - end for text, end in zip(marked, ends, strict=True)}
        if len(unread) > 1 and recurrent(EngineCache(model.config)):
            raise InputError("texts of unequal length after the compressed part, in recurrent layers: give one prompt")
        return call, _read(call, ends) if prefix is None else prefix.rows(call)

    def generate(*inputs: Any, **options: Any) -> Any:
        for name in ("custom_generate", "cache_implementation", "assistant_model"):
            if options.get(name) is not None:
                raise InputError(f"{name} inside evicting(...), which has a cache and a loop of its own: leave it out")
        with installed(model), _served(model, begin):
            return type(model).generate(model, *inputs, **options)

    with with_methods(model, generate=_Generate(model, generate)):
        yield given


class _Generate:
    """A model's `generate` inside a block of this thread. A copy of the model gets its class's own in its place."""

    def __init__(self, model: PreTrainedModel, generate: Callable[..., Any]):
        update_wrapper(self, type(model).generate)
        self.model, self.generate, self.thread = model, generate, get_ident()

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.generate(*inputs, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, "generate")  # of a copy that has only its class's attributes yet


def _ensure_own_thread(model: PreTrainedModel) -> None:
    """Raise InputError inside a block of another thread, since ends in another order would not restore the model."""
    if getattr(vars(model).get("generate"), "thread", get_ident()) != get_ident():
        raise InputError("model inside evicting(...) of another thread: one block around all threads, or a model each")


def _places(named: Any) -> dict[str, list[int]]:
    """The result of `spans` as lists of positions. Raises InputError unless it is a dict of whole numbers."""
    try:
        return {name: whole_numbers(name, where) for name, where in named.items()}
    except (AttributeError, InputError):
        raise InputError(f"spans gave {named!r}: give a dict of positions, {{'question': range(90, 99)}}") from None


class EvictedCache(Cache):
    """The object that Hugging Face's loop takes for its cache and returns. The tokens lie in `rows.cache`."""

    is_compileable = is_croppable = False

    def __init__(self, begin: Callable[[list[list[int]], int], tuple[Call, Rows]], most: int):
        """begin: reads prompts, given the number of tokens that may follow; most: the most tokens of a padded row."""
        super().__init__(layers=[])
        self._begin, self._most = begin, most
        self._steps: Steps | None = None
        self.length, self.step = 0, 0

    @property
    def rows(self) -> Rows:
        """The engine's rows, in the order of the prompts."""
        if self._steps is None:
            raise InputError("an evicted cache without prompts: it is generate that reads them")
        with torch.inference_mode():
            self._steps.release()
        return self._steps.rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that each row has seen, padding and evicted tokens included, as Hugging Face counts them."""
        return self.length

    def update(self, *_: Any, **__: Any) -> Any:
        """Raise InputError: outside the block the model would compute attention itself."""
        raise InputError(
            "an evicted cache outside evicting(...): leave past_key_values out, and the prompts are read anew"
        )

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values as allocated."""
        return self.rows.cache.bytes

    @property
    def kept(self) -> Tensor:
        """Tokens that each KV head may see, int64 [layers, batch, kv_heads]."""
        return torch.stack([layer.seen().cpu() for layer in self.rows.cache.ragged.values()])

    @torch.inference_mode()
    def read(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Logits [batch, 1, vocabulary] after new tokens [batch, new]: in the first call the prompts, then one token
        for each row. Raises ArithmeticError for NaN logits."""
        if self._steps is None:
            call, rows = self._begin(_unpadded(ids, mask, positions), self._most - ids.shape[1])
            if rows.conditions[0].bits is not None:
                rows.cache.quantise()
            self._steps = Steps.of(call, rows)
        else:
            self._next(self._steps, ids[:, 0])
        self.length += ids.shape[1]
        rows = self._steps.rows
        if bool(rows.logits.isnan().any()):
            raise ArithmeticError(f"{rows.conditions[0].label}: NaN at new token {self.step + 1}")
        return rows.logits[:, None]

    def _next(self, now: Steps, token: Tensor) -> None:
        """Read one token for each row, and evict if it is due."""
        self.step += 1
        now.picked = [token.to(now.call.device)]
        now.enter(self.step)
        now.advance(self.step)


def _read(call: Call, ends: list[int]) -> Rows:
    """The prompts' rows after their first eviction; equally long compressed parts share a pass without padding."""
    members_by_end: dict[int, list[int]] = {}
    for i, end in enumerate(ends):
        members_by_end.setdefault(end, []).append(i)
    rows = joined([rows for members in members_by_end.values() for rows in read(call, members, [0])])
    order = [rows.tags.index((i, 0)) for i in range(len(call.texts))]
    return rows if order == sorted(order) else rows.take(order)


def _unpadded(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """The prompts of a batch [batch, tokens] without their padding. Raises InputError for padding that is not on the
    left, and for positions that do not count from each prompt's first token."""
    for given in (mask, positions):  # Hugging Face counts positions by the mask
        if given is not None and given.shape[-1] != ids.shape[1]:
            lengths = f"attention_mask or position_ids of {given.shape[-1]} tokens for {ids.shape[1]} token ids"
            raise InputError(f"{lengths}: give the mask that the tokenizer gave with them")
    real_tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if bool((real_tokens[:, :-1] & ~real_tokens[:, 1:]).any()):
        raise InputError("attention_mask hides tokens after a prompt's first: pad on the left (tokenizer.padding_side)")
    counted = real_tokens.cumsum(1) - 1
    if positions is not None and bool((positions != counted)[real_tokens].any()):
        raise InputError("position_ids do not count from each prompt's first token: leave them out")
    return [row[real].tolist() for row, real in zip(ids, real_tokens, strict=True)]


@contextmanager
def _served(model: PreTrainedModel, begin: Callable[[list[list[int]], int], tuple[Call, Rows]]) -> Iterator[None]:
    """Replace the cache that Hugging Face's `generate` prepares, and its forward passes, by the engine's."""
    model_forward = model.forward

    def prepare(config: Any, given: dict[str, Any], mode: Any, batch: int, most: int, *rest: Any) -> None:
        _ensure_served(config, given, mode, model.generation_config.cache_implementation)
        given["past_key_values"] = EvictedCache(begin, most + 1)

    @wraps(model_forward)
    def forward(*inputs: Any, **given: Any) -> Any:
        if given.get("kvrepro") is not None:
            return model_forward(*inputs, **given)
        cache = given.get("past_key_values")
        if not isinstance(cache, EvictedCache):
            raise InputError("generate lost sight of its evicted cache: take its plain options inside evicting(...)")
        logits = cache.read(given["input_ids"], given.get("attention_mask"), given.get("position_ids"))
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    with with_methods(
        model, forward=forward, _prepare_cache_for_generation=prepare, _compiled_call_impl=model._call_impl
    ):
        yield


def _ensure_served(config: Any, given: dict[str, Any], mode: Any, usual: str | None) -> None:
    """Raise InputError for options of `generate` that an evicted cache does not support."""
    nothing = {name for name, value in given.items() if value is None or value is False or value == {}}
    extra = given.keys() - nothing - SERVED
    if extra:
        raise InputError(f"{', '.join(sorted(extra))} inside evicting(...): give input_ids and attention_mask alone")
    if mode not in MODES:
        raise InputError(f"{mode.replace('_', ' ')} inside evicting(...): take greedy search or sampling, num_beams=1")
    refused = {
        "cache_implementation": config.cache_implementation not in (None, "dynamic", usual),
        "use_cache": config.use_cache is False,
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        "guidance_scale": config.guidance_scale not in (None, 1),
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
    }
    for name in (name for name, is_set in refused.items() if is_set):
        setting = (
            f"{name}={getattr(config, name)!r} inside evicting(...), of the call or the checkpoint's configuration"
        )
        raise InputError(f"{setting}: give the usual value")
