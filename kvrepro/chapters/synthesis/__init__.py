"""The synthesis: one grid over the parts that eviction methods are made of, on common items and on a family of models."""
