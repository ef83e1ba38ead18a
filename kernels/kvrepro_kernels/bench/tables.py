"""The committed tables: their columns, the targets, and the page that the book shows."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvrepro_kernels.bench.harness import TWO_PASSES, UNEQUAL, Bench, Row

COLUMNS = (
    "kernel variant shape tokens batch dtype device p20_us p50_us p80_us floor_us fraction_of_floor reference_p50_us "
    "speedup scratch_mib torch triton date"
).split()
FOLDER = Path(__file__).resolve().parents[3] / "data" / "gpu"


def targets(b: Bench) -> Iterator[Row]:
    """The targets and the measured outcomes."""

    def row(target: str, wanted: str, outcome: float, met: bool) -> Row:
        return dict(target=target, wanted=wanted, outcome=f"{outcome:.3f}", met="yes" if met else "no")

    for tokens, least in ((131072, 0.85), (32768, 0.65)):
        x = b.find("window_scores", "perturbation sum mean", tokens)["fraction_of_floor"]
        yield row(f"window_scores, fraction of the floor, {tokens} tokens", f">= {least}", x, x >= least)
    long = b.find("window_scores", "perturbation sum mean", 131072)
    yield row("window_scores, speedup over plain torch, 131072 tokens", ">= 75", long["speedup"], long["speedup"] >= 75)
    yield row("window_scores, scratch in MiB, 131072 tokens", "<= 2", long["scratch_mib"], long["scratch_mib"] <= 2)
    x = b.find("window_scores", TWO_PASSES, 131072)["p50_us"] / long["p50_us"]
    yield row("window_scores, speedup over two passes in three kernels, 131072 tokens", "> 1", x, x > 1)
    x = 1 / b.find("column_mass", "causal", 32768)["speedup"]
    yield row("column_mass, share of the fastest attention forward, 32768 tokens", "<= 0.6", x, x <= 0.6)
    for tokens in (32768, 6553):
        plain, emits = (b.find("ragged_decode", v, tokens, 8) for v in (UNEQUAL, UNEQUAL + ", emits mean"))
        x = plain["fraction_of_floor"]
        yield row(f"ragged_decode, fraction of copy bandwidth, {tokens} tokens kept, batch 8", ">= 0.80", x, x >= 0.8)
        x = emits["p50_us"] / plain["p50_us"] - 1
        yield row(f"ragged_decode, cost of emitting attention, {tokens} tokens kept, batch 8", "<= 0.15", x, x <= 0.15)
    for tokens, batch in ((32768, 8), (6553, 8), (32768, 1), (2048, 1)):
        ours = b.find("ragged_decode", "equal lengths", tokens, batch)["p50_us"]
        for name in ("flash", "cudnn"):
            x = ours / b.find("ragged_decode", f"torch {name}, equal lengths", tokens, batch)["p50_us"]
            wording = f"ragged_decode, time over torch's {name} decoding, {tokens} tokens, batch {batch}"
            yield row(wording, "<= 1.10", x, x <= 1.1)
    for tokens, share in ((32768, "20%"), (32768, "50%"), (131072, "20%"), (131072, "50%")):
        x = b.find("compaction", f"gather, keep {share}", tokens, shape="8/128")["fraction_of_floor"]
        wording = f"compaction, gather, fraction of copy bandwidth, {tokens} tokens, keep {share}"
        yield row(wording, ">= 0.80", x, x >= 0.8)
    for tokens, requests in ((32768, 8), (32768, 1), (8192, 32)):
        for method in ("repack", "hole filling"):
            x = b.find("compaction", f"{method}, keep 50%", tokens, requests, "8/128")["fraction_of_floor"]
            wording = f"compaction, {method}, fraction of copy bandwidth, {requests} x {tokens}"
            yield row(wording, ">= 0.80", x, x >= 0.8)


def write(path: Path, rows: list[Row], columns: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def page(folder: Path) -> str:
    """The tables of `folder` as the book shows them: targets, times by kernel, errors. Markdown."""

    def table(header: str, rows: Iterable[Sequence[str]]) -> str:
        names = header.split(" | ")
        return "\n".join("| " + " | ".join(x) + " |" for x in (names, ["---"] * len(names), *rows)) + "\n"

    times, targets_, errors = (
        list(csv.DictReader((folder / f"{name}.csv").open())) for name in ("kernels", "targets", "checks")
    )

    def show(text: str, places: int = 2) -> str:
        return f"{float(text):.{places}f}" if text else ""

    parts = ["## Targets\n", table("target | wanted | reached | met", [list(x.values()) for x in targets_])]
    for kernel in dict.fromkeys(x["kernel"] for x in times):
        parts.append(f"## {kernel}\n")
        rows = []
        for x in [x for x in times if x["kernel"] == kernel]:
            tokens, floor = x["tokens"] if x["tokens"] != "0" else "", show(x["floor_us"], 1)
            measured = show(x["fraction_of_floor"]), show(x["speedup"]), show(x["scratch_mib"], 1)
            rows.append([x["variant"], x["shape"], tokens, x["batch"], show(x["p50_us"], 1), floor, *measured])
        names = "variant | heads/KV heads/dims | tokens | batch | median, µs | floor, µs | of the floor | speedup"
        parts.append(table(names + " | scratch, MiB", rows))
    names = "kernel | variant | type | error | kept | differ | not ties"
    rows = [[x[y] for y in "kernel variant dtype error kept differ not_ties".split()] for x in errors]
    parts += ["## Errors against float64\n", table(names, rows)]
    first_row, dates = times[0], " and ".join(sorted({x["date"] for x in times}))
    parts.append(f"{first_row['device']}, torch {first_row['torch']}, triton {first_row['triton']}, {dates}.\n")
    return "\n".join(parts)
