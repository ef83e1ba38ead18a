"""`python -m studies.parity`: do our policies and NVIDIA/kvpress keep the same tokens? data/parity.csv.

Both see the same prompts in the same model; a head agrees when it keeps exactly the same set. Half of the prompts are
random tokens in a model with random weights, half are the embedded model's own. kvpress needs the extra `parity`,
without constraints.txt. The rows of the methods' public codes in that table come from
tests/helpers/public_codes.py, and tests/engine/test_public_codes.py repeats that comparison on a few prompts.

Not compared: KVzipPress, whose softmax covers the sinks, one chunk and the repeat only, ours the whole context;
DuoAttentionPress, which reads the authors' gates files; RandomPress, which draws from another generator. Nor the
policies of the regime `SharedCap`, whose public code is held against its published rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvrepro.engine import attention
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Prefill
from kvrepro.engine.generate import generate
from kvrepro.experiment import data, models
from kvrepro.paths import DATA, write_table
from studies.table import versions

SHARES = (0.25, 0.5)
SHORTEST, LONGEST = 520, 800  # tokens; 25% of the shortest holds two windows of 64


@dataclass(frozen=True)
class PressPair:
    """One of our policies, as run, and the press that should keep the same tokens. note: why it may not."""

    policy: str
    press: Callable[[Any, float], Any]  # (kvpress, share that leaves) -> press
    switches: tuple[tuple[str, object], ...] = ()
    eager: bool = False  # needs the whole attention matrix
    note: str = ""


Cell = tuple[PressPair, float]  # with the share that is kept
Kept = dict[Cell, list[tuple[Tensor, Tensor | None]]]  # of each layer
REPEATED = """layer 0: keys of a repeated word have one norm, up to the rounding of their rotation; of such ties ours \
keeps the later token, kvpress what topk happens to return"""
WINDOW_ALONE = """kvpress 0.5.2 scores the window like the best token before it: where a layer keeps the window alone, \
that tie may cost a window token; 0.5.5 adds 1, ours guards the window"""


def _snapkv(k: Any, r: float, window: int = 64) -> Any:
    return k.SnapKVPress(r, window_size=window, kernel_size=5)


def _pyramid(k: Any, r: float, window: int = 8, beta: int = 20) -> Any:
    return k.PyramidKVPress(r, window_size=window, kernel_size=5, beta=beta)


PAIRS = (
    PressPair("streaming_llm", lambda k, r: k.StreamingLLMPress(r, n_sink=4)),
    PressPair("k_norm", lambda k, r: k.KnormPress(r), (("dense_layers", 0),), note=REPEATED),
    PressPair("key_diff", lambda k, r: k.KeyDiffPress(r), (("block", 0),)),
    PressPair("key_diff", lambda k, r: k.BlockPress(k.KeyDiffPress(r), block_size=128), (("block", 128),)),
    PressPair("h2o", lambda k, r: k.ObservedAttentionPress(r), eager=True),
    PressPair("tova", lambda k, r: k.TOVAPress(r)),
    PressPair("snapkv", _snapkv),
    PressPair("snapkv", lambda k, r: _snapkv(k, r, 32), (("window", 32),)),
    PressPair("pyramid_kv", lambda k, r: _pyramid(k, r, 64), note=WINDOW_ALONE),
    PressPair("pyramid_kv", _pyramid, (("window", 8),), note=WINDOW_ALONE),
    PressPair("pyramid_kv", lambda k, r: _pyramid(k, r, beta=4), (("window", 8), ("beta", 4))),
    PressPair("ada_kv", lambda k, r: k.AdaKVPress(_snapkv(k, r))),
    PressPair("critical_kv", lambda k, r: k.CriticalKVPress(_snapkv(k, r))),
    PressPair("critical_kv", lambda k, r: k.CriticalKVPress(_snapkv(k, r, 32)), (("window", 32),)),
    PressPair("critical_ada_kv", lambda k, r: k.CriticalAdaKVPress(_snapkv(k, r))),
    PressPair("critical_ada_kv", lambda k, r: k.CriticalAdaKVPress(_snapkv(k, r, 32)), (("window", 32),)),
)


def kvpress() -> Any:
    """The library kvpress. Importing it wraps every attention function; ours is put back."""
    import kvpress as library

    ALL_ATTENTION_FUNCTIONS["kvrepro"] = attention._attention
    return library


def random_model(group: int = 4) -> PreTrainedModel:
    """Random weights, large enough that attention is far from uniform: 4 layers, 2 KV heads of 32 with `group` query
    heads each."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64 * group}
    sizes = {"vocab_size": 1000, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    return AutoModelForCausalLM.from_config(LlamaConfig(**heads, **sizes, initializer_range=0.1)).eval()


def prompts(loaded: models.Loaded, n: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """`n` prompts of random tokens and `n` of the world, of 520 to 800 tokens. Half and a quarter of each length are
    whole numbers: a pyramid in kvpress shares out n (1 - r) unrounded."""
    g = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(SHORTEST // 4, LONGEST // 4 + 1, (n,), generator=g) * 4).tolist()
    randoms = [torch.randint(3, 1000, (length,), generator=g).tolist() for length in lengths]
    items = data.load_items("tinyworld", n, seed=seed, tokens=LONGEST)
    texts = [data.build_prompt(item, loaded.tokenizer, 4 * LONGEST).ids for item in items]
    return randoms, [text[: len(text) // 4 * 4] for text in texts]


@torch.inference_mode()
def theirs(model: PreTrainedModel, ids: list[int], presses: dict[Cell, Any], eager: bool) -> Kept:
    """By press and layer: the tokens that it keeps, bool [kv_heads, tokens], and its scores. Every layer is compressed
    as the press does it, but the model goes on with the whole cache, so that one pass serves all presses."""
    kept: Kept = {cell: [] for cell in presses}
    cache = DynamicCache(config=model.config)

    def compress(module, _, kwargs, output):
        layer = cache.layers[module.layer_idx]
        stored = layer.keys, layer.values  # noqa: PD011
        for cell, press in presses.items():
            module.masked_key_indices = None
            shown = (module, kwargs["hidden_states"], *stored, output[1] if eager else None, kwargs)
            out, _ = press.compress(*shown)
            # A press that gathers has its keys found again, which are all different.
            mask = torch.stack([torch.isin(a, b) for a, b in zip(*map(_codes, (layer.keys[0], out[0])), strict=True)])
            if module.masked_key_indices is not None:
                mask[module.masked_key_indices[1], module.masked_key_indices[2]] = False
            module.masked_key_indices = None
            kept[cell].append((mask, _scores(press, shown)))

    before = model.config._attn_implementation
    model.set_attn_implementation("eager" if eager else "sdpa")
    hooks = [layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in model.model.layers]
    try:
        model(torch.tensor([ids]), past_key_values=cache)
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
    return kept


def _scores(press: Any, shown: tuple) -> Tensor | None:
    """The scores that the press ranks by, [kv_heads, tokens]; None where it ranks in several rounds."""
    name = type(press).__name__
    if name == "BlockPress":
        return None
    scores = (press if hasattr(press, "score") else press.press).score(*shown)
    if name == "CriticalAdaKVPress":
        from kvpress import CriticalKVPress

        scores = (scores + press.epsilon) * CriticalKVPress.vwl1norm(shown[3], shown[0])
    return scores[0]


def agreement(ours: Tensor, theirs: Tensor, scores: Tensor | None, joint: bool) -> tuple[Tensor, Tensor]:
    """(share in common, differs by ties alone), [kv_heads], of kept sets `[kv_heads, tokens]`.

    Ties: scores of all tokens in which the head (joint: the layer) differs lie within 1e-5 of the largest of them, and
    both keep equally many.
    """
    common = (ours & theirs).sum(-1) / torch.maximum(ours.sum(-1), theirs.sum(-1))
    differ, more = ours ^ theirs, ours.sum(-1) - theirs.sum(-1)
    if scores is None:
        return common, torch.zeros_like(common, dtype=torch.bool)
    if joint:
        differ, scores, more = differ.view(1, -1), scores.reshape(1, -1), more.sum(0, keepdim=True)
    high = scores.masked_fill(~differ, -torch.inf).amax(-1)
    low = scores.masked_fill(~differ, torch.inf).amin(-1)
    size = scores.abs().masked_fill(~differ, 0.0).amax(-1)
    return common, (common < 1) & (high - low <= 1e-5 * size) & (more == 0)


def _codes(keys: Tensor) -> Tensor:
    """An integer for each key, from its exact bits, int64 [kv_heads, tokens]."""
    bits = keys.contiguous().view(torch.int32).long()
    return (bits * (2 * torch.arange(bits.shape[-1]) + 1) * 0x9E3779B97F4A7C1).sum(-1)


def compare(model: PreTrainedModel, library: Any, texts: list[list[int]], pairs: Sequence[PressPair]) -> pd.DataFrame:
    """A row per pair and share: heads compared, those that keep the same set, those that differ by ties alone."""
    cells = [(pair, share) for pair in pairs for share in SHARES]
    conditions = [Condition(pair.policy, share, Prefill(), switches=pair.switches) for pair, share in cells]
    agreements: list[list[tuple[float, bool]]] = [[] for _ in cells]
    for text in texts:
        ours = generate(model, [text], conditions, max_new_tokens=1, stop_ids=frozenset(), kept_sets=True)[0]
        kept_by_press: Kept = {}
        for eager in {pair.eager for pair in pairs}:
            presses = {(pair, share): pair.press(library, 1 - share) for pair, share in cells if pair.eager == eager}
            kept_by_press |= theirs(model, text, presses, eager)
        for cell, answer, heads in zip(cells, ours, agreements, strict=True):
            joint = CATALOGUE[cell[0].policy].budget == "per head"
            for a, (b, scores) in zip(answer.kept_sets, kept_by_press[cell], strict=True):
                common, tied = agreement(torch.as_tensor(a), b, scores, joint)
                heads += zip(common.tolist(), tied.tolist(), strict=True)
    names = [type(pair.press(library, 0.5)).__name__ for pair, _ in cells]
    return pd.DataFrame(row(*cell, *rest) for cell, *rest in zip(cells, names, agreements, strict=True))


def row(pair: Any, share: float, press: str, heads: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """A row of the table, without the prompts. heads: of each, as of `agreement`."""
    common, tied = zip(*heads, strict=True)
    named = {"policy": pair.policy, "switches": " ".join(f"{k}={v}" for k, v in pair.switches), "press": press}
    counts = {"share_kept": share, "heads": len(heads), "equal": common.count(1), "differ_by_ties": sum(tied)}
    return named | counts | {"least_in_common": min(common), "note": pair.note}


def main() -> None:
    """Compare kept sets with kvpress, head by head, and put the rows into the table; those of other versions stay."""
    library, loaded = kvpress(), models.load()
    randoms, texts = prompts(loaded, 50)
    table = pd.concat(
        compare(model, library, ids, PAIRS).assign(prompts=len(ids), model=name)
        for name, model, ids in (("random", random_model(), randoms), (loaded.name, loaded.model, texts))
    )
    table = table.assign(**versions("kvpress", "torch", "transformers"))
    table = table.sort_values(["policy", "switches", "press", "share_kept", "model"])
    typer.echo(table.drop(columns="note").to_string(index=False))
    equal, tied, heads = table[["equal", "differ_by_ties", "heads"]].sum()
    typer.echo(f"{equal} of {heads} heads keep the same set ({equal / heads:.2%}), {tied} differ by ties")
    before = pd.read_csv(DATA / "parity.csv", keep_default_na=False)
    write_table(DATA / "parity.csv", pd.concat([before[before.kvpress != table.kvpress.iloc[0]], table]), None)


if __name__ == "__main__":
    typer.run(main)
