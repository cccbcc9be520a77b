"""The kernels of a decode step against plain operations: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.sampling.noise import gumbel, noise_keys, random_bits
from pippin.backends.sampling.rules import SlotSampling
from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels.attention import step as attention_step
from pippin.backends.torch.kernels.checks.agreement import kernel_errors
from pippin.backends.torch.kernels.checks.layers import few_layers
from pippin.backends.torch.kernels.decode import DecodeKernels
from pippin.backends.torch.kernels.draw import Noise, draw
from pippin.backends.torch.kernels.recurrent.delta_step import StateTile, delta_step
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import decode_batch
from pippin.backends.torch.step.decode_inputs import (
    NO_ROWS,
    Choice,
    Inputs,
    RowArrays,
    SamplingColumns,
    pack_inputs,
)
from pippin.types import Component, SamplingParams
from torch_serving import load_torch

DEVICE = find_device()
LENGTHS = (0, 1, 63, 64, 130)


class Step:
    """Rows of these lengths with made-up KV and states, one token before their next."""

    def __init__(
        self, name: str, lengths: tuple[int, ...], seed: int = 0, max_len: int = 256
    ) -> None:
        self.decoder = load_torch(name, kernels=True).decoder
        layout = PoolLayout(self.decoder.shape, self.decoder.dtype)
        cells = (sum(lengths) + len(lengths)) * layout.cell_bytes(Component.ATTENTION)
        self.pools = Pools(layout, 40 * layout.slab_bytes + cells, DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        for views in (self.pools.kv, self.pools.recurrent, self.pools.conv):
            for view in views:
                view.normal_(generator=generator)
        self.pools.memory[: layout.slab_bytes] = 0
        self.rows = Rows(self.pools, len(lengths), max_len)
        self.slots = np.arange(1, len(lengths) + 1)
        for slot, length in zip(self.slots.tolist(), lengths, strict=True):
            self.rows.grow(slot, length)
        self.rows.next_states(self.slots[::2])  # some have a state of their own
        positions = self.rows.lengths[self.slots].copy()
        cells = self.rows.grow_each(self.slots, positions)
        states = self.rows.next_states(self.slots)
        self.arrays = RowArrays(self.slots, positions, cells, *states)
        self.tokens = np.arange(5, 5 + len(lengths))
        self.memory = self.pools.memory.clone()

    def plain(self) -> torch.Tensor:
        index = self.pools.index
        batch = decode_batch(self.arrays, index(self.tokens), self.rows, self.pools)
        forward = PlainForward(self.decoder, self.pools)
        return forward.decoder.head(forward.tokens(batch))

    def kernels(self, width: int) -> torch.Tensor:
        words = pack_inputs(width, self.arrays, self.pools.layout.waste_cell)
        future = torch.zeros(len(self.slots) + 1, dtype=torch.int32, device=DEVICE)
        future[1:] = torch.from_numpy(self.tokens)
        run = DecodeKernels(self.decoder, self.pools, self.rows.table)
        inputs = Inputs(torch.from_numpy(words).to(DEVICE))
        return run.logits(inputs, future)[: len(self.slots)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lengths", "width"),
    [
        ("qwen3_5", LENGTHS, 8),
        ("qwen3_5", (70,), 1),
        ("qwen3_5", (0,), 1),
        ("qwen3_next", (1, 63), 3),
        ("qwen3_next", (63,), 1),
        ("qwen2", (5, 17), 2),
        ("qwen2", (17,), 1),
        ("llama", (0, 33), 2),
        ("qwen3_moe", (5, 17, 3), 3),
        ("qwen3_5_moe", (17,), 1),
        ("llama_biases", (5, 17), 2),
        ("llama_biases", (17,), 1),
        ("qwen3_next_biases", (1, 63), 2),
        ("qwen3_next_biases", (63,), 1),
        ("nemotron_h", (1, 0, 63), 3),
        ("nemotron_h", (17,), 1),
        ("nemotron_h_moe", (5, 17), 2),
        ("granitemoehybrid", (5, 17), 2),
        ("lfm2_biases", (0, 17), 2),
        ("glm4_moe_lite", LENGTHS, 8),
        ("glm4_moe_lite", (17,), 1),
        # Windows, sinks, softcaps, scales, norms of every kind, experts of every kind.
        ("mistral", (40,), 1),
        ("gpt_oss", (40, 5), 2),
        ("gpt_oss", (40,), 1),
        ("gemma2", (40, 5), 2),
        ("gemma3", (40,), 1),
        ("glm4_moe", (5, 17), 2),
        ("olmo3", (40,), 1),
        ("granite", (17,), 1),
        ("smollm3", (17,), 1),
        ("cohere", (3, 17), 2),
    ],
)
def test_a_step_of_kernels_is_a_step_of_plain_operations(
    name: str, lengths: tuple[int, ...], width: int
) -> None:
    step = Step(name, lengths)
    with torch.inference_mode():
        expected = step.plain()
        after = step.pools.memory.clone()
        step.pools.memory.copy_(step.memory)
        found = step.kernels(width)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # What was written, too: every held cell and state, and nothing else but the waste.
    pools, waste = step.pools, step.pools.layout.slab_bytes
    mine, theirs = (m.view(torch.float32) for m in (pools.memory[2 * waste :], after[2 * waste :]))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert not pools.memory[:waste].any()


def test_a_state_is_gone_through_in_parts_or_at_once() -> None:
    step = Step("qwen3_5", (70, 5))
    layer = next(x for x in step.decoder.layers if isinstance(x.mixer, DeltaLayer))
    mixer, pool = layer.mixer, step.pools.recurrent[layer.number]
    num_columns = mixer.shape.v_dim
    projected = torch.randn(2, mixer.project.weight.shape[0], device=DEVICE)
    states = [step.pools.index(s).int() for s in (step.arrays.states_in, step.arrays.states_out)]
    found = []
    for columns in (num_columns, num_columns // 4):
        step.pools.memory.copy_(step.memory)
        y = delta_step(projected, mixer, pool, *states, StateTile(columns, 4, 2))
        found.append((y, pool[step.arrays.states_out].clone()))
    for at_once, in_parts in zip(*found, strict=True):
        torch.testing.assert_close(in_parts, at_once, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("many_groups", [1, 512], ids=["copies", "registers"])
@pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss", "gemma2"])
def test_a_long_row_is_attended_by_more_programs_than_the_short_ones_beside_it(
    name: str, many_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches of 64 tokens and four programs a row: as rows of 100,000 tokens have with 64."""
    monkeypatch.setattr(attention_step, "splits_for", lambda num_groups: (4, 64))
    monkeypatch.setattr(attention_step, "MANY_GROUPS", many_groups)
    step = Step(name, (0, 600, 63, 64, 255, 256, 257, 130), max_len=1024)
    with torch.inference_mode():
        expected = step.plain()
        step.pools.memory.copy_(step.memory)
        found = step.kernels(8)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_groups", [1, 2, 16, 33, 64, 128, 512, 4096, 10_000])
def test_programs_are_enough_for_long_rows_and_not_too_many_for_short_ones(num_groups: int) -> None:
    splits, least = attention_step.splits_for(num_groups)
    assert splits & (splits - 1) == 0
    assert splits == 1 or splits * num_groups <= attention_step.MOST_PROGRAMS
    assert splits * max(num_groups, 64) * 2 > min(attention_step.MOST_PROGRAMS, num_groups)
    for dim in (64, 128, 256, 512):
        tile = attention_step.tile_for(dim, 2, num_groups)
        assert least % tile.block == 0
        assert tile.copies * tile.block * dim * 2 * 2 <= 227 << 10  # a processor's shared memory
    short = -(-512 // max(least, -(-512 // splits)))  # stretches of 512 tokens
    assert short <= max(attention_step.PROGRAMS // num_groups, 8)


def states_of(*params: SamplingParams) -> list[SlotSampling]:
    return [SlotSampling(p, stream=1000 + 7 * n) for n, p in enumerate(params)]


def test_draws_are_those_of_the_specification() -> None:
    """Greedy and drawn rows side by side; the noise to the bit, but for logarithms."""
    vocab = 5001
    states = states_of(
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
    )
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32))
    slots, generated = np.arange(1, 4), np.array([0, 3, 9])
    words = pack_inputs(3, NO_ROWS._replace(slots=slots), waste_cell=0)
    sampling = SamplingColumns(3, vocab)
    for slot, state in enumerate(states, start=1):
        sampling.admit(slot, state)
    assert sampling.choice(slots, generated) is Choice.DRAWN
    sampling.fill(words, slots, generated)
    inputs = Inputs(torch.from_numpy(words).to(DEVICE))
    future = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    draw(
        logits.to(DEVICE),
        inputs.slot,
        future,
        out,
        Noise(
            inputs.inverse_temperature,
            thresholds=torch.full((3,), -torch.inf, device=DEVICE),
            noisy=inputs.noisy,
            keys=inputs.keys,
        ),
    )
    streams = np.array([state.stream for state in states], dtype=np.uint64)
    noise = gumbel(random_bits(noise_keys(streams, [0, 3, 9]), vocab))
    scaled = logits.numpy() * np.array([[1.0], [1.0], [2.0]], dtype=np.float32)
    noise[0] = 0.0
    expected = (scaled + noise).argmax(axis=1)
    assert out[0].tolist() == expected.tolist() == future[1:].tolist()
    assert out[1].tolist() == [0, 0, 0]


def test_thresholds_leave_out_and_what_is_no_number_is_told() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [torch.nan, 1.0, 2.0, 3.0]], device=DEVICE)
    inputs = torch.ones(2, dtype=torch.float32, device=DEVICE)
    out = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    draw(
        logits,
        slots,
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
        out,
        Noise(
            inverse_temperature=inputs,
            thresholds=torch.tensor([3.0, -torch.inf], device=DEVICE),
            noisy=slots,
            keys=torch.zeros(2, 2, dtype=torch.int32, device=DEVICE),
        ),
    )
    assert out[0, 0] == 1
    assert out[1].tolist() == [0, 1]
    assert 0 <= int(out[0, 1]) < 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "lfm2", "glm4_moe_lite"])
def test_steps_and_chunks_agree_at_load(name: str) -> None:
    with torch.inference_mode():
        errors = dict(kernel_errors(load_torch(name).decoder, drafts=False))
    for kind in few_layers(load_torch(name).decoder):
        assert {f"chunks of prompts with {kind}", f"captured chunks with {kind}"} <= {*errors}
    assert max(error if error is not None else 1.0 for error in errors.values()) < 1e-3
