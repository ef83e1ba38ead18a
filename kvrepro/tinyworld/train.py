"""Train the embedded model from scratch on one GPU: `python -m kvrepro.tinyworld.train --minutes 25 --out data/models/tiny-gqa`.

Watched per task: a task's share of the rows follows its error, the context grows with the clock, and everything is logged.
"""

import csv
import json
import multiprocessing as mp
import random
import time
from pathlib import Path

import numpy as np
import torch
import typer
from statsmodels.stats.proportion import proportion_confint

from kvrepro.tinyworld import rows as R
from kvrepro.tinyworld.tokenizer import save, vocabulary

STAGES = [(0.0, 256), (0.1, 512), (0.22, 1024), (0.36, 2048), (0.76, 4096)]  # (share of the time passed, new context length)
LENGTHS = [length for _, length in STAGES]
TOKENS = 65_536  # a step
CHECKS = (500, 1000, 1900, 3800)  # prompt lengths at which exact match is watched


def length_shares(progress: float) -> dict[int, float]:
    """Half of the steps at the newest length, the rest spread over the earlier ones."""
    open_lengths = [length for start, length in STAGES if progress >= start]
    older = open_lengths[:-1]
    if not older:
        return {open_lengths[-1]: 1.0}
    return {open_lengths[-1]: 0.5, **{length: 0.5 / len(older) for length in older}}


def worker(seed: int, shared, queue) -> None:
    """Make batches for ever. shared: progress, share of repeated sequences, then a share per length and task."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    while True:
        lengths = length_shares(shared[0])
        length = rng.choices(list(lengths), weights=list(lengths.values()))[0]
        shares = np.asarray(shared[2:]).reshape(len(LENGTHS), -1)[LENGTHS.index(length)]
        made = R.batch(rng, shares, length, TOKENS, shared[1])
        queue.put([torch.from_numpy(x.astype(np.int16)) for x in made])


def model_config(heads: int, kv_heads: int, width: int = 384, layers: int = 8, inner: int = 1024, theta: float = 10_000.0):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=(len(vocabulary()) + 63) // 64 * 64,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attention_bias=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=None,
        eos_token_id=vocabulary()["<|end|>"],
        pad_token_id=R.PAD,
        attn_implementation="sdpa",
    )


def exact(correct: torch.Tensor, turn: torch.Tensor, n_turns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: (answers wholly right, answers), from token correctness; right under teacher forcing = right under greedy decoding."""
    total = torch.zeros(turn.shape[0], n_turns + 1, device=turn.device)
    right = total.clone().scatter_add_(1, turn.long(), correct.float())
    total.scatter_add_(1, turn.long(), torch.ones_like(correct, dtype=torch.float32))
    seen = total[:, 1:] > 0
    return ((right[:, 1:] == total[:, 1:]) & seen).sum(1), seen.sum(1)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def evaluate(model, sets: dict, device, autocast: bool = True) -> dict:
    """Share of answers wholly right, per set."""
    out = {}
    for key, (ids, turn) in sets.items():
        good = n = 0
        for part in range(0, len(ids), 50):
            x, y = ids[part : part + 50].to(device).long(), turn[part : part + 50].to(device)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                guess = model(x, use_cache=False).logits[:, :-1].argmax(-1)
            a, b = exact(guess == x[:, 1:], y[:, 1:], int(y.max()))
            good, n = good + int(a.sum()), n + int(b.sum())
        out[key] = good / n
    return out


def write_evaluation(path: Path, result: dict, n: int) -> None:
    """Exact match per (task, tokens) with Wilson intervals, 95%."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["task", "tokens", "n", "exact_match", "low", "high"])
        for (task, length), rate in result.items():
            low, high = proportion_confint(round(rate * n), n, method="wilson")
            out.writerow([task, length, n, f"{rate:.4f}", f"{low:.4f}", f"{high:.4f}"])


def evaluation_set(task: str, length: int, n: int, seed: int = 99):
    rng = random.Random(f"eval-{seed}-{task}-{length}")
    shares = np.zeros(len(R.TASK_NAMES))
    shares[R.TASK_NAMES.index(task)] = 1
    ids, turn, _ = R.batch(rng, shares, length, length * n, 0.0, evaluation=True, turns=1)
    return torch.from_numpy(ids), torch.from_numpy(turn.astype(np.int16))


def main(
    minutes: float = 25.0,
    out: Path = Path("data/models/tiny-gqa"),
    seed: int = 0,
    heads: int = 6,
    kv_heads: int = 2,
    optimizer: str = "muon",
    lr: float = 2e-3,
    context_weight: float = 0.02,
    workers: int = 14,
    width: int = 384,
    layers: int = 8,
    inner: int = 1024,
    warm_until: float = 0.04,
    theta: float = 10_000.0,
) -> None:
    start = time.time()
    device = torch.device("cuda")
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    n_tasks = len(R.TASK_NAMES)
    context = mp.get_context("fork")
    shared, queue = context.Array("d", [0.0, 1.0] + [1.0] * (n_tasks * len(LENGTHS)), lock=False), context.Queue(maxsize=48)
    processes = [context.Process(target=worker, args=(1000 * seed + i, shared, queue), daemon=True) for i in range(workers)]
    for process in processes:
        process.start()
    pool = context.Pool(4)
    jobs = {(t, L): pool.apply_async(evaluation_set, (t, L, 16)) for L in CHECKS for t in R.TASK_NAMES}
    final = {(t, L): pool.apply_async(evaluation_set, (t, L, 200, 2026)) for L in CHECKS for t in R.TASK_NAMES}
    sets: dict = {}

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_config(heads, kv_heads, width, layers, inner, theta), dtype=torch.float32).to(device)
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in named if p.ndim != 2]
    embeddings = [p for n, p in named if p.ndim == 2 and "embed" in n]
    print(f"parameters {sum(p.numel() for _, p in named) / 1e6:.2f} M, vocabulary {len(vocabulary())}", flush=True)
    if optimizer == "muon":
        optimizers = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([{"params": embeddings, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95), fused=True),
        ]
    else:
        optimizers = [
            torch.optim.AdamW(
                [{"params": matrices + embeddings, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                lr=lr, betas=(0.9, 0.95), fused=True,
            )
        ]

    def token_losses(hidden, embedding, x, weight):
        logits = hidden[:, :-1] @ embedding.T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten(), reduction="none").view_as(weight)
        return (loss * weight).sum() / weight.sum(), (logits.argmax(-1) == x[:, 1:]), loss.detach()

    # One layer is compiled and shared by all: a tenth of the time that compiling the whole model takes at each new length.
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    token_losses = torch.compile(token_losses, dynamic=False)
    error = np.ones((len(LENGTHS), n_tasks))
    log, steps, last, tokens_seen, wait = [], 0, time.time(), 0, 0.0
    t0 = time.time()
    while True:
        progress = (time.time() - start) / (60 * minutes)
        if progress >= 1:
            break
        shared[0] = progress
        shared[1] = 0.5 if progress < warm_until else 0.0
        scale = min(1.0, (steps + 1) / 200) * min(1.0, max(0.02, (1 - progress) / 0.3))
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = lr * scale
        w0 = time.time()
        ids, turn, task = queue.get()
        wait += time.time() - w0
        x, y = ids.to(device, non_blocking=True).long(), turn.to(device, non_blocking=True)[:, 1:]
        weight = torch.where(y > 0, 1.0, context_weight) * (x[:, 1:] != R.PAD)
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model.model(x, use_cache=False).last_hidden_state
            loss, correct, each = token_losses(hidden, model.model.embed_tokens.weight, x, weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizers:
            o.step()
            o.zero_grad(set_to_none=True)
        steps, tokens_seen = steps + 1, tokens_seen + x.numel()
        if steps % 3 == 0:
            a, b = exact(correct, y, 12)
            a, b, t = a.cpu().numpy(), b.cpu().numpy(), task.numpy()
            here = error[LENGTHS.index(x.shape[1])]
            for k in range(n_tasks):
                if b[t == k].sum():
                    here[k] += 0.15 * ((1 - a[t == k].sum() / b[t == k].sum()) - here[k])
            shared[2:] = list(0.1 + error.ravel())
        if time.time() - last > 60:
            sets = sets or {key: job.get() for key, job in jobs.items()}
            model.eval()
            result = evaluate(model, sets, device)
            model.train()
            line = {"seconds": round(time.time() - start), "steps": steps, "tokens": tokens_seen, "loss": round(float(loss.detach()), 4),
                    "context_loss": round(float(each[(y == 0) & (x[:, 1:] != R.PAD)].mean()), 3), "length": x.shape[1], "wait": round(wait, 1)}
            line |= {f"em{L}": round(float(np.mean([v for (t, l), v in result.items() if l == L])), 3) for L in CHECKS}
            line["tasks"] = {t: [round(result[t, L], 2) for L in CHECKS] for t in R.TASK_NAMES}
            log.append(line)
            print(json.dumps({k: v for k, v in line.items() if k != "tasks"}), flush=True)
            if len(log) % 3 == 0:
                print("   ", {t.replace("instruction", "i"): v for t, v in line["tasks"].items()}, flush=True)
            out.mkdir(parents=True, exist_ok=True)
            (out / "training.jsonl").write_text("".join(json.dumps(x) + "\n" for x in log))
            last = time.time()
    for process in processes:
        process.terminate()
    model.to(torch.bfloat16).save_pretrained(out)
    save(out)
    result = evaluate(model.eval().float(), {key: job.get() for key, job in final.items()}, device)
    write_evaluation(out / "evaluation.csv", result, 200)
    print(f"done: {steps} steps, {tokens_seen / 1e9:.2f} G tokens, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
