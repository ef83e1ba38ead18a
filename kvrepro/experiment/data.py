"""Items by the names that a reader gives, as many as wanted, and those that fit a model; public files.

The rows of files are in `jsonl`, prompts in `prompt`; `data` offers what chapters need. data/sources.yml names public
files with commit and checksum; `kvrepro data` lists them, `kvrepro data NAME` fetches one.
"""

import hashlib
import http.client
import json
import os
import random
import re
import shutil
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvrepro.engine.condition import Count, Size, ensure
from kvrepro.errors import InputError, counted, ensure_known
from kvrepro.experiment import jsonl
from kvrepro.experiment.jsonl import answers_of, by_line
from kvrepro.experiment.prompt import LONGBENCH, SYSTEM, build_prompt, named, say_once, tokens_cut, without_passage
from kvrepro.item import Item, Span
from kvrepro.paths import CACHE, DATA, ROOT, replaced
from kvrepro.world import ruler, world

__all__ = ["SYSTEM", "Item", "Span", "answers_of", "build_prompt", "by_line", "named", "say_once", "tokens_cut"]
__all__ += ["without_passage"]
PANEL_NAME = "protection-panel"
PANEL = "artifact/data/longbench-balanced.jsonl"  # the protection paper's 162 items
GROUPS = {
    "": tuple(LONGBENCH),
    "qa": ("2wikimqa", "qasper", "multifieldqa_en", "hotpotqa", "narrativeqa", "musique"),
    "long": ("gov_report", "qmsum", "multi_news"),
}
PAPER = "protection"  # the QA sets as the protection paper puts them
PAPER_WORDS = 6000  # the protection paper's items have 549 to 5,996 words
WORLD = (200, 4000)  # the least and the most tokens of a prompt of the embedded world, by its own tokenizer
FILLED = 0.9  # a prompt stands for a length if it has at least this share of it
MOST_MADE = 100_000  # items of a generator: enough for any interval, and seconds of work


class AtMost(int):
    """A number of items that the user did not choose, such as a profile's: where there are fewer, all are taken."""


def load_items(
    items: str, n_items: int | None = None, seed: int = 0, tokens: int = 1900, tokenizer: Any = None
) -> list[Item]:
    """`n_items` items (None: all of a file), balanced over tasks, the same for the same seed.

    items:
    - "tinyworld" (all its tasks), "tinyworld:domains" (the six QA domains), "tinyworld:long" (eight with long answers),
      "tinyworld:domains,needle" (some tasks); `tokens` is the prompt length
    - "longbench" (its sixteen English sets), "longbench:qasper,gov_report" (some of them), "longbench:qa" (the six QA
      sets), "longbench:long" (reports, meetings, news: answers of up to 512 tokens)
    - "longbench:protection": the QA sets as the protection paper asks them, passages of up to 6,000 words;
      "protection-panel": its 162 items, ids as in `artifact.results`; "protection-panel:qasper": those of some sets
    - "ruler" (thirteen tasks), "ruler:vt,cwe" (some), made for the model's `tokenizer`; `tokens` is the length of
      prompt and answer
    - the path of a .jsonl file, see `jsonl.read`

    Given a `tokenizer`, texts that hold one of its special tokens, such as `<|im_start|>`, are `spelled_out`.
    """
    check_items(items, n_items)
    ensure(Count, seed=seed)
    kind, _, names = items.partition(":")
    if kind == "tinyworld":
        return _tinyworld(names, n_items, seed, tokens)
    if kind == "ruler":
        return ruler.sample(names, n_items, seed, tokens, tokenizer, fetch)
    if kind == "longbench":
        loaded = _longbench(names)
    elif kind == PANEL_NAME:
        loaded = [item for item in jsonl.read(fetch(PANEL), papers=True) if not names or item.task in names.split(",")]
    else:
        loaded = jsonl.read(_own_file(items))
    loaded = balanced(loaded, n_items, seed, items)
    return loaded if tokenizer is None else spelled_out(loaded, tokenizer, items)


def spelled_out(items: list[Item], tokenizer: Any, name: str = "this") -> list[Item]:
    """The items with the tokenizer's special tokens made plain text: the first sign of each becomes its full-width
    twin, so that a passage cannot open a turn or end an answer. Prints how many items held such tokens, if any did."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {*tokenizer.all_special_tokens}
    words = [re.escape(token) for token in sorted(special, key=len, reverse=True) if not token.isalnum()]
    pattern = re.compile("|".join(words) or r"(?!)")

    def twin(token: re.Match[str]) -> str:
        return re.sub("[!-~]", lambda sign: chr(ord(sign[0]) + 0xFEE0), token[0], count=1)

    def plainly(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(turn | {"content": plainly(turn["content"])} for turn in value)
        return pattern.sub(twin, value) if isinstance(value, str) else value

    texts = ("messages", "context", "question")
    spelled = [replace(item, **{text: plainly(getattr(item, text)) for text in texts}) for item in items]
    if changed := sum(a != b for a, b in zip(items, spelled, strict=True)):
        print(f"{name}: {changed} of {len(items)} items hold special tokens of the model: spelled out")
    return spelled


def check_items(items: str, n_items: int | None) -> None:
    """Raise InputError for items, or a number of them, that `load_items` cannot give. Loads none of them."""
    ensure(str, items=items)
    ensure(Size | None, n_items=n_items)
    kind, _, names = items.partition(":")
    if kind in ("tinyworld", "ruler") and n_items and n_items > MOST_MADE:
        raise InputError(f"n_items is {n_items:,}: at most {MOST_MADE:,} {kind} items are made, take fewer or your own")
    if kind == "tinyworld":
        _tasks(names)
    elif kind == "longbench":
        _sets(names)
    elif kind == "ruler":
        ruler.named(names)
    elif items.endswith(".jsonl"):
        if not _own_file(items).is_file():
            raise InputError(f"no file {items!r}: give the path of a .jsonl file that is there")
    elif kind == PANEL_NAME:
        ensure_known("set of the panel", names.split(",") if names else (), GROUPS["qa"])
    else:
        choices = "tinyworld, longbench, protection-panel, ruler, or the path of a .jsonl file"
        raise InputError(f"unknown items {items[:200]!r}: use {choices}")


def _own_file(items: str) -> Path:
    """The path of a reader's own file."""
    try:
        path = Path(items).expanduser()
        return find_file(path) or path
    except (OSError, RuntimeError, ValueError) as error:  # no home of that user, a name too long or with a NUL
        raise InputError(f"items {items[:200]!r} is no path ({error}): give that of a .jsonl file") from None


def load_fitting(
    items: str, n_items: int | None, tokenizer: Any, limit: int, seed: int = 0, tokens: int = 0, room: int = 0
) -> list[Item]:
    """`load_items` whose prompts have at most `limit` tokens of a model's tokenizer.

    Passages will be cut (`build_prompt`). The embedded world counts in tokens of its own, so its length is changed
    until the longest prompt fits and nearly fills the limit; given `tokens`, it is made of that length, and shorter
    only if that does not fit. `tokens` is also the length of RULER's prompts. Other messages may have as many tokens as
    the limit or `room`, whichever is more; prints how many longer ones are left out. InputError where none is left.
    """
    aim = tokens or limit
    if items.partition(":")[0] != "tinyworld":
        return not_too_long(load_items(items, n_items, seed, aim, tokenizer), items, tokenizer, max(limit, room))
    for _ in range(8):
        aim = min(max(aim, WORLD[0]), WORLD[1])
        drawn = load_items(items, n_items, seed, aim)
        longest = max(len(build_prompt(item, tokenizer, 10**9).ids) for item in drawn)
        if longest <= limit and (tokens or longest > 0.9 * limit):
            return drawn
        aim = round(0.99 * aim * limit / longest)
    whose = Path(tokenizer.name_or_path).name
    wanted = f"prompts of {limit} tokens of {whose} wanted, but the nearest of {items} have {longest}"
    raise InputError(f"{wanted}: ask for another length, or take other items")


def not_too_long(items: list[Item], name: str, tokenizer: Any, most: int) -> list[Item]:
    """The `usable` items: those with a passage, which can be cut, or at most `most` tokens."""
    return usable(items, name, lambda item: item.context is not None or build_prompt(item, tokenizer, most))


def filling(items: list[Item], name: str, tokenizer: Any, length: int) -> list[Item]:
    """The `usable` items: those whose prompts, with longer passages cut, have at least the share `FILLED` of `length`
    tokens."""

    def check_length(item: Item) -> None:
        count = len(build_prompt(item, tokenizer, length).ids)
        if count < FILLED * length:
            few = f"item {item.id} has {count} prompt tokens, less than {FILLED:.0%} of {length}"
            raise InputError(f"{few}: ask for fewer tokens or take longer items")

    return usable(items, name, check_length)


def usable(items: Sequence[Item], name: str, check: Callable[[Item], object]) -> list[Item]:
    """The items for which `check` raises no InputError; prints how many are left out, and why the first of them is.
    Raises that error if none is left."""
    errors: dict[str, InputError] = {}
    for item in items:
        try:
            check(item)
        except InputError as error:
            errors[item.id] = error
    if errors:
        first = next(iter(errors.values()))
        if len(errors) == len(items):
            raise first
        say_once(f"{name}: {len(errors)} of {len(items)} items left out, the first because: {first}")
    return [item for item in items if item.id not in errors]


def suited(chapter: str, items: str, instead: Mapping[str, str]) -> str:
    """The name of the items that a chapter takes for `items`: another one where `instead` has it, which is printed."""
    if items not in instead:
        return items
    print(f"{chapter}: items {instead[items]!r}, which suit this chapter, in the place of {items!r}")
    return instead[items]


def find_file(path: str | Path) -> Path | None:
    """The file of that name in the working folder, or else in the project, because notebooks run in a folder of their
    own; None if there is none."""
    return next((place / path for place in (Path(), ROOT) if str(path) and (place / path).is_file()), None)


def _tasks(names: str) -> list[str]:
    """The tasks of "domains,needle". Raises InputError for others."""
    groups = {"": world.TASKS, "domains": world.DOMAINS, "long": world.LONG}
    tasks = [task for name in names.split(",") for task in groups.get(name, [name])]
    ensure_known("tinyworld task", tasks, world.EVERY, also=filter(None, groups))
    return list(dict.fromkeys(tasks))


def _tinyworld(names: str, n_items: int | None, seed: int, tokens: int) -> list[Item]:
    tasks = _tasks(names)
    if n_items is None:
        raise InputError("tinyworld has no end: give n_items")
    counts = [n_items // len(tasks) + (i < n_items % len(tasks)) for i in range(len(tasks))]
    return [item for task, n in zip(tasks, counts, strict=True) if n for item in world.sample(task, n, seed, tokens)]


def _sets(names: str) -> list[str]:
    """LongBench's sets of "qasper,gov_report", of a group ("qa", "long"), or ("") all. Raises InputError for others."""
    names = "qa" if names == PAPER else names
    sets = list(dict.fromkeys(member for name in names.split(",") for member in GROUPS.get(name, [name])))
    if PAPER in sets:
        raise InputError(f"longbench:{names}: '{PAPER}' asks its sets in a form of its own: name it alone")
    ensure_known("LongBench set", sets, LONGBENCH, also=[*filter(None, GROUPS), PAPER])
    return sets


def _longbench(names: str) -> list[Item]:
    """Items of LongBench's sets, ids `<set>-000` and so on in the order of the public archive, which is one file."""
    items = []
    with zipfile.ZipFile(fetch("longbench/data.zip")) as archive:
        for name in _sets(names):
            for i, line in enumerate(archive.read(f"data/{name}.jsonl").splitlines()):
                row, identity = json.loads(line), f"{name}-{i:03d}"
                if names != PAPER:
                    items.append(_in_form(row, identity, name))
                elif row["length"] <= PAPER_WORDS:
                    items.append(jsonl.item_of(row, identity, papers=True))
    return items


def _in_form(row: dict[str, Any], identity: str, name: str) -> Item:
    """The item of a row of LongBench as the benchmark itself asks and scores it."""
    form, context, question, answers = LONGBENCH[name], row["context"], row["input"], row["answers"]
    meta = {"metric": form.metric, "max_new_tokens": form.max_new_tokens, "first_line": form.first_line}
    meta |= {"answers": answers} | ({"classes": row["all_classes"]} if row.get("all_classes") else {})
    turns, spans = form.messages(context, question)
    return Item(identity, name, turns, answers[0], spans, context, question, meta, name, papers=True)


def balanced(items: list[Item], n: int | None, seed: int, name: str = "this") -> list[Item]:
    """n items in file order, spread over tasks as equally as their numbers allow. The seed chooses within a task.
    Raises InputError where there are fewer than n, unless n is `AtMost`."""
    if n is None or n == len(items):
        return items
    if n > len(items):
        if isinstance(n, AtMost):
            say_once(f"{name} has {counted(len(items), 'item')} in all")  # studies load a file more than once
            return items
        raise InputError(f"n_items is {n} but {name} has {counted(len(items), 'item')}: ask for at most {len(items)}")
    groups: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(item.task, []).append(i)
    for task, members in groups.items():
        random.Random(f"{seed} {task}").shuffle(members)
    turns = [members[turn] for turn in range(len(items)) for members in groups.values() if turn < len(members)]
    return [items[i] for i in sorted(turns[:n])]


# ---- public files


def sources() -> dict[str, dict[str, Any]]:
    """The manifest: source name -> title, url, commit, licence, citation, files {path: {bytes, sha256}}."""
    return dict(yaml.safe_load((DATA / "sources.yml").read_text(encoding="utf-8")))


def fetch(name: str) -> Path:
    """The verified local path of a public file ("artifact/data/longbench-balanced.jsonl", or the end of its path where
    that is unique), or the folder of a whole source ("artifact").

    Looks into the folders of $KVREPRO_DATA (read only), then data/cache, else downloads.
    Raises InputError when there is no network, and for a file with another size or checksum, which stays as it is.
    """
    manifest = sources()
    if name in manifest:
        source, paths = name, list(manifest[name]["files"])
    else:
        matches = [(s, p) for s in manifest for p in manifest[s]["files"] if f"/{s}/{p}".endswith(f"/{name}")]
        if len(matches) != 1:
            what = "is not in" if not matches else f"names {len(matches)} files of"
            raise InputError(f"'{name}' {what} data/sources.yml: see `kvrepro data`")
        source, paths = matches[0][0], [matches[0][1]]
    own_folders = [Path(folder) for folder in os.environ.get("KVREPRO_DATA", "").split(os.pathsep) if folder]
    folders = [place for folder in own_folders for place in (folder, folder / source)]
    folder = next((f for f in folders if all((f / path).is_file() for path in paths)), CACHE / source)
    for path in paths:
        file, entry = folder / path, manifest[source]["files"][path]
        if not file.is_file():
            _download(manifest[source]["url"].format(path=path), file, entry, f"{source}/{path}")
        _check(file, entry, f"remove it and run: kvrepro data {source}/{path}")
    return folder if name in manifest else folder / paths[0]


def _check(file: Path, entry: dict[str, Any], way_out: str) -> None:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != entry["sha256"]:
        size = f"{file.stat().st_size} of {entry['bytes']} bytes"
        raise InputError(f"{file} ({size}) has another sha256 than data/sources.yml: {way_out}")


def _download(url: str, file: Path, entry: dict[str, Any], name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replaced(file) as part:  # never under the final name until it is whole and right
            with urllib.request.urlopen(url, timeout=30) as reply, part.open("wb") as out:
                shutil.copyfileobj(reply, out)
            _check(part, entry, "the download is not the file of the manifest; try again")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        way_out = f"connect to the network, or set KVREPRO_DATA to a folder that holds it as {name}"
        raise InputError(f"cannot download {url} ({reason}): {way_out}") from None
