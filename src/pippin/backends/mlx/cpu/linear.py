"""Linear layers of few rows on CPUs, as many small products instead of one large one.

For a large product OpenBLAS first copies the weights into its own order, which for a handful of
rows costs more than the product. For small products it has kernels that read the weights as they
lie. mlx runs a batch of products one after the other in a single operation, so the same weights,
seen as blocks of output channels, take that road. Whether it is shorter here is timed at the first
load, and remembered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import msgspec
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.backends.mlx.timing import RememberedTimes, machine, times_file

SMALL_PRODUCT = 1_000_000  # rows x channels x inputs that OpenBLAS takes for small
BLOCKS = (256, 192, 128, 96, 64, 48, 32)  # output channels
TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
WORTHWHILE = 0.9  # of the plain product's time
SUBJECT = "linear-layers"

Shape = tuple[int, ...]

_faster: dict[Shape, frozenset[int]] = {}  # by weight: numbers of rows for which blocks are faster


def block_of(num_rows: int, num_outputs: int, num_inputs: int) -> int | None:
    """Output channels in a block; None where the whole product is small, or no block divides it."""
    if num_rows * num_outputs * num_inputs <= SMALL_PRODUCT:
        return None
    fits = (b for b in BLOCKS if num_rows * b * num_inputs <= SMALL_PRODUCT)
    return next((b for b in fits if num_outputs % b == 0), None)


def blocks_of(weight: mx.array, block: int) -> mx.array:
    """[outputs / block, inputs, block]: the weights as they lie, seen as many small matrices."""
    return weight.reshape(-1, block, weight.shape[1]).swapaxes(1, 2)


def blocked_product(x: mx.array, blocks: mx.array) -> mx.array:
    """x [.., inputs] @ weight^T, the weight as `blocks_of` it."""
    count, num_inputs, block = blocks.shape
    product = x.reshape(1, -1, num_inputs) @ blocks
    if product.shape[1] > 1:
        product = product.swapaxes(0, 1)
    return product.reshape(*x.shape[:-1], count * block)


class Product:
    """x @ weight^T by whichever road was found to be shorter for this many rows.

    Its views of the weight are made once: a step has some forty products, and operations that only
    look at a constant in another way cost the host as much as any other.
    """

    def __init__(self, weight: mx.array) -> None:
        chosen = _faster.get(weight.shape, frozenset())
        blocks = {num_rows: block_of(num_rows, *weight.shape) for num_rows in chosen}
        self._blocks = {n: blocks_of(weight, block) for n, block in blocks.items() if block}
        self._transposed = weight.T
        mx.eval(self._transposed, self._blocks)  # now: not inside a function that is being compiled

    def __call__(self, x: mx.array) -> mx.array:
        blocks = self._blocks.get(x.size // x.shape[-1])
        return x @ self._transposed if blocks is None else blocked_product(x, blocks)


class FewRowsLinear(Linear):
    """An `nn.Linear` made over in place."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self._product(x)
        return y + self["bias"] if "bias" in self else y


class FewRowsEmbedding(Embedding):
    """An `nn.Embedding` whose other use, as the head, is a linear layer."""

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = self._product(x)
        return y


def use_few_rows(part: Module) -> None:
    """Make a plain linear layer or embedding over; quantized ones stay as they are."""
    if type(part) is Linear:
        part._product = Product(part.weight)
        part.__class__ = FewRowsLinear
    elif type(part) is Embedding:
        part._product = Product(part.weight)
        part.__class__ = FewRowsEmbedding


class Times(msgspec.Struct, frozen=True):
    """Milliseconds of one product, whole and in blocks."""

    plain_ms: float
    blocks_ms: float

    @property
    def blocks_are_faster(self) -> bool:
        return self.blocks_ms < WORTHWHILE * self.plain_ms


def choose_rows(
    weights: Iterable[mx.array], path: Path | None = None
) -> dict[Shape, frozenset[int]]:
    """By the times of both roads on one weight of each shape: those in the file, or new ones."""
    here = f"{machine((sys.modules[__name__],))}, {load_fast_blas().threads} threads"
    remembered = RememberedTimes(path or times_file(SUBJECT), here, Times)

    def times_of(weight: mx.array, num_rows: int, block: int) -> Times:
        key = f"{num_rows} x {weight.shape[1]} x {weight.shape[0]}, {weight.dtype}"
        times = remembered.get(key)
        if times is None:
            times = _time_both(weight, num_rows, block)
            remembered.add(key, times)
        return times

    for shape, weight in {weight.shape: weight for weight in weights}.items():
        blocks = ((num_rows, block_of(num_rows, *shape)) for num_rows in TIMED_ROWS)
        _faster[shape] = frozenset(
            num_rows
            for num_rows, block in blocks
            if block is not None and times_of(weight, num_rows, block).blocks_are_faster
        )
    remembered.save()
    return _faster


def _time_both(weight: mx.array, num_rows: int, block: int) -> Times:
    """In turn: others may be using the machine."""
    x = mx.ones((num_rows, weight.shape[1]), dtype=weight.dtype)
    blocks = blocks_of(weight, block)
    pairs = [
        (_milliseconds(x @ weight.T), _milliseconds(blocked_product(x, blocks)))
        for _ in range(REPEATS)
    ]
    return Times(min(plain for plain, _ in pairs), min(blocked for _, blocked in pairs))


def _milliseconds(product: mx.array) -> float:
    began = perf_counter()
    mx.eval(product)
    return 1e3 * (perf_counter() - began)
