"""Kernels of products, experts, packed weights and sums of words against plain operations.

On a GPU, or interpreted on a CPU.
"""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import torch
import torch.nn.functional as F  # noqa: N812

from mlx_checkpoints import as_mlx_saves
from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels.checks import kernel_errors
from pippin.backends.torch.kernels.epilogues import NO_EPILOGUE, ConvStep, Epilogue
from pippin.backends.torch.kernels.experts import (
    ExpertTile,
    Routes,
    blocks_of,
    expert_tile_for,
    most_blocks,
    route,
)
from pippin.backends.torch.kernels.layers import feed_forward, run_experts
from pippin.backends.torch.kernels.packed import products as packed_linear
from pippin.backends.torch.kernels.packed.products import (
    by_kernels,
    dense_rows,
    few_rows,
    packed_times,
    row_product,
)
from pippin.backends.torch.kernels.packed.sums import PackedTile
from pippin.backends.torch.kernels.products import MOST_ROWS, product
from pippin.backends.torch.kernels.word_sums import BLOCK, sum_words
from pippin.backends.torch.load import load
from pippin.backends.torch.models.packed import Numbers, Packed, Stacked, dense, pack, times
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Linear, Norm
from pippin.backends.torch.shapes import ExpertShape

DEVICE = find_device()


def noise(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [2, 5, MOST_ROWS])
@pytest.mark.parametrize("size", [48, 1024, 1200])
@pytest.mark.parametrize("kind", ["norm", "residual", "swiglu", "bias"])
def test_products_have_norms_sums_and_gates_inside(num_rows: int, size: int, kind: str) -> None:
    torch.manual_seed(num_rows * size)
    num_out = 40
    x, weight = noise(num_rows, size), noise(2 * num_out if kind == "swiglu" else num_out, size)
    bias = noise(num_out) if kind == "bias" else None
    norm = Norm(noise(size, dtype=torch.float32), 1e-6) if kind in ("norm", "swiglu") else None
    residual = noise(num_rows, num_out) if kind == "residual" else None
    linear = Linear(weight / size**0.5, bias)
    found = product(x, linear, norm=norm, residual=residual, swiglu=kind == "swiglu")
    normed = x.float() if norm is None else norm(x.float())
    expected = F.linear(normed, linear.weight.float(), None if bias is None else bias.float())
    if kind == "swiglu":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    if residual is not None:
        expected = expected + residual.float()
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=2e-2)


def layer(
    num_experts: int,
    num_chosen: int,
    *,
    hidden: int = 48,
    size: int = 40,
    normalised: bool = True,
    shared: bool = False,
    dtype: torch.dtype = torch.float32,
) -> ExpertMlp:
    generator = torch.Generator(DEVICE).manual_seed(num_experts)

    def own_drawn(*sizes: int) -> torch.Tensor:
        values = torch.randn(sizes, generator=generator, device=DEVICE) * sizes[-1] ** -0.5
        return values.to(dtype)

    return ExpertMlp(
        ExpertShape(num_experts, num_chosen, size, normalised),
        Linear(own_drawn(num_experts, hidden)),
        own_drawn(num_experts, 2 * size, hidden),
        own_drawn(num_experts, hidden, size),
        DenseMlp(Linear(own_drawn(64, hidden)), Linear(own_drawn(hidden, 32))) if shared else None,
        Linear(own_drawn(1, hidden)) if shared else None,
    )


def tokens(num_tokens: int, mlp: ExpertMlp) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(num_tokens)
    weight = mlp.router.weight
    x = torch.randn(num_tokens, weight.shape[1], generator=generator, device=DEVICE)
    return x.to(weight.dtype)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "normalised", "shared"),
    [(8, 2, True, False), (5, 5, False, True), (33, 8, True, True)],
)
def test_experts_in_kernels_are_experts_in_plain_operations(
    num_tokens: int, num_experts: int, num_chosen: int, normalised: bool, shared: bool
) -> None:
    mlp = layer(num_experts, num_chosen, normalised=normalised, shared=shared)
    x = tokens(num_tokens, mlp)
    torch.testing.assert_close(feed_forward(mlp, x), mlp(x), rtol=1e-4, atol=1e-5)


HALF = (torch.float16, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float16,)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_in_half_precision(num_tokens: int, dtype: torch.dtype) -> None:
    """Held against float32, of the same routes: rounding may tip a choice. numpy, which interprets,
    has no bfloat16."""
    mlp = layer(8, 3, shared=True, dtype=dtype)
    exact = layer(8, 3, shared=True)
    x = tokens(num_tokens, mlp)
    routes = route(mlp.router(x), mlp.shape)
    found = run_experts(mlp, x, routes)
    assert found.dtype == dtype
    assert exact.shared is not None
    assert exact.shared_gate is not None
    wide = x.float()
    expected = exact.run(wide, routes.weights.float(), routes.chosen)
    expected += torch.sigmoid(exact.shared_gate(wide)) * exact.shared(wide)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tile", [ExpertTile(16, 32, 16, 4), ExpertTile(32, 64, 64, 4)])
def test_experts_in_tiles_of_any_size(tile: ExpertTile) -> None:
    """Of which no size is a multiple: of pairs, rows or channels."""
    mlp = layer(3, 2, hidden=72, size=24)
    x = tokens(50, mlp)
    routes = route(mlp.router(x), mlp.shape)
    expected = mlp.run(x, routes.weights, routes.chosen)
    torch.testing.assert_close(run_experts(mlp, x, routes, tile), expected, rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """To the bit, whatever they are and wherever it is among them."""
    mlp = layer(8, 3, shared=True)
    x = tokens(20, mlp)
    others = x.flip(0).contiguous()
    others[4] = x[11]
    # What cuBLAS does with a row is cuBLAS's business.
    y, beside = (run_experts(mlp, rows, route(mlp.router(rows), mlp.shape)) for rows in (x, others))
    assert torch.equal(beside[4], y[11])
    assert torch.equal(y, run_experts(mlp, x, route(mlp.router(x), mlp.shape)))


@pytest.mark.parametrize("normalised", [True, False])
def test_routes_are_those_of_plain_operations(normalised: bool) -> None:
    mlp = layer(33, 8, normalised=normalised)
    x = tokens(17, mlp)
    found = route(mlp.router(x), mlp.shape)
    weights, chosen = mlp.route(x)
    assert torch.equal(found.chosen.long(), chosen)
    torch.testing.assert_close(found.weights, weights)


def test_routes_of_equal_shares_and_of_what_is_no_number() -> None:
    """Every token goes to experts that there are."""
    shape = ExpertShape(6, 3, 8, normalised=True)
    logits = torch.zeros(2, 6, device=DEVICE)
    logits[1] = torch.nan
    found = route(logits, shape)
    assert found.chosen[0].tolist() == [0, 1, 2]
    assert set(found.chosen[1].tolist()) <= set(range(6))
    assert found.weights[1].isnan().all()


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["spread", "one", "two", "last"])
def test_every_pair_is_in_one_block_of_its_expert(kind: str, size: int) -> None:
    num_experts = 7
    generator = torch.Generator().manual_seed(size)
    chosen = torch.randint(0, num_experts, (13, 3), generator=generator, dtype=torch.int32)
    if kind != "spread":
        chosen[:] = {"one": 0, "two": 3, "last": num_experts - 1}[kind]
    if kind == "two":
        chosen[5:, 1] = 5
    blocks = blocks_of(chosen.to(DEVICE), num_experts, size)
    assert blocks.num_blocks == most_blocks(chosen.numel(), num_experts, size)
    assert blocks.order is not None
    assert blocks.firsts is not None
    assert blocks.ends is not None
    seen: list[int] = []
    parts = (blocks.experts, blocks.firsts, blocks.ends)
    for expert, first, end in zip(*(part.tolist() for part in parts), strict=True):
        pairs = blocks.order[first : max(first, end)].tolist()
        assert len(pairs) <= size
        assert 0 <= expert < num_experts
        assert (chosen.flatten()[pairs] == expert).all()
        seen += pairs
    assert seen == chosen.flatten().argsort(stable=True).tolist()


def test_tiles_fit_into_the_memory_of_every_gpu() -> None:
    for itemsize in (2, 4):
        for num_tokens in (1, 2, 8, 64, 512, 8192):
            for num_experts in (8, 128, 512):
                tile = expert_tile_for(num_tokens, 8 * num_tokens / num_experts, itemsize)
                held = (tile.pairs + tile.rows) * tile.channels * itemsize
                assert held * tile.num_stages(itemsize) <= 99 << 10
                assert min(tile.pairs, tile.rows // 2, tile.channels) >= 16


def test_routes_of_one_token_are_its_blocks() -> None:
    routes = Routes(torch.ones(1, 4), torch.tensor([[3, 1, 0, 2]], dtype=torch.int32))
    blocks = blocks_of(routes.chosen, 9, 16)
    assert blocks.num_blocks == 4
    assert blocks.experts.flatten().tolist() == [3, 1, 0, 2]
    assert blocks.order is None


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


@pytest.mark.parametrize("numbers", NUMBERS)
def test_packed_experts(numbers: Numbers) -> None:
    """Also in a block for each pair of a token and an expert: what half precision takes."""
    for num_tokens, size in ((1, 32), (6, 32), (6, 96)):
        mlp = ExpertMlp(
            ExpertShape(5, 2, size, normalised=True),
            Linear(drawn(5, 64)),
            packed(numbers, 5, 2 * size, 64),
            packed(numbers, 5, 64, size),
        )
        x = drawn(num_tokens, 64) * 0.1
        close(feed_forward(mlp, x), mlp(x))
    tile = expert_tile_for(6, 0.5, 2, packed=True)
    assert tile.pairs == 1
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


@pytest.mark.parametrize("num_words", [1, 6, 64, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_runs_add_up(num_words: int) -> None:
    """Words of all sizes: 32 bits would not hold their sums. Runs of several lengths."""
    generator = torch.Generator().manual_seed(num_words)
    limits = torch.iinfo(torch.int32)
    memory = torch.randint(
        limits.min, limits.max, (7 * num_words,), dtype=torch.int32, generator=generator
    )
    memory[:num_words] = limits.max
    on_device = memory.to(DEVICE)
    runs = [(5, num_words), (0, num_words), (3, 2 * num_words), (5, num_words), (6, 1)]
    addresses = [on_device.data_ptr() + 4 * line * num_words for line, _ in runs]
    lengths = [length for _, length in runs]
    found = sum_words(torch.tensor([addresses, lengths], device=DEVICE))
    assert found.dtype == torch.int64
    starts = [line * num_words for line, _ in runs]
    expected = [int(memory[a : a + n].sum()) for a, n in zip(starts, lengths, strict=True)]
    assert found.tolist() == expected
