"""Scorers: pure functions `Observation -> scores`, float32 `[batch, kv_heads, tokens]`, large = keep."""
