"""Triton kernels, usable without kvrepro: torch and triton only.

One file is one page: formula, reference in plain torch, kernel, wrapper. The reference is the truth.
Without a GPU, `TRITON_INTERPRET=1`, set before triton is imported, runs a kernel on CPU tensors.
"""
