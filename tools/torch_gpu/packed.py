"""Packed weights: do products with them agree with plain operations, and how fast are steps?

`packed`: 4 bits against bfloat16 in decode steps, of two shapes. `packed_tiles`: what other tiles of the
kernels would take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_gpu.plays import CONTEXT, GREEDY, Play, make_model, replayed_ms
from torch_gpu.speed import replay_ms

from make_random_hybrid import LLAMA_3_2_1B, QWEN3_0_6B, QWEN3_5_0_8B, TINY, RandomWeights
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.load import LoadedModel
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.models.packed import Packed, pack, times

LLAMA_3_1_8B_8 = LLAMA_3_2_1B | {"hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128, "num_hidden_layers": 8}
SHAPES = {
    "Qwen3.5-0.8B": QWEN3_5_0_8B,
    "Qwen3-0.6B": QWEN3_0_6B,
    "Llama-3.2-1B": LLAMA_3_2_1B,
    "eight layers of Llama-3.1-8B": LLAMA_3_1_8B_8,
}
BAR = 1.8  # times faster with 4 bits, at one row
ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
KINDS = (("int4", 64), ("int8", 64), ("fp4", 32), ("fp8", 128))


class QuantizedWeights(RandomWeights):
    """As mlx stores them: every product, the embedding and the head, in groups of 64."""

    bits, group = 4, 64

    def has(self, name: str) -> bool:
        is_norm = "norm." in name or "conv1d" in name
        return super().has(name) and not (is_norm and name.endswith((".scales", ".biases")))

    def name_in_file(self, name: str) -> str:
        return name

    def stored(self, name: str) -> torch.Tensor:
        layer, _, part = name.rpartition(".")
        values = self.take(f"{layer}.weight", exact=True).unflatten(-1, (-1, self.group))
        low = values.amin(-1)
        scales = ((values.amax(-1) - low) / (2**self.bits - 1)).to(self._dtype)
        biases = low.to(self._dtype)
        if part != "weight":
            return scales if part == "scales" else biases
        codes = ((values - biases[..., None]) / scales[..., None]).round().clamp(0, 2**self.bits - 1)
        parts = codes.to(torch.int64).flatten(-2).unflatten(-1, (-1, 32 // self.bits))
        words = sum(parts[..., i] << (self.bits * i) for i in range(32 // self.bits))
        assert isinstance(words, torch.Tensor)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def quantized_model(config: dict[str, Any], dtype: torch.dtype, device: str = "cuda") -> LoadedModel:
    options = {"bits": QuantizedWeights.bits, "group_size": QuantizedWeights.group}
    shape, where = read_shape(config | {"quantization": options}), torch.device(device)
    with torch.inference_mode():
        decoder = build_decoder(shape, QuantizedWeights(shape, dtype, where), dtype, where, shape.max_len)
    return LoadedModel(decoder, "random", shape.max_len)


def packed_weight(numbers: str, group: int, num_out: int, size: int, dtype: torch.dtype, device: str = "cuda") -> Packed:
    codes = torch.randint(0, 16 if numbers.endswith("4") else 256, (num_out, size), device=device, dtype=torch.uint8)
    if numbers == "fp8":
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)  # NaN
    scales = torch.rand(num_out, size // group, device=device) * 0.01 + 0.01
    if numbers == "fp4":
        scales = torch.randint(115, 122, scales.shape, device=device, dtype=torch.uint8)
    elif numbers != "fp8":
        scales = scales.to(dtype)
    offsets = -scales * 8 if numbers.startswith("int") else None
    return pack(codes, scales, offsets, numbers, dtype)


def packed() -> None:
    for dtype in ROUNDING:
        same_products(dtype)
    same_steps()
    ratios = {name: speeds(name, config) for name, config in SHAPES.items()}
    for name, ratio in ratios.items():
        print(f"{name}: 4 bits are {ratio:.2f} times as fast as bfloat16 at 1 row; {BAR} is the bar", flush=True)
    assert min(ratios.values()) >= BAR, "4 bits are too slow at one row"


def same_products(dtype: torch.dtype, sizes: tuple[tuple[int, int], ...] = ((1000, 1024), (72, 3584)), device: str = "cuda") -> None:
    from pippin.backends.torch.kernels.packed.linear import packed_times

    for numbers, group in KINDS:
        worst = 0.0
        for num_out, size in sizes:
            weight = packed_weight(numbers, group, num_out, size, dtype, device)
            bias = torch.randn(num_out, device=device).to(dtype)
            for num_rows in (1, 2, 8, 32, 64, 200):
                x = torch.randn(num_rows, size, device=device).to(dtype)
                found, expected = packed_times(x, weight, bias).float(), times(x, weight, bias).float()
                worst = max(worst, float((found - expected).norm() / expected.norm()))
        print(f"{numbers}, {dtype}: off by {worst:.1e} of plain operations", flush=True)
        assert worst < ROUNDING[dtype], "the kernels compute something else"


def same_steps() -> None:
    """What is tried at load, of a small packed hybrid: decode steps, chunks, captured chunks."""
    from pippin.backends.torch.kernels.checks.agreement import ROUNDING as ALLOWED, kernel_errors

    for dtype in (torch.float32, torch.bfloat16):
        loaded = quantized_model(TINY, dtype)
        with torch.cuda.stream(torch.cuda.Stream()):
            for what, off in kernel_errors(loaded.decoder, drafts=True):
                assert off is not None and off <= ALLOWED[dtype], f"{what}, {dtype}: off by {off}"
    print("a small packed hybrid: steps, drafts and chunks agree with plain operations", flush=True)


def speeds(name: str, config: dict[str, Any]) -> float:
    """The ratio at one row."""
    found: dict[str, dict[int, float]] = {}
    for kind, make in (("bfloat16", make_model), ("4 bits", quantized_model)):
        loaded = make(config, torch.bfloat16)
        backend = TorchBackend(loaded, num_slots=32, pool_bytes=4 << 30)
        assert backend.has_kernels, "plain operations would be measured"
        found[kind] = {}
        for num_rows in (1, 2, 4, 8, 32):
            play = Play(backend, num_rows, CONTEXT, GREEDY)
            play.decode(3)
            found[kind][num_rows] = replay_ms(backend, play, GREEDY)
            play.end()
        print(f"{name}, {kind}: {loaded.decoder.nbytes / 1e9:.2f} GB of weights", flush=True)
        backend.close()
    print("\n| rows | bfloat16, ms | 4 bits, ms | times faster |\n|---|---|---|---|")
    for num_rows, dense in found["bfloat16"].items():
        few = found["4 bits"][num_rows]
        print(f"| {num_rows} | {dense:.3f} | {few:.3f} | {dense / few:.2f} |", flush=True)
    return found["bfloat16"][1] / found["4 bits"][1]


PRODUCTS = {"in_proj": (8224, 1024), "out_proj": (1024, 2048), "gate_up": (7168, 1024), "down": (1024, 3584), "head": (248_320, 1024)}


def packed_tiles() -> None:
    """Tiles of products with 4 bits, of the shapes of Qwen3.5-0.8B: one row, 8, 32, 64 and 128."""
    from pippin.backends.torch.kernels.epilogues import NO_EPILOGUE
    from pippin.backends.torch.kernels.packed.products import PackedRowTile, packed_row_tile_for, row_product
    from pippin.backends.torch.kernels.packed.rows import PackedTile, dense_rows, few_rows

    for name, (num_out, size) in PRODUCTS.items():
        copies = max(1, (100 << 20) // (num_out * size // 2))  # more than the L2 holds
        weights = [packed_weight("int4", 64, num_out, size, torch.bfloat16) for _ in range(copies)]

        def timed(run: Callable[[Packed], object]) -> float:
            return replayed_ms(lambda: [run(weight) for weight in weights]) / copies * 1e3

        floor = weights[0].nbytes / 4.3e12 * 1e6
        x = torch.randn(1, size, device="cuda").bfloat16()
        found = {}
        for tile in [PackedRowTile(n, warps) for n in (2, 4, 8, 16) for warps in (1, 2, 4, 8)]:
            found[tile] = timed(lambda w, t=tile: row_product(x, w, None, None, NO_EPILOGUE, t))
        ours = timed(lambda w: row_product(x, w, None, None, NO_EPILOGUE))
        show(name, 1, floor, ours, found, packed_row_tile_for(num_out, weights[0].words.shape[1]))
        for num_rows in (8, 32, 64):
            x = torch.randn(num_rows, size, device="cuda").bfloat16()
            rows = max(16, num_rows)
            tiles = [PackedTile(rows, c, w, warps, s) for c in (16, 32, 64) for w in (16, 32, 64) for warps, s in ((4, 2), (4, 3), (2, 3))]
            few: dict[Any, float] = {}
            for few_tile in tiles[:: 1 if name in ("gate_up", "down") else 3]:
                few[few_tile] = timed(lambda w, t=few_tile: few_rows(x, w, None, t))
            dense = timed(lambda w: torch.nn.functional.linear(x, dense_rows(w)))
            print(f"{name}, {num_rows} rows, unpacked for cuBLAS: {dense:.1f} us")
            show(name, num_rows, floor, timed(lambda w: few_rows(x, w, None)), few, None)


def show(name: str, num_rows: int, floor: float, ours: float, found: dict[Any, float], tile: object) -> None:
    best = "; ".join(f"{tile} {us:.1f}" for tile, us in sorted(found.items(), key=lambda item: item[1])[:4])
    print(f"{name}, {num_rows} rows: bytes {floor:.1f} us; ours {ours:.1f} {tile or ''}; best: {best}", flush=True)
