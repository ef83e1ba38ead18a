"""Which tokens the public codes keep of a prompt: plain formulas, none of the engine's.

Each function was written beside the source that data/parity.csv names in its column `press`. It takes (layers, share
kept) and returns for each layer (kept tokens, scores by which the code ranks), both [kv_heads, tokens]. Lengths are
multiples of 8, of which a fifth is no whole number, so that every rounding counts.

`python tests/helpers/public_codes.py POLICY ...` computes these policies' rows of that table anew, with the sources
and notes that it has.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad
from transformers import PreTrainedModel

from kvrepro.engine.attention import read_once
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Prefill, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import generate
from kvrepro.engine.score.learned import load
from kvrepro.experiment import models
from kvrepro.paths import ROOT
from studies import calibrate, parity
from studies.table import versions

Kept = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layer:
    """An attention layer after a prompt. Queries and keys are rotated; scaling is dim^-0.5."""

    queries: Tensor  # [heads, tokens, dim]
    keys: Tensor  # [kv_heads, tokens, dim]
    values: Tensor  # [kv_heads, tokens, dim]
    output: Tensor  # [heads, dim, hidden]
    speed: Tensor  # radians per position of each pair [dim / 2]
    mean: Tensor  # E q_f, complex [heads, dim / 2]
    length: Tensor  # E |q_f| [heads, dim / 2]

    @property
    def size(self) -> tuple[int, int]:
        """(KV heads, tokens)."""
        return self.keys.shape[0], self.keys.shape[1]

    def repeated(self, x: Tensor) -> Tensor:
        """Keys or values once for each query head."""
        return x.repeat_interleave(len(self.queries) // len(x), 0)

    @cached_property
    def logits(self) -> Tensor:
        return self.queries @ self.repeated(self.keys).mT * self.keys.shape[-1] ** -0.5

    @cached_property
    def p(self) -> Tensor:
        """Causal attention [heads, tokens, tokens]."""
        later = torch.ones(self.size[1], self.size[1], dtype=torch.bool).triu(1)
        return self.logits.masked_fill(later, -torch.inf).softmax(-1)

    def grouped(self, x: Tensor) -> Tensor:
        """[heads, ...] as [kv_heads, group, ...]."""
        return x.unflatten(0, (self.size[0], -1))


@torch.inference_mode()
def layers_of(model: PreTrainedModel, ids: list[int], queries: Path) -> list[Layer]:
    """The layers of a Llama after a prompt. queries: the file of TriAttention's statistics."""
    numbers, facts, layers = load(str(queries)), ModelFacts.of(model), []
    mean = torch.complex(numbers["mean_real"], numbers["mean_imaginary"])

    def attend(n: int, query: Tensor, key: Tensor, value: Tensor, *_: float) -> Tensor:
        rotation = facts.inverse_frequencies[n], mean[n], numbers["length"][n]
        layers.append(layer := Layer(query[0], key[0], value[0], facts.outputs[n].detach(), *rotation))
        return (layer.p @ layer.repeated(layer.values)).transpose(0, 1)[None]

    read_once(model, ids, SimpleNamespace(attend=attend))
    return layers


def best(scores: Tensor, count: int) -> Tensor:
    """A mask of each row's `count` best."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count).indices, True)


def best_before(scores: Tensor, count: int, last: int) -> tuple[Tensor, Tensor]:
    """(the best tokens of a past [kv_heads, tokens - last] and the `last` ones, `count` in all; the scores)."""
    mask = pad(best(scores, count - last), (0, last), value=True)
    return mask, pad(scores, (0, last))


def each(code: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Kept]:
    """A code that treats every layer by itself."""
    return lambda layers, share, **settings: [code(layer, share, **settings) for layer in layers]


# ---- windows


def defensive_scores(layer: Layer, share: float, w: int = 32) -> Tensor:
    past = layer.size[1] - w
    p = layer.p[:, past:, :past]
    near = p[..., past - w :].sum(-1).mean()
    pooled = avg_pool1d(p, 5, 1, 2)
    pooled = pooled / pooled.sum(-1, keepdim=True) * p.sum(-1, keepdim=True)
    worst = layer.grouped(pooled).amax((1, 2))
    norm = torch.stack([(v @ o).abs().sum(-1) for v, o in zip(layer.repeated(layer.values), layer.output, strict=True)])
    norm = layer.grouped(norm[:, :past]).mean(1)
    scores = torch.maximum(worst, worst.mean(-1, keepdim=True)) * norm / norm.sum(0)
    top = float(scores.max())
    for head, held in enumerate(layer.grouped(p).mean((1, 2))):
        order = held.argsort(descending=True)
        filled = int(((held / held.sum())[order].cumsum(0) >= 0.9 - near).int().argmax())
        scores[head, order[: min(filled, int(past * share - w))]] = top
    return pad(scores, (0, w), value=top)


def defensive_kv(layers: Sequence[Layer], share: float) -> Kept:
    scores = [defensive_scores(layer, share) for layer in layers]
    return [(best(s.flatten(), int(s.numel() * share)).view_as(s), s) for s in scores]


def layer_defensive_kv(layers: Sequence[Layer], share: float) -> Kept:
    scores = [defensive_scores(layer, share) for layer in layers]
    together = torch.stack(scores)
    counts = best(together.flatten(), int(together.numel() * share)).view_as(together).sum((1, 2)).tolist()
    return [(best(s.flatten(), count).view_as(s), s) for s, count in zip(scores, counts, strict=True)]


def cake(layers: Sequence[Layer], share: float, w: int = 32) -> Kept:
    past, wishes, scores = layers[0].size[1] - w, [], []
    for layer in layers:
        p = layer.p[:, past:, :past]
        wishes.append(float((-(p * (p + 1e-10).log()).sum()) ** (1 / 1.6) * p.var(1).sum() ** (1 / 0.6)))
        scores.append(layer.grouped(avg_pool1d(p.mean(1) + 200 * p.var(1), 5, 1, 2)).mean(1))
    total = int((layers[0].size[1] * share - w) * len(layers))
    counts = [int(wish / sum(wishes) * total) for wish in wishes]
    excess = sum(max(count - past, 0) for count in counts)
    counts = spread_out([min(count, past) for count in counts], excess, past)
    counts = spread_out(counts, total - sum(counts), past)
    return [best_before(s, min(count, past) + w, w) for s, count in zip(scores, counts, strict=True)]


def spread_out(counts: list[int], more: int, limit: int) -> list[int]:
    """`more` tokens in equal parts to the layers below the limit, what is left over to the first of them; negative:
    taken from the layers with more than 1."""
    open_layers = [i for i, count in enumerate(counts) if (count < limit if more > 0 else count > 1)]
    for place, i in enumerate(open_layers):
        part = abs(more) // len(open_layers) + (place < abs(more) % len(open_layers))
        counts[i] += part if more > 0 else -part
    return counts


@each
def dropkv(layer: Layer, share: float, w: int = 8) -> tuple[Tensor, Tensor]:
    values, exact = layer.repeated(layer.values), layer.p[:, -w:]
    p, y = exact.bfloat16().float(), (exact @ values).bfloat16().float()
    far = values.square().sum(-1)[:, None] - 2 * y @ values.mT + y.square().sum(-1, keepdim=True)
    cost = layer.grouped((far.clamp(min=0) * (p / (1 - p + 1e-6)) ** 2).sum(1)).mean(1)
    cost = avg_pool1d(cost, 11, 1, 5)
    cost[:, -w:] = cost.amax(-1, keepdim=True) + 1
    return best(cost, max(int(share * layer.size[1]), w)), cost


@each
def andpro(layer: Layer, share: float, w: int = 32, chunk: int = 4) -> tuple[Tensor, Tensor]:
    heads, n = layer.size
    droppable = torch.ones(n // chunk, dtype=torch.bool)
    droppable[0] = droppable[-w // chunk :] = False
    pull = max_pool1d(layer.p[:, -w:], 7, 1, 3)[..., None] * layer.repeated(layer.values)[:, None]
    pull = pull.unflatten(2, (-1, chunk)).sum(3)  # [heads, w, chunks, dim]
    anchor = pull[:, :, droppable].sum(2, keepdim=True)
    scores = layer.grouped((pull * anchor).sum((1, 3))).amax(1).masked_fill(~droppable, -torch.inf)
    chosen = best(scores.flatten(), int(heads * n * share) // chunk - heads * int((~droppable).sum()))
    mask = (chosen.view_as(scores) | ~droppable).repeat_interleave(chunk, 1)
    return mask, scores.repeat_interleave(chunk, 1)


# ---- keys


@each
def r_kv(layer: Layer, share: float, w: int = 8) -> tuple[Tensor, Tensor]:
    n = layer.size[1]
    logits = layer.grouped(layer.logits[:, -w:, : n - w]).amax(1)
    attention = max_pool1d(logits.softmax(-1).mean(1), 7, 1, 3)
    unit = layer.keys / (layer.keys.norm(dim=-1, keepdim=True) + 1e-8)
    like = unit @ unit.mT
    like.diagonal(dim1=1, dim2=2).zero_()
    last = torch.where(like > 0.5, torch.arange(n), 0).amax(-1, keepdim=True)  # 0: no such key, or the first
    alike = like.scatter(-1, last, 0.0).mean(1).softmax(-1)[:, : n - w]
    return best_before(0.07 * attention - 0.93 * alike, int(n * share), w)


def tri_scores(layer: Layer, recent: int = 128) -> Tensor:
    heads, n = layer.size
    half = layer.keys.shape[-1] // 2
    position = torch.arange(n)[:, None]
    k = torch.complex(*layer.repeated(layer.keys).split(half, -1)).to(torch.complex128)
    k = k * torch.polar(torch.ones(n, half, dtype=torch.float64), -position * layer.speed.double())  # without rotation
    q = layer.mean.to(torch.complex128)[:, None]
    phase = (q * k.conj()).angle()
    far = [(torch.cos(layer.speed.double() * (n + 2**d - position) + phase) * q.abs() * k.abs()) for d in range(17)]
    scores = (sum(far) / 17 + (layer.length[:, None] - q.abs()) * k.abs()).sum(-1)
    scores = ((scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True)).float()
    scores[:, n - recent :] = torch.inf
    return layer.grouped(scores).amax(1)


def tri_attention(layers: Sequence[Layer], share: float) -> Kept:
    scores = torch.stack([tri_scores(layer) for layer in layers]).mean(0)
    return [(best(scores, int(layer.size[1] * share)), scores) for layer in layers]


@each
def tri_attention_layer(layer: Layer, share: float) -> tuple[Tensor, Tensor]:
    return best(scores := tri_scores(layer), int(layer.size[1] * share)), scores


# ---- accumulated attention


@each
def accumulated(layer: Layer, share: float, w: int) -> tuple[Tensor, Tensor]:
    return best_before(layer.grouped(layer.p.sum(1)).mean(1)[:, :-w], int(layer.size[1] * share), w)


# ---- fair presses of the leakage paper: spans [a, e) and [e, b) of n tokens; in all but one n_k e / n of [0, e)


def spans(n: int) -> dict[str, list[int]]:
    """Two spans of a prompt, with tokens before and after them."""
    return {"first": list(range(3, 2 * n // 5)), "second": list(range(2 * n // 5, n - 2))}


@each
def fairly(layer: Layer, share: float, score: Callable[[Layer, int], Tensor]) -> tuple[Tensor, Tensor]:
    n, e = layer.size[1], len(spans(layer.size[1])["first"]) + 3
    scores, count = score(layer, e), int(n * share)
    parts = best(scores[:, :e], count * e // n), best(scores[:, e:], count - count * e // n)
    return torch.cat(parts, -1), scores


def fair_snapkv(layer: Layer, e: int, w: int = 8) -> Tensor:
    scores = torch.zeros(layer.size)
    for start, end in ((0, e), (e, layer.size[1])):
        pooled = avg_pool1d(layer.p[:, end - w : end, start : end - w].mean(1), 5, 1, 2)
        scores[:, start : end - w] = layer.grouped(pooled).mean(1)
        scores[:, end - w : end] = scores[:, start : end - w].amax(-1, keepdim=True)
    return scores


def fair_h2o(layer: Layer, e: int) -> Tensor:
    n = layer.size[1]
    p, where = layer.p.clone(), torch.arange(n)
    p[:, e : n - 2, 3:e] = 0
    counts = torch.where((where >= 3) & (where < e), e - where, n - where)
    return layer.grouped(p.sum(1) / counts).mean(1)


def fair_tova(layer: Layer, e: int) -> Tensor:
    scores = torch.zeros(layer.size[1])
    for start, end in ((0, e), (e, layer.size[1])):
        scores[start : end - 1] = layer.p[:, end - 1, start : end - 1].mean(0)
        scores[end - 1] = scores[start : end - 1].max()
    return scores.expand(layer.size)


def fair_k_norm(layer: Layer, e: int) -> Tensor:
    return -layer.keys.norm(dim=-1)


def fair_streaming_llm(layers: Sequence[Layer], share: float) -> Kept:
    n = layers[0].size[1]
    e = len(spans(n)["first"]) + 3
    ramps = torch.cat([torch.ones(4), torch.linspace(0.1, 0.9, e - 4), torch.linspace(0.1, 0.9, n - e)])
    return [(best(ramps, int(n * share)).expand(layer.size), ramps.expand(layer.size)) for layer in layers]


# ---- our policies and their public codes


@dataclass(frozen=True)
class CodePair:
    """One of our policies, as run, and the public code that should keep the same tokens."""

    policy: str
    code: Callable[[Sequence[Layer], float], Kept]
    switches: tuple[tuple[str, object], ...] = ()
    fair: bool = False  # both spans keep their share


CODES = (
    CodePair("defensive_kv", defensive_kv),
    CodePair("layer_defensive_kv", layer_defensive_kv),
    CodePair("cake", cake),
    CodePair("dropkv", dropkv),
    CodePair("andpro", andpro),
    CodePair("r_kv", r_kv),
    CodePair("tri_attention", tri_attention),
    CodePair("tri_attention_layer", tri_attention_layer),
    CodePair("h2o_online", partial(accumulated, w=8)),
    CodePair("scissorhands", partial(accumulated, w=10)),
    CodePair("snapkv", partial(fairly, score=fair_snapkv), (("window", 16),), True),
    CodePair("h2o", partial(fairly, score=fair_h2o), fair=True),
    CodePair("tova", partial(fairly, score=fair_tova), fair=True),
    CodePair("k_norm", partial(fairly, score=fair_k_norm), (("dense_layers", 0),), True),
    CodePair("streaming_llm", fair_streaming_llm, fair=True),
)


# ---- the comparison

Cell = tuple[CodePair, float]  # a pair and the share kept


def cells(pairs: Sequence[CodePair]) -> list[Cell]:
    """At each share to compare at: AnDPro's keep whole chunks."""
    return [(pair, share) for pair in pairs for share in ((0.25, 0.5) if pair.policy == "andpro" else (0.2, 0.3, 0.5))]


def condition(pair: CodePair, share: float, queries: Path) -> Condition:
    calibration = (("calibration", str(queries)),) if pair.policy.startswith("tri_") else ()
    when = Prefill(fair=1.0, spans=("first", "second")) if pair.fair else Prefill()
    return Condition(pair.policy, share, when, switches=pair.switches + calibration)


def agreements(
    model: PreTrainedModel, ids: list[int], queries: Path, compared: Sequence[Cell]
) -> list[list[tuple[float, bool]]]:
    """(Share in common, differs by ties alone) of each head, for each cell. queries: TriAttention's statistics."""
    conditions = [condition(*cell, queries) for cell in compared]
    prompt, layers, of_cells = Prompt(ids, spans(len(ids))), layers_of(model, ids, queries), []
    [answers] = generate(model, [prompt], conditions, max_new_tokens=1, stop_ids=frozenset(), kept_sets=True)
    for (pair, share), ours in zip(compared, answers, strict=True):
        theirs = pair.code(layers, share)
        sets = [(torch.as_tensor(a), *b) for a, b in zip(ours.kept_sets, theirs, strict=True)]
        budget = CATALOGUE[pair.policy].budget
        if budget == "joint":  # the layers compete: compared as one
            sets = [tuple(map(torch.cat, zip(*sets, strict=True)))]
        heads = [parity.agreement(*of_layer, budget in ("per head", "joint")) for of_layer in sets]
        of_cells.append([head for pair in heads for head in zip(*(x.tolist() for x in pair), strict=True)])
    return of_cells


def table(policies: Sequence[str], stored: pd.DataFrame, prompts: int = 20) -> pd.DataFrame:
    """The rows of data/parity.csv: each policy on random models with groups of 1, 3 and 7, and on the small model.
    stored: rows before, which name sources and give notes."""
    loaded, compared = models.load(), cells([pair for pair in CODES if pair.policy in policies])
    shown = {f"random, group {group}": parity.random_model(group) for group in (1, 3, 7)} | {loaded.name: loaded.model}
    named, rows = stored.drop_duplicates("policy").set_index("policy"), []
    for name, model in shown.items():
        texts, worlds = parity.prompts(loaded, prompts)
        texts = [ids[: len(ids) // 40 * 40 + 8] for ids in (worlds if name == loaded.name else texts)]
        file = Path(tempfile.mkdtemp()) / "queries.json"
        calibrate.write(file, **calibrate.calibrate(model, texts[:1]))
        by_text = [agreements(model, ids, file, compared) for ids in texts]
        for (pair, share), heads in zip(compared, zip(*by_text, strict=True), strict=True):
            said = SimpleNamespace(policy=pair.policy, switches=pair.switches, note=named.note[pair.policy])
            row = parity.row(said, share, named.press[pair.policy], sum(heads, []))
            rows.append(row | {"prompts": len(texts), "model": name})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    FILE = ROOT / "data/parity.csv"
    before = pd.read_csv(FILE, keep_default_na=False)
    of_codes = before.kvpress == ""
    new = table(sys.argv[1:], before[of_codes]).assign(kvpress="", **versions("torch", "transformers"))
    print(new.drop(columns="note").to_string())
    kept = before[~(of_codes & before.policy.isin(sys.argv[1:]))]
    pd.concat([kept, new[before.columns]]).to_csv(FILE, index=False)
