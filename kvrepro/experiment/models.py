"""Models: an embedded one, a checkpoint folder, or a Hugging Face id. A model that cannot be used is refused in one
line, before its weights are read where that is possible."""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from kvrepro.engine.condition import ensure
from kvrepro.errors import LONGEST, InputError, ensure_documented, first_line
from kvrepro.item import plain, rendered, thinking
from kvrepro.paths import CACHE, DATA, INSTALLED, WORK, replaced

DEFAULT = "small-gqa"
EMBEDDED = DATA / "models" / DEFAULT
BESIDE = ("small-gqa-seed-0", "small-gqa-seed-2", "small-mha", "small-mqa", "small-sliding", "tiny-gqa")  # in a clone
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers looks for them in this order
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # fetched and checked before the weights
READ = (*SMALL_FILES, "*.safetensors")
LARGEST = 100_000_000  # bytes of a small file, at most: three times the largest tokenizer.json that we know
TALK, TALK_SECONDS, TALK_BYTES = ("system", "user", "assistant", "user"), 10, 2 << 30  # to try a chat template on
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
    """Load a causal language model with its tokenizer. The engine brings its own attention
    (`kvrepro.engine.attention`).

    model: "small-gqa" or another of `embedded()`, the folder of a checkpoint, or a hub id as owner/name. device: "cpu",
    "cuda", "cuda:0", "auto" (cuda if there is one), "balanced" (layers over all GPUs). dtype: float32, bfloat16,
    float16, or "auto": the checkpoint's own on a GPU, float32 on the CPU. enable_thinking: for the chat template of a
    model that thinks before it answers; None: what the template does by itself.
    Raises InputError before any weight is read or fetched for: an unknown name, .bin-only weights, remote code, no
    tokenizer, no chat template, no network, no such device, a family that the engine cannot drive. Raises it afterwards
    for weights that do not fit or are not finite, and for a model whose logits differ in the engine.
    """
    ensure_documented()
    ensure(get_args(Dtype), dtype=dtype)
    where = device_of(device)
    kind = "float32" if (dtype, where) == ("auto", "cpu") else dtype
    name, path = resolve(model)

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from kvrepro.engine.generate import usable

    logging.disable_progress_bar()
    try:
        tokenizer = _tokenizer(path)
        if not tokenizer.is_fast:
            raise ValueError("no fast tokenizer (tokenizer.json)")
        if path not in embedded().values():
            _check_talk(name, path, tokenizer)
        tokenizer = thinking(tokenizer, enable_thinking)
        network, loading = AutoModelForCausalLM.from_pretrained(
            path,
            device_map=where if where == "balanced" else None,
            dtype=kind,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except InputError:
        raise
    except BaseException as error:  # libraries have error classes of their own; a panic in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{name} in {path} cannot be loaded ({first_line(error)}): save or fetch it again") from error
    if lacking := sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}):
        raise InputError(  # transformers would fill them at random
            f"{name}: weights lack {len(lacking)} of the tensors that config.json asks for, e.g. {lacking[0]}: save or "
            f"fetch both again"
        )
    network = (network if where == "balanced" else network.to(where)).eval().requires_grad_(False)
    _check_finite(name, network)
    usable(network)
    return Loaded(network, tokenizer, name, checkpoint_hash(path), path)


def _check_finite(name: str, network: Any) -> None:
    """Raise InputError for a weight that is NaN or infinite: all logits may be so then, and no row would say why."""
    for key, weights in network.named_parameters():
        ends = weights.aminmax() if weights.dtype.is_floating_point and weights.dtype.itemsize > 1 else ()
        if not all(end.isfinite() for end in ends):
            kind = str(weights.dtype).removeprefix("torch.")
            way_out = "fetch or save the checkpoint again, or take another dtype"
            raise InputError(f"{name}: weights of {key} are NaN or infinite in {kind}: {way_out}")


def _check_talk(name: str, folder: Path, tokenizer: Any) -> None:
    """Raise InputError for a chat template that fails on four turns, does not finish, or differs each time.

    A template is a program by whoever made the checkpoint. Jinja's sandbox limits a loop, but not loops within loops.
    So the template is tried here in a process of its own, which the system stops.
    """
    if "fork" not in multiprocessing.get_all_start_methods():  # Windows
        return
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writer.send(_talk(tokenizer)))
    child.start()
    writer.close()
    why = f"takes more than {TALK_SECONDS} s or {TALK_BYTES >> 30} GiB on four turns"
    with contextlib.suppress(EOFError):  # the system stopped it
        why = reader.recv() if reader.poll(2 * TALK_SECONDS) else why
    child.kill()
    child.join()
    if why:
        raise InputError(f"{name}: its chat template {why}: mend chat_template.jinja in {folder}")


def _talk(tokenizer: Any) -> str:
    """What the template does wrong with turns, short and long; empty if it writes some of them, the same each time."""
    import resource

    from jinja2 import TemplateError

    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + TALK_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (TALK_SECONDS, TALK_SECONDS))
    problems = []
    for roles, repeats in itertools.product((TALK[1:2], TALK[1:], TALK), (1, 400)):
        turns = [{"role": role, "content": " ".join([f"{role} says: yes."] * repeats)} for role in roles]
        try:
            text = rendered(tokenizer, turns)
            if rendered(tokenizer, turns) != text:
                return "says something else each time"
            problems.append("")
        except BaseException as error:
            problems.append(f"fails on four turns ({first_line(error)})")
            if not isinstance(error, TemplateError):  # which may refuse roles that it does not know
                return problems[-1]
    return min(problems)


def tokenizer(model: str) -> Any:
    """The tokenizer of a model, named as for `load`; reads no weights. Raises InputError as `resolve` does."""
    return _tokenizer(resolve(model)[1])


def _tokenizer(folder: Path) -> Any:
    """A checkpoint's tokenizer: tokenizer.json as it stands, unless another class is declared. AutoTokenizer would use
    the class of the family for some (Qwen2's, which splits texts into bytes), whatever the checkpoint declares."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = folder / "tokenizer_config.json"
    declared = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class") if file.is_file() else None
    plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind = PreTrainedTokenizerFast if plain else AutoTokenizer
    read = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    read.deprecation_warnings[TOO_LONG] = True  # texts are counted before they are cut: nothing to warn of
    return read


def _check_family(name: str, folder: Path) -> None:
    """Raise InputError if the engine cannot drive a model of this configuration, which is built without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvrepro.engine.facts import check_family

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a configuration makes transformers raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{name} cannot be built from its config.json ({why}): mend it, or take another") from error
    check_family(network)


def stop_ids(loaded: Loaded) -> frozenset[int]:
    """Token ids that end an answer: the tokenizer's eos, STOP_TOKENS where defined, the generation config's eos list.

    The protection paper's harness left the generation config out. It matters for Gemma, whose <end_of_turn> stands only
    there: as run, every Gemma answer went on to the token limit.
    """
    vocabulary = loaded.tokenizer.get_vocab()
    ids = {vocabulary[token] for token in STOP_TOKENS if token in vocabulary}
    if loaded.tokenizer.eos_token_id is not None:
        ids.add(loaded.tokenizer.eos_token_id)
    configured = getattr(loaded.model.generation_config, "eos_token_id", None)
    if configured is not None:
        ids |= set(configured) if isinstance(configured, list) else {configured}
    return frozenset(ids)


def embedded() -> dict[str, Path]:
    """The folders of the models that ship with the project, by name."""
    return {config.parent.name: config.parent for config in sorted(EMBEDDED.parent.glob("*/config.json"))}


def resolve(model: str) -> tuple[str, Path]:
    """(name, folder) of a checkpoint that passed every check but those of its weights' values; fetches a hub id."""
    name, folder = located(model)
    return name, _fetched(model) if folder is None else _checked(model, folder)


def look(model: str) -> None:
    """Raise InputError for a name that is no checkpoint's. Looks only at the name and at config.json."""
    name, folder = located(model)
    if folder is not None:
        _json(name, folder / "config.json")


def located(model: str) -> tuple[str, Path | None]:
    """(name as pages show it, folder) of a local checkpoint, (name, None) of a hub id. Reads nothing. Raises InputError
    for a name that can be neither."""
    ensure(str, model=model)
    if not model.isprintable() or not 0 < len(model) <= LONGEST:
        raise InputError(f"unknown model {model[:50]!r}: use a name or a path, of printed signs")
    if model in (shipped := embedded()):
        return model, shipped[model]
    if model in (DEFAULT, *BESIDE):
        way_out = f"pip installs {DEFAULT} only, work in a clone" if INSTALLED else "run git checkout data/models"
        raise InputError(f"the embedded model {model} is missing at {EMBEDDED.with_name(model)}: {way_out}")
    with contextlib.suppress(OSError, RuntimeError):  # too long for a path; "~nobody"
        folder = Path(model).expanduser()
        folder = folder if folder.is_dir() else WORK / folder  # notebooks run in a folder of their own
        if folder.is_dir():
            return plain(folder.resolve().name), folder.resolve()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model, re.ASCII) and not model.startswith("."):
        return model, None
    choices = f"{', '.join(shipped)}, an existing checkpoint folder, or a hub id such as owner/name"
    raise InputError(f"unknown model '{model[:200]}': use {choices}")


def _fetched(model: str) -> Path:
    """Snapshot folder of a hub checkpoint: first the small files, checked, then the weights."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        files = HfApi().list_repo_files(model)
        _checked(model, Path(snapshot_download(model, allow_patterns=list(SMALL_FILES))), files)
        return _checked(model, Path(snapshot_download(model, allow_patterns=list(READ))))
    except InputError:
        raise
    except RepositoryNotFoundError:
        way_out = "check the name, or give a checkpoint folder"
        raise InputError(f"the hub knows no model '{model}' (or it is private): {way_out}") from None
    except Exception as error:  # no network, whatever the client calls it: a complete local copy will do
        with contextlib.suppress(Exception):
            return _checked(model, Path(snapshot_download(model, local_files_only=True)))
        what = f"cannot reach the hub for '{model}' ({type(error).__name__}), none is cached"
        raise InputError(f"{what}: connect, or give a folder") from None


def _checked(name: str, folder: Path, files: list[str] | None = None) -> Path:
    """The folder of a checkpoint, if it can be used; InputError otherwise. files: names of the checkpoint's files;
    None: those in the folder."""
    files = [path.name for path in folder.iterdir()] if files is None else files
    for path in _read(folder):
        if not path.is_file() or (path.suffix != ".safetensors" and path.stat().st_size > LARGEST):
            what = f"more than {LARGEST:,} bytes" if path.is_file() else "no regular file"
            raise InputError(f"{name}: {path.name} is {what}: give a folder that save_pretrained wrote")
    config = _json(name, folder / "config.json")
    tokenizer = _json(name, folder / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    kernels = [config.get(key) for key in ("attn_implementation", "_attn_implementation", "experts_implementation")]
    if "auto_map" in config or "auto_map" in tokenizer or any("/" in str(kernel) for kernel in kernels):
        raise InputError(
            f"{name} asks for remote code (auto_map, or kernels of the hub), which is never run here: if transformers "
            f"has {config.get('model_type')} built in, remove that from a local copy and give that folder"
        )
    lacks = {
        "no .safetensors weights": not any(file.endswith(".safetensors") for file in files),
        "an adapter (adapter_config.json) to merge": "adapter_config.json" in files,
        "no tokenizer (tokenizer.json)": not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(files),
        "no chat template": not tokenizer.get("chat_template")
        and not {"chat_template.jinja", "chat_template.json"} & set(files),
    }
    if found := [what for what, is_so in lacks.items() if is_so]:
        way_out = "give a whole instruction-tuned checkpoint, as save_pretrained writes it"
        raise InputError(f"{name} has {found[0]}: {way_out}")
    _check_weights(name, folder, config.get("transformers_weights"), files)
    _check_family(name, folder)
    return folder


def _read(folder: Path) -> list[Path]:
    """The files of a checkpoint that libraries may read; some chat templates lie in a folder of their own."""
    files = [path for path in folder.iterdir() if any(path.match(pattern) for pattern in READ)]
    return sorted(files) + sorted(folder.glob("additional_chat_templates/*.jinja"))


def _check_weights(name: str, folder: Path, declared: str | None, files: Sequence[str]) -> None:
    """Raise InputError unless transformers would read weights from .safetensors files of the folder and no others.

    declared: the file that config.json names, if it names one.
    """
    first = declared or next((file for file in (SINGLE, INDEX) if file in files), SINGLE)
    shards = [first]
    if first in files and first.endswith(".index.json"):
        shards = list(dict(_json(name, folder / first).get("weight_map") or {"": "nothing"}).values())
    for file in shards:
        if file not in files or not str(file).endswith(".safetensors"):
            way_out = "keep all weights as .safetensors files in its folder, as save_pretrained does"
            raise InputError(f"{name} reads weights from {file!r}, which {first} names: {way_out}")


def _json(name: str, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{name} is no checkpoint: {path.name} is missing in {path.parent}") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}): fetch the checkpoint again") from None


def device_of(device: str) -> str:
    """The name that torch has for a device of `load`, or "balanced". Raises InputError for a device that is missing."""
    import torch

    ensure(str, device=device)
    count = torch.cuda.device_count()
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "balanced" and (count < 2 or find_spec("accelerate") is None):
        needed = "GPUs, with the package accelerate (pip install 'kvrepro[hub]')"
        raise InputError(f"device 'balanced' spreads layers over several {needed}; torch sees {count} GPUs: use auto")
    if device not in ("cpu", "balanced"):
        if not re.fullmatch("cuda(:[0-9]{1,3})?", device):
            raise InputError(f"unknown device {device[:200]!r}: use cpu, cuda, cuda:0, balanced, or auto")
        if int(device.partition(":")[2] or 0) >= count:
            raise InputError(f"device '{device}' asked for, torch sees {count} CUDA devices: use cpu or auto")
    return device


def checkpoint_hash(folder: Path) -> str:
    """sha256 (first 16 hex digits) over the files that may decide an answer: weights, configuration, and the files of
    the tokenizer. The hashes of large files are remembered by size and time."""
    total = hashlib.sha256()
    for path in _read(folder):
        if path.is_file():
            total.update(f"{path.relative_to(folder).as_posix()} {_file_hash(path)}\n".encode())
    return total.hexdigest()[:16]


def _file_hash(path: Path) -> str:
    real = path.resolve()
    stat = real.stat()
    identity = f"{real} {stat.st_size} {stat.st_mtime_ns}"
    note = CACHE / "hashes" / hashlib.sha256(identity.encode()).hexdigest()
    if note.is_file():
        return note.read_text()
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if stat.st_size > LARGEST:
        note.parent.mkdir(parents=True, exist_ok=True)
        with replaced(note) as aside:
            aside.write_text(digest)
    return digest
