"""Experts: kernels and captured graphs against plain operations; and what is tried at load, of every kind of model."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from torch_gpu.mixed import compare
from torch_gpu.plays import make_model
from torch_gpu.right import reply_of

from make_random_hybrid import QWEN3_5_0_8B, TINY
from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.backends.torch.load import LoadedModel
from pippin.backends.torch.models.parts import ExpertMlp
from pippin.backends.torch.step.words import room
from pippin.types import SamplingParams

DEVICE, HALF = "cuda", torch.bfloat16
SCORED = SamplingParams(temperature=0.0, logprobs=5)
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 8500,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 24,
    "num_experts_per_tok": 5,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 160,
}
ATTENTION_MOE = SIZES | EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [1], "shared_expert_intermediate_size": 0}
HYBRID_MOE = TINY | {
    "model_type": "qwen3_5_moe",
    "text_config": TINY["text_config"] | EXPERTS | {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4},
}
MODELS = {"attention": ATTENTION_MOE, "hybrid": HYBRID_MOE}
BIASED = {
    "llama": SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": SIZES | {"model_type": "qwen2"},
    "qwen3": SIZES | {"model_type": "qwen3", "attention_bias": True},
    "hybrid": TINY | {"text_config": TINY["text_config"] | {"attention_bias": True, "num_hidden_layers": 4}},
}
# Of one layer's result, by its norm: kernels add up in float32, and round where plain ones round.
ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
NEAR = 1e-2  # of log probabilities in float32


def model(config: dict[str, Any], dtype: torch.dtype) -> LoadedModel:
    return make_model(config, dtype, DEVICE)


def moe() -> None:
    for dtype in ROUNDING:
        for num_tokens in (1, 2, 7, 33, 256, 2048):
            same_layer(dtype, num_tokens)
    for name, config in MODELS.items():
        loaded = model(config, torch.float32)
        plain = TorchBackend(loaded, num_slots=8, kernels=False)
        launched, captured = (TorchBackend(loaded, num_slots=8, kernels=True, chunk_graphs=on) for on in (False, True))
        for num_rows in (1, 3, 8):
            for other, backend in (("launched chunks", launched), ("captured chunks", captured)):
                same_numbers(f"{name}, {num_rows} rows, captured steps, {other}", backend, plain, num_rows)
        for size in (room(64, 4), room(512, 4), room(256, 16)):
            if size.least_chunks <= 8:
                compare(launched, captured, size, "float32")
        print(f"{name}: captured chunks say what launched ones say", flush=True)
        deterministic(name, config)


def same_layer(dtype: torch.dtype, num_tokens: int) -> None:
    """One layer of experts: of the same routes, and replayed to the bit."""
    from pippin.backends.torch.kernels.layers import feed_forward, run_experts
    from pippin.backends.torch.kernels.experts import route

    for name, config in MODELS.items():
        mlp = model(config, dtype).decoder.layers[0].mlp
        assert isinstance(mlp, ExpertMlp)
        x = torch.randn(num_tokens, mlp.gate_up.shape[2], device="cuda").to(dtype)
        routes = route(mlp.router(x), mlp.shape)
        shares, _ = mlp.route(x)
        off = float((routes.weights.float() - shares.float()).abs().max())
        assert off < ROUNDING[dtype], f"{name}, {dtype}: shares of routes are off by {off:.1e}"
        expected = mlp.run(x, routes.weights, routes.chosen.long()).float()
        if mlp.shared is not None and mlp.shared_gate is not None:
            expected = expected + (torch.sigmoid(mlp.shared_gate(x)) * mlp.shared(x)).float()
        found = run_experts(mlp, x, routes)
        off = float((found.float() - expected).norm() / expected.norm())
        print(f"{name}, {dtype}, {num_tokens} tokens: off by {off:.1e} of plain operations", flush=True)
        assert off < ROUNDING[dtype], "the kernels compute something else"
        launched = feed_forward(mlp, x).clone()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            recorded = CudaGraphs(torch.device("cuda")).record(lambda: feed_forward(mlp, x))
            recorded.replay()
            torch.cuda.synchronize()
            assert torch.equal(recorded.result, launched), "a replay says something else"


def same_numbers(what: str, found: TorchBackend, expected: TorchBackend, num_rows: int) -> None:
    """float32: the same tokens, and much the same log probabilities."""
    mine, theirs = (reply_of(backend, num_rows, SCORED) for backend in (found, expected))
    worst = 0.0
    for slot in mine.slots:
        assert mine.tokens[slot] == theirs.tokens[slot], f"{what}: {mine.tokens[slot]}, plain {theirs.tokens[slot]}"
        for a, b in zip(mine.logprobs[slot], theirs.logprobs[slot]):
            worst = max(worst, *(abs(x - y) for x, y in zip(a.top_logprobs, b.top_logprobs)))
    print(f"{what}: the same tokens, log probabilities within {worst:.1e}", flush=True)
    assert worst < NEAR, "the kernels compute something else"


def deterministic(name: str, config: dict[str, Any]) -> None:
    """In half precision: to the bit, alone and in company, in any order, and again."""
    backend = TorchBackend(model(config, HALF), num_slots=8, deterministic=True)
    alone = {slot: said(backend, (slot,))[slot] for slot in range(1, 9)}
    for slots in ((1, 2, 3, 4, 5, 6, 7, 8), (5, 3, 1), (8, 2), (1, 2, 3, 4, 5, 6, 7, 8)):
        for slot, lines in said(backend, slots).items():
            assert lines == alone[slot], f"{name}: slot {slot} in company {slots} says something else"
    print(f"{name}: --deterministic is the same to the bit, alone and in company", flush=True)


def said(backend: TorchBackend, slots: tuple[int, ...]) -> dict[int, list[Any]]:
    """Tokens and log probabilities of requests that start and decode together."""
    prompts = {s: np.random.default_rng(s).integers(10, 8000, 40 + 30 * s).astype(np.int32) for s in slots}
    lines: dict[int, list[Any]] = {slot: [] for slot in slots}

    def take(**fields: Any) -> None:
        result = backend.launch(StepPlan(0, **fields)).wait()
        for slot, (token,) in result.tokens.items():
            lines[slot].append((token, tuple(result.logprobs[slot][0].top_logprobs)))

    rows = tuple(PrefillRow(s, 0, p, samples=True) for s, p in prompts.items())
    take(admit=tuple(Admit(s, SCORED, (), p, seed=s) for s, p in prompts.items()), prefill=rows)
    for step in range(10):
        take(decode=tuple(DecodeRow(s, len(p) + step) for s, p in prompts.items()))
    backend.launch(StepPlan(0, retire=tuple(Retire(slot) for slot in slots))).wait()
    return lines


def agreement() -> None:
    """What is tried at load: the kernels agree on every model here, and it takes seconds."""
    from pippin.backends.fallbacks import Fallbacks
    from pippin.backends.torch.kernels.checks import ALL, our_kernels_agree

    configs = [*MODELS.items(), *BIASED.items(), ("Qwen3.5-0.8B", QWEN3_5_0_8B)]
    for name, config in configs:
        for dtype in ROUNDING:
            loaded = model(config, dtype)
            times = []
            for _ in range(2):  # the first one compiles kernels
                torch.cuda.synchronize()
                began = time.perf_counter()
                with torch.cuda.stream(torch.cuda.Stream()):
                    agreed = our_kernels_agree(loaded.decoder, loaded.max_len, 256, Fallbacks())
                assert agreed == ALL, f"{name}, {dtype}: see the warning"
                times.append(time.perf_counter() - began)
            print(f"{name}, {dtype}: kernels agree, tried in {times[1]:.2f} s, first {times[0]:.1f} s", flush=True)
            assert times[1] < 5.0, "this is too slow for every start"
