"""Decode steps: how fast, in bfloat16 and with packed weights; and do products with those agree with plain operations?"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from torch_gpu.plays import CONTEXT, DRAWN, GREEDY, Play, Requests, make_model, random_model, replay_ms

from make_random_hybrid import LLAMA_3_2_1B, QWEN3_0_6B, QWEN3_5_0_8B, TINY, RandomWeights
from pippin.backends.base import Admit, PrefillRow
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


def decode() -> None:
    table = []
    backend = TorchBackend(random_model(), num_slots=64, pool_bytes=8 << 30)
    for num_rows in (1, 2, 4, 8, 32, 64):
        for params, name in ((GREEDY, "greedy"), (DRAWN, "drawn")):
            play = Play(backend, num_rows, CONTEXT, params)
            began = time.perf_counter()
            play.decode(2)
            captured = time.perf_counter() - began
            wall = statistics.median(play.decode(60)[20:]) * 1e3
            device = replay_ms(backend, play, params)
            play.end()
            table.append((num_rows, name, device, wall))
            print(f"{num_rows:3} rows, {name}: replay {device:.3f} ms, served {wall:.3f} ms a step, first {captured:.1f} s", flush=True)
    print("\n| rows | tokens | replay, ms | served, ms a step |\n|---|---|---|---|")
    for num_rows, name, device, wall in table:
        print(f"| {num_rows} | {name} | {device:.3f} | {wall:.3f} |")
    for chunk in (8192, 2048, 512):
        print(f"a prompt of 8,192 tokens in chunks of {chunk}: {prompt_ms(backend, 8192, chunk):.1f} ms", flush=True)


def prompt_ms(backend: TorchBackend, length: int, chunk: int) -> float:
    """From the first launch to the last result; the best of four."""
    prompt = np.random.default_rng(0).integers(10, backend.spec.vocab_size, length).astype(np.int32)
    times = []
    for _ in range(4):
        requests = Requests(backend, 1)
        requests.take(requests.launch(admit=(Admit(1, GREEDY, (), prompt, 1),)))
        began = time.perf_counter()
        starts = range(0, length, chunk)
        pending = [requests.launch(prefill=(PrefillRow(1, at, prompt[at : at + chunk], samples=at + chunk >= length),)) for at in starts]
        for step in pending:
            requests.take(step)
        times.append(time.perf_counter() - began)
        requests.end()
    return min(times) * 1e3


def packed() -> None:
    for dtype in ROUNDING:
        same_products(dtype)
    same_steps()
    for name, config in SHAPES.items():
        print(f"{name}: 4 bits are {speeds(name, config):.2f} times as fast as bfloat16 at 1 row", flush=True)


def same_products(dtype: torch.dtype, sizes: tuple[tuple[int, int], ...] = ((1000, 1024), (72, 3584)), device: str = "cuda") -> None:
    from pippin.backends.torch.kernels.packed.products import packed_times

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
