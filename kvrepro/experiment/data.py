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
import urllib.request
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kvrepro.engine.condition import Size, ensure
from kvrepro.errors import InputError, counted, ensure_known
from kvrepro.experiment import jsonl
from kvrepro.experiment.prompt import LONGBENCH, SYSTEM, build_prompt, named, say_once, tokens_cut, without_passage
from kvrepro.item import Item, Span
from kvrepro.paths import CACHE, DATA, ROOT, replaced
from kvrepro.world import ruler, world

__all__ = ["SYSTEM", "Item", "Span", "build_prompt", "named", "say_once", "tokens_cut", "without_passage"]
PANEL = "artifact/data/longbench-balanced.jsonl"  # the protection paper's 162 items
GROUPS = {
    "qa": ("2wikimqa", "qasper", "multifieldqa_en", "hotpotqa", "narrativeqa", "musique"),
    "long": ("gov_report", "qmsum", "multi_news"),
}
# Kind of items -> its parts, all those that a name without parts means, and groups of parts
PARTS: dict[str, tuple[Collection[str], Collection[str], Mapping[str, Collection[str]]]] = {
    "tinyworld": (world.EVERY, world.TASKS, {"domains": world.DOMAINS, "long": world.LONG}),
    "longbench": (LONGBENCH, LONGBENCH, GROUPS),
    "protection-panel": (GROUPS["qa"], GROUPS["qa"], {}),
    "ruler": (ruler.TASKS, ruler.TASKS, {}),
}
PAPER = "longbench:protection"  # the QA sets as the protection paper puts them
PAPER_WORDS = 6000  # the protection paper's items have 549 to 5,996 words
FILLED = 0.9  # a prompt stands for a length if it has at least this share of it


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
    kind, parts = check_items(items, n_items)
    if kind == "ruler":
        return ruler.sample(parts, n_items, seed, tokens, tokenizer, fetch)
    if kind == "tinyworld":
        if n_items is None:
            raise InputError("tinyworld has no end: give n_items")
        shares = [(part, n_items // len(parts) + (i < n_items % len(parts))) for i, part in enumerate(parts)]
        return [item for part, n in shares for item in world.sample(part, n, seed, tokens)]
    if kind == "longbench":
        loaded = _longbench(parts, items == PAPER)
    elif kind == "protection-panel":
        loaded = [item for item in jsonl.read(fetch(PANEL), papers=True) if item.task in parts]
    else:
        loaded = jsonl.read(Path(kind))
    loaded = balanced(loaded, n_items, seed, items)
    return loaded if tokenizer is None else spelled_out(loaded, tokenizer, items)


def check_items(items: str, n_items: int | None) -> tuple[str, list[str]]:
    """(kind, its parts) of a name of items, or (the path of a file, []). Loads no items. Raises InputError for items,
    or a number of them, that `load_items` cannot give."""
    ensure(Size | None, n_items=n_items)
    kind, _, names = ("longbench:qa" if items == PAPER else items).partition(":")
    if kind in PARTS:
        every, usual, groups = PARTS[kind]
        parts = [part for name in names.split(",") for part in groups.get(name, [name])] if names else usual
        ensure_known(f"part of {kind}", parts, every, also=groups)
        return kind, list(dict.fromkeys(parts))
    if not items.endswith(".jsonl"):
        raise InputError(f"unknown items {items[:200]!r}: use {', '.join(PARTS)}, or the path of a .jsonl file")
    if (path := find_file(items)) is None:
        raise InputError(f"no file {items!r}: give the path of a .jsonl file that is there")
    return str(path), []


def spelled_out(items: list[Item], tokenizer: Any, name: str) -> list[Item]:
    """The items with the tokenizer's special tokens made plain text: the first sign of each becomes its full-width
    twin, so that a passage cannot open a turn or end an answer. Prints how many items held such tokens, if any did."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    words = sorted((token for token in special if not token.isalnum()), key=len, reverse=True)
    twins = {word: re.sub("[!-~]", lambda sign: chr(ord(sign[0]) + 0xFEE0), word, count=1) for word in words}
    pattern = re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def plainly(text: Any) -> Any:
        return pattern.sub(lambda word: twins[word[0]], text) if text else text

    def plain(item: Item) -> Item:
        turns = tuple(turn | {"content": plainly(turn["content"])} for turn in item.messages)
        return replace(item, messages=turns, context=plainly(item.context), question=plainly(item.question))

    spelled = [*map(plain, items)]
    if changed := sum(a != b for a, b in zip(items, spelled, strict=True)):
        print(f"{name}: {changed} of {len(items)} items hold special tokens of the model: spelled out")
    return spelled


def load_fitting(
    items: str, n_items: int | None, tokenizer: Any, limit: int, seed: int = 0, tokens: int = 0, room: int = 0
) -> list[Item]:
    """`load_items` whose prompts have at most `limit` tokens of a model's tokenizer, longer passages cut.

    The embedded world counts in tokens of its own, so its length is changed until the longest prompt fits and nearly
    fills the limit; given `tokens`, it is made of that length, and shorter only if that does not fit. `tokens` is also
    the length of RULER's prompts. Other messages may have as many tokens as the limit or `room`, whichever is more;
    prints how many longer ones are left out. InputError where none is left.
    """
    aim = tokens or limit
    if items.partition(":")[0] != "tinyworld":
        return fitting(load_items(items, n_items, seed, aim, tokenizer), items, tokenizer, max(limit, room))
    for _ in range(8):
        aim = min(max(aim, 200), 4000)  # what the world can do
        drawn = load_items(items, n_items, seed, aim)
        longest = max(len(build_prompt(item, tokenizer, 10**9).ids) for item in drawn)
        if longest <= limit and (tokens or longest > FILLED * limit):
            return drawn
        aim = round(0.99 * aim * limit / longest)
    raise InputError(
        f"{items} has no prompts of about {limit} tokens, the nearest have {longest}: ask for another length"
    )


def fitting(items: list[Item], name: str, tokenizer: Any, most: int, filled: float = 0) -> list[Item]:
    """The `usable` items: those whose prompts, longer passages cut, have at most `most` tokens and at least the share
    `filled` of that."""

    def check(item: Item) -> None:
        count = len(build_prompt(item, tokenizer, most).ids)
        if count < filled * most:
            few = f"item {item.id} has {count} prompt tokens, less than {filled:.0%} of {most}"
            raise InputError(f"{few}: ask for fewer tokens or take longer items")

    return usable(items, name, check)


def usable(items: Sequence[Item], name: str, check: Callable[[Item], object]) -> list[Item]:
    """The items for which `check` raises no InputError; prints how many are left out, and why the first of them is.
    Raises that error if none is left."""
    kept, errors = [], []
    for item in items:
        try:
            check(item)
            kept.append(item)
        except InputError as error:
            errors.append(error)
    if errors and not kept:
        raise errors[0]
    if errors:
        say_once(f"{name}: {len(errors)} of {len(items)} items left out, the first because: {errors[0]}")
    return kept


def find_file(path: str | Path) -> Path | None:
    """The file of that name in the working folder, or else in the project, because notebooks run in a folder of their
    own; None if there is none."""
    return next((place for place in (Path(path).expanduser(), ROOT / path) if place.is_file()), None)


def _longbench(sets: Sequence[str], papers_form: bool) -> list[Item]:
    """Items of LongBench's sets, ids `<set>-000` and so on in the order of the public archive, which is one file: as
    the benchmark asks and scores them, or in the protection paper's form."""
    items = []
    with zipfile.ZipFile(fetch("longbench/data.zip")) as archive:
        for name in sets:
            form = LONGBENCH[name]
            for i, line in enumerate(archive.read(f"data/{name}.jsonl").splitlines()):
                row, identity = json.loads(line), f"{name}-{i:03d}"
                if papers_form:
                    items += [jsonl.item_of(row, identity, papers=True)] if row["length"] <= PAPER_WORDS else []
                    continue
                context, question, answers = row["context"], row["input"], row["answers"]
                meta = {"metric": form.metric, "max_new_tokens": form.max_new_tokens, "first_line": form.first_line}
                meta |= {"answers": answers} | ({"classes": row["all_classes"]} if row.get("all_classes") else {})
                turns, spans = form.messages(context, question)
                items.append(Item(identity, name, turns, answers[0], spans, context, question, meta, name, papers=True))
    return items


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
    """The verified local path of a public file ("artifact/data/longbench-balanced.jsonl"), or the folder of a whole
    source ("artifact"): in $KVREPRO_DATA (read only), in data/cache, or else downloaded. Raises InputError without a
    network, and for a file with another checksum, which stays as it is."""
    source, _, file_name = name.partition("/")
    known = sources().get(source, {"files": {}})
    paths = [file_name] if file_name else list(known["files"])
    if not known["files"].keys() & set(paths):
        raise InputError(f"{name!r} is not in data/sources.yml: see `kvrepro data`")
    mirror = Path(os.environ.get("KVREPRO_DATA") or CACHE, source)
    folder = mirror if all((mirror / path).is_file() for path in paths) else CACHE / source
    for path in paths:
        file, entry = folder / path, known["files"][path]
        if not file.is_file():
            url = known["url"].format(path=path)
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with urllib.request.urlopen(url, timeout=30) as reply, replaced(file) as part:
                    part.write_bytes(reply.read())
            except (OSError, http.client.HTTPException) as error:
                way_out = f"connect to the network, or set KVREPRO_DATA to a folder that holds it as {source}/{path}"
                raise InputError(f"cannot download {url} ({error}): {way_out}") from None
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            what = f"{file} ({len(content)} of {entry['bytes']} bytes) has another sha256 than data/sources.yml"
            raise InputError(f"{what}: remove it and run: kvrepro data {source}/{path}")
    return folder / file_name
