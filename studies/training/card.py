"""The model card: `python -m studies.training.card` fills data/words/card.md in from the CSV files there."""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from kvrepro.experiment.models import EMBEDDED, embedded
from kvrepro.item import Item
from kvrepro.paths import DATA
from kvrepro.tools import command
from kvrepro.tools.family_claims import Kind
from kvrepro.tools.filterable import table
from kvrepro.world import world
from kvrepro.world.tokenizer import vocabulary

TEMPLATE = DATA / "words" / "card.md"


def _short(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[: text.rindex(" ", 0, most)] + " ..."


def _example(item: Item) -> dict[str, str]:
    """An item as a row: task, the text that holds the answer, the request, the answer."""
    text = {name: [] for name in ("evidence", "directive", "defense", "question")}
    for span in item.spans:
        text[span.name].append(item.messages[span.message]["content"][span.start : span.end])
    facts = " ".join(text["evidence"][:2]) or " ".join(text["directive"])
    facts = facts.removeprefix(world.pretty(world.PREAMBLE)).strip()
    if text["defense"]:
        facts = f"{_short(facts, 60)} + defense: {_short(text['defense'][0], 40)}"
    question = "".join(text["question"])
    return {"task": f"`{item.task}`", "told": _short(facts), "asked": question, "answer": _short(item.answer, 70)}


def _with_ends(r: Any, name: str) -> str:
    return f"{getattr(r, name):.3f} ({r.low:.3f}-{r.high:.3f})"


def exact_match(evaluation: pd.DataFrame) -> str:
    cells = evaluation.assign(cell=[_with_ends(r, "exact_match") for r in evaluation.itertuples()])
    wide = cells.pivot_table("cell", "task", "tokens", aggfunc="first").reindex(evaluation.task.unique())
    return table([{"task": f"`{task}`"} | {f"{n:,}": cell for n, cell in row.items()} for task, row in wide.iterrows()])


def lowest(evaluation: pd.DataFrame) -> str:
    r = evaluation.loc[evaluation.exact_match.idxmin()]
    return f"{_with_ends(r, 'exact_match')}, `{r.task}` at {r.tokens:,}"


def right_of(check: pd.DataFrame) -> str:
    """How many answers were right at each length, all tasks together, and which tasks missed some."""
    sums = check.assign(right=check.exact_match * check.n).groupby("tokens")[["right", "n"]].sum()
    lengths = [f"{row.right:.0f} of {row.n:.0f} answers right at {row.Index:,} tokens" for row in sums.itertuples()]
    missed = [f"`{row.task}` at {row.tokens:,}" for row in check[check.exact_match < 1].itertuples()]
    return f"{', '.join(lengths)}; missed: {', '.join(missed) or 'none'}"


def sink_table(sinks: pd.DataFrame) -> str:
    """A table with a row per layer: the mean over its heads, and its largest head."""
    rows = []
    for layer, of_layer in sinks.groupby("layer"):
        mean, heads = of_layer[of_layer["head"] == "mean"].iloc[0], of_layer[of_layer["head"] != "mean"]
        top = heads.loc[heads.mass.idxmax()]
        cells = {"mean over heads": _with_ends(mean, "mass"), "largest head": _with_ends(top, "mass")}
        rows.append({"layer": str(layer), **cells, "which": str(top["head"])})
    return table(rows)


def sink_summary(sinks: pd.DataFrame) -> str:
    """Which heads give position 0 at least a tenth of their attention, in a sentence."""
    heads = sinks[sinks["head"] != "mean"]
    strong = heads[heads.mass >= 0.1]
    places = "; ".join(f"layer {layer}, heads {', '.join(group['head'])}" for layer, group in strong.groupby("layer"))
    return (
        f"Heads that give position 0 at least 0.1 of their attention: {places or 'none'} ({len(strong)} of "
        f"{len(heads)}; all others at most {heads.mass[heads.mass < 0.1].max():.3f}). Claims about sinks can be tried "
        "on such heads alone; a model with sinks in most layers, as is reported of large ones, is a different case."
    )


WITH = "(torch 2.11, transformers 5.17, November 2026)"
TRAINED = {  # minutes of the command, and where: what the log does not hold
    "tiny-gqa": (8.2, f"on one NVIDIA H200 with 16 CPU cores {WITH}, in Qwen2's layout, stored in Llama's, its equal"),
}
TOGETHER = (17.0, f"three of the family at once on each of two NVIDIA H200 with 32 CPU cores {WITH}")


def _millions(folder: Path) -> float:
    """Millions of stored weights, of two bytes each."""
    return (folder / "model.safetensors").stat().st_size / 2e6


def family() -> str:
    """A row for each model that ships."""
    rows = []
    for name, folder in embedded().items():
        kind, at = Kind.of(folder), pd.read_csv(folder / "evaluation.csv").query("tokens == 1900")
        short = at[at.exact_match < 0.95].sort_values("exact_match")
        rows.append({
            "model": f"`{name}`", "parameters": f"{_millions(folder):.1f} M",
            "layers": str(kind.layers), "query heads on KV heads": f"{kind.heads} on {kind.kv_heads}",
            "window": f"{kind.window} in every other layer" if kind.window else "",
            "exact match": f"{at.exact_match.mean():.3f}",
            "below 0.95": ", ".join(f"`{r.task}` {r.exact_match:.2f}" for r in short.itertuples()),
        })  # fmt: skip
    return table(rows)


def _facts(folder: Path) -> dict[str, str]:
    """The card's fields on shape and training."""
    config, log = json.loads((folder / "config.json").read_text()), (folder / "training.jsonl").read_text().splitlines()
    kind, last, (minutes, where) = Kind.of(folder), json.loads(log[-1]), TRAINED.get(folder.name, TOGETHER)
    sliding = f"; layers 0, 2, 4 see the last {kind.window} tokens" if kind.window else ""
    plain = config["model_type"] == "llama"
    llama = "Llama with biases on query, key and value (`attention_bias`; the output projection's bias is 0)"
    architecture = (llama if plain else "Qwen2") + sliding
    return {
        "tokenizer": "AutoTokenizer" if plain else "PreTrainedTokenizerFast",
        "why": "" if plain else " (AutoTokenizer takes Qwen2's own class, which reads bytes.)",
        "name": folder.name, "parameters": f"{_millions(folder):.1f}", "architecture": architecture,
        "layers": str(kind.layers), "width": str(kind.width),
        "inner": f"{config['intermediate_size']:,}",
        "heads": f"{kind.heads} query heads on {kind.kv_heads} KV head{'s' * (kind.kv_heads > 1)}, "
                 f"{kind.width // kind.heads} dimensions each",
        "megabytes": f"{2 * _millions(folder):.0f}", "minutes": f"{minutes:g}", "where": where,
        "steps": f"{last['steps']:,}", "billion": f"{last['tokens'] / 1e9:.2f}",
        "seconds": f"{last['seconds']:,}",
    }  # fmt: skip


def card(folder: Path = EMBEDDED) -> str:
    """The card of a model's folder, as markdown."""
    evaluation, check = pd.read_csv(folder / "evaluation.csv"), folder / "evaluation_cpu.csv"
    sinks = pd.read_csv(folder / "sinks.csv", dtype={"head": str})
    items = [world.sample(task, 1, seed=0, tokens=300)[0] for task in world.ALL]
    again = "Checked apart from that run, on a CPU in float32, on other held-out items (`python -m"
    return TEMPLATE.read_text(encoding="utf-8").format(
        vocabulary=f"{len(vocabulary()):,}", examples=table([_example(item) for item in items]),
        n=evaluation.n.iloc[0], exact_match=exact_match(evaluation), lowest=lowest(evaluation),
        cpu=f"{again}\nstudies.training.evaluate`): {right_of(pd.read_csv(check))}." if check.exists() else "",
        sinks=sink_table(sinks), sink_summary=sink_summary(sinks),
        answered=f"{evaluation.query('tokens == 1900').exact_match.mean():.1%}", family=family(), **_facts(folder),
    )  # fmt: skip


def main(folder: Path | None = None) -> None:
    """Write the card of the model in `folder`; where none is given, of all that ship."""
    for model_folder in [folder] if folder else embedded().values():
        (model_folder / "README.md").write_text(card(model_folder), encoding="utf-8")


if __name__ == "__main__":
    command.run(main)
