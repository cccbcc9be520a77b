"""What this machine could do at best with a checkpoint's weights, measured now. Knows mlx.

A bare chain of the products that a step cannot avoid, and the fastest that memory gives up its
bytes. Nothing here knows how a model is put together: shapes come from the checkpoint's headers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.bench.servers.endless_copy import read_header

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
NAMES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
NOT_IN_A_STEP = ("visual", "vision", "mtp")  # parts of a checkpoint that text does not run through
REPEATS = 5
MEMORY_SIDE = 8192  # a square matrix far larger than any cache


@dataclass(frozen=True)
class Products:
    """The shapes [out, in] of a forward pass's matrix products."""

    layers: list[tuple[int, int]]
    head: tuple[int, int]
    dtype: str  # as stored


class Ceilings:
    """Holds random weights of a checkpoint's shapes and times what can be done with them."""

    def __init__(self, products: Products, dtype: str) -> None:
        load_fast_blas()
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        if dtype == "auto":
            self._dtype = mx.float32 if on_cpu else DTYPES[products.dtype]
        else:
            self._dtype = NAMES[dtype]
        self._layers = [self._random(shape) for shape in products.layers]
        self._head = self._random(products.head)
        mx.eval(self._layers, self._head)

    @property
    def weight_bytes(self) -> int:
        """What a decode step has to read at least."""
        return sum(int(w.nbytes) for w in self._layers) + int(self._head.nbytes)

    def flops_per_token(self) -> int:
        return sum(2 * w.size for w in self._layers)

    def prefill_seconds(self, rows: int) -> float:
        """The layers' products for this many tokens; the head sees only the last of them."""
        return self._seconds(self._layers, rows)

    def decode_seconds(self, rows: int) -> float:
        return self._seconds([*self._layers, self._head], rows)

    def memory_bytes_per_second(self) -> float:
        """The faster of a copy and of a product with one vector, which all cores can share."""
        matrix = self._random((MEMORY_SIDE, MEMORY_SIDE))
        vector = self._random((1, MEMORY_SIDE))
        mx.eval(matrix, vector)
        product = _best(lambda: mx.eval(vector @ matrix.T))
        copy = _best(lambda: mx.eval(matrix + 1))
        return max(matrix.nbytes / product, 2 * matrix.nbytes / copy)

    def _seconds(self, weights: list[mx.array], rows: int) -> float:
        inputs = {size: self._random((rows, size)) for size in {w.shape[1] for w in weights}}
        mx.eval(inputs)
        return _best(lambda: mx.eval([inputs[w.shape[1]] @ w.T for w in weights]))

    def _random(self, shape: tuple[int, ...]) -> mx.array:
        return mx.random.normal(shape).astype(self._dtype)


def read_products(model_dir: Path) -> Products | None:
    """The products of a checkpoint; None if it is quantized, where shapes do not tell."""
    shapes: dict[str, tuple[int, int]] = {}
    dtypes: Counter[str] = Counter()
    for path in sorted(model_dir.glob("*.safetensors")):
        header, _ = read_header(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                return None
            if len(entry["shape"]) == 2 and not any(part in name for part in NOT_IN_A_STEP):
                out_size, in_size = entry["shape"]
                shapes[name] = (out_size, in_size)
                dtypes[entry["dtype"]] += out_size * in_size
    embedding = next((n for n in shapes if n.endswith("embed_tokens.weight")), None)
    if embedding is None:
        return None
    table = shapes.pop(embedding)
    head = next((n for n in shapes if n.endswith("lm_head.weight")), None)
    top = shapes.pop(head) if head else table  # tied: the embedding is the head
    return Products(list(shapes.values()), top, dtypes.most_common(1)[0][0])


def _best(work: Callable[[], None]) -> float:
    """The shortest of a few runs: a ceiling is what happens when nothing gets in the way."""
    work()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
