"""How chunks of prompts are put into the rooms of captured graphs, and what their words say."""

from __future__ import annotations

import numpy as np
import pytest

from cases import cases

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from chunk_words import MadeUpChunks, PlainPrompt, chunk
from pippin.backends.base import PrefillRow
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.pools.layout import WASTE_SLAB
from pippin.backends.torch.step.batches import chunk_batch
from pippin.backends.torch.step.chunk_inputs import pack_chunks
from pippin.backends.torch.step.sizes import ROOMS, Room, group_by_room, room_for
from pippin.types import GRID

SMALL = Room(128, 4)


def rows_of(*lengths: int) -> list[PrefillRow]:
    return [PrefillRow(n, 0, np.zeros(length, np.int32)) for n, length in enumerate(lengths, 1)]


def test_the_smallest_room_that_holds_them() -> None:
    assert room_for(1, 1) == Room(64, 4)
    assert room_for(64, 5) == Room(64, 16)
    assert room_for(65, 4) == Room(128, 4)
    assert room_for(2048, 16) == Room(2048, 16)
    assert room_for(2049, 1) is None
    assert room_for(64, 17) is None


@cases("room", ROOMS, ids=str)
def test_there_are_blocks_for_rows_of_any_lengths(room: Room) -> None:
    """The most come of rows that are one token over a block."""
    rng = np.random.default_rng(room.num_tokens)
    worst = np.ones(room.num_rows, dtype=np.int64)
    worst[: (room.num_tokens - room.num_rows) // GRID] += GRID
    for _ in range(50):
        cuts = np.sort(rng.choice(np.arange(1, room.num_tokens), room.num_rows - 1, replace=False))
        lengths = np.diff([0, *cuts, room.num_tokens])
        assert (-(-lengths // GRID)).sum() <= room.num_blocks
    assert (-(-worst // GRID)).sum() <= room.num_blocks


def test_chunks_go_together_as_far_as_a_room_takes_them() -> None:
    chunks = rows_of(1000, 1000, *[10] * 20, 5000, 7)
    groups = group_by_room(chunks)
    lengths = [[len(row.tokens) for row in group] for group in groups]
    assert lengths == [[1000, 1000, *[10] * 4], [10] * 16, [2048], [2048], [904, 7]]
    assert [row.start for group in groups for row in group if row.slot == 23] == [0, 2048, 4096]
    assert group_by_room([]) == []


def test_what_chunks_do_not_fill_reads_zeros_and_writes_waste() -> None:
    made = MadeUpChunks("qwen3_5", (chunk(3, 0, 70, 64, 70), chunk(1, 5, 2)))
    words = pack_chunks(SMALL, made.taken, made.held, made.layout)
    assert (words.tokens[2, 72:] == made.layout.waste_cell).all()
    cells = [made.held.held(3, 0, 70), made.held.held(1, 5, 7)]
    assert words.tokens[2, :72].tolist() == np.concatenate(cells).tolist()
    own = SMALL.num_rows * made.layout.conv_shape[0] + np.arange(72, 128)  # nobody else's inputs
    assert (words.tokens[3:, 72:] == own).all()
    lengths, slabs = words.blocks[3].tolist(), words.blocks[6].tolist()
    assert lengths[:4] == [64, 6, 2, 0]
    assert not any(lengths[3:])
    tap, states = made.taken.taps[0].slab, made.taken.states_out.tolist()
    assert slabs[:4] == [tap, states[0], states[1], 0]
    assert not any(slabs[3:])
    assert words.rows.tolist() == [[69, 71, 0, 0], [0, 2, 0, 0], [2, 1, 0, 0]]
    assert words.samples[0].tolist() == [0] * 4  # whoever samples is filled in later


MADE_UP = pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("qwen3_5", (chunk(1, 0, 70, 64, 70), chunk(2, 5, 2), chunk(3, 60, 1))),
        ("qwen3_next", (chunk(1, 3, 65, 67),)),
        ("llama", (chunk(2, 0, 20), chunk(1, 7, 9))),
    ],
    ids=["qwen3_5", "qwen3_next", "llama"],
)


@MADE_UP
def test_words_say_what_chunks_are(name: str, chunks: tuple[PrefillRow, ...]) -> None:
    """The same hidden vectors, and the same KV and states for whoever comes next."""
    made = MadeUpChunks(name, chunks)
    with torch.inference_mode():
        batch = chunk_batch(made.taken, made.held, made.pools)
        expected = PlainForward(made.decoder, made.pools).chunks(batch)[batch.last]
        kept = made.written()
        waste = slice(WASTE_SLAB * made.layout.slab_bytes, 2 * made.layout.slab_bytes)
        made.pools.memory[waste].view(torch.float32).fill_(torch.nan)  # nobody reads it
        run = PlainPrompt(made.decoder, made.pools, made.held.table)
        inputs = made.inputs(SMALL)
        found = run.hidden(inputs)[inputs.last.long()]
    torch.testing.assert_close(found[: len(chunks)], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.written(), kept, rtol=1e-4, atol=1e-4, equal_nan=True)
