"""Kernels that read packed weights against plain operations: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import torch

from mlx_checkpoints import as_mlx_saves
from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels.checks.agreement import kernel_errors
from pippin.backends.torch.kernels.epilogues import NO_EPILOGUE, ConvStep, Epilogue
from pippin.backends.torch.kernels.experts.products import expert_tile_for
from pippin.backends.torch.kernels.experts.routing import route
from pippin.backends.torch.kernels.layers import feed_forward, run_experts
from pippin.backends.torch.kernels.packed import linear as packed_linear
from pippin.backends.torch.kernels.packed.linear import by_kernels, packed_times
from pippin.backends.torch.kernels.packed.products import row_product
from pippin.backends.torch.kernels.packed.rows import dense_rows, few_rows
from pippin.backends.torch.kernels.packed.sums import PackedTile
from pippin.backends.torch.kernels.products import product
from pippin.backends.torch.load import load
from pippin.backends.torch.models.packed import Numbers, Packed, Stacked, dense, pack, times
from pippin.backends.torch.models.parts import ExpertMlp, Linear, Norm
from pippin.backends.torch.shapes import ExpertShape

DEVICE = find_device()
NUMBERS: tuple[Numbers, ...] = ("int4", "int8", "fp4", "fp8")


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(sizes) + seed)
    return torch.randn(sizes, generator=generator, device=DEVICE)


def packed(
    numbers: Numbers,
    *sizes: int,
    group: int = 32,
    offsets: bool | None = None,
    dtype: torch.dtype = torch.float32,
) -> Packed:
    """Of numbers that are all there is of them, but for NaN."""
    generator = torch.Generator(DEVICE).manual_seed(sizes[-1])
    most = 16 if numbers.endswith("4") else 256
    codes = torch.randint(0, most, sizes, generator=generator, device=DEVICE, dtype=torch.uint8)
    if numbers == "fp8":
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)
    shape = (*sizes[:-1], sizes[-1] // group)
    has_offsets = numbers.startswith("int") if offsets is None else offsets
    scales = drawn(*shape).abs() * 0.01 + 0.001
    if numbers == "fp4":
        scales = (120 + drawn(*shape).abs() * 3).to(torch.uint8)
    return pack(codes, scales, drawn(*shape, seed=1) if has_offsets else None, numbers, dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_weight_is_unpacked_to_the_bit(numbers: Numbers, group: int) -> None:
    weight = packed(numbers, 7, 384, group=group)
    torch.testing.assert_close(dense_rows(weight), dense(weight), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("size", "group"), [(96, 32), (1280, 128)])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_one_row(numbers: Numbers, size: int, group: int) -> None:
    """Of more words than a program reads at a time, and of fewer."""
    weight, x = packed(numbers, 21, size, group=group), drawn(1, size)
    bias, residual = drawn(21), drawn(1, 21, seed=1)
    close(row_product(x, weight, bias, None, NO_EPILOGUE), times(x, weight, bias))
    found = row_product(x, weight, None, None, Epilogue.of(residual, False, None))
    close(found, residual + times(x, weight))


@pytest.mark.parametrize("numbers", ["int4", "fp8"])
def test_one_row_with_its_norm_and_a_gated_product(numbers: Numbers) -> None:
    weight, x = packed(numbers, 2 * 13, 96), drawn(1, 96)
    norm, linear = Norm(drawn(96, seed=3), 1e-6), Linear(weight)
    gate, up = times(norm(x), weight).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    close(product(x, linear, norm=norm, swiglu=True), expected)


def test_a_row_that_is_large_before_its_norm_in_half_precision() -> None:
    weight, x = packed("int4", 21, 128, dtype=torch.float16), (drawn(1, 128) * 3000).half()
    norm = Norm(drawn(128, seed=3).abs() * 100, 1e-6)
    expected = norm(x.float()) @ dense(packed("int4", 21, 128)).T
    found = product(x, Linear(weight), norm=norm)
    torch.testing.assert_close(
        found.float(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())
    )


def test_one_row_and_the_convolution_behind_it() -> None:
    """As behind a dense weight: results, and the inputs that are kept."""
    weight, x, norm = packed("int4", 24, 64), drawn(1, 64), Norm(drawn(64, seed=3), 1e-6)
    found = []
    for linear in (Linear(weight), Linear(dense(weight))):
        inputs = drawn(3, 3, 20)
        places = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (1, 2))
        conv = ConvStep(inputs, drawn(4, 20), *places)
        found.append((product(x, linear, norm=norm, conv=conv), inputs))
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("num_rows", [2, 19])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_few_rows(numbers: Numbers, num_rows: int, group: int) -> None:
    """Of more words than its warps read at a time, and not of a multiple of them."""
    weight, x = packed(numbers, 21, 896, group=group), drawn(num_rows, 896)
    bias = drawn(21)
    tile = PackedTile(16, 16, 2, 2)
    close(few_rows(x, weight, bias, tile), times(x, weight, bias))


def test_integers_without_an_offset() -> None:
    weight, x = packed("int8", 9, 64, offsets=False), drawn(3, 64)
    for rows in (x[:1], x):
        close(packed_times(rows, weight, None), times(rows, weight))


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_any_number_of_rows_and_weights_stored_in_different_ways(num_rows: int) -> None:
    parts = (packed("int4", 10, 64), drawn(3, 64), packed("int8", 4, 64))
    x, bias = drawn(num_rows, 64), drawn(17)
    weight = Stacked(parts)
    close(packed_times(x, weight, bias), times(x, weight, bias))


def test_half_precision_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = packed("int4", 16, 128, dtype=torch.float16), drawn(4, 128).half()
    exact = x.float() @ dense(packed("int4", 16, 128)).T
    for rows in (x[:1], x):
        found = packed_times(rows, weight, None)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), exact[: len(rows)], rtol=5e-3, atol=5e-2)
    monkeypatch.setattr(packed_linear, "MOST_ROWS", 2)
    found = packed_times(x, weight, None)
    torch.testing.assert_close(found.float(), exact, rtol=5e-3, atol=5e-2)


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("numbers", ["int4", "fp4", "int8", "fp8"])
def test_packed_experts(numbers: Numbers, num_tokens: int) -> None:
    num_experts, hidden, size = 5, 64, 32
    mlp = ExpertMlp(
        ExpertShape(num_experts, 2, size, normalised=True),
        Linear(drawn(num_experts, hidden)),
        packed(numbers, num_experts, 2 * size, hidden),
        packed(numbers, num_experts, hidden, size),
    )
    x = drawn(num_tokens, hidden) * 0.1
    close(feed_forward(mlp, x), mlp(x))


@pytest.mark.parametrize("numbers", ["int4", "fp8"])
def test_packed_experts_of_few_tokens(numbers: Numbers) -> None:
    """A block for each pair of a token and an expert: what half precision takes by itself."""
    tile = expert_tile_for(6, 0.5, 2, packed=True)
    assert tile.pairs == 1
    mlp = ExpertMlp(
        ExpertShape(5, 2, 96, normalised=True),
        Linear(drawn(5, 64)),
        packed(numbers, 5, 2 * 96, 64),
        packed(numbers, 5, 64, 96),
    )
    x = drawn(6, 64) * 0.1
    routes = route(mlp.router(x), mlp.shape)
    close(run_experts(mlp, x, routes, tile), mlp.run(x, routes.weights, routes.chosen))


def test_only_products_with_packed_weights_change() -> None:
    weight = Linear(packed("int4", 4, 32))
    dense_linear = Linear(drawn(4, 32))
    assert by_kernels(dense_linear) is dense_linear
    changed = by_kernels((weight, dense_linear))
    assert changed[0].times is packed_times
    assert changed[0].weight is weight.weight
    assert changed[1] is dense_linear


@pytest.mark.slow
def test_whole_steps_of_a_packed_model_agree() -> None:
    """Decode, chunks and captured chunks of a hybrid, with packed embedding and head."""
    decoder = load(as_mlx_saves("qwen3_5", 4), dtype="float32").decoder
    with torch.inference_mode():
        errors = dict(kernel_errors(decoder, drafts=False))
    assert len(errors) > 5
    assert {what: off for what, off in errors.items() if off is None or off > 1e-4} == {}
