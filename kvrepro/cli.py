"""The command `kvrepro`, or `python -m kvrepro`: run a study, look up policies and items."""

import contextlib
import json
import os
import shutil
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer import Argument, Option

from kvrepro.errors import InputError, Stopped, ensure_known, first_line

HELP = """Which cached tokens may a language model forget? Policies, budgets and regimes on any checkpoint.

`kvrepro run -p snapkv -p random -b 0.2 -s until=question` compares two policies on the model that ships with the
project; `-m Qwen/Qwen2.5-3B-Instruct -i longbench --device cuda` runs the same elsewhere.
"""
WHEN = "prefill, chunked, offline, decode-cap, per-step or shared-cap"
SET = "of the condition, its regime or policy, such as until=question, interval=4, prefix=0.1, window=16"
OPTIONS = "of the settings, such as dtype=bfloat16, seed=1, enable_thinking=false, results=folder"
app = typer.Typer(add_completion=False, no_args_is_help=True, help=HELP, rich_markup_mode="markdown")


@app.command()
def run(
    policy: Annotated[list[str], Option("-p", "--policy", help="a name, or my_policy.py:MINE; repeat for more")],
    budget: Annotated[list[str], Option("-b", "--budget", help="tokens per KV head, or a share; repeat")] = ["0.2"],  # noqa: B006
    regime: Annotated[str, Option("-r", "--regime", help=f"{WHEN}; otherwise the policy's first")] = "",
    setting: Annotated[list[str], Option("-s", "--set", help=f"name=value: {SET}; repeat")] = [],  # noqa: B006
    model: Annotated[str, Option("-m", "--model", help="small-gqa, a checkpoint's folder, a hub id")] = "small-gqa",
    items: Annotated[str, Option("-i", "--items", help="as `kvrepro items` lists them")] = "tinyworld:domains",
    n_items: Annotated[int | None, Option("-n", "--n-items", help="otherwise 12, or all of a shorter file")] = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="of an answer; otherwise the item's own, or 32")] = None,
    limit: Annotated[int | None, Option(min=1, help="tokens of a prompt: longer passages are cut")] = None,
    measure: Annotated[str, Option(help="the column that the table shows")] = "token_f1",
    device: Annotated[str, Option(help="cpu, cuda, auto or balanced")] = "cpu",
    option: Annotated[list[str], Option("-o", "--option", help=f"name=value: {OPTIONS}; repeat")] = [],  # noqa: B006
    name: Annotated[str, Option(help="of the table of results")] = "main",
    out: Annotated[Path | None, Option(help="write the rows to this CSV file as well")] = None,
    engine: Annotated[str | None, Option(help="local, or ray: one machine or a cluster")] = None,
    address: Annotated[str | None, Option(help="host:port of a Ray cluster; otherwise Ray on this machine")] = None,
) -> None:
    """Run one study, policies x budgets beside the full cache, and print a table. A second call computes what is
    missing. The exit status is 1 where rows failed."""  # long, because every option is declared here
    conditions = _conditions(policy, budget, regime, _named(setting))
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise InputError(f"--out {str(out)!r}: give a file in a folder that is there and can be written to")
    from kvrepro.experiment import data, models, store
    from kvrepro.experiment.answers import prompt_limit
    from kvrepro.experiment.run import Answers, Settings
    from kvrepro.experiment.run import run as run_study

    ensure_known("column", [measure], store.COLUMNS)
    given = {"model": model, "items": items, "n_items": n_items, "device": device, "engine": engine, "address": address}
    settings = Settings.of(_named(option), **given)
    loaded = models.load(settings.model, settings.device, settings.dtype, settings.enable_thinking)
    new = 32 if max_new_tokens is None else max_new_tokens
    room = prompt_limit(loaded, new, limit)
    count = data.AtMost(12) if n_items is None else n_items
    prompt_tokens = room if limit is not None else min(room, 1900)  # of prompts that are made
    drawn = data.load_fitting(items, count, loaded.tokenizer, room, settings.seed, prompt_tokens)
    if max_new_tokens is not None:
        drawn = [replace(item, meta=item.meta | {"max_new_tokens": new}) for item in drawn]
    try:
        rows, stopped = run_study(Answers("run", name, drawn, conditions, new, limit), loaded, settings), None
    except Stopped as error:
        if error.results is None:
            raise
        rows, stopped = error.results, error  # too many rows failed: the table shows the others
    print(_table(rows, measure).round(3).to_string(index=False, na_rep="-"))
    print(f"rows: {settings.folder / 'run' / name}", flush=True)
    if out is not None:
        rows.to_csv(out, index=False)
    if rows.attrs["failed"]:
        raise stopped or typer.Exit(1)


@app.command()
def policies(name: Annotated[str, Argument(help="one of them, or my_policy.py:MINE")] = "") -> None:
    """List the policies: regimes, budget, readings, what each keeps. With a name: its parameters too."""
    from kvrepro.engine import catalogue, policy

    rows = {row["name"]: row for row in catalogue.table()}
    if not name:
        for row in rows.values():
            print(f"{row['name']:20} {row['keeps'].splitlines()[0]}")
            print(f"{'':20} regimes: {row['regimes']}; budget: {row['budget']}; readings: {row['readings']}")
        return
    p = policy.find(name)
    own = {"name": name, "title": p.title, "keeps": p.rule, "source": p.source, "regimes": ", ".join(p.regimes)}
    described = {**rows.get(name, own), "code": p.code, **{reading: p.reading(reading) for reading in p.readings}}
    print(*(f"{key}: {value}" for key, value in described.items() if value), sep="\n")


@app.command()
def items(
    name: Annotated[str, Argument(help="of items: prints some, as lines of a .jsonl file")] = "",
    n_items: Annotated[int, Option("-n", "--n-items")] = 1,
    seed: int = 0,
    tokens: Annotated[int, Option(help="prompt length of tinyworld's and ruler's items")] = 1900,
    model: Annotated[str, Option("-m", "--model", help="in whose tokens ruler's items are counted")] = "small-gqa",
) -> None:
    """Say which names of items there are, or print a sample of one."""
    from kvrepro.experiment import data, models
    from kvrepro.world import world

    if not name:
        print(data.load_items.__doc__, f"Tasks of tinyworld: {', '.join(world.EVERY)}", sep="\n\n")
        return
    with contextlib.redirect_stdout(sys.stderr):  # remarks on items do not belong among their lines
        counting = models.tokenizer(model) if name.startswith("ruler") else None
        sample = data.load_items(name, n_items, seed, tokens, counting)
    for item in sample:
        print(json.dumps({k: v for k, v in asdict(item).items() if v is not None}, ensure_ascii=False))


@app.command()
def notebooks(to: Annotated[Path, Argument(help="the folder; it must not be there yet")] = Path("notebooks")) -> None:
    """Copy the chapters' notebooks, to run or to edit."""
    from kvrepro.paths import ROOT

    if to.exists():
        raise InputError(f"{str(to)!r} is there already: give another name, as in `kvrepro notebooks mine`")
    shutil.copytree(ROOT / "notebooks", to, ignore=shutil.ignore_patterns(".*"))
    print(*sorted(to.iterdir()), sep="\n")


@app.command()
def data(name: Annotated[str, Argument(help="a source, or one of its files: fetches it")] = "") -> None:
    """Say which public data there are, or fetch some, verify it, and print where it lies."""
    from kvrepro.experiment import data as files

    print(files.fetch(name) if name else yaml.safe_dump(files.sources(), sort_keys=False, width=120))


def _conditions(policies: list[str], budgets: list[str], regime: str, settings: dict[str, Any]) -> list[Any]:
    """The full cache, and every policy with every budget. Raises InputError for an unknown policy or setting."""
    from kvrepro.engine.condition import REGIMES, Condition
    from kvrepro.engine.policy import find

    regimes = {name.replace(" ", "-"): kind for name, kind in REGIMES.items()}
    regime = regime.replace(" ", "-").replace("_", "-")
    ensure_known("regime", [regime] if regime else [], regimes)
    of_conditions = {f.name for f in fields(Condition)} - {"policy", "budget", "regime", "switches"}
    more = {name: settings[name] for name in of_conditions & settings.keys()}
    conditions, settable = [Condition()], of_conditions
    for policy in (name for name in policies if name != "full"):
        p = find(policy)
        kind = regimes[regime] if regime else REGIMES[p.regimes[0]]
        of_regime = {f.name for f in fields(kind)}
        of_policy = {*p.parameters, *p.as_run, *(() if p.shared else ("sinks", "recent"))}
        settable = settable | of_regime | of_policy
        when = kind(**{name: settings[name] for name in of_regime & settings.keys()})
        switches = tuple((name, settings[name]) for name in sorted(of_policy & settings.keys()))
        conditions += [Condition(policy, _budget(size), when, switches=switches, **more) for size in budgets]
    ensure_known("setting of these conditions, regimes and policies", settings, sorted(settable))
    return conditions


def _table(rows: Any, measure: str) -> Any:
    """Per policy and budget: the measure's mean, its interval, tokens that a head holds, memory as a share of full."""
    from kvrepro.experiment import stats

    rows = rows.assign(memory=rows.bytes_held / rows.bytes_full, budget=rows.share.fillna(rows.capacity))
    keys = ["policy", "budget"]
    held = rows.groupby(keys, sort=False, dropna=False)[["kept_mean", "memory"]].mean().reset_index()
    return stats.means(rows, keys, measure).rename(columns={"value": measure}).merge(held)


def _budget(text: str) -> Any:
    """`256`, `0.2` or `20%` as a number; anything else as it is, which no condition takes."""
    value = read_value(text.removesuffix("%"))
    return value / 100 if text.endswith("%") and isinstance(value, int | float) else value


def _named(texts: list[str]) -> dict[str, Any]:
    """`["until=question", "spans=[a, b]"]` as a dict, values read as YAML."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"{text!r} is not of the form name=value")
        values[key] = tuple(read) if isinstance(read := read_value(value), list) else read
    return values


def read_value(text: str) -> Any:
    """The value of a YAML or JSON text. Raises InputError for other texts."""
    try:
        with contextlib.suppress(ValueError):
            return json.loads(text)  # 1e-5 is a number, which PyYAML takes for a text
        return yaml.safe_load(text)
    except Exception as error:  # of many classes: no YAML, `!!bool x`, a 13th month
        raise InputError(f"{text[:50]!r} is no YAML value ({first_line(error)}): lists look like [1, 2]") from None
