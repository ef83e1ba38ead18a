"""Can the world's evidence be told without reading? `python -m studies.shortcuts` writes data/shortcuts.csv.

A policy must guess which tokens a question will ask for. Where these differ from the rest in something simple, such as
the length of their values, it need not guess. The measure is the AUC: how often a token of the evidence has a higher
score than another token. One half is chance; below it the evidence has the lower scores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from scipy import stats as scipy_stats
from torch import Tensor

from kvrepro.engine.attention import attend, read_once
from kvrepro.engine.condition import Condition, Prefill, Prompt
from kvrepro.engine.generate import generate
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy, own
from kvrepro.engine.shapes import Scores
from kvrepro.experiment import data, models, stats
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, Settings, run
from kvrepro.item import Item
from kvrepro.paths import DATA, write_table
from kvrepro.world.words import MARKS
from kvrepro.world.world import FILLER

WINDOW = 32  # queries before the question: what SnapKV sees of a prompt
SHARES = (0.1, 0.2, 0.3, 0.5)
CONTRASTS = ("answer words, filler", "evidence, filler", "evidence, other facts")  # which tokens against which


def value_norm(o: Observation) -> Scores:
    """s_j = ||v_j||."""
    return o.values.float().norm(dim=-1)  # noqa: PD011  (not a pandas frame)


def auc(scores: np.ndarray, positive: np.ndarray, negative: np.ndarray) -> float:
    """Chance that a score of `positive` (bool, like scores) exceeds one of `negative`; ties count one half."""
    a, b = scores[positive], scores[negative]
    return float(scipy_stats.mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b)))


class Onlooker:
    """Attention that records, during one pass, what a policy could see in each layer: `seen`, by layer and signal,
    [kv_heads, tokens before the question]."""

    def __init__(self, question: int, tokens: int):
        self.end, self.seen = question, {}
        self.queries = {"window": range(question - WINDOW, question), "question": range(question, tokens)}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding=None) -> Tensor:
        at = torch.arange(query.shape[2], device=query.device)[None]
        sums = {name: torch.zeros(key.shape[1], self.end) for name in self.queries}

        def see(p: Tensor, queries: slice) -> None:  # [1, kv_heads, group, queries, tokens]
            for name, wanted in self.queries.items():
                a, b = max(wanted.start, queries.start), min(wanted.stop, queries.stop)
                if a < b:
                    sums[name] += p[0, :, :, a - queries.start : b - queries.start, : self.end].sum((1, 2)).cpu()

        out = attend(query, at, [(key, value, at[:, None])], scaling, sliding, see)
        norms = {"value_norm": value[0], "key_norm": key[0]}
        signals = {name: x[:, : self.end].float().norm(dim=-1).cpu() for name, x in norms.items()} | sums
        self.seen[layer] = {name: x.numpy() for name, x in signals.items()}
        return out


def groups(loaded: Loaded, item: Item) -> tuple[Prompt, list[str], Mapping[str, np.ndarray]]:
    """The item's prompt, its tokens as words, and by kind of token, bool [tokens before the question]: evidence, words
    of the answer in the evidence, filler, and other facts."""
    prompt = data.build_prompt(item, loaded.tokenizer, loaded.context)
    words = loaded.tokenizer.convert_ids_to_tokens(prompt.ids)
    answer = set(loaded.tokenizer.tokenize(item.answer)) - set(MARKS)
    start, end = prompt.turns["user"] + 1, min(prompt.spans["question"])
    evidence = np.isin(np.arange(end), prompt.spans["evidence"])
    sentences, filler = {tuple(sentence) for sentence in FILLER}, np.zeros(end, bool)
    size = len(FILLER[0])
    for at in range(start, end - size + 1):
        if tuple(words[at : at + size]) in sentences:
            filler[at : at + size] = True
    other = ~evidence & ~filler & (np.arange(end) >= start)
    answer_words = evidence & np.array([word in answer for word in words[:end]])
    kinds = {"evidence": evidence, "answer words": answer_words, "filler": filler & ~evidence, "other facts": other}
    return prompt, words, kinds


@torch.inference_mode()
def of_item(loaded: Loaded, item: Item) -> pd.DataFrame:
    """The AUCs of one prompt, with columns layer (-1 for signals of no layer), head, signal, contrast (of `CONTRASTS`),
    auc."""
    prompt, words, where = groups(loaded, item)
    end, counts = min(prompt.spans["question"]), Counter(words[: min(prompt.spans["question"])])
    look = Onlooker(end, len(words))
    read_once(loaded.model, prompt.ids, look)
    rarity = -np.array([counts[word] for word in words[:end]])
    scores = [(-1, 0, "position", np.arange(end)), (-1, 0, "rarity", rarity)]
    for n, seen in look.seen.items():
        scores += [(n, h, name, x) for name, heads in seen.items() for h, x in enumerate(heads)]
    rows = [
        (layer, head, name, contrast, auc(x, where[a], where[b]))
        for layer, head, name, x in scores
        for contrast in CONTRASTS
        for a, b in [contrast.split(", ")]
        if where[a].any() and where[b].any()
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "signal", "contrast", "auc"])


def lost(loaded: Loaded, items: list[Item]) -> pd.DataFrame:
    """The share of the full cache's token F1 that policies lose which keep a share of the passage before the question
    is read, the longest values among them: columns policy, share, value, low, high, n. Beside it for each kind of token
    of `groups` the share that a head keeps, mean over prompts, layers and heads."""
    plain = own("value_norm", Policy("Value norm", "this page", value_norm, parameters={"sinks": 4}))
    policies, before = (plain, "k_norm", "snapkv", "critical_kv", "random"), Prefill(until="question")
    cells = [Condition(name, share, before, reading="as_described") for share in SHARES for name in policies]
    rows = run(Answers("shortcuts", "main", items, [Condition(), *cells], 32), loaded, Settings(progress=False))
    full = rows.policy == "full"
    losses = stats.contrasts(rows[~full], rows[full], ["policy", "share"], "token_f1", kind="loss")
    held = []
    for item in items:
        prompt, _, where = groups(loaded, item)
        [answers] = generate(loaded.model, [prompt], cells, max_new_tokens=1, stop_ids=(), kept_sets=True)
        for cell, answer in zip(cells, answers, strict=True):
            kept = {name: float(np.stack(answer.kept_sets)[..., at].mean()) for name, at in where.items() if at.any()}
            held.append({"policy": cell.policy, "share": cell.budget, **kept})
    return losses.merge(pd.DataFrame(held).groupby(["policy", "share"]).mean().reset_index(), on=["policy", "share"])


def main(model: Annotated[str, typer.Option(help="or the folder of a checkpoint")] = models.DEFAULT) -> None:
    """Measure on the CPU in float32: shortcuts.csv and shortcuts_lost.csv."""
    loaded = models.load(model)
    drawn_items = data.load_items("tinyworld:long,story,ledger,needle_multikey", 22, seed=2028, tokens=1900)
    aucs = pd.concat([of_item(loaded, item) for item in drawn_items])
    aucs = stats.means(aucs, ["signal", "contrast", "layer", "head"], "auc")
    write_table(DATA / "shortcuts.csv", aucs, "%.4f")
    losses = lost(loaded, drawn_items)
    write_table(DATA / "shortcuts_lost.csv", losses, "%.4f")
    wide = aucs.pivot_table("value", ["contrast", "layer", "head"], "signal")
    typer.echo(wide.round(3).to_string())
    typer.echo(losses.round(3).to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
