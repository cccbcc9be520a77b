"""Decode rows beside chunks of prompts in one forward of kernels, against plain operations that run
the ones and then the others: on a GPU, or interpreted.
"""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import torch

from chunk_words import DEVICE, MadeUpChunks, chunk
from pippin.backends.base import PrefillRow
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.kernels.decode import DecodeKernels
from pippin.backends.torch.kernels.mixed import MixedKernels
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.pools.layout import WASTE_SLAB
from pippin.backends.torch.step.batches import chunk_batch, decode_batch
from pippin.backends.torch.step.decode_inputs import Inputs, pack_inputs
from pippin.backends.torch.step.sizes import Room
from run_again import RunAgain
from torch_serving import load_torch

ROOM = Room(128, 4)
WIDTH = 8
THREE = (chunk(1, 0, 70, 64, 70), chunk(2, 5, 2), chunk(3, 60, 1))
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
    made = MadeUpChunks(name, chunks, BESIDE)
    future = torch.arange(3, 10, dtype=torch.int32, device=DEVICE)
    with torch.inference_mode():
        plain = PlainForward(made.decoder, made.pools)
        tokens = future[made.pools.index(made.rows.slots)].long()
        rows = plain.tokens(decode_batch(made.rows, tokens, made.held, made.pools))
        batch = chunk_batch(made.taken, made.held, made.pools)
        expected = torch.cat([rows, plain.chunks(batch)[batch.last]])
        kept = made.written()
        waste = slice(WASTE_SLAB * made.layout.slab_bytes, 2 * made.layout.slab_bytes)
        made.pools.memory[waste].view(torch.float32).fill_(torch.nan)
        table = made.held.table
        decode = DecodeKernels(made.decoder, made.pools, table)
        run = MixedKernels(made.decoder, made.pools, table, decode)
        words = torch.from_numpy(pack_inputs(WIDTH, made.rows, made.layout.waste_cell))
        inputs = made.inputs(ROOM)
        found = run.hidden(Inputs(words.to(DEVICE)), inputs, future)
        last = found[WIDTH:][inputs.last.long()][: len(chunks)]
        found = torch.cat([found[: len(BESIDE)], last])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.written(), kept, rtol=1e-4, atol=1e-4, equal_nan=True)


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
