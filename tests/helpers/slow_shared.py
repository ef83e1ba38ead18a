"""The protection paper's harness (`SharedCap`) once more, slowly: dicts, sorts, a masked full cache, eager attention.

Written from the protocol's text, not from the engine, so that the two can disagree.
"""

import hashlib
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from kvrepro.engine.policy import find


@dataclass
class Token:
    L: int
    I: int
    a: float
    M: float
    S: float
    Pf: float


def n_prot(fraction, capacity, reading):
    if fraction == 0:
        return 0
    return max(4, int(fraction * capacity) if reading.n_prot == "floor" else math.ceil(round(fraction * capacity, 9)))


def reduce_attention(p, reading):
    """[layers, heads, tokens] of one query to one number per token."""
    return p.amax((0, 1)) if reading.score_reduce == "max" else p.mean((0, 1))


def reduce_heads(p, reading, kv_heads):
    """[layers, heads, tokens] of one query to [kv_heads, tokens]."""
    p = p[:, :kv_heads] if reading.head_map == "first_n_kv" else p.unflatten(1, (kv_heads, -1)).mean(2)
    return p.amax(0) if reading.score_reduce == "max" else p.mean(0)


def protected(retained, c, reading, n, dynamic=False):
    order = sorted(retained)
    first, last = n_prot(c.prefix, c.budget, reading), n_prot(c.suffix, c.budget, reading)
    suffix = set(order[len(order) - last :])
    if c.static_suffix and not dynamic:
        suffix = set(range(n - last, n)) & set(order)
    return set(order[:first]) | suffix


def place(reading):
    return str if reading.tie_break == "string" else int


def score(policy, token, t, reading):
    x = token
    return {
        "lru": lambda: x.L,
        "slw": lambda: x.L,
        "h2o_simple": lambda: 0.7 * x.S + 0.1 * max(x.a, x.M) + (1.0 if t - x.L <= 64 else 0.0),
        "snapkv_simple": lambda: x.S + (max(x.a, x.M) if reading.snapkv_bonus == "peak" else x.a),
        "ada_kv_simple": lambda: x.S + 0.5 * x.M,
        "quest_simple": lambda: x.a,
        "h2o_faithful": lambda: x.S,
        "snapkv_faithful": lambda: x.Pf,
    }[policy]()


def evict_global(state, retained, c, reading, t, n, rng):
    """The retained set after one call."""
    excess = len(retained) - c.budget
    if excess <= 0:
        return set(retained)
    shielded = protected(retained, c, reading, n)
    inner = set(retained) - shielded
    if c.prefix > 0 and c.suffix == 0 and reading.empty_suffix == "keeps_newest":
        inner = set()
    key = place(reading)
    if c.policy == "slw" and reading.slw_window == "position":  # a fixed rule: nothing but positions counts
        ascending = sorted(retained, key=key)
        stays = shielded | set(ascending[:4])
        newest = [i for i in reversed(ascending) if i not in stays]
        return stays | set(newest[: c.budget - len(stays)])
    if c.policy == "random_sample":
        pool = sorted(inner)
        victims = set(rng.sample(pool, min(excess, len(pool))))
    else:
        pool = set(inner)
        if c.policy == "slw":
            oldest = sorted(inner, key=lambda i: (state[i].I, key(i)))
            latest = sorted(inner, key=lambda i: (state[i].L, state[i].I, key(i)))
            pool -= set(oldest[:4]) | set(latest[max(0, len(latest) - (c.budget - 4)) :])
        ties = {"lru": "I", "slw": "I", "h2o_simple": "LI", "h2o_faithful": "LI"}.get(c.policy, "L")

        def order(i):
            return (score(c.policy, state[i], t, reading), *[getattr(state[i], f) for f in ties], key(i))

        victims = set(sorted(pool, key=order)[:excess])
    kept = set(retained) - victims
    if len(kept) > c.budget:
        pool = kept - shielded if reading.guardrail == "honours" else kept
        kept -= set(sorted(pool, key=lambda i: (state[i].L, state[i].I, i))[: len(kept) - c.budget])
    return kept


def evict_per_head(signal, retained, c, reading, n):
    """Per-head sets after one call; `signal` [kv_heads][position]."""
    kv_heads = len(signal)
    if len(retained) <= c.budget:
        return [set(retained) for _ in range(kv_heads)]
    shielded = protected(retained, c, reading, n)
    pool, key = set(retained) - shielded, place(reading)
    budget = c.budget - len(shielded)
    counts = [budget] * kv_heads
    if c.policy == "ada_kv_faithful":
        inverse = []
        for h in range(kv_heads):
            total = sum(signal[h][i] for i in pool)
            p = [signal[h][i] / total if total else 1 / len(pool) for i in pool]
            inverse.append(1 / max(-sum(x * math.log(x) for x in p if x > 0), 1e-9))
        counts = [max(1, round(x / sum(inverse) * budget * kv_heads)) for x in inverse]
        while sum(counts) > budget * kv_heads:
            counts[counts.index(max(counts))] -= 1
        while sum(counts) < budget * kv_heads:
            counts[counts.index(min(counts))] += 1
    heads = []
    for h in range(kv_heads):
        ranked = sorted(pool, key=lambda i: (signal[h][i], key(i)))
        heads.append(set(ranked[max(0, len(ranked) - counts[h]) :]) | shielded)
    union = set().union(*heads)
    firm = protected(retained, c, reading, n, dynamic=reading.trim_guard == "dynamic")
    votes = {i: sum(i in head for head in heads) for i in union}
    total = {i: sum(signal[h][i] for h in range(kv_heads)) for i in union}
    order = sorted(union - firm, key=lambda i: (votes[i], total[i], key(i)))
    lost = set(order[: max(0, len(union) - c.budget)])
    return [head - lost for head in heads]


@torch.no_grad()
def run(model, prompt, c, max_new_tokens, stop_ids):
    """Greedy tokens, the kept set per head after every policy call, and what every head sees at the end."""
    reading, n = SimpleNamespace(**find(c.policy).reading(c.reading, c.switches)), len(prompt)
    kv_heads, query_heads = model.config.num_key_value_heads, model.config.num_attention_heads
    out = model(torch.tensor([prompt]), output_attentions=True, use_cache=True)
    p = torch.stack(out.attentions)[:, 0]  # [layers, heads, queries, tokens]
    cache, logits = out.past_key_values, out.logits[0, -1]

    if reading.score_reduce == "max":
        s = p.amax((0, 1, 2))
        a, M, S = s, s, s
    else:
        a, M, S = p[:, :, -1].mean((0, 1)), p.amax(2).mean((0, 1)), p.sum(2).mean((0, 1))
    state = {i: Token(0, 0, float(a[i]), float(M[i]), float(S[i]), float(S[i])) for i in range(n)}
    per_head = c.policy in ("ada_kv_faithful", "quest_faithful")
    width = n + max_new_tokens
    if reading.per_head_first_reduction == 8:
        now = sums = torch.zeros(kv_heads, n)
    else:
        each = torch.stack([reduce_heads(p[:, :, q], reading, kv_heads) for q in range(n)])
        sums = each.amax(0) if reading.score_reduce == "max" else each.sum(0)
        now = sums if reading.score_reduce == "max" else each[-1]
    now = torch.nn.functional.pad(now, (0, width - n))
    sums = torch.nn.functional.pad(sums, (0, width - n))

    heads = [set(range(n)) for _ in range(kv_heads)]
    seed = 42
    if reading.random_seed == "by_prompt":
        seed = int.from_bytes(hashlib.sha256(str([42, *prompt]).encode()).digest()[:8])
    rng = random.Random(seed)
    first = reading.per_head_first_reduction if per_head else 0

    def call(t):
        retained = set().union(*heads)
        if per_head:
            signal = sums if c.policy == "ada_kv_faithful" else now
            return evict_per_head(signal.tolist(), retained, c, reading, n)
        kept = evict_global(state, retained, c, reading, t, n, rng)
        return [kept for _ in range(kv_heads)]

    history = []
    if first == 0:
        heads = call(0)
    history.append([sorted(h) for h in heads])
    tokens = []
    for t in range(1, max_new_tokens + 1):
        token = int(logits.argmax())
        tokens.append(token)
        if token in stop_ids:
            break
        position = n + t - 1
        heads = [h | {position} for h in heads]
        state[position] = Token(t, t, 0.0, 0.0, 0.0, 0.0)
        if t % c.regime.interval == 0 and t >= first:
            heads = call(t)
            history.append([sorted(h) for h in heads])
        mask = torch.full((1, query_heads, 1, position + 1), torch.finfo(torch.float32).min)
        for q in range(query_heads):
            mask[0, q, 0, sorted(heads[q * kv_heads // query_heads])] = 0.0
        given = {"attention_mask": mask, "position_ids": torch.tensor([[position]]), "past_key_values": cache}
        out = model(torch.tensor([[token]]), output_attentions=True, **given)
        logits = out.logits[0, -1]
        p = torch.stack(out.attentions)[:, 0, :, 0]
        a = reduce_attention(p, reading)
        now = torch.nn.functional.pad(reduce_heads(p, reading, kv_heads), (0, width - position - 1))
        sums = sums + now
        retained = set().union(*heads)
        top = max(float(a[j]) for j in retained)
        for i in retained:
            x, attention = state[i], float(a[i])
            x.a, x.M, x.S = attention, max(x.M, attention), x.S + attention
            if attention > 0.05 * top:
                x.L = t
    return tokens, history, heads
