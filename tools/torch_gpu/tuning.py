"""Where does a step's time go, and which sizes of kernels would be faster?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_gpu.plays import CONTEXT, Play, random_model, replayed_ms

from pippin.backends.torch.backend import TorchBackend


def recurrence() -> None:
    """Ways to go through the states of one layer, against the time that their bytes take."""
    from pippin.backends.torch.kernels.recurrent.delta_step import StateTile, delta_step, state_tile_for

    backend = TorchBackend(random_model(), num_slots=4, pool_bytes=8 << 30)
    layer = random_model().decoder.layers[0]
    mixer, state = layer.mixer, backend.runner.pools.recurrent[layer.number]
    for num_rows in (1, 8, 32, 64):
        projected = torch.randn(num_rows, mixer.project.weight.shape[0], device="cuda").bfloat16()
        slabs = torch.arange(2, 2 + num_rows, device="cuda", dtype=torch.int32)
        floor = num_rows * 16 * 128 * 128 * 4 * 2 / 4.3e12 * 1e6
        found = {}
        tiles = [StateTile(c, w, s) for c in (16, 32, 64, 128) for w in (2, 4, 8) for s in (1, 2, 3) if c * s <= 192]
        for tile in tiles:
            found[tile] = replayed_ms(lambda t=tile: [delta_step(projected, mixer, state, slabs, slabs, t) for _ in range(20)]) / 20 * 1e3
        ours = state_tile_for(num_rows * 16, 128)
        best = sorted(found.items(), key=lambda item: item[1])[:4]
        names = "; ".join(f"{t.columns} columns, {t.num_warps} warps, {t.num_stages} stages {us:.1f}" for t, us in best)
        print(f"{num_rows} rows: bytes {floor:.1f} us; ours {found[ours]:.1f}; {names}", flush=True)


def products() -> None:
    """Tiles of the product kernels, for the shapes of a step of one row and of four; cuBLAS beside them."""
    import torch.nn.functional as F  # noqa: N812

    from pippin.backends.torch.kernels.epilogues import Tile
    from pippin.backends.torch.kernels.products import product
    from pippin.backends.torch.models.parts import Linear

    device = torch.device("cuda")
    shapes = {"in_proj": (8224, 1024, False), "out_proj": (1024, 2048, False), "gate_up": (7168, 1024, True), "down": (1024, 3584, False), "head": (248_320, 1024, False)}
    for name, (num_out, size, gated) in shapes.items():
        copies = max(1, (200 << 20) // (num_out * size * 2))  # more than the L2 holds
        weights = [torch.randn(num_out, size, device=device).bfloat16() * 0.02 for _ in range(copies)]
        block_k = 1 << (size - 1).bit_length()
        tiles = {1: [Tile(n, block_k, w) for n in (2, 4, 8) for w in (2, 4, 8)], 4: [Tile(16, min(k, block_k), w) for k in (512, 1024, 2048) for w in (2, 4, 8)]}
        for num_rows, tried in tiles.items():
            x = torch.randn(num_rows, size, device=device).bfloat16()

            def timed(run: Callable[[torch.Tensor], object]) -> float:
                return replayed_ms(lambda: [run(w) for w in weights]) / copies * 1e3

            found = {"cuBLAS": timed(lambda w, x=x: F.linear(x, w))}
            for tile in tried:
                try:
                    found[str(tile)] = timed(lambda w, t=tile, x=x: product(x, Linear(w), swiglu=gated, tile=t))
                except Exception as error:  # noqa: BLE001
                    found[f"{tile}: {type(error).__name__}"] = 1e9
            best = sorted(found.items(), key=lambda item: item[1])[:4]
            floor = num_out * size * 2 / 4.3e12 * 1e6
            print(f"{name}, {num_rows} rows: read {floor:.1f} us; cuBLAS {found['cuBLAS']:.1f}; " + "; ".join(f"{key} {us:.1f}" for key, us in best), flush=True)


def profile() -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    backend = TorchBackend(random_model(), num_slots=64, pool_bytes=8 << 30)
    for num_rows in (1, 32):
        play = Play(backend, num_rows, CONTEXT)
        play.decode(5)
        with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            play.decode(10)
            torch.cuda.synchronize()
        play.end()
        print(f"{num_rows} rows, 10 steps")
        print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=40))
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        Play(backend, 1, 8192).end()
        torch.cuda.synchronize()
    print("a prompt of 8,192 tokens")
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=40))
