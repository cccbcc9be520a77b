"""The kernels that captured chunks are made of, against plain operations: on a GPU, or interpreted.

What depends on the chunks is looked up: same room, same launches.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("interpreted")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chunk_words import DEVICE, MadeUpChunks, chunk
from pippin.backends.base import PrefillRow
from pippin.backends.torch.kernels.attention.blocks import attend_blocks
from pippin.backends.torch.kernels.attention.tiles import (
    AttentionTile,
    attention_tile_for,
    latent_tile_for,
    splits_for,
)
from pippin.backends.torch.kernels.prompt import PromptKernels
from pippin.backends.torch.kernels.recurrent.convolution import keep_inputs
from pippin.backends.torch.models.attention_layer import Scoring
from pippin.backends.torch.models.latent_layer import LatentLayer
from pippin.backends.torch.plain.attention import attend_rows
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.plain.latent import attend_latent
from pippin.backends.torch.pools.layout import WASTE_SLAB
from pippin.backends.torch.shapes import AttentionShape
from pippin.backends.torch.step.batches import chunk_batch
from pippin.backends.torch.step.sizes import Room

ROOM = Room(128, 4)
THREE = (chunk(1, 0, 70, 64, 70), chunk(2, 5, 2), chunk(3, 60, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("qwen3_5", THREE),
        ("llama", (chunk(2, 7, 9),)),
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
def test_chunks_in_a_room_are_chunks_through_plain_operations(
    name: str, chunks: tuple[PrefillRow, ...]
) -> None:
    """Whatever padding reads and writes: the waste is no number here, and nobody sees it."""
    made = MadeUpChunks(name, chunks)
    with torch.inference_mode():
        batch = chunk_batch(made.taken, made.held, made.pools)
        expected = PlainForward(made.decoder, made.pools).chunks(batch)[batch.last]
        kept = made.written()
        waste = slice(WASTE_SLAB * made.layout.slab_bytes, 2 * made.layout.slab_bytes)
        made.pools.memory[waste].view(torch.float32).fill_(torch.nan)
        run = PromptKernels(made.decoder, made.pools, made.held.table)
        inputs = made.inputs(ROOM)
        found = run.hidden(inputs)[inputs.last.long()]
    torch.testing.assert_close(found[: len(chunks)], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.written(), kept, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert found.isfinite().all()


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
    made = MadeUpChunks("llama", (chunk(1, 0, 70), chunk(2, 5, 2), chunk(3, 60, 1)))
    kv = made.pools.kv[0]
    shape = made.decoder.shape.mixers(AttentionShape)[0]
    heads, dim = shape.num_heads, shape.head_dim
    q = torch.randn(128, heads, dim, device=DEVICE)
    batch = chunk_batch(made.taken, made.held, made.pools)
    scoring = Scoring(dim**-0.5)
    if window:
        sinks = torch.randn(heads, device=DEVICE)
        scoring = Scoring(dim**-0.5, softcap=5.0, window=window, sinks=sinks)
    expected = attend_rows(q[:73], kv, batch.lengths, batch.held.seen, scoring)
    blocks = made.inputs(ROOM).recurrent.blocks
    table = made.held.table
    found = attend_blocks(q, kv, table, blocks, scoring, 0, tile, splits, least=32)
    torch.testing.assert_close(found[:73], expected, rtol=1e-5, atol=1e-5)
    assert not found[73:].any()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tile", [None, AttentionTile(16, 32, 8, num_heads=4)])
def test_blocks_attend_to_latents(tile: AttentionTile | None, splits: int) -> None:
    """A head's queries brought to the latents, the sums of latents brought to values."""
    made = MadeUpChunks("glm4_moe_lite", (chunk(1, 0, 70), chunk(2, 5, 2), chunk(3, 90, 1)))
    layer, kept = made.decoder.layers[0].mixer, made.pools.kv[0].flatten(1)
    assert isinstance(layer, LatentLayer)
    shape = layer.shape
    q = torch.randn(128, shape.num_heads, shape.plain_dim + shape.rope.dim, device=DEVICE)
    batch = chunk_batch(made.taken, made.held, made.pools)
    rows = zip(q.split([*batch.lengths, 128 - 73]), batch.held.seen, strict=False)
    expected = torch.cat([attend_latent(layer, part, kept[seen]) for part, seen in rows])
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
    made = MadeUpChunks("qwen3_5", (*THREE, chunk(4, 9, 3)))
    assert (made.taken.states_in == made.taken.states_out).any()
    conv = made.pools.conv[0]
    channels = conv.shape[2]
    x = torch.randn(128, channels + 5, device=DEVICE)
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
    from pippin.backends.torch.kernels import rows
    from pippin.backends.torch.kernels.attention import blocks as attention_blocks
    from pippin.backends.torch.kernels.attention import heads
    from pippin.backends.torch.kernels.experts import products, routing
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

        for module in (attention_blocks, heads, delta_blocks, convolution, rows, products, routing):
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
        made = MadeUpChunks(name, chunks)
        inputs = made.inputs(ROOM)
        run = PromptKernels(made.decoder, made.pools, made.held.table)
        with torch.inference_mode(), launches:
            run.hidden(inputs)
        found.append(launches.seen)
    assert found[0] == found[1]
    expected = {"_attend_blocks", "_place_heads", "_scan", "_keep_inputs"}
    expected |= {"_expert_product", "_order"} if name == "qwen3_5_moe" else set()
    assert expected <= {kernel for kernel, _ in found[0]}
