"""KV-cache eviction: one engine for every policy, every regime and every statistic of the papers under study."""

__version__ = "0.1.0"
