"""Kept sets and texts of every policy, regime, reading and guard on the smallest model, as stored in golden.parquet.

`python tests/helpers/golden.py` computes them anew, which a change of what is kept needs, and a new policy.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

import kvrepro as kv

FILE = Path(__file__).with_name("golden.parquet")
KEYS = ["policy", "regime", "reading", "guard", "extra", "prompt"]
BUDGET, NEW = 64, 14
REGIMES = {
    "prefill": kv.Prefill(),
    "question": kv.Prefill(until="question"),
    "chunked": kv.Chunked(chunk=80, when="every_chunk"),
    "offline": kv.Offline(until="question"),
    "decode cap": kv.DecodeCap(interval=4),
    "per step": kv.PerStep(),
    "shared cap": kv.SharedCap(interval=4),
}
LARGER = {  # policies that protect more than the others need more
    **dict.fromkeys(("snapkv", "pyramid_kv", "ada_kv", "critical_kv", "critical_ada_kv"), 80),
    **dict.fromkeys(("tri_attention", "tri_attention_layer"), 160),
}
SWITCHES = {"duo_attention": (("recent", 24), ("sinks", 8))}
FEW = ("snapkv", "defensive_kv", "k_norm")  # also with a share, four bits, a whitelist, fair spans


def conditions() -> Iterator[tuple[tuple[str, str, str, str, str], kv.Condition]]:
    """The key and the condition of every case, each once for both prompts and both backends."""
    table = kv.policies()
    for name, row in table.drop("full").iterrows():
        allowed = list(REGIMES)[:-1] if row.regimes == "all" else row.regimes.split(", ")
        for regime, reading in ((r, i) for r in REGIMES if r in allowed for i in row.readings.split(", ")):
            for guard, ends in {"none": {}, "both": {"prefix": 0.1, "suffix": 0.1}}.items():
                if guard == "both" and (regime == "chunked" or name == "quest_pages"):
                    continue  # as decode cap; chooses pages for every query
                budget = LARGER.get(name, BUDGET)
                more = {"reading": reading, "switches": SWITCHES.get(name, ()), **ends}
                yield (name, regime, reading, guard, ""), kv.Condition(name, budget, REGIMES[regime], **more)
    extras = {
        "share": {"budget": 0.4},
        "int4": {"bits": 4},
        "whitelist": {"whitelist": ("question",), "regime": kv.Prefill()},
        "fair": {"regime": kv.Prefill(fair=1.0)},
    }
    for name in FEW:
        for extra, more in extras.items():
            given = {"budget": 100, "regime": kv.Prefill(until="question"), **more}
            yield (name, "question", "as_run", "none", extra), kv.Condition(name, **given)
    static = kv.Condition(
        "lru", BUDGET, REGIMES["shared cap"], 0.1, 0.2, True, switches=(("static_suffix", "anywhere"),)
    )
    yield ("lru", "shared cap", "as_run", "none", "static"), static


def compute(backend: str, policies: set[str] | None = None, regimes: set[str] | None = None) -> pd.DataFrame:
    """A row per case and prompt: generated tokens, tokens kept per layer, and the kept sets as packed bits."""
    loaded = kv.load("small-gqa")
    items = [kv.load_items(f"tinyworld:{task}", 1, 7, n)[0] for task, n in (("needle", 320), ("entries", 250))]
    prompts = [kv.build_prompt(item, loaded.tokenizer, limit=400) for item in items]
    cases = [
        (key, c) for key, c in conditions() if key[0] in (policies or {key[0]}) and key[1] in (regimes or {key[1]})
    ]
    rows = []
    for batch in ([c for c in cases if c[0][1] == regime] for regime in REGIMES):
        if not batch:
            continue
        given = {"max_new_tokens": NEW, "stop_ids": (), "kept_sets": True, "errors": "return", "seed": 3}
        repeat = loaded.tokenizer.encode("Repeat the previous context: ")
        conditions_of_batch = [c for _, c in batch]
        answers = kv.generate(loaded.model, prompts, conditions_of_batch, backend=backend, repeat=repeat, **given)
        for i, answers_of_prompt in enumerate(answers):
            for (key, _), answer in zip(batch, answers_of_prompt, strict=True):
                row = dict(zip(KEYS, [*key, i], strict=True))
                if isinstance(answer, Exception):
                    rows.append(row | {"error": str(answer)})
                    continue
                sets = [np.asarray(layer).reshape(-1) for layer in answer.kept_sets or [np.zeros(0, bool)]]
                row |= {name: getattr(answer, name) for name in ("tokens", "kept", "evicted", "bytes_held", "backend")}
                row |= {"calls": answer.policy_calls, "hash": answer.kept_positions_hash, "error": ""}
                rows.append(row | {"sets": np.packbits(np.concatenate(sets)).tobytes()})
    return pd.DataFrame(rows)


if __name__ == "__main__":
    compute("torch").to_parquet(FILE, compression="zstd", index=False)
