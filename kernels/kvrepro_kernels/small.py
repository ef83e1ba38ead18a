"""One small launch of every kernel, odd shapes, for memory and race checkers:

compute-sanitizer --tool racecheck python -m kvrepro_kernels.small     (memcheck, initcheck, synccheck likewise)
"""

import torch

from kvrepro_kernels.bench.harness import RULE, random
from kvrepro_kernels.column_mass import column_mass
from kvrepro_kernels.compaction import compact
from kvrepro_kernels.fill_holes import fill_holes
from kvrepro_kernels.largest import largest
from kvrepro_kernels.projected_norm import projected_norm
from kvrepro_kernels.ragged_decode import ragged_decode
from kvrepro_kernels.repack import repack
from kvrepro_kernels.rms_norm import rms_norm
from kvrepro_kernels.rotary import rotary
from kvrepro_kernels.window_scores import window_scores


def main() -> None:
    keys, values = random(2, 2, 333, 80), random(2, 2, 333, 80)
    for heads, window in ((6, 5), (8, 64)):  # all query rows in one go, and in chunks
        for rule in (("perturbation", "sum", "mean"), ("value", "variance", "max"), ("anchor", "max", "max")):
            names = dict(zip(RULE, rule, strict=True))
            starts = torch.tensor([0, 21], device="cuda")
            window_scores(random(2, heads, window, 80), keys, values, starts=starts, **names)  # type: ignore[arg-type]
    lse = torch.randn(2, 6, 333, device="cuda") + 6
    window_scores(random(2, 6, 5, 80), keys, values, indicator="attention", aggregate="max", reduction="none", pool=5)
    projected_norm(values, random(160, 480).view(160, 6, 80).permute(1, 2, 0))
    column_mass(random(2, 6, 333, 80), keys, lse)
    column_mass(random(2, 6, 333, 80), keys, lse, spans=torch.arange(333, device="cuda").expand(2, -1) // 50 - 1)
    largest(torch.randn(3, 333, device="cuda").round(), torch.tensor([0, 7, 400], device="cuda"))
    offsets = torch.tensor([0, 301, 301, 400, 501], device="cuda")
    flat, tail = (random(501, 96), random(501, 96)), (random(2, 2, 9, 96), random(2, 2, 9, 96))
    ragged_decode(random(2, 6, 1, 96), *flat, offsets, *tail, 7)
    ragged_decode(random(2, 6, 1, 96), *flat, offsets, *tail, 7, emit=("mean", "max"))
    compact(keys, values, torch.randint(-1, 333, (2, 2, 77), device="cuda"))
    pools = random(50, 4, 2, 24), random(50, 4, 2, 24)
    table = torch.randperm(50, device="cuda")[:40].view(2, 20).int()
    kept = torch.rand(2, 80, device="cuda").topk(41).indices.sort().values
    repack(*pools, table, kept)
    fill_holes(*pools, table, kept)
    rms_norm(random(3, 130), random(130), 1e-6)
    rotary(random(2, 5, 7, 24), random(2, 3, 7, 24), random(1, 7, 24), random(1, 7, 24))
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
