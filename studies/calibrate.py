"""What TriAttention must know of a model beforehand: `python -m studies.calibrate` writes `<model>-queries.json`.

Queries before their rotation, as complex numbers: element i of a head and element i + half turn together, at frequency
i. For each layer, query head and frequency: the mean E[q] (complex) and the mean length E|q|, over the tokens of a few
prompts. Source: Mao et al. 2026.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kvrepro.engine.attention import attend, read_once
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.score.learned import frequencies, pairs, sampled
from kvrepro.engine.shapes import KeyValue, Query
from kvrepro.experiment import data, models

TASKS = "two_hop,needle,variable_tracking,few_shot,list_all,dialogue,instruction_several,refusal"


def rounded(numbers: list[Any] | float) -> list[Any] | float:
    """Numbers rounded to five significant digits, for a file."""
    return [rounded(x) for x in numbers] if isinstance(numbers, list) else float(f"{numbers:.5g}")


class QuerySums:
    """Attention of one prompt that adds up the statistics of queries as the layers pass."""

    def __init__(self, inverse_frequencies: dict[int, Tensor], scale: float):
        self.inverse_frequencies, self.scale = inverse_frequencies, scale
        self.mean: dict[int, Tensor] = {}
        self.length: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding=None) -> Tensor:
        n, dim = query.shape[2:]
        positions = torch.arange(n, device=query.device)[None]
        if layer in self.inverse_frequencies:
            inverse = self.inverse_frequencies[layer]
            angle = torch.outer(positions[0].double(), frequencies(inverse, dim))
            q = pairs(query[0], 2 * len(inverse)) / self.scale * torch.polar(torch.ones_like(angle), -angle)
            self.mean[layer] = self.mean.get(layer, 0) + q.sum(1)
            self.length[layer] = self.length.get(layer, 0) + q.abs().sum(1)
        return attend(query, positions, [(key, value, positions[:, None])], scaling, sliding)


@torch.inference_mode()
def calibrate(model, texts: list[list[int]]) -> dict[str, Tensor]:
    """Over all tokens of `texts`, of the layers that can be evicted: mean (complex) and length [layers, heads,
    frequencies] of queries, and a sample [layers, weights], which identifies the model."""
    facts = ModelFacts.of(model)
    scale = float(getattr(model.get_decoder().rotary_emb, "attention_scaling", 1.0))  # of rotated queries and keys
    watch, tokens = QuerySums(facts.inverse_frequencies, scale), sum(map(len, texts))
    for ids in texts:
        read_once(model, ids, watch)
    layers = sorted(watch.mean)
    mean, length = (torch.stack([s[layer].cpu() / tokens for layer in layers]) for s in (watch.mean, watch.length))
    sample = sampled([facts.outputs[layer] for layer in layers])
    return {"mean": mean.to(torch.complex64), "length": length.float(), "sample": sample}


def write(path: Path, mean: Tensor, length: Tensor, sample: Tensor, model: str = "") -> None:
    """JSON, five significant digits. model: hash of the checkpoint."""
    numbers = {"mean_real": mean.real, "mean_imaginary": mean.imag, "length": length, "sample": sample}
    shape = dict(zip(("layers", "heads", "frequencies"), length.shape, strict=True))
    text = {name: rounded(values.tolist()) for name, values in numbers.items()}
    path.write_text(json.dumps({"model": model, **shape, **text}, separators=(",", ":")) + "\n")


def main(
    model: Annotated[str, typer.Option(help="small-gqa, a checkpoint folder, or a hub id")] = models.DEFAULT,
    items: Annotated[str, typer.Option(help="where the prompts come from")] = f"tinyworld:{TASKS}",
) -> None:
    """Measure on the CPU in float32, on 16 prompts. Held out: no chapter's items come from this seed."""
    loaded = models.load(model)
    drawn = data.load_items(items, 16, 2027, 1000)
    texts = [data.build_prompt(item, loaded.tokenizer, loaded.context).ids for item in drawn]
    path = loaded.path.with_name(f"{loaded.path.name}-queries.json")
    write(path, **calibrate(loaded.model, texts), model=loaded.hash)
    print(f'written: {path}; use it as Condition("tri_attention", ..., switches=(("calibration", "{path}"),))')


if __name__ == "__main__":
    typer.run(main)
