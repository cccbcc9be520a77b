"""Kernels of experts against plain operations: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels.experts.products import ExpertTile, expert_tile_for
from pippin.backends.torch.kernels.experts.routing import Routes, blocks_of, most_blocks, route
from pippin.backends.torch.kernels.layers import feed_forward, run_experts
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Linear
from pippin.backends.torch.shapes import ExpertShape

DEVICE = find_device()


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

    def drawn(*sizes: int) -> torch.Tensor:
        values = torch.randn(sizes, generator=generator, device=DEVICE) * sizes[-1] ** -0.5
        return values.to(dtype)

    return ExpertMlp(
        ExpertShape(num_experts, num_chosen, size, normalised),
        Linear(drawn(num_experts, hidden)),
        drawn(num_experts, 2 * size, hidden),
        drawn(num_experts, hidden, size),
        DenseMlp(Linear(drawn(64, hidden)), Linear(drawn(hidden, 32))) if shared else None,
        Linear(drawn(1, hidden)) if shared else None,
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
