"""Operations of ours in mlx's graphs give what mlx's and mlx-lm's give, or are refused."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from pippin.backends.mlx.cpu import operations as drop_ins
from pippin.backends.mlx.cpu.build import SOURCES
from pippin.backends.mlx.cpu.layers import (
    PackedEmbedding,
    PackedLinear,
    pack_head,
    pack_linear_layers,
)
from pippin.backends.mlx.cpu.operations import (
    LinearLayers,
    LinearWeights,
    pack,
    without_operations,
)
from processes import run_python


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def assert_close(got: mx.array, want: mx.array, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=tolerance, atol=tolerance)


def test_what_is_no_array_of_mlx_is_an_error(ours: Any) -> None:
    with pytest.raises(TypeError, match="incompatible"):
        ours.rms_norm(np.ones(3, np.float32), None, 1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [1, 7, 64, 100, 384])
def test_norms_are_mlx_s(ours: Any, dim: int, weighted: bool) -> None:
    x, weight = normal(2, 3, 5, dim), normal(dim, seed=1) if weighted else None
    assert_close(ours.rms_norm(x, weight, 1e-6), mx.fast.rms_norm(x, weight, 1e-6))


def test_views_are_read_as_they_lie(ours: Any) -> None:
    x = normal(4, 6, 32)
    for view in (x.transpose(1, 0, 2), x.swapaxes(1, 2), x[1:3, ::2, 8:24], x[:, :1]):
        weight = mx.ones(view.shape[-1])
        assert_close(ours.rms_norm(view, weight, 1e-5), mx.fast.rms_norm(view, weight, 1e-5))
    spread = mx.broadcast_to(x[:1], (4, 6, 32))
    assert_close(ours.rms_norm(spread, None, 1e-5), mx.fast.rms_norm(spread, None, 1e-5))


def test_what_is_not_a_number_stays_none(ours: Any) -> None:
    x = mx.array([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0]])
    for y in (ours.rms_norm(x, None, 1e-5), ours.swiglu(x, mx.ones(x.shape))):
        assert np.isnan(np.array(y)[0]).any()
        assert not np.isnan(np.array(y)[1]).any()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 20), (33, 100), (1500, 64), (7, 1)])
def test_linear_layers_are_mlx_s(
    ours: Any, num_inputs: int, num_outputs: int, biased: bool
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


def test_a_row_s_products_do_not_depend_on_the_rows_beside_it(ours: Any) -> None:
    layers = LinearLayers([LinearWeights(pack(normal(200, 1100)), None, 200)])
    x = normal(131, 1100, seed=1)
    (alone,) = layers(x[17:18])
    for num_rows in (18, 19, 29, 64, 131):
        (beside,) = layers(x[:num_rows])
        assert mx.array_equal(beside[17], alone[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_weights_lie_in_as_few_bits_as_they_have(ours: Any, dtype: mx.Dtype) -> None:
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
def test_an_embedding_that_is_the_head_is_packed(ours: Any, dtype: mx.Dtype) -> None:
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


def test_a_head_of_its_own_is_packed_and_the_embedding_is_not(ours: Any) -> None:
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


def test_layers_of_one_input_are_one_operation(ours: Any) -> None:
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


def test_several_threads_compute_what_one_does() -> None:
    code = """
import mlx.core as mx
from pippin.backends.mlx.cpu.operations import LinearLayers, LinearWeights, pack
weight, x = mx.random.normal((1000, 300)), mx.random.normal((40, 300))
layers = LinearLayers([LinearWeights(pack(weight), None, 1000)] * 2)
products = [layers(x * i) for i in range(100)]
wanted = [x * i @ weight.T for i in range(100)]
print(max(mx.abs(y - want).max().item() for two, want in zip(products, wanted) for y in two))
"""
    assert float(run_python(code, OMP_NUM_THREADS="3")) < 1e-2  # sums of 300 numbers around 100


@pytest.mark.parametrize("dims", [16, 64])
@pytest.mark.parametrize("offset", [0, 5000, "each row's", "one of all"])
def test_rotations_are_mlx_s(ours: Any, dims: int, offset: int | str) -> None:
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
    ours: Any, kind: str, num_queries: int, num_keys: int
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


def test_large_scores_neither_overflow_nor_vanish(ours: Any) -> None:
    q, k, v = 60 * normal(1, 2, 40, 32), 60 * normal(1, 2, 40, 32, seed=1), normal(1, 2, 40, 32)
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask="causal")
    assert_close(ours.attention(q, k, v, 1.0, None, True), want, 1e-3)


def test_what_nobody_holds_any_more_is_given_back(ours: Any) -> None:
    """Nodes with several outputs hold each other, which mlx has to take apart."""
    code = """
import mlx.core as mx
from pippin.backends.mlx.cpu.operations import LinearLayers, LinearWeights, pack

x, weight = mx.random.normal((3, 16)), pack(mx.random.normal((40, 16)))
layers = LinearLayers([LinearWeights(weight, None, 40), LinearWeights(weight, None, 40)])
mx.eval(x, weight)

def run():
    first, _ = layers(x)
    mx.eval(first)  # the other is never asked for
    layers(x)  # nor is either of these

run()
before = mx.get_active_memory()
for _ in range(5):
    run()
print(mx.get_active_memory() - before)
"""
    assert run_python(code).strip() == "0"


# A program for the headers alone: the first line that fails is printed.
CHECKS = """
#include <cstdio>
#include <cstdlib>
#define EXPECT(what) if (!(what)) { std::printf("line %d: %s\\n", __LINE__, #what); std::_Exit(1); }
"""


POOL = """
#include <set>
#include <stdexcept>
#include <string>
#include "pool.h"

// Blocks that take a while, so that every thread gets some.
std::string thrown_by(long bad, bool only_others) {
  const auto caller = std::this_thread::get_id();
  try {
    Pool::shared().run(64, 1, [&](long from, long) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const bool other = std::this_thread::get_id() != caller;
      const bool fails = only_others ? other : from == bad;
      if (fails) throw std::runtime_error("block " + std::to_string(from));
    });
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

long sum_of(long count) {
  std::atomic<long> sum{0};
  Pool::shared().run(count, 1, [&](long from, long to) {
    for (long i = from; i < to; i++) sum += i;
  });
  return sum;
}

int main() {
  Pool::start(4);
  for (int i = 0; i < 20; i++) {
    EXPECT(thrown_by(i, false) == "block " + std::to_string(i));
    EXPECT(thrown_by(0, true).starts_with("block "));  // in a thread that is not the caller's
    EXPECT(thrown_by(-1, false) == "nothing");
    EXPECT(sum_of(1000) == 499500);
  }
  std::_Exit(0);
}
"""


SCRATCH = """
#include <cstdint>
#include <new>
#include "scratch.h"

bool is_refused(long count) {
  try {
    Scratch room(count);
    return false;
  } catch (const std::bad_alloc&) {
    return true;
  }
}

int main() {
  Scratch first(10);
  EXPECT(is_refused(long(1) << 58));
  Scratch second(20);
  EXPECT(is_refused(long(1) << 58));
  first[9] = 1.0f;
  second[19] = 2.0f;
  EXPECT(first.get() != second.get());
  { Scratch third(5); EXPECT(third.get() != second.get()); third[4] = 3.0f; }
  EXPECT(first[9] == 1.0f && second[19] == 2.0f);
}
"""


def run_program(directory: Path, text: str, *options: str) -> None:
    source, program = directory / "program.cpp", directory / "program"
    source.write_text(CHECKS + text)
    flags = ("-std=c++20", "-O1", "-pthread", f"-I{SOURCES}")
    built = subprocess.run(
        ["g++", *flags, str(source), "-o", str(program), *options], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.usefixtures("ours")
def test_an_exception_in_any_thread_is_the_caller_s_and_the_pool_goes_on(tmp_path: Path) -> None:
    run_program(tmp_path, POOL)


@pytest.mark.usefixtures("ours")
def test_memory_that_is_refused_is_an_exception(tmp_path: Path) -> None:
    run_program(tmp_path, SCRATCH)


FAILS = """
import mlx.core as mx
from pippin.backends.mlx.cpu.operations import check_operations, operations
ours = operations()
one = mx.ones((1, 1, 1, 16))
endless = mx.broadcast_to(one, (1, 1 << 16, 1 << 30, 16))  # more than any process can address
y = ours.attention(one, endless, endless, 1.0, None, False)
print(mx.isnan(y).all().item())
try:
    check_operations()
except RuntimeError as error:
    print(error)
check_operations()  # it was told once
print(ours.attention(one, one, one, 1.0, None, False).sum().item())
"""


@pytest.mark.usefixtures("ours")
def test_an_operation_that_fails_in_mlx_s_thread_is_an_error_of_the_step() -> None:
    is_nan, error, after = run_python(FAILS).splitlines()
    assert (is_nan, after) == ("True", "16.0")
    assert error.startswith("a CPU operation of Pippin's failed: AttentionOfChunk: std::")
    assert "--safe" in error
