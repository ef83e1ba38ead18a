"""The chapter on leakage: what a compressed system prompt still commands, and what it gives away."""
