"""What this machine could do at best with a checkpoint's weights, measured now. Knows mlx.

A bare chain of the products that a step cannot avoid, and the fastest that memory gives up its
bytes. Of models without experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.bench.in_process.products import Products

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
NAMES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
REPEATS = 5
MEMORY_SIDE = 8192  # a square matrix far larger than any cache


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

    def step_bytes(self, rows: int) -> float:
        return self.weight_bytes

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


def _best(work: Callable[[], None]) -> float:
    """The shortest of a few runs: a ceiling is what happens when nothing gets in the way."""
    work()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
