"""Packed weights: do products with them agree with plain operations, and how fast are steps?

`packed`: 4 bits against bfloat16 in decode steps, of two shapes. `packed_tiles`: single products, and what
other tiles of the kernel would take.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
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
    for name, config in SHAPES.items():
        print(f"{name}: 4 bits are {speeds(name, config):.2f} times as fast as bfloat16 at 1 row", flush=True)


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
    from pippin.backends.torch.kernels.checks import ROUNDING as ALLOWED, kernel_errors

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


SIZES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28_672, 4096), "down": (4096, 14_336), "head": (128_256, 4096)}
SIZES |= {"0.8B in": (8224, 1024), "0.8B out": (1024, 2048), "0.8B up": (7168, 1024), "0.8B down": (1024, 3584)}
TILE_ROWS = (1, 2, 4, 8, 16, 32, 64)


def packed_tiles() -> None:
    """Products with 4 bits, of the sizes of Llama-3.1-8B and of Qwen3.5-0.8B, in us: by the kernel with its own tile and with
    others (rows of the weight, warps, runs), by cuBLAS with the weight unpacked for it, and with a dense one."""
    with ProcessPoolExecutor(16, get_context("spawn")) as pool:  # kernels are kept on disk
        sizes = sorted({size for _, size in SIZES.values()})
        for _ in pool.map(compile_tiles, *zip(*itertools.product(sizes, TILE_ROWS))):
            pass
    for name, (num_out, size) in SIZES.items():
        time_tiles(name, num_out, size)


def compile_tiles(size: int, num_rows: int) -> None:
    weight, x = packed_weight("int4", 64, 64, size, torch.bfloat16), torch.randn(num_rows, size, device="cuda").bfloat16()
    for run in products_of(num_rows).values():
        run(x, weight)
    torch.cuda.synchronize()


def products_of(num_rows: int) -> dict[str, Callable[[torch.Tensor, Packed], torch.Tensor]]:
    from pippin.backends.torch.kernels.packed.linear import packed_times
    from pippin.backends.torch.kernels.packed.rows import MOST_ROWS, dense_rows, few_rows
    from pippin.backends.torch.kernels.packed.sums import PackedTile

    found = {"unpacked": lambda x, w: torch.nn.functional.linear(x, dense_rows(w)), "ours": lambda x, w: packed_times(x, w, None)}
    few = ((16, 8, 1), (16, 8, 2), (32, 4, 2)) if num_rows <= 4 else ()
    tiles = [PackedTile(num_rows, *of) for of in (*few, (32, 4, 1), (32, 8, 1), (64, 4, 1), (64, 8, 1)) if num_rows <= MOST_ROWS]
    return found | {f"{t.columns}, {t.num_warps}, {t.runs}:": lambda x, w, t=t: few_rows(x, w, None, t) for t in tiles}


def time_tiles(name: str, num_out: int, size: int) -> None:
    copies = max(1, min(40, (200 << 20) // (num_out * size // 2)))  # more than the L2 holds
    weights = [packed_weight("int4", 64, num_out, size, torch.bfloat16) for _ in range(copies)]
    dense = [torch.randn(num_out, size, device="cuda", dtype=torch.bfloat16) for _ in range(max(1, copies // 4))]
    for num_rows in TILE_ROWS:
        x = torch.randn(num_rows, size, device="cuda").bfloat16()
        us = {"dense": replayed_ms(lambda: [torch.nn.functional.linear(x, w) for w in dense]) / len(dense) * 1e3}  # noqa: B023
        products = products_of(num_rows)
        expected = products["unpacked"](x, weights[0]).float()
        for kind, run in products.items():
            off = float((run(x, weights[0]).float() - expected).norm() / expected.norm())
            assert off < ROUNDING[torch.bfloat16], f"{name}, {num_rows} rows, {kind}: off by {off}"
            us[kind] = replayed_ms(lambda: [run(x, w) for w in weights]) / copies * 1e3  # noqa: B023
        floor = weights[0].nbytes / 4.25e12 * 1e6
        print(f"{name}, {num_rows:2} rows: bytes {floor:.1f}; " + "; ".join(f"{kind} {value:.1f}" for kind, value in us.items()), flush=True)
