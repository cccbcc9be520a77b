"""Divides one memory budget between several models. Reads no weights, and knows no engine.

As many models as fit at the same time, whichever they are, share what their weights leave:

    any k models fit:   weights of the k largest + least KV cache of each  <=  budget
    a model's claim:    its own least + (budget - the k largest) / k
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pippin.amounts import option_bytes, parse_memory, show_bytes, split_amount
from pippin.backends.host import host_memory_bytes
from pippin.backends.nvidia import memory_bytes
from pippin.config import Config
from pippin.errors import LoadError
from pippin.text.tokenizer import read_json

SHARE_OF_GPU, SHARE_OF_METAL, SHARE_OF_HOST = 0.85, 0.65, 0.5
SPARE = 1.3  # buffers of steps, as a factor of the weights
ENGINE_BYTES = 64_000_000
LEAST_TOKENS = 4096  # of KV cache
SIXTEEN_BITS = ("bfloat16", "float16")


def budget_bytes(config: Config) -> int:
    """`--memory` for all models together. `config` is resolved."""
    amount, num_parts = split_amount(config.engine.memory)
    of_gpu = memory_bytes() if config.model.backend == "torch" else None
    device = of_gpu or host_memory_bytes()
    if amount == "auto":
        on_metal = platform.system() == "Darwin"
        host_share = SHARE_OF_METAL if on_metal else SHARE_OF_HOST
        return int(device * (SHARE_OF_GPU if of_gpu else host_share)) // num_parts
    parsed = parse_memory(amount)
    return (int(device * parsed) if isinstance(parsed, float) else parsed) // num_parts


def least_bytes(config: Config) -> int:
    """About what a model needs: its weights, buffers, and the keys and values of a short prompt."""
    paths = [Path(path) for path in (config.model.model, config.engine.draft_model) if path]
    checkpoint = read_json(paths[0] / "config.json")
    text = checkpoint.get("text_config")
    options: dict[str, Any] = {**checkpoint, **(text if isinstance(text, dict) else {})}
    factor = _widening(config, options)
    on_disk = sum(f.stat().st_size for path in paths for f in path.glob("model*.safetensors"))
    return int(SPARE * factor * on_disk) + ENGINE_BYTES + _least_kv_bytes(config, options, factor)


def divide(budget: int, leasts: Sequence[int]) -> list[int]:
    """What each model claims. Each of `leasts` fits alone."""
    largest = sorted(leasts, reverse=True)
    together = max(k for k in range(1, len(largest) + 1) if sum(largest[:k]) <= budget)
    spare = (budget - sum(largest[:together])) // together
    return [least + spare for least in leasts]


def check_fit(budget: int, config: Config, least: int) -> None:
    if least > budget:
        sharing = config.server.replicas_per_device
        replicas = f" for {sharing} replicas" if sharing > 1 else ""
        raise LoadError(
            f"memory: the model {config.server.served_name} needs about {show_bytes(least)}"
            f"{replicas}, and the budget for all models is {show_bytes(budget)}: use --memory "
            f"{option_bytes(least)} or more, a smaller or quantized model, or a lower max-len"
        )


def _widening(config: Config, options: dict[str, Any]) -> int:
    """On a CPU 16-bit weights are computed with as float32, unless a data type is given."""
    stored = options.get("dtype") or options.get("torch_dtype")
    on_cpu = platform.system() != "Darwin" and memory_bytes() is None
    is_quantized = bool(options.get("quantization") or options.get("quantization_config"))
    widened = config.model.dtype == "float32" or (config.model.dtype == "auto" and on_cpu)
    return 2 if widened and not is_quantized and stored in SIXTEEN_BITS else 1


def _least_kv_bytes(config: Config, options: dict[str, Any], factor: int) -> int:
    """0 where config.json has other names for it."""
    heads = options.get("num_key_value_heads") or options.get("num_attention_heads")
    layers, hidden = options.get("num_hidden_layers"), options.get("hidden_size")
    queries = options.get("num_attention_heads")
    sizes = (heads, layers, hidden, queries)
    if not all(isinstance(each, int) and each > 0 for each in sizes):
        return 0
    head_dim = options.get("head_dim") or math.ceil(hidden / queries)  # type: ignore[operator]
    tokens = min(config.model.max_len or LEAST_TOKENS, LEAST_TOKENS)
    return int(2 * layers * heads * head_dim * 2 * factor * tokens)  # type: ignore[operator]
