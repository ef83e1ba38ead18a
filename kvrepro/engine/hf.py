"""Hugging Face's own `generate` on a cache that evicts, and prefixes that are compressed once and kept in files.

    with evicting(model, condition):
        model.generate(...)

    prefix = compress(model, ids, Condition("snapkv", 0.2, Offline()))
    prefix.save("manual.safetensors")
    with evicting(model, load_prefix("manual.safetensors", model)):
        model.generate(...)  # prompts that begin with `ids`

Hugging Face's loop picks tokens, streams and stops; the engine runs each forward pass. A prefix belongs to one model:
its file holds a hash of the model's `identity` and of all that the file says.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from threading import get_ident
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvrepro.engine.attention import installed
from kvrepro.engine.batches import passes
from kvrepro.engine.cache import FLAT, STATES, EngineCache, RaggedLayer
from kvrepro.engine.condition import Condition, Offline, Prompt
from kvrepro.engine.decode import Steps
from kvrepro.engine.evict import EvictionJob, Prompts
from kvrepro.engine.facts import ModelFacts, ensure_one_rotation
from kvrepro.engine.generate import calls, conditions_by_prompt, usable
from kvrepro.engine.policy import find
from kvrepro.engine.prefill import boundary, read
from kvrepro.engine.rows import Call, Row, Rows
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError, first_line
from kvrepro.paths import replaced

SAMPLED = 64  # numbers of each tensor that identify a model
APPLIED = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")  # of a layer with adapters (PEFT)
ANOTHER = "another model read the prefix (weights, adapters or dtype differ): compress it anew"


@dataclass(frozen=True)
class Prefix:
    """A compressed prefix: one row's cache, and the logits [1, vocabulary] of the token after it."""

    ids: list[int]
    condition: Condition
    model: str  # `identity` of the model that it belongs to
    cache: EngineCache
    logits: Tensor

    @property
    def bytes(self) -> int:
        """Bytes of its keys and values."""
        return self.cache.bytes

    def save(self, path: str | Path) -> Path:
        """Write it to a safetensors file, whole or not at all. Raises InputError where it cannot be written."""
        path, tensors = Path(path), {"logits": self.logits}
        for number, layer in enumerate(self.cache.layers):
            for name in STATES:
                states = getattr(layer, name, None) or {}
                tensors |= {f"{number}.{name}.{place}": state for place, state in states.items() if state is not None}
        for number, layer in self.cache.ragged.items():
            layer.settle()
            tensors |= {f"{number}.{part}": getattr(layer, part) for part in (*FLAT, "offsets")}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        text = json.dumps({"ids": self.ids, "condition": asdict(self.condition)})
        try:
            with replaced(path) as aside:
                save_file(tensors, aside, {"prefix": text, "hash": _hash(self.model + text, tensors)})
        except (OSError, SafetensorError) as error:
            way = "give a file in a folder that is there and has room"
            raise InputError(f"{path} cannot be written ({first_line(error)}): {way}") from error
        return path

    def rows(self, call: Call) -> Rows:
        """A copy of the prefix for every text of `call`, whose rest is still unread. Raises InputError for a text that
        does not begin with the prefix, or that is so long that the model would rotate its keys differently."""
        n, batch, device = len(self.ids), len(call.texts), call.device
        if any(text.ids[:n] != self.ids for text in call.texts):
            way_out = "begin with it, unchanged, and let it end where a word does, before the blank"
            raise InputError(f"a prompt that does not begin with the prefix's {n} tokens: {way_out}")
        longest = max(len(text.ids) for text in call.texts) + call.max_new_tokens - 1
        description = f"a prefix of {n} tokens, a text of {longest}"
        ensure_one_rotation(call.model, n, longest, description, "compress a prefix that is longer")
        c, whole = self.condition, Prompts.of([Prompt(self.ids, {})], device)
        done = EvictionJob([c], None if c.policy == "full" else find(c.policy), {}, [n], whole)
        rows = [Row((i, 0), text, done, {"prefill_seconds": 0.0}) for i, text in enumerate(call.texts)]
        seen = torch.full((batch,), n, device=device)
        copies = self.cache.rows(torch.zeros(batch, dtype=torch.long, device=device))
        return Rows(rows, copies, self.logits.expand(batch, -1).clone(), seen, seen * 0)


@torch.inference_mode()
def compress(
    model: PreTrainedModel,
    ids: Sequence[int],
    condition: Condition,
    *,
    repeat: Sequence[int] = (),
    backend: str = "auto",
    seed: int = 0,
) -> Prefix:
    """Read `ids` and compress all of them by `condition`, in the regime `Offline()`. repeat, backend, seed: as in
    `generate`. Raises InputError for wrong input before anything is computed."""
    text = Prompt(ids, {})  # type: ignore[arg-type]
    [call] = calls(model, [text], conditions_by_prompt([condition], 1), [1], repeat, backend, seed)
    frees = call.rules[0] is None or call.rules[0].policy.frees
    if condition.regime != Offline() or condition.whitelist or not frees:
        way = "a prefix is compressed whole, in the regime Offline(), without spans, by a policy that frees memory"
        raise InputError(f"{condition.label}: {way}")
    with installed(call.model):
        [rows] = read(call, [0], [0])
    return Prefix(text.ids, condition, identity(call.model), rows.cache, rows.logits)


def load_prefix(path: str | Path, model: PreTrainedModel) -> Prefix:
    """The prefix in a file of `Prefix.save`, on the model's devices. Raises InputError for other files and models."""
    model = usable(model)
    try:
        with safe_open(path, "pt") as file:
            metadata, names = file.metadata() or {}, file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        way = "give a whole file of Prefix.save, or compress the prefix anew"
        raise InputError(f"{path} cannot be read ({first_line(error)}): {way}") from error
    text, own = metadata.get("prefix", ""), identity(model)
    if metadata.get("hash") != _hash(own + text, tensors):
        raise InputError(f"{path} is no whole file of Prefix.save, or {ANOTHER}")
    given, cache = json.loads(text), EngineCache(model.config)
    c = given["condition"]
    c |= {"regime": Offline(), "whitelist": (), "switches": tuple((k, v) for k, v in c["switches"])}
    for number, output in ModelFacts.of(model).outputs.items():
        parts = {part: tensors[f"{number}.{part}"].to(output.device) for part in (*FLAT, "offsets")}
        cache.ragged[number] = RaggedLayer(**parts, shape=(1, len(parts["offsets"]) - 1), sums={})
    for key, state in tensors.items():
        if key.count(".") == 2:
            layer, name, place = key.split(".")
            device = next(model.get_decoder().layers[int(layer)].parameters()).device
            getattr(cache, f"update_{name[:-1]}")(state.to(device), int(layer), int(place))
    return Prefix(given["ids"], Condition(**c), own, cache, tensors["logits"].to(model.device))


def _hash(text: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).cpu().numpy())
    return total.hexdigest()


@torch.inference_mode()
def identity(model: PreTrainedModel) -> str:
    """A hash of the model: of names, shapes and types of all parameters and buffers (rotations are among these), of 64
    evenly spaced numbers of each, and of which adapters (PEFT) apply how strongly. Fine-tuning or another dtype changes
    it, another device does not."""
    text, sampled = type(model).__name__, {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        text += f"\n{name} {tuple(tensor.shape)} {tensor.dtype}"
        at = torch.linspace(0, tensor.numel() - 1, min(SAMPLED, tensor.numel()), dtype=torch.float64).long()
        sampled[name] = tensor.flatten()[at.to(tensor.device)].float()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a model has a method of that name
            text += f"\n{name} {[getattr(module, part, None) for part in APPLIED]}"
    return _hash(text, sampled)


Spans = Callable[[list[int]], Mapping[str, Iterable[int]]]
SERVED = {"attention_mask", "position_ids", "logits_to_keep", "use_cache"}  # model arguments allowed beside input_ids


@contextmanager
def evicting(
    model: PreTrainedModel,
    condition: Condition | Prefix,
    *,
    spans: Spans | None = None,
    repeat: Sequence[int] = (),
    backend: str = "auto",
    seed: int = 0,
) -> Iterator[PreTrainedModel]:
    """Inside the block `model.generate`, and whatever calls it, a pipeline for instance, evicts by `condition`.

    Greedy tokens, without a penalty, are those of `kvrepro.generate`; sampling, streaming and prompts padded on the
    left work as usual, and `return_dict_in_generate=True` returns the `EvictedCache`. A direct call `model(...)` does
    not evict. Calls from several threads wait for each other. The compiled code of a `torch.compile` model is not used.

    condition: in any regime, or a `Prefix` that all prompts begin with. spans: a function from the token ids of a
    prompt to the positions of each span that the condition names. repeat, backend, seed: as in `kvrepro.generate`.
    Raises InputError for a model that the engine cannot drive, and inside the block of another thread; `generate`
    raises it, before anything is computed, for what a condition or an evicted cache cannot serve, and in a copy.
    """
    given, model = model, usable(model)
    prefix, c = (condition, condition.condition) if isinstance(condition, Prefix) else (None, condition)
    if prefix is not None and prefix.model != identity(model):
        raise InputError(ANOTHER)
    if getattr(vars(model).get("generate"), "thread", get_ident()) != get_ident():  # its end restores nothing
        raise InputError("model inside evicting(...) of another thread: one block around all threads, or a model each")

    def begin(prompts: list[list[int]], max_new_tokens: int) -> Steps:
        n, wanted = len(prompts), c if prefix is None else Condition()  # a prefix is compressed already
        marked = [{} if spans is None else {name: list(at) for name, at in spans(ids).items()} for ids in prompts]
        texts = [Prompt(ids, at) for ids, at in zip(prompts, marked, strict=True)]
        [call] = calls(model, texts, [[wanted]] * n, [max_new_tokens] * n, repeat, backend, seed)
        if c.bits is not None and n > 1:
            raise InputError(f"{n} prompts in {c.bits} bits: give one at a time")
        unread = {len(text.ids) - (boundary(text, c) if prefix is None else len(prefix.ids)) for text in texts}
        if len(unread) > 1 and EngineCache(model.config).recurrent:
            raise InputError("texts of unequal length after the compressed part, in recurrent layers: give one prompt")
        if prefix is not None:
            rows = prefix.rows(call)
        else:
            rows = Rows.joined([rows for part in passes(call, [[0]] * n, n) for rows in read(call, *part)])
            if (order := [rows.tags.index((i, 0)) for i in range(n)]) != sorted(order):
                rows = rows.take(order)
        return Steps(call, rows)

    @wraps(type(model).generate)
    def generate(self: PreTrainedModel, *inputs: Any, **options: Any) -> Any:
        if self is not model:
            raise InputError("a copy of a model that is inside evicting(...): copy it outside")
        for name in ("custom_generate", "cache_implementation", "position_ids"):
            if options.get(name) is not None:
                raise InputError(f"{name} inside evicting(...), which has its own: leave it out")
        with installed(model), _served(model, begin):
            return type(model).generate(model, *inputs, **options)

    vars(generate)["thread"] = get_ident()
    with patch.multiple(model, generate=MethodType(generate, model)):
        yield given


class EvictedCache(Cache):
    """The object that Hugging Face's loop takes for its cache and returns. The tokens lie in `rows.cache`."""

    is_compileable = is_croppable = False

    def __init__(self, begin: Callable[[list[list[int]], int], Steps], most: int):
        """begin: reads prompts, given the number of tokens that may follow; most: the most tokens of a padded row."""
        super().__init__(layers=[])
        self._begin, self._most = begin, most
        self._steps: Steps | None = None
        self.rows: Rows  # the engine's, in the order of the prompts
        self.length, self.step = 0, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that each row has seen, padding and evicted tokens included, as Hugging Face counts them."""
        return self.length

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values as allocated."""
        return self.rows.cache.bytes

    @property
    def kept(self) -> Tensor:
        """Tokens that each KV head holds, int64 [layers, batch, kv_heads]."""
        return torch.stack([layer.held().cpu() for layer in self.rows.cache.ragged.values()])

    @torch.inference_mode()
    def read(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Logits [batch, 1, vocabulary] after new tokens [batch, new]: in the first call the prompts, then one token
        for each row. Raises InputError for padding on the right, and ArithmeticError for NaN logits."""
        if self._steps is None:
            real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            if real.shape != ids.shape:
                raise InputError(f"attention_mask of {real.shape[-1]} tokens for {ids.shape[-1]} token ids")
            if bool((real[:, :-1] & ~real[:, 1:]).any()):
                raise InputError("attention_mask hides tokens after a prompt's first: pad on the left (padding_side)")
            prompts = [row[own].tolist() for row, own in zip(ids, real, strict=True)]
            self._steps = self._begin(prompts, self._most - ids.shape[1])
        else:
            self.step += 1
            self._steps.picked = [ids[:, 0].to(self._steps.call.device)]
            self._steps.enter(self.step)
            self._steps.advance(self.step)
        self.length, self.rows = self.length + ids.shape[1], self._steps.rows
        if bool(self.rows.logits.isnan().any()):
            raise ArithmeticError(f"{self.rows.job.condition.label}: NaN at new token {self.step + 1}")
        return self.rows.logits[:, None]


@contextmanager
def _served(model: PreTrainedModel, begin: Callable[[list[list[int]], int], Steps]) -> Iterator[None]:
    """Replace the cache that Hugging Face's `generate` prepares, and its forward passes, by the engine's."""
    model_forward = model.forward

    def prepare(config: Any, given: dict[str, Any], mode: str, batch: int, most: int, *rest: Any) -> None:
        refused = [name for name, x in given.items() if not (name in SERVED or x is None or x is False or x == {})]
        refused += ["prefill_chunk_size"] * (config.prefill_chunk_size is not None)
        refused += ["guidance_scale"] * (config.guidance_scale not in (None, 1))
        refused += ["use_cache=False"] * (config.use_cache is False)
        refused += [mode] * (mode not in ("greedy_search", "sample"))
        if refused:
            way_out = "give input_ids and attention_mask alone, for greedy search or sampling"
            raise InputError(f"{', '.join(refused)} inside evicting(...): {way_out}")
        given["past_key_values"] = EvictedCache(begin, most + 1)  # the last token needs no place, so `most` omits it

    @wraps(model_forward)
    def forward(*inputs: Any, **given: Any) -> Any:
        if given.get("kvrepro") is not None:
            return model_forward(*inputs, **given)
        cache: EvictedCache = given["past_key_values"]
        logits = cache.read(given["input_ids"], given.get("attention_mask"))
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    served = {"_prepare_cache_for_generation": prepare, "_compiled_call_impl": model._call_impl}
    with patch.multiple(model, forward=forward, **served):
        yield
