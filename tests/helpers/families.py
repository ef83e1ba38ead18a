"""Model families, each a small random checkpoint, and what the engine does with it: `python tests/helpers/families.py`
writes data/families.csv; `tests/engine/test_families.py` holds the table to what it finds.

The truth is Hugging Face: its `generate` where nothing is evicted, otherwise the model's own eager attention over the
whole text again for every token, under a mask of who may see whom.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
import yaml
from checkpoint import tokenizer
from slow_engine import Slow, newest
from slow_engine import run as slow_run
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Chunked, Condition, DecodeCap, Generation, Prefill, Regime, SharedCap
from kvrepro.engine.policy import Policy, own
from kvrepro.errors import InputError
from kvrepro.experiment import models
from kvrepro.paths import ROOT

TABLE = ROOT / "data" / "families.csv"
TOKENS, WINDOW, CAP, NEW = 60, 4, 20, 5
_DATA = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
Said = tuple[list[int], list[Tensor]]  # tokens, and the logits that they were taken from
SHAPE, FAMILIES = _DATA["shape"], _DATA["families"]  # name -> [class of the configuration, what differs from SHAPE]


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A family's random model, the same each time."""
    kind, own_settings = FAMILIES[name]
    config_class = getattr(transformers, kind)
    shape = {} if "text_config" in own_settings else {k: v for k, v in SHAPE.items() if _settable(config_class, k)}
    torch.manual_seed(11)
    config = config_class(**{**shape, **own_settings, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def _settable(kind: type, name: str) -> bool:
    """Falcon computes its head_dim."""
    return not isinstance(getattr(kind, name, None), property)


def prompt(tokens: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPE["vocab_size"], (tokens,), generator=generator).tolist()


# ---- the truth


class Reference(Slow):
    """`Slow` with the attention of the model's own file; `paid` to whom, [1, heads, queries, tokens] by layer."""

    def __call__(self, module, query, key, value, scaling, **more):
        n = module.layer_idx
        self.seen[n] = (query[0], key[0], value[0], scaling)
        mask = torch.zeros(query.shape[1], *self.visible[n].shape[1:])
        mask.masked_fill_(~self.visible[n].repeat_interleave(query.shape[1] // key.shape[1], 0), -torch.inf)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        out, self.paid[n] = eager(module, query, key, value, mask[None], scaling=scaling, **more)
        return out


def reference(model: PreTrainedModel, ids: list[int], **given: Any) -> Reference:
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ["-"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    sliding = [n for n, kind in enumerate(types) if window and kind in ("sliding_attention", "-")]
    slow = Reference(model, ids, dict.fromkeys(sliding, window), **given)
    slow.evictable = [n for n in slow.layers if n not in sliding] or slow.layers
    slow.paid = {}
    return slow


def most_attended(slow: Reference) -> None:
    """Keep the WINDOW newest and what they pay most to, mean over them and over a group, CAP in all."""
    for n in slow.evictable:
        paid = slow.paid[n][0, :, -WINDOW:]
        if n in slow.windows:  # what the next query can still see
            paid[..., : max(0, slow.length - slow.windows[n] + 1)] = 0
            paid = paid / paid.sum(-1, keepdim=True)
        paid = paid.unflatten(0, (slow.kv_heads, -1)).mean((1, 2))
        paid[:, -WINDOW:] = torch.inf
        slow.held[n] = torch.zeros_like(slow.held[n]).scatter(1, paid.topk(CAP).indices, True)


def continued(slow: Reference, logits: Tensor) -> Said:
    """NEW greedy tokens and the logits that each was taken from."""
    tokens, seen = [], []
    for _ in range(NEW):
        seen.append(logits)
        tokens.append(int(logits.argmax()))
        slow.ids.append(tokens[-1])
        logits = slow.read(1) if len(tokens) < NEW else logits
    return tokens, seen


# ---- the engine


def watched(o: Any) -> Tensor:
    """Mean attention of the window, over queries and group."""
    return o.attention.mean((2, 3))


def watching() -> Condition:
    """Keep what they pay most attention to, after the prompt."""
    policy = Policy("Watched", "tests", watched, {"window": WINDOW, "recent": "window"})
    return Condition(own("watched", policy), CAP, Prefill())


def ours(model: PreTrainedModel, c: Condition, tokens: int = TOKENS) -> tuple[Generation, list[Tensor]]:
    """What the engine says, and the logits that each token was taken from."""
    seen: list[Tensor] = []
    hook = model.register_forward_hook(lambda *given: seen.append(given[2].logits[0, -1]))
    try:
        [[answer]] = engine.generate(model, [prompt(tokens)], [c], max_new_tokens=NEW, stop_ids=(), kept_sets=True)
    finally:
        hook.remove()
    return answer, seen[-NEW:]


def agree(actual: Said, expected: Said) -> bool:
    """Equal tokens, and logits equal to 0.003% of the largest."""
    worst = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(actual[1], expected[1], strict=True))
    return actual[0] == expected[0] and worst < 3e-5


# ---- what is asked of a family


def loads(model: PreTrainedModel, folder: Path) -> bool:
    """From a folder as the hub has it, which is tried there."""
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return type(models.load(str(folder)).model) is type(model)


def hugging_face(model: PreTrainedModel, ids: list[int], new: int = NEW) -> Said:
    """Greedy tokens of its `generate`, and the logits that each was taken from."""
    given = {"do_sample": False, "eos_token_id": 10**6, "output_logits": True, "return_dict_in_generate": True}
    tokens = torch.tensor([ids])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, **given)
    return out.sequences[0, len(ids) :].tolist(), [x[0] for x in out.logits]


def full(model: PreTrainedModel) -> bool:
    """Without eviction: tokens and logits of Hugging Face's `generate`."""
    answer, logits = ours(model, Condition())
    return agree((answer.tokens, logits), hugging_face(model, prompt(TOKENS)))


def attended(model: PreTrainedModel) -> bool:
    """Evicted after the prompt by attention: kept sets, tokens and logits of the reference."""
    slow = reference(model, prompt(TOKENS))
    logits = slow.read(TOKENS)
    most_attended(slow)
    kept = [slow.held[n].clone() for n in slow.evictable]
    expected = continued(slow, logits)
    answer, logits = ours(model, watching())
    same = all(torch.equal(torch.tensor(x), y) for x, y in zip(answer.kept_sets, kept, strict=True))
    return same and agree((answer.tokens, logits), expected)


def newest_kept(model: PreTrainedModel, regime: Regime, **given: Any) -> bool:
    """Tokens and last logits of the slow engine."""
    slow = reference(model, prompt(TOKENS))
    tokens, last = slow_run(slow, newest(4), budget=CAP, new_tokens=NEW, **given)
    answer, logits = ours(model, Condition("streaming_llm", CAP, regime))
    return agree((answer.tokens, logits[-1:]), (tokens, [last]))


def shared_cap(model: PreTrainedModel) -> bool:
    """One set for all layers, sliding ones included, of a text longer than their window."""
    answer, logits = ours(model, Condition("lru", 16, SharedCap(interval=100)))
    slow = reference(model, prompt(TOKENS))
    first = slow.read(TOKENS)
    for n in slow.layers:
        slow.held[n] = torch.zeros_like(slow.held[n])
        slow.held[n][:, answer.kept_positions] = True
    return len(answer.kept_positions) == 16 and agree((answer.tokens, logits), continued(slow, first))


def uneven(model: PreTrainedModel) -> bool:
    """Prompts of several lengths in one pass: what each says alone."""
    prompts = [prompt(n, seed=n) for n in (TOKENS, 33, 47)]
    conditions = [Condition(), watching()]
    given = {"max_new_tokens": NEW, "stop_ids": ()}
    together = engine.generate(model, prompts, conditions, prompt_rows=3, **given)
    alone = [engine.generate(model, [p], conditions, **given)[0] for p in prompts]
    return [[g.tokens for g in row] for row in together] == [[g.tokens for g in row] for row in alone]


CHECKS: dict[str, Callable[[PreTrainedModel], bool]] = {
    "full cache": full,
    "prefill": attended,
    "chunked": lambda m: newest_kept(m, Chunked(chunk=13, when="budget"), chunk=13, chunk_budget=lambda _: CAP),
    "decode cap": lambda m: newest_kept(m, DecodeCap(interval=2), every=2),
    "shared cap": shared_cap,
    "uneven prompts": uneven,
}


def row(name: str, folder: Path) -> dict[str, str]:
    """A family's row: "yes", "no" with the reason in the last column, or "wrong"."""
    model = build(name)
    cells = {"family": name, "model type": model.config.model_type}
    reasons = []

    def verdict_of(check: Callable[..., bool], *given: Any) -> str:
        try:
            return "yes" if check(model, *given) else "wrong"
        except InputError as refused:
            reasons.append(str(refused))
            return "no"

    cells["loads"] = verdict_of(loads, folder)
    for column, check in CHECKS.items():
        cells[column] = verdict_of(check) if cells["loads"] == "yes" else "–"
    return cells | {"why not": "; ".join(reasons)}


@cache
def _tokenizer() -> Any:
    return tokenizer(vocabulary=SHAPE["vocab_size"])


def read() -> dict[str, Mapping[str, str]]:
    """The committed table by family."""
    return {line["family"]: line for line in pd.read_csv(TABLE, keep_default_na=False).to_dict("records")}


def main() -> None:
    """Write the table."""
    rows = []
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, Path(folder) / "model"))
        print(" | ".join(rows[-1].values()), flush=True)
    pd.DataFrame(rows).to_csv(TABLE, index=False, lineterminator="\n")


if __name__ == "__main__":
    main()
