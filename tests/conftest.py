"""Without a GPU, Triton's interpreter runs the kernels; it must be asked for before anything imports triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
