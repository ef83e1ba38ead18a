"""The published policies, with their sources and defaults, in both readings where paper and public code differ."""

from typing import Any

from kvrepro.engine import allocate, shared
from kvrepro.engine.policy import Policy
from kvrepro.engine.score import cumulative, keys, learned, window

# ---- windows: indicator x aggregator x pooling (see `kvrepro.engine.score.window`)
# fmt: off
SNAPKV = {"recent": "window", "aggregate": "mean", "pool": "average", "kernel": 5, "group": "mean", "pool_at": "head"}
GROUPED_MAX = SNAPKV | {"pool": "max", "kernel": 7, "pool_at": "kv_head"}
ADAPTIVE = {"floor": 0.2, "blend": False}
CRITICAL = {"window": 32, **SNAPKV, "alpha": 0.5, "eps": 1e-4}
DEFENSIVE = {
    "window": 32, "recent": "window", "aggregate": "defensive", "pool": "average", "kernel": 5, "over": "all",
    "rescale": False, "share": "none", "mass": 0.0, "exact": False,
}
DEFENSIVE_AS_RUN = {"over": "past", "rescale": True, "share": "heads", "mass": 0.9, "exact": True}

WINDOWS: dict[str, Policy] = {
    "snapkv": Policy(
        "SnapKV", "Li et al. 2024, equations 2 and 3", window.snapkv,
        {"window": 32, **SNAPKV, "aggregate": "sum", "pool": "max", "kernel": 7, "group": "union"},
        {"window": 64, **SNAPKV}, code="NVIDIA/kvpress@8bb29b9 snapkv_press.py", together=True),
    "pyramid_kv": Policy(
        "PyramidKV", "Cai et al. 2024, equations 1 to 3", window.snapkv,
        {"window": 8, **GROUPED_MAX, "beta": 20, "inside": False}, {"window": 64, **SNAPKV, "inside": True},
        code="NVIDIA/kvpress@8bb29b9 pyramidkv_press.py", allocate=allocate.pyramid, budget="per layer"),
    "ada_kv": Policy(
        "Ada-KV", "Feng et al. 2024, Algorithm 1", window.snapkv,
        {"window": 32, **GROUPED_MAX, **ADAPTIVE, "blend": True}, {"window": 64, **SNAPKV, "blend": False},
        code="NVIDIA/kvpress@8bb29b9 adakv_press.py", allocate=allocate.adaptive, budget="per head", together=True),
    "cake": Policy(
        "CAKE", "Qin et al. 2025, equations 5 to 11", window.cake,
        {"window": 32, "recent": "window", "gamma": 200.0, "aggregate": "mean_var", "pool": "average", "kernel": 5,
         "group": "mean", "tau1": 1.0, "tau2": 1.0, "floored": False},
        {"tau1": 1.6, "tau2": 0.6, "floored": True},
        code="FFY0/DefensiveKV@9251b95 cake_global_press.py", across=allocate.cake, summary=window.cake_preference,
        budget="per layer", together=True),
    "critical_kv": Policy(
        "CriticalKV", "Feng et al. 2025, Algorithm 1", window.snapkv, CRITICAL, {"window": 64},
        code="NVIDIA/kvpress@8bb29b9 criticalkv_press.py", refine=window.critical, together=True),
    "critical_ada_kv": Policy(
        "Critical-AdaKV", "Feng et al. 2025, Algorithm 1, on Ada-KV's budgets", window.snapkv,
        {**CRITICAL, **ADAPTIVE, "exempt_floor": 0.0}, {"window": 64, "exempt_floor": 0.2},
        code="NVIDIA/kvpress@8bb29b9 criticalkv_press.py", allocate=allocate.adaptive, refine=window.critical,
        budget="per head", together=True),
    "andpro": Policy(
        "AnDPro", "Geng et al. 2025, equation 15", window.andpro,
        {"window": 32, "recent": "window", "sinks": 0, "aggregate": "sum", "pool": "none", "kernel": 7,
         "group": "mean", "chunk": 0, "floor": 1.0},  # a floor of 1 is a uniform budget
        {"sinks": 4, "pool": "max", "group": "max", "chunk": 4, "floor": 0.0},
        code="MIRALab-USTC/LLM-AnDPro snapkv_utils.py", allocate=allocate.adaptive, budget="per head", together=True),
    "dropkv": Policy(
        "DropKV", "DropKV paper, section 3.3 and Algorithm 1", window.dropkv,
        {"window": 8, "recent": "window", "eps": 1e-6, "round_p": False, "aggregate": "sum", "pool": "max",
         "kernel": 11, "group": "mean"},
        {"pool": "average", "round_p": True}, code="AozhongZhang/DropKV@67cdfeb dropkv_cache.py", together=True),
    "defensive_kv": Policy(
        "DefensiveKV", "DefensiveKV paper, Algorithms 1 and 2", window.defensive_kv, DEFENSIVE, DEFENSIVE_AS_RUN,
        code="FFY0/DefensiveKV@9251b95 efficient_defensivekv_press.py", allocate=allocate.joint, budget="per head",
        together=True),
    "layer_defensive_kv": Policy(
        "Layer-DefensiveKV", "DefensiveKV paper, Algorithm 2, lines 11 and 12", window.defensive_kv,
        DEFENSIVE | {"share": "layer"}, DEFENSIVE_AS_RUN | {"recent": 0},
        code="FFY0/DefensiveKV@9251b95 efficient_layer_defensivekv_press.py", across=allocate.joint_layers,
        budget="joint", together=True),
}

# ---- positions, keys, cumulative attention, heads
ONCE = "it repeats a context once: generated tokens would have no score"
REPEATS = {"decode cap": ONCE, "per step": ONCE, "chunked": "the whole context is in the cache while it is repeated"}
KV_ZIP = cumulative.by_sum(
    "reconstruction",
    "s_j = largest attention to j of any query of the group while the model repeats the context. Their score.py",
)
WHOLE = "its retrieval heads keep every generated token: no cap can hold"

TOKENS: dict[str, Policy] = {
    "streaming_llm": Policy(
        "StreamingLLM", "Xiao et al. 2023, section 3.2", keys.streaming_llm, {"sinks": 4, "ramps": False},
        {"ramps": True}, code="leakage artifact@fc0f5df streamingllm_fair_eviction_press.py, under quotas",
        together=True),
    "random": Policy(
        "Random", "a baseline of kvpress", keys.random, {"draw": "float32"}, {"draw": "keys"},
        code="NVIDIA/kvpress@8bb29b9 random_press.py"),
    "k_norm": Policy(
        "K-norm", "Devoto et al. 2024", keys.k_norm, {"dense_layers": 0}, {"dense_layers": 2},
        code="alessiodevoto/l2compress; Zefan-Cai/KVCache-Factory@c97f9d7", allocate=learned.whole),
    "key_diff": Policy(
        "KeyDiff", "Park et al. 2025", keys.key_diff, {"anchor": "unit", "block": 128}, {"block": 0},
        code="NVIDIA/kvpress@8bb29b9 keydiff_press.py", refine=keys.key_diff_blocks, together=True),
    "r_kv": Policy(
        "R-KV", "Cai et al. 2025", keys.r_kv,
        {"window": 8, "recent": "window", "mix": 0.1, "kernel": 7, "threshold": 0.5, "alone": "nothing"},
        {"mix": 0.07, "alone": "first"}, code="Zefan-Cai/R-KV@31cf555 rkv/compression/r1_kv.py"),
    "tri_attention": Policy(
        "TriAttention, one choice for all layers", "Mao et al. 2026", keys.tri_attention,
        {"calibration": learned.QUERIES, "horizon": 65536, "recent": 0}, {"recent": 128},
        code="WeianMao/triattention@c3744ee, vLLM; its Hugging Face path pins the prompt instead",
        across=keys.shared_by_layers),
    "tri_attention_layer": Policy(
        "TriAttention, each layer for itself", "Mao et al. 2026", keys.tri_attention,
        {"calibration": learned.QUERIES, "horizon": 65536, "recent": 0}, {"recent": 128},
        code="WeianMao/triattention@c3744ee, per_layer_per_head"),
    "h2o": Policy(
        "H2O, offline", "leakage paper; kvpress ObservedAttentionPress", cumulative.h2o, {"extended": True},
        {"extended": False}, needs=("mass",),
        code="leakage artifact@fc0f5df observed_attention_fair_eviction_press.py, under quotas", together=True),
    "h2o_online": Policy(
        "H2O", "Zhang et al. 2023, Algorithm 1", cumulative.h2o_online,
        {"share": 0.5, "recent": 0}, {"share": 0.0, "recent": 8},
        code="Zefan-Cai/KVCache-Factory@c97f9d7 pyramidkv_utils.py", shield=cumulative.recent_share, needs=("mass",),
        together=True),
    "scissorhands": Policy(
        "Scissorhands", "Liu et al. 2023, Algorithm 2", cumulative.scissorhands,
        {"signal": "low", "recent": 10}, {"signal": "mass"},
        code="Zefan-Cai/KVCache-Factory@c97f9d7", needs=("low", "mass")),
    "tova": Policy(
        "TOVA", "Oren et al. 2024", cumulative.tova, {"window": 1, "recent": 0}, {"recent": 1},
        code="NVIDIA/kvpress@8bb29b9 tova_press.py", together=True),
    "quest": Policy(
        "QUEST as eviction", "Tang et al. 2024, Algorithm 1, its bound as a score", cumulative.quest,
        {"window": 1, "page": 16, "group": "max"}),
    "quest_pages": Policy(
        "Quest, pages selected", "Tang et al. 2024; mit-han-lab/Quest quest_attention.py", cumulative.quest,
        {"page": 16, "dense_layers": 2}, frees=False, budget="memory stays: pages are chosen per query",
        refuses={"chunked": "nothing leaves: a prompt in chunks is read in full, as in regime prefill"}),
    "kv_zip": Policy(
        "KVzip", "Kim et al. 2025", KV_ZIP, {"sinks": 4},
        across=allocate.joint_layers, needs=("reconstruction",), budget="joint", refuses=REPEATS),
    "kv_zip_plus": Policy(
        "KVzip+", "NVIDIA/kvpress@8bb29b9 kvzip_press.py, kvzip_plus_normalization", learned.kv_zip_plus, {"sinks": 4},
        across=allocate.joint_layers, needs=("reconstruction_per_norm",), budget="joint", refuses=REPEATS),
    "duo_attention": Policy(
        "DuoAttention", "Xiao et al. 2024", keys.streaming_llm,
        {"sinks": 128, "recent": 256, "gates_file": learned.GATES, "count": "tokens"}, {"count": "heads"},
        code="NVIDIA/kvpress@8bb29b9 duo_attention_press.py",
        across=learned.duo_attention, budget="joint", refuses={"decode cap": WHOLE, "per step": WHOLE}),
}

# ---- the protection paper's: one set of tokens for all layers (regime SharedCap)
ARTIFACT = "protection artifact 496739f"
ONE_SET, UNION = "one set for all heads and layers", "tokens per KV head, union trimmed to the budget"


def _shared(title: str, source: str, score: Any, ties: tuple[str, ...] = ("last_use",), **more: Any) -> Policy:
    """A policy of `SharedCap`, whose parameters are the regime's switches."""
    more = {"ties": ties, "needs": ("latest", "largest", "summed", "last_use"), "budget": ONE_SET, **more}
    return Policy(title, source.format(ARTIFACT), score, shared.AS_DESCRIBED, shared.AS_RUN, ARTIFACT, **more)


MASS_TIES = ("last_use", "entered")
LRU = cumulative.by_sum("last_use", "L, the last use. Protection paper, section 3.")
LATEST = cumulative.by_sum("latest", "a, attention of the latest query. Artifact's simplified QUEST; paper, Table 19.")
SUMMED = cumulative.by_sum("summed", "S, attention mass without a recency term. Paper, appendix B.")
PROMPT = cumulative.by_sum("prompt", "Pf, attention frozen at the prompt's end, then 0. Paper, appendix B.")
HEAD_SUMMED = cumulative.by_sum("head_summed", "S per KV head. Paper, appendix B.")
HEAD_LATEST = cumulative.by_sum("head_latest", "a per KV head. Paper, appendix B.")
SHARED: dict[str, Policy] = {
    "lru": _shared("LRU", "{}", LRU, ("entered",)),
    "h2o_simple": _shared("H2O", "Zhang et al. 2023, simplified in {}", cumulative.h2o_simple, MASS_TIES),
    "snapkv_simple": _shared("SnapKV", "Li et al. 2024, simplified in {}", cumulative.snapkv_simple),
    "slw": _shared("StreamingLLM (SLW)", "Xiao et al. 2023, after the prompt in {}", LRU, ("entered",),
                   shield=shared.sinks_and_window),
    "ada_kv_simple": _shared("Ada-KV", "Feng et al. 2024, simplified in {}", cumulative.ada_kv_simple),
    "quest_simple": _shared("QUEST", "Tang et al. 2024, simplified in {}", LATEST),
    "random_sample": _shared("Random", "{}", cumulative.random_sample, ()),
    "h2o_faithful": _shared("H2O-faithful", "Zhang et al. 2023, as in {}", SUMMED, MASS_TIES),
    "snapkv_faithful": _shared("SnapKV-faithful", "Li et al. 2024, as in {}", PROMPT),
    "ada_kv_faithful": _shared("Ada-KV-faithful", "Feng et al. 2024, as in {}", HEAD_SUMMED,
                               budget=UNION, allocate=shared.by_entropy),
    "quest_faithful": _shared("QUEST-faithful", "Tang et al. 2024, as in {}", HEAD_LATEST,
                              budget=UNION, allocate=shared.every_head),
}
# fmt: on

CATALOGUE: dict[str, Policy] = {**TOKENS, **WINDOWS, **SHARED}


def table() -> list[dict[str, str]]:
    """The catalogue as rows, the policies of `SharedCap` last."""
    columns = ("name", "title", "keeps", "source", "regimes", "budget", "readings")
    rows = [("full", "Full cache", "everything", "-", "all", "every token", "-")]
    for name, p in CATALOGUE.items():
        regimes = ", ".join(p.regimes) if p.refuses or p.shared else "all"
        rows.append((name, p.title, p.rule, p.source, regimes, p.budget, ", ".join(p.readings)))
    return [dict(zip(columns, row, strict=True)) for row in rows]
