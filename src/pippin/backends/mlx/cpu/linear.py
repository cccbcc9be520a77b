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
    blocks = blocks_of(weight, block)
    return _seconds(blocked_product(x, blocks) for _ in range(REPEATS)) < WORTHWHILE * plain


def _seconds(products: Iterable[mx.array]) -> float:
    """The shortest of a few runs: others may be using the machine."""
    shortest = float("inf")
    for y in products:
        began = perf_counter()
        mx.eval(y)
        shortest = min(shortest, perf_counter() - began)
    return shortest
