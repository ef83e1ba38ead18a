"""Two results folders side by side: which rows both have, which of these are equal, which verdicts changed.

`python -m kvrepro.tools.compare A B`, for instance before and after a change of the engine. Rows are told apart by what
was asked (`kvrepro.experiment.table.IDENTITY`, but for the limit that no prompt met); what a regime does not have is
left out, and so is the folder of a policy's file, so that older tables can be compared.
"""

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
import yaml

from kvrepro.errors import one_line_errors
from kvrepro.experiment import store
from kvrepro.experiment.table import IDENTITY
from kvrepro.tools import command

SAME = ("prediction", "kept_hash", "token_f1", "error")
BEFORE = {  # the protection paper's policies, when their regime was called harness -> since
    "h2o": "h2o_simple", "snapkv": "snapkv_simple", "ada_kv": "ada_kv_simple", "quest": "quest_simple",
    "random": "random_sample", "streaming_llm": "slw",
}  # fmt: skip
OF_REGIME = {  # columns -> regimes that have them
    "interval": ("decode cap", "shared cap"), **dict.fromkeys(("chunk", "chunk_mode"), ("chunked",)),
    **dict.fromkeys(("fair", "spans"), ("prefill", "offline")),
}  # fmt: skip
ALONE = ("item", "model", "dtype", "device", "max_new_tokens", "policy", "bits")  # what tells full caches apart


def identified(rows: pd.DataFrame, renamed: dict[str, str] | None = None) -> pd.DataFrame:
    """The rows, once each, by a text that says what was asked; `renamed`: names of policies -> as they are now."""
    rows = rows.copy()
    old = rows.regime == "harness"
    rows.loc[old, "policy"] = rows.policy[old].replace(BEFORE)
    rows["regime"] = rows.regime.replace("harness", "shared cap")
    rows["policy"] = rows.policy.str.replace("chapters/", "").replace(renamed or {})
    names = [name for name in IDENTITY if name != "limit"]
    asked = rows[names].astype(object).where(rows[names].notna(), None)
    for name, regimes in OF_REGIME.items():
        asked.loc[~rows.regime.isin(regimes), name] = None
    asked.loc[rows.policy == "full", [name for name in names if name not in ALONE]] = None
    empty = {"switches": "{}", "whitelist": "[]", "spans": "[]", "until": "", "prefix": 0, "suffix": 0}
    texts = []
    for row in asked.to_dict("records"):
        said = {k: v for k, v in row.items() if v is not None and v != empty.get(k)}
        texts.append(" ".join(f"{k}={v:g}" if isinstance(v, float | int) else f"{k}={v}" for k, v in said.items()))
    rows.index = pd.Index(texts)
    return rows[~rows.index.duplicated(keep="last")]


def compare(a: pd.DataFrame, b: pd.DataFrame) -> tuple[dict[str, int], pd.DataFrame]:
    """Counts, and the rows (column -> a's and b's value) that both have and that differ."""
    both = a.index.intersection(b.index)
    left, right = a.loc[both], b.loc[both]
    unequal = {name: (left[name] != right[name]) & (left[name].notna() | right[name].notna()) for name in SAME}
    counts = {"only A": len(a) - len(both), "only B": len(b) - len(both), "both": len(both)}
    counts |= {f"other {name}": int(values.sum()) for name, values in unequal.items()}
    some = pd.DataFrame(unequal).any(axis=1)
    parts = {f"{name}, {side}": frame[name][some] for name in SAME for side, frame in (("A", left), ("B", right))}
    return counts, pd.DataFrame(parts)


def verdicts(a: Path, b: Path) -> pd.DataFrame:
    """Claims whose verdict is another, or that only one of two claims.csv has, of the first model in each: claim,
    reading, A, B."""
    tables = {side: pd.read_csv(path).drop_duplicates(["claim", "reading"]) for side, path in (("A", a), ("B", b))}
    frames = {side: table.set_index(["claim", "reading"]).verdict for side, table in tables.items()}
    found = pd.DataFrame(frames).fillna("-")
    return found[found.A != found.B].reset_index()


@one_line_errors()
def main(
    a: Path,
    b: Path,
    chapter: Annotated[str, typer.Option(help="this one alone")] = "",
    names: Annotated[Path | None, typer.Option(help="a YAML file, policy in A -> policy in B")] = None,
    show: Annotated[int, typer.Option(help="differing rows to print of each table")] = 5,
) -> None:
    """Compare all tables and verdicts of two results folders; the exit status is 1 where rows of both differ."""
    renamed = yaml.safe_load(names.read_text()) if names else None
    differing = 0
    tables = sorted({p.relative_to(f) for f in (a, b) for p in f.glob(f"{chapter or '*'}/*.parquet")})
    for table in (t for t in tables if any((f / t.with_suffix(".rows")).is_dir() for f in (a, b))):
        if missing := [str(folder) for folder in (a, b) if not (folder / table).is_file()]:
            print(f"{table}: not in {', '.join(missing)}")
            continue
        counts, rows = compare(*(identified(store.read(folder / table), renamed) for folder in (a, b)))
        differing += len(rows)
        print(f"{table}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
        for text, row in rows.head(show).iterrows():
            print(f"  {text}")
            print(*(f"    {name}: {str(value)[:150]}" for name, value in row.items()), sep="\n")
    for claims in sorted(a.glob(f"{chapter or '*'}/claims.csv")):
        other = b / claims.relative_to(a)
        if other.is_file():
            changed = verdicts(claims, other)
            print(f"{claims.relative_to(a)}: {len(changed)} verdicts differ")
            print(*(f"  {one.claim} {one.reading}: {one.A} -> {one.B}" for one in changed.itertuples()), sep="\n")
    raise typer.Exit(1 if differing else 0)


if __name__ == "__main__":
    command.run(main)
