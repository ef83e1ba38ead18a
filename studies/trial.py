"""Do all chapters run on a real model's shape? `python -m studies.trial --shape qwen2.5-3b --device cuda`.

Writes a checkpoint with random weights in that shape and a byte-level tokenizer trained on the items, runs every
chapter on a few items, and stores per chapter: results, failed ones, seconds, the share of prefill and decoding, peak
memory. A failed row fails the trial. Random weights answer nothing: this tests that chapters run, and how fast.
"""

import contextlib
import datetime
import gc
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, get_args

import pandas as pd
import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvrepro.engine.allowed import ensure
from kvrepro.errors import InputError, error_line
from kvrepro.experiment import data, models, progress
from kvrepro.item import Item
from kvrepro.paths import GPU
from kvrepro.tools import command
from kvrepro.tools.rows import answers_of, replace_rows, words

SHAPES: dict[str, dict[str, Any]] = words("shapes")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAPTERS = ("protection", "fragility", "dropkv_bound", "leakage", "reclamation")
DTYPES = get_args(models.Dtype)[1:]  # without "auto"
KEY = ["shape", "device", "chapter"]  # a trial replaces the rows with equal values in these, whatever their sizes


def tokenizer(texts: Iterable[str], vocabulary: int = 4096) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the texts: any text can be encoded and comes back unchanged. Turns as in ChatML."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def checkpoint(
    folder: Path, shape: str, texts: Iterable[str], vocabulary: int = 4096, dtype: str = "float32", **changes: Any
) -> Path:
    """Write random weights in a shape of `SHAPES`, and the tokenizer, into `folder`, as files of the hub. The weights
    are the same each time. changes: of the configuration."""
    ensure(tuple(SHAPES), shape=shape)
    fast = tokenizer(texts, vocabulary)
    ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(**{"vocab_size": len(fast)} | SHAPES[shape] | ends | changes)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    network.save_pretrained(folder)
    del network
    torch.cuda.empty_cache()  # the chapter's process needs the room
    fast.save_pretrained(folder)
    return folder


def checkpoint_for(items: Iterable[Item], folder: Path, shape: str, dtype: str = "float32") -> Path:
    """A `checkpoint` in `folder` whose tokenizer knows the words of these items. Its hash is remembered, so that no
    process reads the weights for it."""
    texts = [message["content"] for item in items for message in item.messages]
    path = checkpoint(folder / shape, shape, texts, dtype=dtype)
    models.checkpoint_hash(path)
    return path


def _attempt(answer: Connection, name: str, parameters: dict[str, Any], counts: Sequence[int], log: Path) -> None:
    """Run a chapter in this process for each of `counts`, the number of items, and send a row for each: seconds, peak
    GiB, rows, failed rows, and its error or "". What the chapter prints goes to `log`."""
    from kvrepro.tools.book import cells

    seconds = in_studies = 0.0
    for number, count in enumerate(counts):
        began, error, messages, space = time.perf_counter(), "", list[dict[str, Any]](), dict[str, Any]()
        with (
            log.open("a", buffering=1, encoding="utf-8") as output, contextlib.redirect_stdout(output),
            progress.listening(messages.append),
        ):  # fmt: skip
            try:
                for _ in cells(name, parameters | {"n_items": count}, space=space):
                    pass
            except Exception as raised:
                traceback.print_exc()
                error = error_line(raised)
        studies = pd.DataFrame(
            [message for message in messages if "failed" in message], columns=["results", "failed", "seconds"]
        )
        new_seconds = float(studies.seconds.sum())
        in_studies += new_seconds
        seconds += new_seconds if number else time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
        answer.send({
            "chapter": name, "n_items": count,
            "results": int(studies.results.sum()), "failed": int(studies.failed.sum()),
            "seconds": round(seconds, 1), "in_studies": round(in_studies, 1),
            "peak_gib": round(peak, 2), "error": error,
        } | _spent(Path(parameters["results"]) / name))  # fmt: skip
        if error:
            return
        space.clear()  # frees the model before it is loaded again: a policy that the notebook registered may hold it
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def attempt(name: str, parameters: dict[str, Any], counts: Sequence[int], limit: float) -> Iterator[dict[str, Any]]:
    """A chapter's row for each number of items, fewest first. A larger size computes the new items alone; its seconds
    are those of the size before and of its own studies. A size that takes longer than `limit` seconds is stopped, and
    its row says so. Where one ends in an error, its last output is printed."""
    log, context = Path(f"{parameters['results']}-{name}.log"), multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_attempt, args=(sender, name, parameters, counts, log))
    process.start()
    sender.close()
    try:
        for count in counts:
            row = {"chapter": name, "n_items": count, "seconds": limit, "error": f"not done after {limit:.0f} s"}
            if receiver.poll(limit):
                try:
                    row = receiver.recv()
                except EOFError:
                    process.join()
                    row |= {"error": f"its process ended with exit code {process.exitcode}"}
            yield row
            if row["error"]:
                break
        else:
            process.join(10)  # it ends its workers
    finally:
        process.kill()
        process.join()
    if row["error"] and log.is_file():
        last = log.read_text(encoding="utf-8").splitlines()[-8:]
        print("\n".join(line[:200] for line in last), flush=True)  # a figure is one long line


def _spent(folder: Path) -> dict[str, Any]:
    """Seconds that a chapter's answers took for reading prompts, and for decoding; {} where it stored no answers."""
    rows = answers_of(folder)
    return {name: round(float(rows[f"{name}_seconds"].sum()), 1) for name in ("prefill", "decode") if len(rows)}


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "two-layer",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"of weights and caches: {', '.join(DTYPES)}")] = "float32",
    chapter: Annotated[list[str], typer.Option(help=f"these alone, of {', '.join(CHAPTERS)}")] = [],  # noqa: B006
    items: Annotated[str, typer.Option(help="longbench, or a .jsonl file; leakage takes ifeval instead")] = "longbench",
    n_items: Annotated[list[int], typer.Option(help="of each study; repeat for what more items take")] = [2],  # noqa: B006
    limit: Annotated[float, typer.Option(help="seconds for a chapter, and for what a larger size adds")] = 600,
    out: Annotated[Path, typer.Option(help="the table")] = GPU / "chapters.csv",
) -> None:
    """Run the chapters on random weights of a real shape; exit 1 where a row failed or a chapter did not end."""
    ensure(tuple(SHAPES), shape=shape)
    ensure(DTYPES, dtype=dtype)
    for name in chapter:
        ensure(CHAPTERS, chapter=name)
    models.device_of(device)
    try:
        read = data.load_items(items, data.AtMost(8))
    except InputError as error:
        if items.endswith(".jsonl"):
            raise
        raise InputError(f"{error}; or give a file of your own, --items FILE.jsonl") from None
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    run_facts = {"shape": shape, "dtype": dtype, "device": where, "torch": torch.__version__}
    run_facts |= {"transformers": transformers.__version__, "date": datetime.date.today().isoformat(), "note": "alone"}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        path = checkpoint_for(read, Path(folder), shape, dtype)
        print(f"{shape}: written in {time.perf_counter() - began:.0f} s", flush=True)
        parameters = {"model": str(path), "device": device, "options": {"dtype": dtype, "progress": False}}
        parameters |= {"items": items, "results": f"{folder}/results"}
        for name in chapter or CHAPTERS:
            for row in attempt(name, parameters, sorted(set(n_items)), limit):
                rows.append(row | run_facts)
                print(pd.Series(rows[-1]).to_frame().T.to_string(index=False), flush=True)
                replace_rows(out, pd.DataFrame(rows), KEY)
    print(f"the table: {out}")
    frame = pd.DataFrame(rows)
    if frame.error.any() or frame.failed.sum():
        raise typer.Exit(1)


if __name__ == "__main__":
    command.run(main)
