"""The protection paper's own rows, analysed again: printed numbers, comparisons, what its scores are made of."""
