"""data/gpu/defaults.csv: a step and a first token as people call them, beside Hugging Face's generate.

python studies/defaults.py --out data/gpu/defaults.csv      # on a GPU; random weights of Qwen2.5-3B's shape, bfloat16
"""

import datetime
import statistics
import time
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import transformers
import triton
import typer

import kvrepro as kv

SHAPE = dict(
    vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
    num_key_value_heads=2, max_position_embeddings=40960, tie_word_embeddings=True,
)  # fmt: skip
STEPS = 64


def seconds(call, new: int, runs: int) -> list[float]:
    times = []
    for _ in range(runs + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(new)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])


def main(out: Path = Path("data/gpu/defaults.csv"), tokens: list[int] = [2048, 8192, 32768], runs: int = 5) -> None:  # noqa: B006
    """Time 1 and 1 + 64 new tokens; a step is a 64th of the difference of medians."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SHAPE), dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    c = kv.Condition("snapkv", 0.2, kv.Prefill())
    rows = []
    for n in tokens:
        ids = torch.randint(0, 150000, (1, n), device="cuda")
        mask, given = torch.ones_like(ids), ids[0].tolist()

        def hugging(new: int, ids=ids, mask=mask):
            return model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

        def inside(new: int, hugging=hugging, **more):
            with kv.evicting(model, c, **more):
                return hugging(new)

        def engine(new: int, given=given, **more):
            return kv.generate(model, [given], [c], max_new_tokens=new, stop_ids=(), **more)

        calls = {
            ("Hugging Face's generate, full cache", "-"): hugging,
            ("evicting, snapkv at 20%", "default"): inside,
            ("evicting, snapkv at 20%", "torch"): partial(inside, backend="torch"),
            ("kv.generate, snapkv at 20%", "default"): engine,
            ("kv.generate, snapkv at 20%", "torch"): partial(engine, backend="torch"),
        }
        for (method, backend), call in calls.items():
            try:
                first = seconds(call, 1, runs)
                whole = seconds(call, 1 + STEPS, runs)
            except torch.OutOfMemoryError:
                print(n, method, backend, "out of memory", flush=True)
                continue
            step = (statistics.median(whole) - statistics.median(first)) / STEPS
            row = {"tokens": n, "method": method, "backend": backend, "first_ms": 1e3 * statistics.median(first)}
            row |= {"first_low": 1e3 * first[0], "first_high": 1e3 * first[-1], "step_ms": 1e3 * step, "runs": runs}
            print(row, flush=True)
            rows.append(row | {
                "shape": "Qwen2.5-3B, random weights, bfloat16", "device": torch.cuda.get_device_name(),
                "torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__,
                "date": f"{datetime.date.today()}",
            })  # fmt: skip
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")


if __name__ == "__main__":
    typer.run(main)
