"""Operations of ours in mlx's graphs give what mlx's and mlx-lm's give."""

from __future__ import annotations

import io

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from pippin.backends.mlx.cpu.operations import check, drop_ins
from pippin.backends.mlx.cpu.operations.bindings import (
    LinearLayers,
    LinearWeights,
    Operations,
    without_operations,
)
from pippin.backends.mlx.cpu.operations.linear import (
    PackedEmbedding,
    PackedLinear,
    pack_head,
    pack_linear_layers,
)
from processes import run_python


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def assert_close(got: mx.array, want: mx.array, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=tolerance, atol=tolerance)


def test_arrays_are_looked_for_where_they_lie(ours: Operations) -> None:
    assert check.finds_arrays(ours)
    x = normal(2, 3)
    mx.eval(x)
    assert not ours.is_array(x, 1)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 7, 64, 100, 384])
def test_norms_are_mlx_s(ours: Operations, dim: int, weighted: bool) -> None:
    x, weight = normal(2, 3, 5, dim), normal(dim, seed=1) if weighted else None
    assert_close(ours.rms_norm(x, weight, 1e-6), mx.fast.rms_norm(x, weight, 1e-6))


def test_views_are_read_as_they_lie(ours: Operations) -> None:
    x = normal(4, 6, 32)
    for view in (x.transpose(1, 0, 2), x.swapaxes(1, 2), x[1:3, ::2, 8:24], x[:, :1]):
        weight = mx.ones(view.shape[-1])
        assert_close(ours.rms_norm(view, weight, 1e-5), mx.fast.rms_norm(view, weight, 1e-5))
    spread = mx.broadcast_to(x[:1], (4, 6, 32))
    assert_close(ours.rms_norm(spread, None, 1e-5), mx.fast.rms_norm(spread, None, 1e-5))


def test_what_is_not_a_number_stays_none(ours: Operations) -> None:
    x = mx.array([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]])
    for y in (ours.rms_norm(x, None, 1e-5), ours.swiglu(x, mx.ones(x.shape))):
        assert np.isnan(np.array(y)[0]).any()
        assert not np.isnan(np.array(y)[1]).any()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 20), (33, 100), (1500, 64), (7, 1)])
def test_linear_layers_are_mlx_s(
    ours: Operations, num_inputs: int, num_outputs: int, biased: bool
) -> None:
    layer = nn.Linear(num_inputs, num_outputs, bias=biased)
    x = normal(3, 5, num_inputs)
    views = (x, x[:, 2:4], x.swapaxes(0, 1), x[0, 0], x[:, :, None])
    expected = [layer(view) for view in views]
    weight = mx.array(layer.weight)
    pack_linear_layers(layer)
    assert type(layer) is PackedLinear
    for view, want in zip(views, expected, strict=True):
        assert_close(layer(view), want)
        with without_operations():
            assert_close(layer(view), want)
    assert mx.array_equal(layer.weight, weight)
    layer.weight = weight * 2.0  # some models do that to their own
    assert_close(layer(x) + (layer.bias if biased else 0.0), 2.0 * expected[0])
    assert "panels" not in layer


def test_a_row_s_products_do_not_depend_on_the_rows_beside_it(ours: Operations) -> None:
    layers = LinearLayers([LinearWeights(ours.pack(normal(200, 1100)), None, 200)])
    x = normal(131, 1100, seed=1)
    (alone,) = ours.linear(x[17:18], layers)
    for num_rows in (18, 19, 29, 64, 131):
        (beside,) = ours.linear(x[:num_rows], layers)
        assert mx.array_equal(beside[17], alone[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_weights_lie_in_as_few_bits_as_they_have(ours: Operations, dtype: mx.Dtype) -> None:
    weight = normal(70, 48).astype(dtype)
    tiny = mx.array([6e-8, -6e-5, 0.0, -0.0, 2.0], dtype)
    weight[0, :5] = tiny  # among them numbers under float16's least normal one
    layer = nn.Linear(48, 70, bias=False)
    layer.weight = weight.astype(mx.float32)
    x = normal(3, 5, 48, seed=1)
    want = layer(x)
    pack_linear_layers(layer)
    assert layer.panels.dtype == dtype
    assert mx.array_equal(layer.weight, weight.astype(mx.float32))
    assert_close(layer(x), want)
    unit = mx.eye(48)
    assert mx.array_equal(layer(unit).T, weight.astype(mx.float32))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_an_embedding_that_is_the_head_is_packed(ours: Operations, dtype: mx.Dtype) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(100, 48)

    model, tokens, x = Tied(), mx.array([[3, 99, 0]]), normal(2, 3, 48)
    model.embed_tokens.weight = normal(100, 48, seed=1).astype(dtype).astype(mx.float32)
    weight = mx.array(model.embed_tokens.weight)
    want = model.embed_tokens(tokens), model.embed_tokens.as_linear(x)
    pack_head(model)
    assert type(model.embed_tokens) is PackedEmbedding
    assert model.embed_tokens.lines.dtype == dtype
    assert mx.array_equal(model.embed_tokens(tokens), want[0])
    assert_close(model.embed_tokens.as_linear(x), want[1])
    assert mx.array_equal(model.embed_tokens.weight, weight)
    with without_operations():
        assert_close(model.embed_tokens.as_linear(x), want[1])


def test_a_head_of_its_own_is_packed_and_the_embedding_is_not(ours: Operations) -> None:
    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens, self.lm_head = nn.Embedding(100, 48), nn.Linear(48, 100)

    model = Untied()
    pack_head(model)
    assert type(model.embed_tokens) is nn.Embedding
    assert type(model.lm_head) is PackedLinear


class ThreeReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(48, 70), nn.Linear(48, 5, bias=False), nn.Linear(48, 32)

    def __call__(self, x: mx.array) -> list[mx.array]:
        return [self.a(x), self.c(x), self.b(x), self.a(x + 1.0)]


def test_layers_of_one_input_are_one_operation(ours: Operations) -> None:
    model, x = ThreeReaders(), normal(3, 5, 48)
    want = model(x)
    pack_linear_layers(model, [[model.a, model.b, model.c]])
    graph = io.StringIO()
    mx.export_to_dot(graph, *model(x)[:3])
    assert graph.getvalue().count('"Linear"') == 1
    for got, expected in zip(model(x), want, strict=True):
        assert_close(got, expected)
    model.b.weight = mx.zeros((5, 48))
    for number, got in enumerate(model(x)):
        assert_close(got, mx.zeros((3, 5, 5)) if number == 2 else want[number])


THREADS = """
from pathlib import Path
import mlx.core as mx
from pippin.backends.mlx.cpu.operations.bindings import LinearLayers, LinearWeights, Operations
from pippin.backends.mlx.cpu.operations.library import find_library
ours = Operations(find_library().path, num_threads=3)
weight, x = mx.random.normal((1000, 300)), mx.random.normal((40, 300))
layers = LinearLayers([LinearWeights(ours.pack(weight), None, 1000)] * 2)
products = [ours.linear(x * i, layers) for i in range(100)]
wanted = [x * i @ weight.T for i in range(100)]
print(max(mx.abs(y - want).max().item() for two, want in zip(products, wanted) for y in two))
"""


def test_several_threads_compute_what_one_does(ours: Operations) -> None:
    assert float(run_python(THREADS)) < 1e-2  # of sums of 300 numbers around 100


def test_gated_units_are_mlx_s(ours: Operations) -> None:
    gate, x = normal(3, 5, 33) * 20, normal(3, 5, 33, seed=1)
    assert_close(ours.swiglu(gate, x), gate * mx.sigmoid(gate) * x)


@pytest.mark.parametrize("dims", [16, 64])
@pytest.mark.parametrize("offset", [0, 5000, "each row's", "one of all"])
def test_rotations_are_mlx_s(ours: Operations, dims: int, offset: int | str) -> None:
    x = normal(3, 9, 4, 64).swapaxes(1, 2)
    given = {"each row's": mx.array([7, 0, 4000]), "one of all": mx.array([12])}.get(offset, offset)
    options = {"traditional": False, "base": 10000.0, "scale": 0.5, "offset": given}
    want = mx.fast.rope(x, dims, **options)
    assert_close(drop_ins.rope(x, dims, **options), want)
    own = {**options, "base": None, "freqs": mx.arange(1.0, dims // 2 + 1)}
    assert_close(drop_ins.rope(x, dims, **own), mx.fast.rope(x, dims, **own))


def test_what_they_are_not_for_is_left_to_mlx() -> None:
    x = normal(2, 4, 3, 8)
    options = {"traditional": True, "base": 10000.0, "scale": 1.0, "offset": 3}
    assert_close(drop_ins.rope(x, 8, **options), mx.fast.rope(x, 8, **options))
    half = x.astype(mx.float16)
    assert drop_ins.rms_norm(half, mx.ones(8, mx.float16), 1e-5).dtype == mx.float16


@pytest.mark.parametrize("kind", ["causal", "all", "one mask", "each row's"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 9), (5, 5), (33, 90), (100, 1500)])
def test_attention_of_chunks_is_mlx_s(
    ours: Operations, kind: str, num_queries: int, num_keys: int
) -> None:
    q = normal(2, num_queries, 6, 16).swapaxes(1, 2)
    k, v = normal(2, 2, num_keys, 16, seed=1), normal(2, 2, num_keys, 24, seed=2)
    allowed = mx.random.uniform(shape=(2, 1, num_queries, num_keys), key=mx.random.key(3)) < 0.6
    allowed[..., 0] = True  # nobody sees nothing
    mask = {"causal": "causal", "all": None, "one mask": allowed[:1], "each row's": allowed}[kind]
    got = drop_ins.attention(q, k, v, scale=0.25, mask=mask)
    with without_operations():
        assert_close(got, drop_ins.attention(q, k, v, scale=0.25, mask=mask))
    assert_close(got, mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask))


def test_large_scores_neither_overflow_nor_vanish(ours: Operations) -> None:
    q, k, v = 60 * normal(1, 2, 40, 32), 60 * normal(1, 2, 40, 32, seed=1), normal(1, 2, 40, 32)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal")
    assert_close(ours.attention(q, k, v, 1.0, None, causal=True), want, 1e-3)


def test_compiled_functions_may_hold_them(ours: Operations) -> None:
    weight = normal(16)

    @mx.compile
    def run(x: mx.array) -> mx.array:
        return ours.rms_norm(x * 2.0, weight, 1e-5) + ours.swiglu(x, x + 1.0)

    for seed in range(3):
        x = normal(4, 16, seed=seed)
        want = mx.fast.rms_norm(x * 2.0, weight, 1e-5) + x * mx.sigmoid(x) * (x + 1.0)
        assert_close(run(x), want)


def test_what_nobody_holds_any_more_is_given_back(ours: Operations) -> None:
    """Nodes with several outputs hold each other, which mlx has to take apart."""
    code = """
import mlx.core as mx
from pippin.backends.mlx.cpu.operations.bindings import LinearLayers, LinearWeights, operations

ours = operations()
x, weight = mx.random.normal((3, 16)), ours.pack(mx.random.normal((40, 16)))
layers = LinearLayers([LinearWeights(weight, None, 40), LinearWeights(weight, None, 40)])
mx.eval(x, weight)

def run():
    first, _ = ours.linear(x, layers)
    mx.eval(first)  # the other is never asked for
    ours.linear(x, layers)  # nor is either of these

run()
before = mx.get_active_memory()
for _ in range(5):
    run()
print(mx.get_active_memory() - before)
"""
    assert run_python(code).strip() == "0"
