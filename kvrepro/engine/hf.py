"""Hugging Face's own `generate` on a cache that evicts, and prefixes that are compressed once and kept in files.

    with evicting(model, condition):
        model.generate(...)

    prefix = compress(model, ids, Condition("snapkv", 0.2, Offline()))
    prefix.save("manual.safetensors")
    with evicting(model, load_prefix("manual.safetensors", model)):
        model.generate(...)  # prompts that begin with `ids`

Hugging Face's loop picks tokens, streams and stops; the engine runs each forward pass. A prefix's file belongs to one
model: it names the model's `identity`, the condition and the tokens, and holds a checksum.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import update_wrapper, wraps
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvrepro.engine.attention import installed, with_methods
from kvrepro.engine.backend import BACKENDS
from kvrepro.engine.batches import passes
from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.condition import Condition, Offline, Prompt, ensure
from kvrepro.engine.decode import Steps
from kvrepro.engine.evict import EvictionJob, Prompts
from kvrepro.engine.facts import ModelFacts, ensure_one_rotation
from kvrepro.engine.generate import calls, usable
from kvrepro.engine.policy import check, find
from kvrepro.engine.prefill import boundary, read
from kvrepro.engine.rows import Call, Row, Rows
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError, first_line
from kvrepro.paths import replaced

KIND = "kvrepro prefix 2"
SUM = "sha256"  # of the rest of the file
SAMPLED = 64  # numbers of each tensor that identify a model
STATES = ("conv_states", "recurrent_states")  # of a recurrent layer, as Hugging Face's cache calls them
APPLIED = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")  # of a layer with adapters (PEFT)
PARTS = ("keys", "values", "positions", "offsets")  # of a layer


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
        """Write it to a safetensors file, whole or not at all. Raises InputError if the file cannot be written."""
        path = Path(path)
        tensors = {"logits": self.logits}
        for number, layer in enumerate(self.cache.layers):
            for name in STATES:
                states = getattr(layer, name, None) or {}
                tensors |= {f"{number}.{name}.{place}": state for place, state in states.items() if state is not None}
        for number, layer in self.cache.ragged.items():
            layer.settle()
            tensors |= {f"{number}.{part}": getattr(layer, part) for part in PARTS}
        metadata = {"kind": KIND, "model": self.model, "condition": json.dumps(asdict(self.condition))}
        metadata["ids"] = json.dumps(self.ids)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            with replaced(path) as aside:
                save_file(tensors, aside, metadata | {SUM: digest(metadata, tensors)})
        except (OSError, SafetensorError) as error:  # a full disk, a folder that takes no files
            raise InputError(f"{path} cannot be written ({first_line(error)}): name another file") from None
        return path

    def rows(self, call: Call) -> Rows:
        """A copy of the prefix for every text of `call`, whose rest is still unread. Raises InputError for a text that
        does not begin with the prefix, or that is so long that the model would rotate its keys differently."""
        n, batch, device = len(self.ids), len(call.texts), call.device
        for text in call.texts:
            if text.ids[:n] != self.ids:
                differs = next((at for at, (a, b) in enumerate(zip(text.ids, self.ids, strict=False)) if a != b), None)
                where = f"ends after {len(text.ids)}" if differs is None else f"differs at token {differs}"
                way_out = "begin with the prefix, unchanged, and let it end where a word does, before the blank"
                raise InputError(f"the prompt {where} of the prefix's {n} tokens: {way_out}")
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
    """Read `ids` and compress all of them by `condition`, in the regime `Offline()`.

    repeat, backend, seed: as in `generate`. Raises InputError for wrong input before anything is computed.
    """
    text = Prompt(ids, {})  # type: ignore[arg-type]
    if not isinstance(condition, Condition):
        raise InputError(f"condition {condition!r:.60}: give a kvrepro.Condition")
    if condition.regime != Offline() or condition.whitelist:
        raise InputError(f"{condition.label}: a prefix is compressed whole, in the regime Offline(), without spans")
    if condition.policy != "full" and not find(condition.policy).frees:
        raise InputError(f"{condition.policy} evicts nothing, so there is no compressed prefix: take another policy")
    [call] = calls(model, [text], [[condition]], [1], repeat, backend, seed)
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
        raise InputError(f"no prefix in {path} ({str(error).splitlines()[0]}): give what Prefix.save wrote") from None
    if metadata.get("kind") != KIND:
        raise InputError(f"{path} is {metadata.get('kind', 'no prefix')!r}, not {KIND!r}: save it again")
    if metadata.get(SUM) != digest(metadata, tensors):
        raise InputError(f"{path} is damaged (its checksum is another): save or copy it again")
    ensure_same(metadata["model"], model)
    c, cache = json.loads(metadata["condition"]), EngineCache(model.config)
    c |= {"regime": Offline(), "whitelist": (), "switches": tuple((k, v) for k, v in c["switches"])}
    for number, output in ModelFacts.of(model).outputs.items():
        parts = {part: tensors[f"{number}.{part}"].to(output.device) for part in PARTS}
        cache.ragged[number] = RaggedLayer(**parts, shape=(1, len(parts["offsets"]) - 1), sums={})
    for key, state in tensors.items():
        if key.count(".") == 2:
            layer, name, place = key.split(".")
            device = next(model.get_decoder().layers[int(layer)].parameters()).device
            getattr(cache, f"update_{name[:-1]}")(state.to(device), int(layer), int(place))
    logits = tensors["logits"].to(model.device)
    return Prefix(json.loads(metadata["ids"]), Condition(**c), metadata["model"], cache, logits)


def digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The checksum of a file: of its tensors, and of its metadata but for the checksum."""
    total = hashlib.sha256(json.dumps({key: metadata[key] for key in sorted(metadata) if key != SUM}).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).cpu().numpy())
    return total.hexdigest()


def ensure_same(expected: str, model: PreTrainedModel) -> None:
    """Raise InputError if the model's `identity` is not the expected one."""
    if (actual := identity(model)) != expected:
        problem = f"the prefix was read by model {expected}, this one is {actual}"
        raise InputError(f"{problem} (weights, adapters or dtype differ): compress it anew")


@torch.inference_mode()
def identity(model: PreTrainedModel) -> str:
    """A hash of the model, 16 hex digits: of names, shapes and types of all parameters and buffers (rotations are among
    these), of 64 evenly spaced numbers of each, and of which adapters (PEFT) apply how strongly. Fine-tuning or another
    dtype changes it, another device does not.
    """
    descriptions, sampled = [type(model).__name__], []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        descriptions.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}")
        at = torch.linspace(0, tensor.numel() - 1, min(SAMPLED, tensor.numel()), dtype=torch.float64).long()
        sampled.append(tensor.flatten()[at.to(tensor.device)].float().cpu())
    for name, module in model.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a model has a method of that name
            descriptions.append(f"{name} {[getattr(module, part, None) for part in APPLIED]}")
    return hashlib.sha256("\n".join(descriptions).encode() + torch.cat(sampled).numpy().tobytes()).hexdigest()[:16]


Spans = Callable[[list[int]], Mapping[str, Iterable[int]]]
SERVED = {"attention_mask", "position_ids", "logits_to_keep", "use_cache"}  # model arguments allowed beside input_ids
MODES = ("greedy_search", "sample")


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
    elif spans is None and (names := sorted({*c.whitelist, *c.spans, c.until} - {""})):
        raise InputError(f"{c.label} needs the span {names[0]!r}: give spans=, a function that says where it is")

    if getattr(vars(model).get("generate"), "thread", get_ident()) != get_ident():  # its end restores nothing
        raise InputError("model inside evicting(...) of another thread: one block around all threads, or a model each")

    def begin(texts: list[list[int]], max_new_tokens: int) -> tuple[Call, Rows]:
        marked = [
            Prompt(ids, {} if spans is None else {name: list(at) for name, at in spans(ids).items()}) for ids in texts
        ]
        if c.bits is not None and len(texts) > 1:
            raise InputError(f"{len(texts)} prompts in {c.bits} bits: give one at a time")
        conditions = [[c if prefix is None else Condition()]] * len(marked)  # a prefix is compressed already
        [call] = calls(model, marked, conditions, [max_new_tokens] * len(marked), repeat, backend, seed)
        ends = [boundary(text, c) if prefix is None else len(prefix.ids) for text in marked]
        unread = {len(text.ids) - end for text, end in zip(marked, ends, strict=True)}
        if len(unread) > 1 and EngineCache(model.config).recurrent:
            raise InputError("texts of unequal length after the compressed part, in recurrent layers: give one prompt")
        return call, _rows(call) if prefix is None else prefix.rows(call)

    def generate(*inputs: Any, **options: Any) -> Any:
        for name in ("custom_generate", "cache_implementation", "assistant_model"):
            if options.get(name) is not None:
                raise InputError(f"{name} inside evicting(...), which has a cache and a loop of its own: leave it out")
        with installed(model), _served(model, begin):
            return type(model).generate(model, *inputs, **options)

    with with_methods(model, generate=_Generate(model, generate)):
        yield given


def _rows(call: Call) -> Rows:
    """The prompts' rows after their first eviction, in the order of the prompts."""
    n = len(call.texts)
    rows = Rows.joined([rows for part in passes(call, [[0]] * n, n) for rows in read(call, *part)])
    order = [rows.tags.index((i, 0)) for i in range(n)]
    return rows if order == sorted(order) else rows.take(order)


class _Generate:
    """A model's `generate` inside a block of this thread. A copy of the model gets its class's own in its place."""

    def __init__(self, model: PreTrainedModel, generate: Callable[..., Any]):
        update_wrapper(self, type(model).generate)
        self.model, self.generate, self.thread = model, generate, get_ident()

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.generate(*inputs, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, "generate")  # of a copy that has only its class's attributes yet


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
        return self._steps.rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that each row has seen, padding and evicted tokens included, as Hugging Face counts them."""
        return self.length

    def update(self, *_: Any, **__: Any) -> Any:
        """Raise InputError: outside the block the model would compute attention itself."""
        way_out = "leave past_key_values out, and the prompts are read anew"
        raise InputError(f"an evicted cache outside evicting(...): {way_out}")

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values as allocated."""
        return self.rows.cache.bytes

    @property
    def kept(self) -> Tensor:
        """Tokens that each KV head holds, int64 [layers, batch, kv_heads]."""
        return torch.stack([layer.held().cpu() for layer in self.rows.cache.ragged.values()])

    @torch.inference_mode()
    def read(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Logits [batch, 1, vocabulary] after new tokens [batch, new]: in the first call the prompts, then one token
        for each row. Raises ArithmeticError for NaN logits."""
        if self._steps is None:
            call, rows = self._begin(_unpadded(ids, mask, positions), self._most - ids.shape[1])
            self._steps = Steps(call, rows)
        else:
            self.step += 1
            self._steps.picked = [ids[:, 0].to(self._steps.call.device)]
            self._steps.enter(self.step)
            self._steps.advance(self.step)
        self.length += ids.shape[1]
        rows = self._steps.rows
        if bool(rows.logits.isnan().any()):
            raise ArithmeticError(f"{rows.first.condition.label}: NaN at new token {self.step + 1}")
        return rows.logits[:, None]


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

    served = {"_prepare_cache_for_generation": prepare, "_compiled_call_impl": model._call_impl}
    with with_methods(model, forward=forward, **served):
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
        whose = "inside evicting(...), of the call or the checkpoint's configuration"
        raise InputError(f"{name}={getattr(config, name)!r} {whose}: give the usual value")
