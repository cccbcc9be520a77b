"""Kernels of prompts' chunks, beside decode rows and of Mamba-2, against plain operations.

On a GPU, or interpreted. What depends on the chunks is looked up: same room, same launches.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

pytest.importorskip("interpreted")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunk_words import DEVICE, MadeUpStep, chunk
from pippin.backends.base import PrefillRow
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.kernels.attention.blocks import (
    AttentionTile,
    attend_blocks,
    attention_tile_for,
    latent_tile_for,
    splits_for,
)
from pippin.backends.torch.kernels.forward import KernelForward
from pippin.backends.torch.kernels.recurrent.convolution import keep_inputs
from pippin.backends.torch.kernels.recurrent.mamba import mamba_blocks
from pippin.backends.torch.kernels.rows import gated_norm
from pippin.backends.torch.models.mixers import LatentLayer, MambaInputs, MambaLayer, Scoring
from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.plain.attention import attend_latent, attend_row
from pippin.backends.torch.plain.recurrent import Blocks
from pippin.backends.torch.plain.recurrent import mamba_blocks as plain_mamba_blocks
from pippin.backends.torch.shapes import AttentionShape, MambaShape
from pippin.backends.torch.step.batches import chunk_batch
from pippin.backends.torch.step.words import BlockInputs, RecurrentInputs, launched, room
from run_again import RunAgain
from torch_serving import load_torch

ROOM = room(128, 4)


THREE = (chunk(1, 0, 70, 64, 70), chunk(2, 5, 2), chunk(3, 60, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("qwen3_5", THREE),
        ("qwen3_next", (chunk(1, 3, 65, 67),)),
        ("llama", (chunk(1, 0, 20), chunk(2, 7, 9))),
        ("qwen3_5_moe", (chunk(2, 7, 9),)),
        ("gpt_oss", (chunk(1, 60, 9), chunk(2, 7, 40))),
        ("gemma2", (chunk(1, 0, 40),)),
        ("glm4_moe_lite", (chunk(1, 60, 9), chunk(2, 0, 70))),
        ("nemotron_h", THREE),
        ("granitemoehybrid", (chunk(1, 7, 70, 71),)),
        ("lfm2_biases", THREE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_chunks_through_kernels_are_chunks_through_plain_operations(
    name: str, chunks: tuple[PrefillRow, ...]
) -> None:
    """As they are launched, and in a room as they are captured."""
    made = MadeUpStep(name, chunks)
    num_tokens = sum(len(row.tokens) for row in chunks)
    with torch.inference_mode():
        expected = made.plain()
        for size in (launched(num_tokens, len(chunks)), ROOM):
            found = made.by(KernelForward, size)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


TWO_HEADS = AttentionTile(64, 16, 8, num_heads=2)


@pytest.mark.parametrize(
    "tile", [None, AttentionTile(64, 64, 4), AttentionTile(32, 16, 4), TWO_HEADS]
)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [0, 40])
def test_blocks_attend_to_what_their_rows_attend_to(
    tile: AttentionTile | None, splits: int, window: int
) -> None:
    """In one stretch, or in four: some of the blocks see less than two have."""
    made = MadeUpStep("llama", (chunk(1, 0, 70), chunk(2, 5, 2), chunk(3, 60, 1)))
    kv = made.pools.kv[0]
    shape = made.decoder.shape.mixers(AttentionShape)[0]
    heads, dim = shape.num_heads, shape.head_dim
    q = torch.randn(128, heads, dim, device=DEVICE)
    assert made.taken is not None
    batch = chunk_batch(made.taken, made.held, made.pools)
    scoring = Scoring(dim**-0.5)
    if window:
        sinks = torch.randn(heads, device=DEVICE)
        scoring = Scoring(dim**-0.5, softcap=5.0, window=window, sinks=sinks)
    rows = zip(q[:73].split(batch.lengths), batch.held.seen, strict=True)
    expected = torch.cat([attend_row(part, kv, seen, scoring) for part, seen in rows])
    blocks = made.inputs(ROOM).recurrent.blocks
    table = made.held.table
    found = attend_blocks(q, kv, table, blocks, scoring, 0, tile, splits, least=32)
    torch.testing.assert_close(found[:73], expected, rtol=1e-5, atol=1e-5)
    assert not found[73:].any()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tile", [None, AttentionTile(16, 32, 8, num_heads=4)])
def test_blocks_attend_to_latents(tile: AttentionTile | None, splits: int) -> None:
    """A head's queries brought to the latents, the sums of latents brought to values."""
    made = MadeUpStep("glm4_moe_lite", (chunk(1, 0, 70), chunk(2, 5, 2), chunk(3, 90, 1)))
    layer, kept = made.decoder.layers[0].mixer, made.pools.kv[0].flatten(1)
    assert isinstance(layer, LatentLayer)
    shape = layer.shape
    q = torch.randn(128, shape.num_heads, shape.plain_dim + shape.rope.dim, device=DEVICE)
    assert made.taken is not None
    batch = chunk_batch(made.taken, made.held, made.pools)
    rows = zip(q.split([*batch.lengths, 128 - 73]), batch.held.seen, strict=False)
    expected = torch.cat([attend_latent(layer, part, kept, seen) for part, seen in rows])
    blocks = made.inputs(ROOM).recurrent.blocks
    found = attend_blocks(
        layer.absorb(q).transpose(0, 1),
        kept,
        made.held.table,
        blocks,
        Scoring(shape.scale),
        shape.rank,
        tile,
        splits,
        least=32,
    )
    values = layer.values_of(found.transpose(0, 1))
    torch.testing.assert_close(values[:73], expected, rtol=1e-5, atol=1e-5)
    assert not found[73:].any()


def test_tiles_fit_into_shared_memory() -> None:
    """Queries, and two stages of keys and values: 96 KB, which every GPU since Ampere has."""
    for dim in (16, 32, 64, 128, 256):
        for itemsize in (2, 4):
            tile = attention_tile_for(dim, itemsize)
            assert 64 % tile.num_tokens == 0
            assert shared_bytes(tile, dim, itemsize) <= 96 << 10
            for heads_of_a_key in (1, 2, 3, 8):
                tile = attention_tile_for(dim, itemsize, heads_of_a_key, shared_bytes=227 << 10)
                assert heads_of_a_key % tile.num_heads == 0
                assert shared_bytes(tile, dim, itemsize) <= 200 << 10


def test_tiles_of_latents_fit_into_shared_memory() -> None:
    """Queries and cells of 576 channels; of several stages one is that of the cells' places."""
    for heads in (1, 6, 16, 20, 64, 128):
        for itemsize, has, most in ((2, 227 << 10, 220 << 10), (2, 0, 96 << 10), (4, 0, 96 << 10)):
            tile = latent_tile_for(heads, itemsize, has)
            assert heads % tile.num_heads == 0
            assert 64 % tile.num_tokens == 0
            rows = tile.num_tokens * tile.num_heads
            assert rows >= 16  # what products by tensor cores take
            num_cells = max(1, tile.num_stages - 1) * tile.num_keys
            assert (rows + num_cells) * 576 * itemsize <= most


def shared_bytes(tile: AttentionTile, dim: int, itemsize: int) -> int:
    """Queries, and the stages of keys and values."""
    queries = tile.num_tokens * tile.num_heads
    return (queries + 2 * tile.num_stages * tile.num_keys) * dim * itemsize


def test_few_blocks_are_divided_and_many_are_not() -> None:
    assert [splits_for(programs) for programs in (1, 16, 100, 528, 4000)] == [32, 32, 4, 1, 1]


def test_the_last_inputs_of_a_chunk_are_kept() -> None:
    """Of chunks of one, two and many tokens, in place and elsewhere, and at checkpoints."""
    made = MadeUpStep("qwen3_5", (*THREE, chunk(4, 9, 3)))
    assert made.taken is not None
    assert (made.taken.states_in == made.taken.states_out).any()
    conv = made.pools.conv[0]
    channels = conv.shape[2]
    x = torch.randn(128, channels + 5, device=DEVICE)
    assert made.taken is not None
    batch = chunk_batch(made.taken, made.held, made.pools)
    assert batch.conv is not None
    source = torch.cat([conv[batch.states_in].flatten(0, 1), x[:, :channels]])
    expected = source[batch.conv.after]
    inputs = made.inputs(ROOM)
    before = conv.clone()
    keep_inputs(x, conv, inputs.recurrent.blocks)
    slabs = [*made.taken.states_out.tolist(), *(tap.slab for tap in made.taken.taps)]
    assert torch.equal(conv[slabs], expected)
    others = [slab for slab in range(len(conv)) if slab not in slabs]
    assert torch.equal(conv[others], before[others])


class Launches(TorchDispatchMode):
    """Notes every operation with the shapes that it reads; none may ask the device."""

    ASKS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.ASKS, f"the host waits in {func}"
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        self.seen.append((name, shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_launches_depend_on_the_room_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The kernels themselves are left out: which are launched, and in how many programs, is not."""
    from pippin.backends.torch.kernels import experts, rows
    from pippin.backends.torch.kernels.attention import blocks as attention_blocks
    from pippin.backends.torch.kernels.attention import step as attention_step
    from pippin.backends.torch.kernels.recurrent import convolution, delta_blocks

    found = []
    for chunks in (THREE, (chunk(1, 0, 128, 64),)):
        launches = Launches()

        class Noted:
            def __init__(self, name: str, launches: Launches = launches) -> None:
                self._name, self._launches = name, launches

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                self._launches.seen.append((self._name, grid))
                return lambda *args, **options: None

        for module in (attention_blocks, attention_step, delta_blocks, convolution, rows, experts):
            names = (
                "_attend_blocks",
                "_sum_stretches",
                "_place_heads",
                "_solve",
                "_scan",
                "_keep_inputs",
                "_add_norm",
            )
            names += ("_swiglu", "_conv_rows", "_gated_norm", "_route", "_order", "_cut")
            for kernel in (*names, "_expert_product", "_weighted_sum"):
                if hasattr(module, kernel):
                    monkeypatch.setattr(module, kernel, Noted(kernel))
        made = MadeUpStep(name, chunks)
        packed = torch.from_numpy(made.words(ROOM).words).to(DEVICE)
        run = KernelForward(made.decoder, made.pools, made.held.table, made.future)
        with torch.inference_mode(), launches:
            run.run(ROOM, packed)
        found.append(launches.seen)
    assert found[0] == found[1]
    expected = {"_attend_blocks", "_place_heads", "_scan", "_keep_inputs"}
    expected |= {"_expert_product", "_order"} if name == "qwen3_5_moe" else set()
    assert expected <= {kernel for kernel, _ in found[0]}


WIDTH = 8


BESIDE = {4: 30, 6: 3, 5: 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("llama", THREE),
        ("qwen3_moe", (chunk(2, 7, 9),)),
        ("gpt_oss", (chunk(1, 60, 9), chunk(2, 7, 40))),
        ("glm4_moe_lite", (chunk(1, 60, 9), chunk(2, 0, 70))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_and_chunks_in_one_forward(name: str, chunks: tuple[PrefillRow, ...]) -> None:
    made = MadeUpStep(name, chunks, BESIDE)
    with torch.inference_mode():
        expected = made.plain()
        found = made.by(KernelForward, ROOM._replace(num_rows=WIDTH))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "num_slots", "runs_together"),
    [("llama", 4, True), ("llama", 1, False), ("qwen3_5", 4, False)],
)
def test_models_with_recurrent_layers_run_them_apart(
    name: str, num_slots: int, runs_together: bool
) -> None:
    backend = TorchBackend(
        load_torch(name), num_slots=num_slots, pool_bytes=None, kernels=True, recorder=RunAgain()
    )
    assert any(shape.beside for shape in backend.shapes_to_warm_up) == runs_together


NO_PRODUCT = cast(Linear, None)  # none is run here


LENGTHS = (70, 3)  # of rows whose states are in slabs 1 and 2


NUM_TOKENS = 80  # the rest is padding


# By block: position, first token, tokens, the slab that its state goes to; the last is of no row.
POSITIONS, STARTS, COUNTS, SLABS = (0, 64, 5, 0), (0, 64, 70, 0), (64, 6, 3, 0), (3, 1, 4, 0)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_layer(num_groups: int) -> MambaLayer:
    shape = MambaShape(4, 16, num_groups, state_dim=16, num_taps=4, least_dt=0.01, most_dt=2.0)
    return MambaLayer(
        shape,
        project=NO_PRODUCT,
        taps=torch.zeros(0),
        conv_bias=None,
        decay=-2.0 * torch.rand(4, device=DEVICE),
        dt_bias=torch.randn(4, device=DEVICE),
        skip=torch.randn(4, device=DEVICE),
        norm=Norm(torch.randn(shape.inner, device=DEVICE), 1e-5),
        out=NO_PRODUCT,
    )


# An interpreter multiplies no bfloat16.
@pytest.mark.parametrize(
    ("dtype", "num_groups", "near"),
    [(torch.float32, 2, 1e-5), (torch.float32, 4, 1e-5), (torch.float16, 1, 2e-3)],
)
def test_blocks_are_run_from_state_to_state(
    dtype: torch.dtype, num_groups: int, near: float
) -> None:
    """Two rows, one of two blocks whose first state is kept as well; heads that share B and C."""
    torch.manual_seed(0)
    layer = make_layer(num_groups)
    shape, num_tokens = layer.shape, sum(LENGTHS)
    mixed = torch.randn(NUM_TOKENS, shape.num_channels, device=DEVICE).to(dtype)
    gates = torch.randn(NUM_TOKENS, shape.num_heads + 3, device=DEVICE)[:, : shape.num_heads]
    state = torch.randn(6, *shape.state_parts, device=DEVICE)
    groups = shape.num_groups * shape.state_dim
    parts = mixed[:num_tokens].float().split([shape.inner, groups, groups], dim=-1)
    x, b, c = (
        part.unflatten(1, (count, -1))
        for part, count in zip(parts, (shape.num_heads, num_groups, num_groups), strict=True)
    )
    dt = torch.nn.functional.softplus(gates[:num_tokens] + layer.dt_bias)
    dt = dt.clamp(shape.least_dt, shape.most_dt)
    plain = MambaInputs(x, b, c, dt, layer.decay * dt)
    y, after = plain_mamba_blocks(plain, layer.skip, Blocks(LENGTHS, DEVICE), state[[1, 2]].clone())
    words = ((1, 1, 2, 0), POSITIONS, STARTS, COUNTS, (0, 0, 70, 0), (1, 1, 2, 0), SLABS)
    blocks = BlockInputs(*(integers(*line) for line in words))
    rows = (integers(1, 2, 0, 0), integers(0, 2, 0, 0), integers(2, 1, 0, 0))
    before = state.clone()
    found = mamba_blocks(mixed, gates, layer, state, RecurrentInputs(integers(), *rows, blocks))
    torch.testing.assert_close(found[:num_tokens].float(), y, rtol=near, atol=10 * near)
    assert not found[num_tokens:].any()
    torch.testing.assert_close(state[[3, 1, 4]], after, rtol=near, atol=10 * near)
    assert torch.equal(state[[0, 2, 5]], before[[0, 2, 5]])


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_gate_comes_before_the_norm_of_a_group(num_groups: int) -> None:
    torch.manual_seed(0)
    layer = make_layer(num_groups)
    y, z = (torch.randn(3, layer.shape.inner, device=DEVICE) for _ in range(2))
    expected = layer.normed(y * torch.nn.functional.silu(z))
    found = gated_norm(y.unflatten(1, (num_groups, -1)), z, layer.norm, gate_first=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
