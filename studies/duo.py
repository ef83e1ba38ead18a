"""DuoAttention's gates, learned: `python -m studies.duo` writes small-gqa-gates.json in a minute on a CPU.

One gate per KV head mixes its attention over everything with attention over sinks and recent tokens. The model stays as
it is; the gates shrink as far as the hidden states at the answers allow. Source: Xiao et al. 2024;
duo_attn/train.py of mit-han-lab/duo-attention (there at a rate of 0.02).
"""

import json
import random

import numpy as np
import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvrepro.engine.attention import installed
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.score.learned import sampled
from kvrepro.engine.shapes import KeyValue, Query
from kvrepro.errors import InputError
from kvrepro.experiment import models
from studies.calibrate import rounded
from studies.training import rows

TASKS = ("needle", "needle_multivalue", "needle_multiquery", "two_hop", "variable_tracking", "passage_retrieval")
RATE, WEIGHT, SEED = 0.05, 0.05, 2027


class Gated:
    """Attention of whole prompts of one length, mixed by `gates` [layers, kv_heads]; None: over everything."""

    def __init__(self, gates: Tensor | None, sinks: int, recent: int):
        self.gates, self.sinks, self.recent = gates, sinks, recent

    def attend(self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float) -> Tensor:
        group = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (key, value))
        out = scaled_dot_product_attention(query, k, v, is_causal=True, scale=scaling)
        if self.gates is not None:
            at = torch.arange(query.shape[2], device=query.device)
            near = (at[:, None] >= at) & ((at < self.sinks) | (at[:, None] - at < self.recent))
            streaming = scaled_dot_product_attention(query, k, v, attn_mask=near, scale=scaling)
            gate = self.gates[layer].repeat_interleave(group)[:, None, None]
            out = gate * out + (1 - gate) * streaming
        return out.transpose(1, 2)


def learn(
    model, batches: list[tuple[Int[Tensor, "rows tokens"], Int[Tensor, "rows tokens"]]], sinks: int, recent: int
) -> tuple[Float[Tensor, "layers kv_heads"], list[float]]:
    """(gates in [0, 1], distillation losses): one step for each of `batches`, token ids and a mask of answers.

    The loss is the squared change of the last hidden states at the answers, mean over elements, plus `WEIGHT` times the
    gates' mean. The rate rises over the first fifth of the steps and falls over the last, as the authors' does.
    """
    layers, kv_heads = model.config.get_text_config().num_hidden_layers, max(ModelFacts.of(model).kv_heads.values())
    gates = torch.ones(layers, kv_heads, device=model.device, requires_grad=True)
    optimizer = torch.optim.AdamW([gates], lr=RATE, weight_decay=0)
    losses, ramp = [], max(1, len(batches) // 5)
    decoder = model.get_decoder()
    with installed(model):
        for step, (ids, answers) in enumerate(batches):
            with torch.no_grad():
                target = decoder(ids, use_cache=False, kvrepro=Gated(None, sinks, recent)).last_hidden_state[answers]
            hidden = decoder(ids, use_cache=False, kvrepro=Gated(gates, sinks, recent)).last_hidden_state[answers]
            distillation = (hidden - target).square().mean()
            optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / ramp, max((len(batches) - step) / ramp, 0.1))
            optimizer.zero_grad()
            (distillation + WEIGHT * gates.abs().mean()).backward()
            optimizer.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
            losses.append(distillation.item())
    return gates.detach(), losses


def draw(steps: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """A conversation for each step: token ids, and a mask of the answers, [1, length]."""
    rng = random.Random(SEED)
    shares = np.asarray([float(name in TASKS) for name in rows.TASK_NAMES])
    drawn = [rows.batch(rng, shares, length, length, turns=8)[:2] for _ in range(steps)]
    return [(torch.from_numpy(ids).long(), torch.from_numpy(turn) > 0) for ids, turn in drawn]


def main(model: str = models.DEFAULT, steps: int = 80, length: int = 768, sinks: int = 32, recent: int = 64) -> None:
    """Learn on the CPU in float32 and write the gates, with what they were learned with, beside the model, which has
    the embedded one's vocabulary. length: tokens of a conversation, one a step."""
    loaded = models.load(model)
    facts = ModelFacts.of(loaded.model)
    if facts.sliding:
        raise InputError(f"{model} has layers that slide, which need no gates: take one whose layers see everything")
    gates, losses = learn(loaded.model, draw(steps, length), sinks, recent)
    result = {"model": loaded.hash, "sinks": sinks, "recent": recent, "length": length, "steps": steps, "seed": SEED}
    result |= {"rate": RATE, "weight": WEIGHT, "distillation": round(float(np.mean(losses[-10:])), 5)}
    result |= {"sample": rounded(sampled([facts.outputs[n] for n in facts.attention]).tolist())}
    result |= {"gates": [[round(g, 4) for g in layer] for layer in gates.tolist()]}
    loaded.path.with_name(f"{loaded.path.name}-gates.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)
