"""The kernels of a prompt's chunks against plain operations: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.base import PrefillRow
from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels.prompt import ChunkKernels
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import chunk_batch, take_chunks
from torch_serving import load_torch

DEVICE = find_device()


def chunk(slot: int, start: int, length: int, *checkpoints: int) -> PrefillRow:
    tokens = np.random.default_rng(slot).integers(3, 90, length).astype(np.int32)
    return PrefillRow(slot, start, tokens, captures=True, checkpoints=checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("qwen3_5", (chunk(1, 0, 70, 64, 70), chunk(2, 5, 2), chunk(3, 60, 1))),
        ("qwen3_next", (chunk(1, 3, 65, 67),)),
        ("llama", (chunk(1, 0, 20), chunk(2, 7, 9))),
        ("qwen3_moe", (chunk(1, 0, 20), chunk(2, 7, 9))),
        ("glm4_moe_lite", (chunk(1, 0, 70), chunk(2, 60, 2))),
        ("bamba", (chunk(1, 0, 70, 64, 70), chunk(2, 5, 2), chunk(3, 60, 1))),
        ("lfm2", (chunk(1, 0, 70, 64), chunk(2, 5, 2))),
    ],
)
def test_chunks_through_kernels_are_chunks_through_plain_operations(
    name: str, chunks: tuple[PrefillRow, ...]
) -> None:
    decoder = load_torch(name).decoder
    layout = PoolLayout(decoder.shape, decoder.dtype)
    pools = Pools(layout, 40 * layout.slab_bytes, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for views in (pools.kv, pools.recurrent, pools.conv):
        for view in views:
            view.normal_(generator=generator)
    pools.memory[: layout.slab_bytes] = 0
    rows = Rows(pools, len(chunks), max_len=256)
    for row in chunks:
        rows.grow(row.slot, row.start)
        if row.start:
            rows.next_states(np.array([row.slot]))
    with torch.inference_mode():
        batch = chunk_batch(take_chunks(chunks, rows, pools), rows, pools)
        before = pools.memory.clone()
        expected = PlainForward(decoder, pools).chunks(batch)
        after = pools.memory.clone()
        pools.memory.copy_(before)
        found = ChunkKernels(decoder, pools, rows.table).chunks(batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    mine, theirs = (memory.view(torch.float32) for memory in (pools.memory, after))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.equal(after, before)
