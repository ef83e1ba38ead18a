"""The synthesis: one grid over the parts that methods are made of, on common items and on a family of models."""
