"""Commands around the package: the book, benchmarks, parity, what policies learn of a model."""
