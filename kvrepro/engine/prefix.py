"""A prefix that is compressed once, kept in a file and continued by many prompts: the regime `Offline`.

    prefix = compress(model, ids, Condition("snapkv", 0.2, Offline()))
    prefix.save("manual.safetensors")
    with evicting(model, load_prefix("manual.safetensors", model)):
        model.generate(...)  # prompts that begin with `ids`

A file belongs to one model: it names the model's `identity`, the condition and the tokens, and holds a checksum.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvrepro.engine.attention import installed
from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.evict import EvictionJob, Prompts
from kvrepro.engine.facts import ModelFacts, ensure_one_rotation
from kvrepro.engine.generate import calls
from kvrepro.engine.passes import Call, read
from kvrepro.engine.policy import find
from kvrepro.engine.regime import Offline
from kvrepro.engine.rows import Rows
from kvrepro.engine.rule import budget_of
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.engine.usable import usable
from kvrepro.errors import InputError, first_line
from kvrepro.paths import replaced

KIND = "kvrepro prefix 2"
SUM = "sha256"  # of the rest of the file
SAMPLED = 64  # numbers of each tensor that identify a model
STATES = ("conv_states", "recurrent_states")  # of a recurrent layer, as Hugging Face's cache calls them
APPLIED = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")  # of a layer with adapters (PEFT)
PARTS = ("keys", "values", "positions", "offsets", "hidden")  # of a layer


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
        if path.is_dir() or not path.parent.is_dir():
            problem = "that is a folder" if path.is_dir() else f"no folder {path.parent}"
            raise InputError(f"{path}: {problem}, name a file in a folder that is there")
        tensors = {"logits": self.logits}
        for number, layer in enumerate(self.cache.layers):
            for name in STATES:
                states = getattr(layer, name, None) or {}
                tensors |= {f"{number}.{name}.{place}": state for place, state in states.items() if state is not None}
        for number, layer in self.cache.ragged.items():
            layer.settle()
            parts = {part: getattr(layer, part) for part in PARTS}
            tensors |= {f"{number}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
        metadata = {"kind": KIND, "model": self.model, "condition": json.dumps(asdict(self.condition)),
                "ids": json.dumps(self.ids)}  # fmt: skip
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
        c, whole = self.condition, Prompt(self.ids, {})
        policy = None if c.policy == "full" else find(c.policy)
        parameters = policy.reading(c.reading, c.switches) if policy is not None else {}
        job = EvictionJob([c], policy, parameters, [budget_of(c, call.facts.held(n))], Prompts.of([whole], device))
        tags = [(i, 0) for i in range(batch)]
        call.notes |= dict.fromkeys(tags, {"prefill_seconds": 0.0})
        seen = torch.full((batch,), n, device=device)
        copies = self.cache.rows(torch.zeros(batch, dtype=torch.long, device=device))
        return Rows(tags, [job] * batch, call.texts, copies, self.logits.expand(batch, -1).clone(), seen, seen * 0)


@torch.inference_mode()
def compress(
    model: PreTrainedModel, ids: Sequence[int], condition: Condition, *, repeat: Sequence[int] = (),
    backend: str = "auto", seed: int = 0,
) -> Prefix:  # fmt: skip
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
    [(call, _)] = calls(model, [text], [condition], [1], repeat, backend, seed=seed)
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
    try:
        ensure_same(metadata["model"], model)
        return _from_parts(metadata, tensors, model)
    except InputError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise InputError(f"{path} is no whole prefix ({why}): save it again") from None


def digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The checksum of a file: of its tensors, and of its metadata but for the checksum."""
    total = hashlib.sha256(json.dumps({key: metadata[key] for key in sorted(metadata) if key != SUM}).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.flatten().view(torch.uint8).cpu().numpy())
    return total.hexdigest()


def _from_parts(metadata: dict[str, str], tensors: dict[str, Tensor], model: PreTrainedModel) -> Prefix:
    """The prefix in a file. Raises KeyError, IndexError, TypeError or ValueError if its parts do not make one."""
    c, ids = json.loads(metadata["condition"]), [int(token) for token in json.loads(metadata["ids"])]
    c |= {"regime": Offline(), "whitelist": (), "switches": tuple((k, v) for k, v in c["switches"])}
    cache, facts = EngineCache(model.config), ModelFacts.of(model)
    for number, output in facts.outputs.items():
        named = {part: f"{number}.{part}" for part in PARTS}
        parts = {
            part: tensors[name].to(output.device) for part, name in named.items() if part != "hidden" or name in tensors
        }
        offsets = parts["offsets"]
        counts = {len(tensor) for part, tensor in parts.items() if part != "offsets"}
        if len(offsets) != facts.kv_heads[number] + 1 or counts != {int(offsets[-1])}:
            raise ValueError(f"tensors of layer {number} do not fit each other")
        cache.ragged[number] = RaggedLayer(**parts, shape=(1, len(offsets) - 1), sums={})
    for key, state in tensors.items():
        if key.count(".") == 2:
            layer, name, place = key.split(".")
            device = next(model.get_decoder().layers[int(layer)].parameters()).device
            getattr(cache, f"update_{name[:-1]}")(state.to(device), int(layer), int(place))
    return Prefix(ids, Condition(**c), metadata["model"], cache, tensors["logits"].to(model.device))


def recurrent(cache: EngineCache) -> bool:
    """Does the cache's model have recurrent layers, with states in the place of tokens?"""
    return any(hasattr(layer, "recurrent_states") for layer in cache.layers)


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
