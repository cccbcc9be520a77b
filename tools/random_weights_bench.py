"""Prefill and decode of a model's shape with random weights: Pippin and mlx-lm in one run.

    python tools/random_weights_bench.py [--shape qwen3-0.6b] [--rows 1 8 32] [--context 512]

The shape is Qwen3.5-0.8B's or Qwen3-0.6B's, in bfloat16 on GPUs. Needs no checkpoint, so that it
runs where there is nothing to download from. Times are medians of steps in a pipeline that is two
steps deep.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import pippin.backends.mlx  # noqa: F401  (the fast BLAS, before mlx)

# isort: split
import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3, qwen3_5
from mlx_lm.models.cache import ArraysCache, BatchKVCache, make_prompt_cache

from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows

HYBRID: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "vocab_size": 248_320,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}


PLAIN: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "vocab_size": 151_936,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
}

PROMPT_CHUNK = 512
SHAPES = {"qwen3.5-0.8b": HYBRID, "qwen3-0.6b": PLAIN}


def random_model(dtype: mx.Dtype, shape: dict[str, Any] = HYBRID) -> Module:
    mx.random.seed(0)
    module = {"qwen3_5": qwen3_5, "qwen3": qwen3}[shape["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(shape))
    weights = [
        (name, (mx.random.normal(w.shape) * 0.02).astype(dtype) if w.ndim > 1 else w.astype(dtype))
        for name, w in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def tokens(rows: int, n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(10, 200_000, (rows, n)).astype(np.int32)


def pippin_prompt(loaded: LoadedModel, ids: np.ndarray, chunk: int) -> PromptState:
    prompt = PromptState()
    for start in range(0, len(ids), chunk):
        batch = ChunkBatch(loaded.layout, [ids[start : start + chunk]], [prompt])
        loaded.head.positions = mx.array(batch.last_positions[:, None])
        logits = loaded.forward(batch.tokens, batch.caches)
        batch.advance()
        mx.async_eval(logits, *prompt.arrays())
    loaded.head.positions = None
    mx.eval(logits, *prompt.arrays())
    return prompt


class PippinDecode:
    def __init__(self, loaded: LoadedModel, rows: int, context: int, *, plain: bool) -> None:
        self._forward = DecodeForward(loaded.layout, loaded.forward, compiled=not plain)
        self._rows = DecodeRows(loaded.layout, loaded.attention)
        prompts = [pippin_prompt(loaded, ids, 2048) for ids in tokens(rows, context)]
        self._rows.join(list(enumerate(prompts, start=1)))
        self._slots = list(range(1, rows + 1))
        self._drawn = mx.zeros(self._rows.width, mx.int32)

    def step(self) -> mx.array:
        _, logits = self._rows.advance(self._slots, lambda _: self._drawn, self._forward)
        self._drawn = mx.argmax(logits, axis=-1).astype(mx.int32)
        mx.async_eval(self._drawn, *self._rows.arrays())
        return self._drawn


class MlxLmDecode:
    def __init__(self, model: Module, rows: int, context: int) -> None:
        self._model = model
        cache = make_prompt_cache(model)
        if rows > 1:
            cache = [c if isinstance(c, ArraysCache) else BatchKVCache([0] * rows) for c in cache]
        self._cache = cache
        prompt = tokens(rows, context)
        for start in range(0, context, PROMPT_CHUNK):  # logits of all positions would be 80 GB
            logits = model(mx.array(prompt[:, start : start + PROMPT_CHUNK]), cache=cache)
            self._drawn = mx.argmax(logits[:, -1], axis=-1)
            mx.eval(self._drawn)

    def step(self) -> mx.array:
        logits = self._model(self._drawn[:, None], cache=self._cache)
        self._drawn = mx.argmax(logits[:, -1], axis=-1)
        mx.async_eval(self._drawn)
        return self._drawn


def step_ms(decode: PippinDecode | MlxLmDecode, steps: int) -> float:
    """Median time between results, two steps in flight; the first third warms up."""
    waiting = decode.step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        following = decode.step()
        mx.eval(waiting)
        waiting = following
        times.append(time.perf_counter() - began)
    mx.eval(waiting)
    return statistics.median(times[steps // 3 :]) * 1e3


def measure_pippin(shape: dict[str, Any], dtype: mx.Dtype, args: argparse.Namespace) -> None:
    loaded = prepare(random_model(dtype, shape), shape)
    packed = loaded.attention.kernel is not None
    print("pippin: packed rows:", packed, "taps:", loaded.state_taps, flush=True)
    ids = tokens(1, args.prefill)[0]
    for chunk in (512, 2048, args.prefill):
        pippin_prompt(loaded, ids, chunk)
        seconds = min(timed(lambda c=chunk: pippin_prompt(loaded, ids, c)) for _ in range(3))
        print(f"pippin prefill, chunks of {chunk}: {len(ids) / seconds:,.0f} tok/s", flush=True)
    for rows in args.rows:
        for plain in (True, False):
            mx.reset_peak_memory()
            ms = step_ms(PippinDecode(loaded, rows, args.context, plain=plain), args.steps)
            name = "plain" if plain else "compiled"
            peak = mx.get_peak_memory() / 2**30
            print(f"pippin decode, {rows} rows, {name}: {ms:.2f} ms, {peak:.2f} GiB", flush=True)


def measure_mlx_lm(shape: dict[str, Any], dtype: mx.Dtype, args: argparse.Namespace) -> None:
    stock = random_model(dtype, shape)
    hybrid = shape is HYBRID  # a prompt of many tokens would take minutes without a Metal kernel
    for rows in args.rows:
        mx.reset_peak_memory()
        context = min(args.context, 64) if hybrid else args.context
        ms = step_ms(MlxLmDecode(stock, rows, context), args.steps)
        peak = mx.get_peak_memory() / 2**30
        print(f"mlx-lm decode, {rows} rows: {ms:.2f} ms, {peak:.2f} GiB", flush=True)
    cut = mx.array(tokens(1, max(256, args.prefill // 8)))

    def stock_prefill() -> None:
        mx.eval(stock(cut, cache=make_prompt_cache(stock)))

    seconds = timed(stock_prefill)
    print(f"mlx-lm prefill of {cut.shape[1]}: {cut.shape[1] / seconds:,.0f} tok/s", flush=True)


SIDES = {"pippin": measure_pippin, "mlx-lm": measure_mlx_lm}


def main() -> None:
    parser = argparse.ArgumentParser(description="Pippin and mlx-lm on random weights")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--side", choices=SIDES, nargs="+", default=list(SIDES))
    args = parser.parse_args()
    print("device", mx.default_device(), mx.device_info(mx.default_device()), flush=True)
    cpu = mx.default_device() == mx.Device(mx.cpu)
    for side in args.side:
        SIDES[side](SHAPES[args.shape], mx.float32 if cpu else mx.bfloat16, args)
        mx.clear_cache()


if __name__ == "__main__":
    main()
