"""What the engine must know about a model: its layers with tokens to evict, windows, outputs and rotations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformers.pytorch_utils import Conv1D

from kvrepro.engine.attention import Softmax, alone
from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError

OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense")  # families' names for the projection of an attention's output
ATTENDING = {"full_attention", "sliding_attention", "attention"}  # types of layers with keys and values alone
HOLDING = ATTENDING | {"hybrid"}  # with keys and values, and maybe a recurrent state
RECURRENT = {"linear_attention", "mamba", "conv", "mlp", "moe"}  # without keys and values


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model. Layers are numbered as in the model."""

    attention: tuple[int, ...]  # numbers of the layers with keys and values
    evictable: tuple[int, ...]  # numbers of the layers that policies evict from
    kv_heads: dict[int, int]
    sliding: dict[int, int]  # tokens that a query looks back, itself included, of each sliding layer
    outputs: dict[int, Tensor]  # [heads, dim, hidden]
    inverse_frequencies: dict[int, Tensor | None]  # [rotated / 2] of each evictable layer's rotation, if it has one
    own_softmax: bool = False  # do layers cap their logits, or have sinks?
    backend: str = "torch"  # that scorers compute with

    def observe(self, layer: int, keys: Tensor, seeds: Sequence[int] | Tensor, **fields: Any) -> Observation:
        """An observation of an evictable layer. fields: those of `Observation` that the model does not determine."""
        frequencies = self.inverse_frequencies[layer]
        if isinstance(rule := fields["scaling"], Softmax):
            fields |= {"scaling": rule.scaling, "softmax": rule}
        fields |= {"keys": keys, "output": self.outputs[layer], "sliding": self.sliding.get(layer)}
        fields |= {"seed": torch.as_tensor(seeds, device=keys.device), "backend": self.backend}
        fields["inverse_frequencies"] = None if frequencies is None else frequencies.to(keys.device)
        return Observation(layer=self.evictable.index(layer), layers=len(self.evictable), **fields)

    @classmethod
    def of(cls, model: PreTrainedModel, one_set: bool = False) -> "ModelFacts":
        """The facts of a model. Sliding layers drop tokens by themselves, so policies evict from them only if the model
        has no other attention layers. one_set: one set of tokens serves all layers; then a sliding layer sees those
        within its window and drops none. Raises InputError for a model that the engine cannot drive."""
        modules = check_family(model)
        outputs, kv_heads, sliding = {}, {}, {}
        for number, module in modules.items():
            outputs[number] = output_projection(module)
            kv_heads[number] = len(outputs[number]) // getattr(module, "num_key_value_groups", 1)
            if not one_set and (window := sliding_window(model.config, number)) is not None:
                sliding[number] = window
        evictable = tuple(n for n in outputs if n not in sliding) or tuple(outputs)
        rotary, kinds = getattr(model.get_decoder(), "rotary_emb", None), layer_types(model.config.get_text_config())
        usual = getattr(rotary, "inv_freq", None)  # Gemma 3 has frequencies for each type of layer
        frequencies = {n: getattr(rotary, f"{kinds[n]}_inv_freq", usual) for n in evictable}
        own_softmax = any(getattr(m, "attn_logit_softcapping", None) or hasattr(m, "sinks") for m in modules.values())
        return cls(tuple(outputs), evictable, kv_heads, sliding, outputs, frequencies, own_softmax)

    def held(self, tokens: int) -> int:
        """Tokens that an evictable layer holds of `tokens` seen; if it slides, those that the next query can see."""
        return min([tokens, *(self.sliding[n] - 1 for n in self.evictable if n in self.sliding)])


def check_family(model: PreTrainedModel) -> dict[int, Module]:
    """The model's `attention_modules`. Raises InputError for a model whose attention the engine cannot take over."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise refused(model, "it has an encoder")
    config, modules = model.config.get_text_config(), attention_modules(model)
    types, shared = layer_types(config), getattr(config, "num_kv_shared_layers", 0)
    holding, unknown = [n for n, kind in enumerate(types) if kind in HOLDING], sorted(set(types) - HOLDING - RECURRENT)
    weights = [getattr(_outputs(module)[0], "weight", None) for module in modules.values()]
    plain = [w for w in weights if isinstance(w, Tensor) and w.is_floating_point() and w.dim() == 2 and w.itemsize > 1]
    reasons = {
        "transformers does not let others compute its attention": not model._can_set_attn_implementation(),
        f"layers of type {', '.join(unknown)} are unknown here": unknown,
        f"layers share keys and values (num_kv_shared_layers {shared})": shared,
        "it brings a cache of its own": not model._supports_default_dynamic_cache(),
        f"{len(modules)} of {len(holding)} layers with tokens hold keys and values per head": list(modules) != holding,
        "no layer holds keys and values": not holding,
        "its weights are quantised": len(plain) < len(weights),
    }
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise refused(model, why)
    return modules


def refused(model: PreTrainedModel, why: str, way_out: str = "take a family of data/families.csv") -> InputError:
    """The error for a model that the engine cannot drive."""
    return InputError(f"cannot evict from a {model.config.get_text_config().model_type} model: {why}; {way_out}")


def layer_types(config: Any) -> Sequence[str]:
    """The type of each layer of a text model; "attention" for all if the configuration names none."""
    return getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers


def attention_modules(model: PreTrainedModel) -> dict[int, Module]:
    """The attention modules of the layers that hold keys and values, by layer, in order."""
    types = layer_types(model.config.get_text_config())
    modules = {}
    for module in model.get_decoder().modules():
        number = vars(module).get("layer_idx")  # `getattr` would search thousands of parts
        if number is not None and types[number] in HOLDING and head_dim(module) and _outputs(module):
            modules[number] = module
    return dict(sorted(modules.items()))


def head_dim(module: Module) -> int:
    """Numbers in a key of this attention module; 0 if it does not say."""
    return int(getattr(module, "head_dim", 0) or getattr(module, "head_size", 0))


def _outputs(module: Module) -> list[Module]:
    return [output for name in OUTPUTS if (output := getattr(module, name, None)) is not None]


@torch.no_grad()
def output_projection(module: Module) -> Tensor:
    """The weights with which an attention module projects its heads' outputs, with adapters, [heads, dim, hidden]."""
    output = _outputs(module)[0]
    plain = next(part for part in output.modules() if isinstance(part, Conv1D | Linear))
    weight = plain.weight if isinstance(plain, Conv1D) else plain.weight.T  # [heads * dim, hidden]
    if plain is not output:  # adapters of PEFT change what it applies
        inputs = torch.eye(len(weight)).to(weight)
        with alone(output):
            weight = output(inputs) - output(torch.zeros_like(inputs[:1]))
    return weight.unflatten(0, (-1, head_dim(module)))


def ensure_one_rotation(model: PreTrainedModel, shortest: int, longest: int, description: str, way_out: str) -> None:
    """Raise InputError if transformers uses other frequencies in a pass of `longest` tokens than in one of `shortest`
    (Phi-3 with a long context): queries of one pass would meet keys with the other's rotation. description: what has
    passes of both lengths."""
    config = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for kind in (given, *given.values()):
        if not isinstance(kind, dict) or kind.get("rope_type") not in ("longrope", "dynamic"):
            continue
        after = int(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        if shortest <= after < longest:
            problem = f"{description}, and this model rotates keys otherwise beyond {after}"
            raise InputError(f"{problem}: stay below, or {way_out}")


def sliding_window(config: Any, layer: int) -> int | None:
    """Tokens that a query of this layer looks back, itself included; None: all."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    return int(window) if types is None or types[layer] == "sliding_attention" else None
