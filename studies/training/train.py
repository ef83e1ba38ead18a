"""Train an embedded model from scratch on one GPU: `python -m studies.training.train --name small-gqa`.

Watched per task: at each context length a task's share of the rows follows its error, the context grows with the clock,
and every minute's exact match is logged. Muon for the matrices, AdamW for the rest. As the clock decides, a second run
gives another model of the same kind. All settings were fixed before any claim was looked at.
"""

import json
import multiprocessing as mp
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from kvrepro.engine.condition import ensure
from kvrepro.experiment.models import embedded
from kvrepro.paths import DATA
from studies.training import rows as R
from studies.training.evaluate import LENGTHS as CHECKS
from studies.training.evaluate import evaluation_set, exact, exact_match, write
from studies.training.rows import build

# (share of the time passed, newest context length)
STAGES = [(0.0, 256), (0.1, 512), (0.22, 1024), (0.36, 2048), (0.76, 4096)]
LENGTHS = [length for _, length in STAGES]
TOKENS, RATE = 65_536, 2e-3  # of a step
CONTEXT_WEIGHT = 0.02  # loss weight of a token outside answers; answers have 1
WARM = 0.04  # for this share of the time half of the rows are repeated random sequences


def length_shares(progress: float) -> dict[int, float]:
    """Half of the steps at the newest length, the rest spread over the earlier ones."""
    *older, newest = [length for start, length in STAGES if progress >= start]
    return {newest: 0.5, **{length: 0.5 / len(older) for length in older}} if older else {newest: 1.0}


def worker(seed: str, shared, queue) -> None:
    """Put batches into the queue for ever. shared: progress, share of repeated sequences, then a share per length and
    task."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    while True:
        lengths = length_shares(shared[0])
        length = rng.choices(list(lengths), weights=list(lengths.values()))[0]
        shares = np.asarray(shared[2:]).reshape(len(LENGTHS), -1)[LENGTHS.index(length)]
        queue.put([torch.from_numpy(x) for x in R.batch(rng, shares, length, TOKENS, shared[1])])


SEEDS = {"small-gqa": 1, "small-gqa-seed-2": 2}  # 0 where none is named


def optimizers_of(model) -> list[torch.optim.Optimizer]:
    """Muon on the layers' matrices, AdamW on embeddings, biases, norms. The output projection's bias stays 0."""
    for layer in model.model.layers:
        if layer.self_attn.o_proj.bias is not None:
            layer.self_attn.o_proj.bias.requires_grad_(False)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in trained if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def token_losses(hidden, embedding, x, weight):
    """Weighted mean cross-entropy, and of each next token whether it is right, and its loss."""
    logits = hidden[:, :-1] @ embedding.T
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten(), reduction="none")
    loss = flat.view_as(weight)
    return (loss * weight).sum() / weight.sum(), logits.argmax(-1) == x[:, 1:], loss.detach()


def watched_line(result: dict[tuple[str, int], float], log: list[dict], out: Path, **line: float) -> None:
    """Print a line with each length's exact match, and log it with the exact match of each task and length."""
    line |= {f"em{length}": float(np.mean([v for k, v in result.items() if k[1] == length])) for length in CHECKS}
    print(json.dumps(line), flush=True)
    log.append(line | {"tasks": {t: [result[t, length] for length in CHECKS] for t in R.TASK_NAMES}})
    (out / "training.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))


def started(seed: str, workers: int) -> tuple[Any, Any, dict, dict]:
    """Start the workers. Returns what they share, their queue, and two evaluation sets, as results to wait for: one to
    watch the training by and one for its end."""
    context = mp.get_context("fork")
    shared = context.Array("d", [0.0, 1.0] + [1.0] * (len(R.TASK_NAMES) * len(LENGTHS)), lock=False)
    queue = context.Queue(maxsize=48)
    for i in range(workers):
        context.Process(target=worker, args=(f"{seed}-{i}", shared, queue), daemon=True).start()
    pool = context.Pool(4)
    keys = [(task, length) for length in CHECKS for task in R.TASK_NAMES]
    watched, final = (
        {key: pool.apply_async(evaluation_set, (*key, *drawn)) for key in keys} for drawn in ((16, 99), (200, 2026))
    )
    return shared, queue, watched, final


def step(model, optimizers: list, losses, x, y, lr: float) -> tuple:
    """One step of all optimizers. Returns the loss, and of each token whether it is right, and its loss. Answers have
    weight 1."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr
    weight = torch.where(y > 0, 1.0, CONTEXT_WEIGHT) * (x[:, 1:] != R.PAD)
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.model(x, use_cache=False).last_hidden_state
        loss, correct, per_token = losses(hidden, model.model.embed_tokens.weight, x, weight)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss, correct, per_token


def main(name: str = "tiny-gqa", minutes: float = 8.2, workers: int = 14, seed: int | None = None) -> None:
    """Train a model of the family for `minutes` on one CUDA device; write weights, tokenizer, training.jsonl and
    evaluation.csv to its place in data/models."""  # long, because the state of a run is its variables
    ensure(tuple(embedded()), name=name)
    out, seed = DATA / "models" / name, SEEDS.get(name, 0) if seed is None else seed
    start, device, sets = time.time(), torch.device("cuda"), {}
    torch.manual_seed(seed)
    steps, tokens_seen, log, error = 0, 0, list[dict](), np.ones((len(LENGTHS), len(R.TASK_NAMES)))
    shared, queue, watched, final = started(f"{seed}-0", workers)  # forks, so before the device is touched
    # Llama with biases on the projections and heads of 64, or where layers slide Qwen2, which computes the same.
    config = AutoConfig.from_pretrained(embedded()[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:  # one is compiled and shared by all, in a tenth of the whole model's time
        layer.compile(dynamic=False)
    optimizers, losses = optimizers_of(model), torch.compile(token_losses, dynamic=False)
    last = time.time()
    shared[2:] = list(0.1 + error.ravel())
    out.mkdir(parents=True, exist_ok=True)
    while (progress := (time.time() - start) / (60 * minutes)) < 1:
        shared[0], shared[1] = progress, 0.5 if progress < WARM else 0.0
        # Warm up over 200 steps, hold, decay over the last 30% of the time.
        scale = min(1.0, (steps + 1) / 200) * min(1.0, max(0.02, (1 - progress) / 0.3))
        ids, turn, task = queue.get()
        x, y = ids.to(device, non_blocking=True).long(), turn.to(device, non_blocking=True)[:, 1:]
        loss, correct, per_token = step(model, optimizers, losses, x, y, RATE * scale)
        steps, tokens_seen = steps + 1, tokens_seen + x.numel()

        if steps % 3 == 0:  # a task's share follows its error at this length
            a, b, t = *(z.cpu().numpy() for z in exact(correct, y, 12)), task.numpy()
            error_of_task = error[LENGTHS.index(x.shape[1])]
            for k in np.unique(t[t >= 0]):
                error_of_task[k] += 0.15 * ((1 - a[t == k].sum() / b[t == k].sum()) - error_of_task[k])
            shared[2:] = list(0.1 + error.ravel())
        if time.time() - last > 60:
            sets = sets or {key: job.get() for key, job in watched.items()}
            result = exact_match(model.eval(), sets, "cuda")
            model.train()
            context_loss = float(per_token[(y == 0) & (x[:, 1:] != R.PAD)].mean())
            line = {"seconds": round(time.time() - start), "steps": steps, "tokens": tokens_seen}
            watched_line(result, log, out, **line, loss=float(loss.detach()), context_loss=context_loss)
            last = time.time()

    model.to(torch.bfloat16).save_pretrained(out)
    build().save_pretrained(out)
    result = exact_match(model.eval().float(), {key: job.get() for key, job in final.items()}, "cuda")
    write(out / "evaluation.csv", result, 200)
    with (out / "training.jsonl").open("a") as file:
        json.dump({"seconds": round(time.time() - start), "steps": steps, "tokens": tokens_seen}, file)
        file.write("\n")


if __name__ == "__main__":
    typer.run(main)
