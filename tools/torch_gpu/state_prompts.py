"""Prompts of Mamba-2 hybrids and of latent attention: are their kernels right, and how fast are they?"""

from __future__ import annotations

from typing import Any

import torch

from torch_gpu.chunks import compare
from torch_gpu.moe import ROUNDING, same_numbers
from torch_gpu.plays import gpu_ms, make_model
from torch_gpu.speed import time_prompts

from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.plain.latent import attend_latent
from pippin.backends.torch.step.sizes import Room

# Granite-4.0-H-Tiny's mixers with a dense feed-forward part, and five of its 40 layers.
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "hidden_size": 1536,
    "shared_intermediate_size": 2048,
    "num_local_experts": 0,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"],
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "attention_multiplier": 0.0078125,
    "mamba_n_heads": 48,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
# GLM-4.7-Flash's mixer with a dense feed-forward part, and four of its 47 layers.
GLM_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154_880,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "num_hidden_layers": 4,
    "num_attention_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-5,
}
SHAPES = {"Granite 4": GRANITE, "GLM-4.7-Flash": GLM_FLASH}
DEVICE, HALF = "cuda", torch.bfloat16
ROOMS = (Room(64, 4), Room(512, 4), Room(2048, 16))
KERNELS = True  # False: where there are none, plain operations are compared with themselves
LATENTS = ((0, 64), (3000, 64), (3000, 200), (30_000, 2048))  # tokens before, and new ones


def state_prompts() -> None:
    for name, config in SHAPES.items():
        loaded = make_model(config, torch.float32, DEVICE)
        plain, launched, captured = (
            TorchBackend(loaded, num_slots=16, kernels=kernels, chunk_graphs=graphs)
            for kernels, graphs in ((False, False), (KERNELS, False), (KERNELS, KERNELS))
        )
        for way, backend in (("launched chunks", launched), ("captured chunks", captured)):
            for num_rows in (1, 3):
                same_numbers(f"{name}, {num_rows} rows, {way}", backend, plain, num_rows)
        for room in ROOMS if KERNELS else ():
            compare(launched, captured, room, "float32")
    for dtype in ROUNDING:
        for context, new in LATENTS:
            latents(dtype, context, new)
    for name, config in SHAPES.items():
        print(f"\n{name}, {len(config.get('layer_types', range(4)))} layers, {HALF}", flush=True)
        time_prompts(make_model(config, HALF, DEVICE))


def latents(dtype: torch.dtype, context: int, new: int) -> None:
    """One layer's attention of a chunk behind a context, in stretches where it is long."""
    from pippin.backends.torch.kernels.attention.blocks import attend_blocks
    from pippin.backends.torch.models.attention_layer import Scoring
    from pippin.backends.torch.step.chunk_inputs import BlockInputs
    from pippin.types import GRID

    layer = make_model(GLM_FLASH | {"num_hidden_layers": 1, "vocab_size": 1000}, dtype, DEVICE).decoder.layers[0].mixer
    shape = layer.shape
    generator = torch.Generator(DEVICE).manual_seed(new)
    cells = torch.randn(context + new + 2, shape.rank + shape.rope.dim, generator=generator, device=DEVICE).to(dtype)
    cells[0] = 0.0
    held = 2 + torch.randperm(context + new, generator=generator, device=DEVICE)
    q = torch.randn(new, shape.num_heads, shape.plain_dim + shape.rope.dim, generator=generator, device=DEVICE).to(dtype)
    starts = torch.arange(0, new, GRID, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros_like(starts)
    blocks = BlockInputs(zeros, starts + context, starts, (new - starts).clamp(max=GRID), zeros, zeros, zeros)
    absorbed, table = layer.absorb(q).transpose(0, 1), held.int()[None]

    def attend() -> torch.Tensor:
        return attend_blocks(absorbed, cells, table, blocks, Scoring(shape.scale), shape.rank)

    found = layer.values_of(attend().transpose(0, 1)).float()
    expected = attend_latent(layer, q, cells[held]).float()
    off = float((found - expected).norm() / expected.norm())
    taken, plain = gpu_ms(attend, repeats=10), gpu_ms(lambda: attend_latent(layer, q, cells[held]), repeats=5)
    flops = 2.0 * shape.num_heads * new * (context + new / 2) * (2 * shape.rank + shape.rope.dim)
    print(f"latents, {dtype}, {new} tokens behind {context}: off by {off:.1e}, {taken:.3f} ms, {flops / taken * 1e-9:.0f} TFLOP/s; plain operations {plain:.3f} ms", flush=True)
    assert off < ROUNDING[dtype], "the kernels compute something else"
