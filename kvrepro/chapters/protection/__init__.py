"""The protection paper's harness: one set of tokens for all layers, kept under a cap while decoding; both readings."""
