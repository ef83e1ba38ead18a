"""Whether the engine can drive a model. A model's own logits are compared once, before the first tokens leave it."""

from typing import Any
from weakref import WeakSet

import torch
from torch.nn import Module
from transformers import GenerationMixin

from kvrepro.engine.attention import alone, installed
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.facts import ModelFacts, refused
from kvrepro.engine.passes import Call, read
from kvrepro.engine.regime import Chunked
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError, first_line

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
