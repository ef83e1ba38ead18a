"""Which tokens stay in a KV cache, and what that costs."""
