"""data/oracle/: rows and verdicts of the quick profile before the third design; `compare` holds a run's to them.

python studies/oracle.py freeze data/results      # after make book, by one worker
python studies/oracle.py compare data/results
"""

from pathlib import Path

import pandas as pd
import typer

ORACLE = Path(__file__).parents[1] / "data/oracle"
IDENTITY = """chapter name item model limit max_new_tokens policy capacity prefix suffix suffix_mode interval reading
    switches regime share until whitelist spans fair chunk chunk_mode bits""".split()
EXACT = ["kept_hash", "prediction", "policy_calls", "evicted", "n_generated"]
CLOSE = ["token_f1", "exact_match", "rouge_l", "official", "evidence_coverage", "kept_mean", "bytes_held"]
CLAIM = ["chapter", "claim", "reading", "model", "profile"]
NUMBERS = ["ours", "low", "high", "p"]
app = typer.Typer(help=__doc__)


def rows(results: Path) -> pd.DataFrame:
    """All answers in a folder of results, the latest of each identity."""
    frames = [pd.read_parquet(file) for file in sorted(results.rglob("*.parquet"))]
    frames = [frame for frame in frames if {"kept_hash", "prediction", "policy"} <= set(frame)]
    table = pd.concat([f.reindex(columns=[*IDENTITY, *EXACT, *CLOSE, "date", "error"]) for f in frames])
    table = table[table.error.isna() | (table.error == "")].sort_values("date", kind="stable")
    return table.drop_duplicates(IDENTITY, keep="last").drop(columns=["date", "error"])


def verdicts(results: Path) -> pd.DataFrame:
    """The claims.csv of every chapter."""
    files = sorted(results.glob("*/claims.csv"))
    table = pd.concat([pd.read_csv(file).assign(chapter=file.parent.name) for file in files])
    return table[[*CLAIM, "verdict", *NUMBERS, "n"]]


@app.command()
def freeze(results: Path) -> None:
    """Store rows and verdicts."""
    ORACLE.mkdir(exist_ok=True)
    rows(results).to_parquet(ORACLE / "rows.parquet", compression="zstd", compression_level=15, index=False)
    verdicts(results).to_csv(ORACLE / "claims.csv", index=False, float_format="%.10g")


@app.command()
def compare(results: Path, chapter: str = "") -> None:
    """Print how many rows and verdicts are equal, and the others. chapter: this one alone."""
    old, new = pd.read_parquet(ORACLE / "rows.parquet"), rows(results)
    old_claims, new_claims = pd.read_csv(ORACLE / "claims.csv"), verdicts(results)
    if chapter:
        old, new, old_claims, new_claims = (t[t.chapter == chapter] for t in (old, new, old_claims, new_claims))
    both = old.merge(new, how="outer", on=IDENTITY, suffixes=("", "_new"), indicator="where")
    print(both["where"].value_counts().rename({"left_only": "gone", "right_only": "new"}).to_string())
    both = both[both["where"] == "both"]
    for name in EXACT:
        differ = both[name].ne(both[f"{name}_new"]) & ~(both[name].isna() & both[f"{name}_new"].isna())
        print(f"{name}: {int(differ.sum())} of {len(both)} differ")
        if differ.any():
            where = both[differ].groupby(["chapter", "name", "policy", "regime"], dropna=False)
            print(where.size().head(20).to_string())
    for name in CLOSE:
        print(f"{name}: largest difference {(both[name] - both[f'{name}_new']).abs().max():.3g}")
    claims = old_claims.merge(new_claims, how="outer", on=CLAIM, suffixes=("", "_new"), indicator="where")
    print(claims["where"].value_counts().rename({"left_only": "claims gone", "right_only": "claims new"}).to_string())
    claims = claims[claims["where"] == "both"]
    moved = claims.verdict != claims.verdict_new
    for name in NUMBERS:
        away = (claims[name] - claims[f"{name}_new"]).abs() > 1e-6 * claims[name].abs().clip(lower=1)
        moved |= away | (claims[name].isna() != claims[f"{name}_new"].isna())
    turned = claims.verdict != claims.verdict_new
    print(f"verdicts: {int(turned.sum())} of {len(claims)} turn, {int(moved.sum())} move")
    columns = [*CLAIM[:3], "verdict", "verdict_new", "ours", "ours_new", "low", "low_new"]
    print(claims[moved][columns].to_string(index=False))


if __name__ == "__main__":
    app()
