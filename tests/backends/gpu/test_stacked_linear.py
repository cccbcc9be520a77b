"""Layers that read the same input, merged: the same numbers from fewer products."""

from __future__ import annotations

import gc
import io

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cases import cases
from pippin.backends.mlx.gpu.stacked_linear import FEW_ROWS, stack_linear_layers
from pippin.backends.mlx.linear_groups import find_linear_groups

ROUNDING = 5e-5  # of numbers of about one


class Block(nn.Module):
    """Queries, keys and values of one input; two layers of another kind; one that reads alone."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(64, 96, bias=bias)
        self.k = nn.Linear(64, 32, bias=bias)
        self.v = nn.Linear(64, 32, bias=bias)
        self.wide = nn.Linear(64, 64, bias=not bias)
        self.out = nn.Linear(96, 64, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        q, k, v = self.q(x), self.k(x), self.v(x)
        mixed = mx.concatenate([q[..., :32] * k, v, q[..., 64:]], axis=-1)
        y: mx.array = self.out(mixed) + self.wide(x)
        return y


def block_of(*, bias: bool = False, bits: int | None = None) -> Block:
    mx.random.seed(0)
    block = Block(bias)
    if bits is not None:
        nn.quantize(block, group_size=32, bits=bits)
    mx.eval(block.parameters())
    return block


def merged(block: Block) -> list[list[nn.Module]]:
    groups = find_linear_groups(block, lambda: block(mx.zeros((1, 1, 64))))
    stack_linear_layers(groups)
    return groups


def test_groups_are_the_layers_of_one_input_that_can_be_stacked() -> None:
    block = block_of()
    groups = find_linear_groups(block, lambda: block(mx.zeros((1, 1, 64))))
    assert [[id(part) for part in group] for group in groups] == [
        [id(block.q), id(block.k), id(block.v)]
    ]
    assert type(block.q) is nn.Linear  # watching leaves no trace


@cases("bits", [None, 4, 8])
@cases("bias", [False, True])
@cases("num_rows", [1, 7, FEW_ROWS + 1])
def test_merged_layers_give_the_same_numbers(num_rows: int, bias: bool, bits: int | None) -> None:
    block = block_of(bias=bias, bits=bits)
    x = mx.random.normal((1, num_rows, 64))
    want = np.array(block(x))
    merged(block)
    for _ in range(2):  # what the first call left behind must not be seen by the second
        np.testing.assert_allclose(np.array(block(x)), want, rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(
        np.array(block(-x)), np.array(block_of(bias=bias, bits=bits)(-x)), rtol=0, atol=ROUNDING
    )


def num_products(out: mx.array) -> int:
    text = io.StringIO()
    mx.export_to_dot(text, out)
    return text.getvalue().count('"Matmul"') + text.getvalue().count('"AddMM"')


def test_few_rows_take_one_product_for_a_group() -> None:
    block = block_of()
    x = mx.random.normal((1, 4, 64))
    apart = num_products(block(x))
    merged(block)
    assert num_products(block(x)) == apart - 2
    assert num_products(block(mx.random.normal((1, FEW_ROWS + 1, 64)))) == apart


@pytest.mark.slow
def test_weights_are_not_stored_twice() -> None:
    parts = [nn.Linear(1024, 1024, bias=False) for _ in range(3)]
    mx.eval([part.parameters() for part in parts])
    gc.collect()  # what earlier tests left
    mx.synchronize()
    before = mx.get_active_memory()
    stack_linear_layers([parts])
    gc.collect()
    mx.synchronize()
    weights = 3 * parts[0].weight.nbytes  # 12 MB: far more than others have under way
    assert mx.get_active_memory() - before < weights / 2


def test_a_layer_that_is_called_twice_in_a_row_computes_again() -> None:
    block = block_of()
    x = mx.random.normal((1, 2, 64))
    want = np.array(block.k(x))
    merged(block)
    for _ in range(3):
        np.testing.assert_allclose(np.array(block.k(x)), want, rtol=0, atol=ROUNDING)
