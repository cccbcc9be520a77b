"""Linear layers of few rows on CPUs, as many small products instead of one large one.

For a large product OpenBLAS first copies the weights into its own order, which for a handful of
rows costs more than the product. For small products it has kernels that read the weights as they
lie. mlx runs a batch of products one after the other in a single operation, so the same weights,
seen as blocks of output channels, take that road. Whether it is shorter here is timed at load.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

SMALL_PRODUCT = 1_000_000  # rows x channels x inputs that OpenBLAS takes for small
BLOCKS = (256, 192, 128, 96, 64, 48, 32)  # output channels
TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
WORTHWHILE = 0.9  # of the plain product's time

Shape = tuple[int, ...]

_faster: dict[Shape, frozenset[int]] = {}  # by weight: numbers of rows for which blocks are faster


def block_of(num_rows: int, num_outputs: int, num_inputs: int) -> int | None:
    """Output channels in a block; None where the whole product is small, or no block divides it."""
    if num_rows * num_outputs * num_inputs <= SMALL_PRODUCT:
        return None
    fits = (b for b in BLOCKS if num_rows * b * num_inputs <= SMALL_PRODUCT)
    return next((b for b in fits if num_outputs % b == 0), None)


def blocked_product(x: mx.array, weight: mx.array, block: int) -> mx.array:
    """x [.., inputs] @ weight^T, weight [outputs, inputs]."""
    num_outputs, num_inputs = weight.shape
    rows = x.reshape(1, -1, num_inputs)
    blocks = weight.reshape(-1, block, num_inputs).swapaxes(1, 2)
    product = (rows @ blocks).swapaxes(0, 1)
    return product.reshape(*x.shape[:-1], num_outputs)


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight^T by whichever road is shorter for this many rows."""
    num_rows = x.size // x.shape[-1]
    if num_rows in _faster.get(weight.shape, ()):
        block = block_of(num_rows, *weight.shape)
        if block is not None:
            return blocked_product(x, weight, block)
    return x @ weight.T


class FewRowsLinear(Linear):
    """An `nn.Linear` made over in place."""

    def __call__(self, x: mx.array) -> mx.array:
        y = product(x, self["weight"])
        return y + self["bias"] if "bias" in self else y


class FewRowsEmbedding(Embedding):
    """An `nn.Embedding` whose other use, as the head, is a linear layer."""

    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self.weight)


def use_few_rows(part: Module) -> None:
    """Make a plain linear layer or embedding over; quantized ones stay as they are."""
    if type(part) is Linear:
        part.__class__ = FewRowsLinear
    elif type(part) is Embedding:
        part.__class__ = FewRowsEmbedding


def choose_rows(weights: Iterable[mx.array]) -> dict[Shape, frozenset[int]]:
    """Time both roads on one of the model's own weights of each shape, for few and more rows."""
    one_of_each = {weight.shape: weight for weight in weights}
    for shape, weight in one_of_each.items():
        _faster[shape] = frozenset(n for n in TIMED_ROWS if _blocks_are_faster(weight, n))
    return _faster


def _blocks_are_faster(weight: mx.array, num_rows: int) -> bool:
    block = block_of(num_rows, *weight.shape)
    if block is None:
        return False
    x = mx.ones((num_rows, weight.shape[1]), dtype=weight.dtype)
    plain = _seconds(x @ weight.T for _ in range(REPEATS))
    return _seconds(blocked_product(x, weight, block) for _ in range(REPEATS)) < WORTHWHILE * plain


def _seconds(products: Iterable[mx.array]) -> float:
    """The shortest of a few runs: others may be using the machine."""
    shortest = float("inf")
    for y in products:
        began = perf_counter()
        mx.eval(y)
        shortest = min(shortest, perf_counter() - began)
    return shortest
