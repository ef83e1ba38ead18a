"""Do all chapters run on a real model's shape? `python -m studies.trial --shape qwen2.5-3b --device cuda`.

Writes a checkpoint with random weights in that shape and a byte-level tokenizer trained on the items, runs every
chapter on a few items, and stores per chapter: results, failed ones, seconds, the share of prefill and decoding, peak
memory. A failed row fails the trial. Random weights answer nothing: this tests that chapters run, and how fast.
"""

import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvrepro.errors import error_line
from kvrepro.experiment import data, models
from kvrepro.paths import GPU
from studies import chapters
from studies.table import answers_of, replace_rows, versions, words

SHAPES: dict[str, dict[str, Any]] = words("shapes")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAPTERS = ("protection", "fragility", "dropkv_bound", "leakage", "reclamation")
KEY = ["shape", "device", "chapter"]  # a trial replaces the rows with equal values in these, whatever their sizes


def tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the texts: any text can be encoded and comes back unchanged. Turns as in ChatML."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": vocabulary, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(**how))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def checkpoint(
    folder: Path, shape: str, texts: Iterable[str], vocabulary: int = 4096, dtype: str = "float32", **changes: Any
) -> Path:
    """Write random weights in a shape of `SHAPES`, and the tokenizer, into `folder`, as files of the hub. The weights
    are the same each time. changes: of the configuration."""
    fast = tokenizer(texts, vocabulary)
    ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**{"vocab_size": len(fast)} | SHAPES[shape] | ends | changes)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    network.save_pretrained(folder)
    del network
    torch.cuda.empty_cache()  # the chapters need the room
    fast.save_pretrained(folder)
    return folder


def attempt(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A chapter's row: results, failed ones, seconds, those of reading prompts and of decoding, peak memory, error."""
    began, row = time.perf_counter(), {"chapter": name, "n_items": parameters["n_items"], "error": ""}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        chapters.run(name, parameters)
    except Exception as raised:  # whatever a cell raises
        traceback.print_exc()
        row["error"] = error_line(raised)
    row["seconds"] = round(time.perf_counter() - began, 1)
    if torch.cuda.is_available():
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    folder = Path(parameters["results"]) / name
    rows = answers_of(folder)
    row |= {part: round(float(rows[f"{part}_seconds"].sum()), 1) for part in ("prefill", "decode") if len(rows)}
    of_items = {file.parent for file in folder.glob("*/*/*.parquet")}
    return row | {"results": max(len(rows), len(of_items)), "failed": int(rows.error.notna().sum())}


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "two-layer",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="of weights and caches")] = "float32",
    chapter: Annotated[list[str], typer.Option(help=f"these alone, of {', '.join(CHAPTERS)}")] = [],  # noqa: B006
    items: Annotated[str, typer.Option(help="longbench, or a .jsonl file; leakage takes ifeval instead")] = "longbench",
    n_items: Annotated[int, typer.Option(help="of each study")] = 2,
    out: Annotated[Path, typer.Option(help="the table")] = GPU / "chapters.csv",
) -> None:
    """Run the chapters on random weights of a real shape; exit 1 where a row or a chapter failed."""
    models.device_of(device)
    read = data.load_items(items, data.AtMost(8))
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    facts = {"shape": shape, "dtype": dtype, "device": where, **versions("torch", "transformers"), "note": "alone"}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        texts = [message["content"] for item in read for message in item.messages]
        path = checkpoint(Path(folder) / shape, shape, texts, dtype=dtype)
        parameters = {"model": str(path), "device": device, "options": {"dtype": dtype, "progress": False}}
        parameters |= {"items": items, "n_items": n_items, "results": f"{folder}/results"}
        for name in chapter or CHAPTERS:
            rows.append(attempt(name, parameters) | facts)
            print(pd.Series(rows[-1]).to_frame().T.to_string(index=False), flush=True)
            replace_rows(out, pd.DataFrame(rows), KEY)
    if any(row["error"] or row["failed"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
