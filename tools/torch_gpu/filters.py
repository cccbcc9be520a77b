"""top_p of a whole vocabulary without a sort: does it keep what a sort keeps, and what does it take?"""

from __future__ import annotations

import torch

from torch_gpu.plays import gpu_ms, replayed_ms

from pippin.backends.torch.step import filters

VOCAB = 248_320
KINDS = ("spread", "peaked", "tied", "masked", "level")
SHARES = (1e-6, 0.3, 0.9, 0.95, 1 - 2**-24)
# Of a row's probability: exponentials are rounded in another way, and sums end elsewhere.
ROUNDING = 1e-6


def top_p() -> None:
    from pippin.backends.torch.kernels.top_p import least_in_top_p

    for kind in KINDS:
        x = logits(kind, 4)
        for share in SHARES:
            for floor in (0.0, 0.01):
                columns = [torch.full((4,), value, device="cuda") for value in (share, floor)]
                found, expected = least_in_top_p(x, *columns), filters.least_in_top_p(x, *columns)
                more, less = torch.minimum(found, expected), torch.maximum(found, expected)
                # Equal logits are kept or dropped together: those at the lower threshold may be the whole difference.
                between = ((x >= more[:, None]) & (x < less[:, None])).double()
                alone = (between * torch.softmax(x.double(), dim=1)).sum(dim=1)
                tied = (x == more[:, None]).double() * torch.softmax(x.double(), dim=1)
                assert (alone <= ROUNDING + tied.sum(dim=1)).all(), f"{kind}, top_p {share}, min_p {floor}: {alone.tolist()} of the probability is kept by one alone"
                again = least_in_top_p(x, *columns)
                assert torch.equal(again, found), "another run keeps other tokens"
    print("without a sort the same tokens are kept", flush=True)
    print("\n| rows | by a sort, ms | without, replayed, ms |\n|---|---|---|")
    for num_rows in (1, 8, 32, 128):
        x = logits("spread", num_rows)
        columns = [torch.full((num_rows,), value, device="cuda") for value in (0.95, 0.0)]
        by_sort = gpu_ms(lambda: filters.least_in_top_p(x, *columns), repeats=8)
        without = replayed_ms(lambda: least_in_top_p(x, *columns))
        print(f"| {num_rows} | {by_sort:.3f} | {without:.3f} |", flush=True)


def logits(kind: str, num_rows: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(KINDS.index(kind))
    x = 2.0 * torch.randn(num_rows, VOCAB, generator=generator, device="cuda")
    match kind:
        case "peaked":
            return x * 6
        case "tied":
            return (x * 4).round() / 4
        case "masked":
            return x.masked_fill(torch.rand(x.shape, generator=generator, device="cuda") < 0.7, -torch.inf)
        case "level":
            return torch.full_like(x, 1.5)
    return x
