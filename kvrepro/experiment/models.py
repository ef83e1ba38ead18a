"""Models: an embedded one, a checkpoint folder, or a Hugging Face id. Weights are read from safetensors alone, and no
code of a checkpoint is run."""

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvrepro.engine.condition import ensure
from kvrepro.errors import InputError, ensure_known, first_line
from kvrepro.item import plain, thinking
from kvrepro.paths import DATA, WORK

DEFAULT = "small-gqa"
EMBEDDED = DATA / "models" / DEFAULT
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READ = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")  # the files of a checkpoint that libraries may read
TOKENIZER = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")  # of which a checkpoint has one
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # transformers' name for a warning that comes once
# Stop tokens beside the tokenizer's eos, where a vocabulary has them (protection paper's run_v3_jax.py:397-403).
STOP_TOKENS = ("<|im_end|>", "<|end|>", "<|endoftext|>")


@dataclass(frozen=True)
class Loaded:
    """A model ready for the engine. `hash` covers weights, configuration, tokenizer and chat template."""

    model: Any
    tokenizer: Any
    name: str
    hash: str
    path: Path

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.model.device.type)

    @property
    def context(self) -> int:
        """Tokens that the model was made for, prompt and answer together."""
        return int(self.model.config.get_text_config().max_position_embeddings)


def load(model: str = DEFAULT, device: str = "cpu", dtype: str = "auto", enable_thinking: bool | None = None) -> Loaded:
    """Load a causal language model with its tokenizer.

    model: "small-gqa" or another of `embedded()`, the folder of a checkpoint, or a hub id as owner/name. device: "cpu",
    "cuda", "cuda:0", "auto" (cuda if there is one), "balanced" (layers over all GPUs). dtype: float32, bfloat16,
    float16, or "auto": the checkpoint's own on a GPU, float32 on the CPU. enable_thinking: for the chat template of a
    model that thinks before it answers; None: what the template does by itself.
    Raises InputError for an unknown name, no such device, a checkpoint with code or with other weights than its own
    safetensors, whatever transformers cannot load, and a model that the engine cannot drive.
    """
    ensure(get_args(Dtype), dtype=dtype)
    where = device_of(device)
    name, folder = located(model)
    folder = folder or _fetched(model)

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from kvrepro.engine.generate import usable

    logging.disable_progress_bar()
    try:
        _check_plain(folder)
        fast = thinking(tokenizer(str(folder)), enable_thinking)
        network, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            device_map=where if where == "balanced" else None,
            dtype="float32" if (dtype, where) == ("auto", "cpu") else dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        if lacking := sorted(loading["missing_keys"]):  # transformers fills them at random
            raise ValueError(f"weights lack {len(lacking)} of the tensors that config.json asks for, e.g. {lacking[0]}")
        network = (network if where == "balanced" else network.to(where)).eval().requires_grad_(False)
    except BaseException as error:  # libraries have error classes of their own; a panic in Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise InputError(f"{name} in {folder} cannot be loaded: {first_line(error)}") from error
    usable(network)
    return Loaded(network, fast, name, checkpoint_hash(folder), folder)


def _check_plain(folder: Path) -> None:
    """Raise ValueError for a checkpoint that asks transformers to run code, or to read other files than the folder's
    safetensors."""
    config, tokens, index = (_json(folder / file) for file in ("config.json", "tokenizer_config.json", INDEX))
    kernels = [config.get(key) for key in ("attn_implementation", "_attn_implementation", "experts_implementation")]
    if "auto_map" in {*config, *tokens} or any("/" in str(kernel) for kernel in kernels):
        raise ValueError("it asks for remote code (auto_map, or kernels of the hub), which is never run here")
    if (folder / "adapter_config.json").exists():
        raise ValueError("it is an adapter (adapter_config.json): merge it into its model, and save that")
    for file in (config.get("transformers_weights", WEIGHTS), *dict(index.get("weight_map", {})).values()):
        if Path(str(file)).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"it reads weights from {file!r}: keep them in its folder, as .safetensors")


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def tokenizer(model: str) -> Any:
    """The tokenizer of a model, named as for `load`: tokenizer.json as it stands, unless another class is declared.
    AutoTokenizer would use the class of the family for some (Qwen2's, which splits texts into bytes), whatever the
    checkpoint declares. Reads no weights."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = located(model)[1] or _fetched(model)
    if not any(file.match(name) for file in folder.iterdir() for name in TOKENIZER):
        raise InputError(f"there is no tokenizer ({', '.join(TOKENIZER)}): give the folder of a whole checkpoint")
    declared = _json(folder / "tokenizer_config.json").get("tokenizer_class")
    as_it_stands = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind = PreTrainedTokenizerFast if as_it_stands else AutoTokenizer
    read = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not read.is_fast:
        raise InputError(f"{folder} has no fast tokenizer (tokenizer.json)")
    read.deprecation_warnings[TOO_LONG] = True  # texts are counted before they are cut: nothing to warn of
    return read


def stop_ids(loaded: Loaded) -> frozenset[int]:
    """Token ids that end an answer: the tokenizer's eos, STOP_TOKENS where defined, the generation config's eos list.

    The protection paper's harness left the generation config out. It matters for Gemma, whose <end_of_turn> stands only
    there: as run, every Gemma answer went on to the token limit.
    """
    vocabulary, configured = loaded.tokenizer.get_vocab(), loaded.model.generation_config.eos_token_id
    ids = {vocabulary.get(token) for token in STOP_TOKENS} | {loaded.tokenizer.eos_token_id}
    ids |= set(configured) if isinstance(configured, list) else {configured}
    return frozenset(ids - {None})


def embedded() -> dict[str, Path]:
    """The folders of the models that ship with the project, by name."""
    return {config.parent.name: config.parent for config in sorted(EMBEDDED.parent.glob("*/config.json"))}


def located(model: str) -> tuple[str, Path | None]:
    """(name as pages show it, folder) of a local checkpoint, (name, None) of a hub id. Reads nothing. Raises InputError
    for a name that can be neither."""
    ensure(str, model=model)
    if model in (shipped := embedded()):
        return model, shipped[model]
    with contextlib.suppress(OSError, RuntimeError):  # too long for a path; "~nobody"
        here = Path(model).expanduser()
        for folder in (here.resolve(), (WORK / here).resolve()):  # notebooks run in a folder of their own
            if folder.is_dir():
                return plain(folder.name), folder
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model, re.ASCII):
        return model, None
    choices = f"{', '.join(shipped)}, an existing checkpoint folder, or a hub id such as owner/name"
    raise InputError(f"unknown model {model[:200]!r}: use {choices}")


def _fetched(model: str) -> Path:
    """Snapshot folder of a hub checkpoint; without a network, one that was fetched before."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(READ)))
    except Exception as error:  # whatever the client calls it
        what = f"cannot fetch '{model}' from the hub ({first_line(error)})"
        raise InputError(f"{what}: check its name and the network, or give a folder") from error


def device_of(device: str) -> str:
    """The name that torch has for a device of `load`, or "balanced". Raises InputError for a device that is missing."""
    import torch

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if device == "auto":
        return "cuda" if gpus else "cpu"
    there = ["cpu", *(["cuda", *gpus] if gpus else []), *(["balanced"] if len(gpus) > 1 else [])]
    ensure_known("device", [device], there, also=["auto"])
    return device


def checkpoint_hash(folder: Path) -> str:
    """sha256 (first 16 hex digits) over the files that may decide an answer: weights, configuration, and the files of
    the tokenizer; some chat templates lie in a folder of their own."""
    total = hashlib.sha256()
    files = sorted(path for path in folder.iterdir() if any(path.match(pattern) for pattern in READ))
    for path in files + sorted(folder.glob("additional_chat_templates/*.jinja")):
        if path.is_file():
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            total.update(f"{path.relative_to(folder).as_posix()} {digest}\n".encode())
    return total.hexdigest()[:16]
