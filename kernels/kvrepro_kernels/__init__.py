"""Triton kernels, usable without kvrepro: torch and triton only.

One file is one page: formula, reference in plain torch, kernel, wrapper. The kernel must agree with the reference. A
kernel that needs more room has a file of its own, `*_kernel.py`.

    window_scores        any window score in one pass; window_rules: indicators, aggregates, reductions;
                         window_attention: for when no log-sum-exp was kept
    column_mass          cumulative attention per key; prefill_attention: a prompt's attention with its log-sum-exp
    ragged_decode        decode attention over heads of unequal length; ragged_storage: what it reads; ragged_attend,
                         ragged_merge: its two kernels; rms_norm, rotary: norms and rotations in one launch each
    projected_norm       length of every value after the output projection; largest: which tokens stay, without sorting
    compaction           gathers what a layer keeps; paging: the same for a paged cache, by repack or fill_holes
    window, launch       what wrappers check and divide; window_indicators: what attention to a token is worth
    small                one launch of each, for checkers; bench: `python -m kvrepro_kernels.bench`

Without a GPU, `TRITON_INTERPRET=1`, set before triton is imported, runs a kernel on CPU tensors.
"""

from kvrepro_kernels.column_mass import column_mass
from kvrepro_kernels.compaction import compact
from kvrepro_kernels.fill_holes import fill_holes
from kvrepro_kernels.largest import LONGEST, largest
from kvrepro_kernels.prefill_attention import prefill_attention
from kvrepro_kernels.projected_norm import projected_norm
from kvrepro_kernels.ragged_decode import ragged_decode
from kvrepro_kernels.repack import repack
from kvrepro_kernels.rms_norm import rms_norm
from kvrepro_kernels.rotary import rotary
from kvrepro_kernels.window_attention import window_attention
from kvrepro_kernels.window_scores import window_scores

__all__ = [
    "LONGEST",
    "column_mass",
    "compact",
    "fill_holes",
    "largest",
    "prefill_attention",
    "projected_norm",
    "ragged_decode",
    "repack",
    "rms_norm",
    "rotary",
    "window_attention",
    "window_scores",
]
