"""Chunks of prompts in made-up pools; and what their words say, read in the plainest way.

`PlainPrompt` looks at nothing but the words that a captured graph reads: token by token, row by
row. It stands in for kernels where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pippin.backends.base import PrefillRow
from pippin.backends.sampling.rules import FAR
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.device import find_device
from pippin.backends.torch.graphs.steps import CapturedSteps, chunk_steps, mixed_steps
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer, Inputs
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.plain.gated_delta import gated_delta_step
from pippin.backends.torch.pools.layout import WASTE_SLAB, PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import Batch, HeldCells, chunk_batch, take_chunks
from pippin.backends.torch.step.chunk_inputs import ChunkInputs, pack_chunks
from pippin.backends.torch.step.decode_inputs import Choice, RowArrays
from pippin.backends.torch.step.decode_inputs import Inputs as SampleInputs
from pippin.backends.torch.step.filters import is_top_p_alone, least_in_top_p, least_kept
from pippin.backends.torch.step.sampler import add_gumbel_noise
from pippin.backends.torch.step.sizes import ROOM_ROWS, MixedSize, Room
from torch_serving import load_torch

DEVICE = find_device()
NO_ROWS: Mapping[int, int] = {}


def chunk(slot: int, start: int, length: int, *checkpoints: int) -> PrefillRow:
    tokens = np.random.default_rng(slot).integers(3, 90, length).astype(np.int32)
    return PrefillRow(slot, start, tokens, captures=True, checkpoints=checkpoints)


class MadeUpChunks:
    """Rows with KV and states of noise, and these chunks to run behind them, beside one token each
    of other rows: `beside` has positions by slot."""

    def __init__(
        self, name: str, chunks: tuple[PrefillRow, ...], beside: Mapping[int, int] = NO_ROWS
    ) -> None:
        self.decoder: Decoder = load_torch(name, kernels=True).decoder
        self.layout = PoolLayout(self.decoder.shape, self.decoder.dtype)
        self.pools = Pools(self.layout, 40 * self.layout.slab_bytes, DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(0)
        for views in (self.pools.kv, self.pools.recurrent, self.pools.conv):
            for view in views:
                view.normal_(generator=generator)
        self.pools.memory[: self.layout.slab_bytes] = 0
        lengths = {row.slot: row.start for row in chunks} | dict(beside)
        self.held = Rows(self.pools, max(lengths), max_len=256)
        for slot, length in lengths.items():
            self.held.grow(slot, length)
            if length:  # it has a state of its own, which it may write in place
                self.held.next_states(np.array([slot]))
        slots, positions = (np.array([*x], dtype=np.int64) for x in (beside, beside.values()))
        cells = self.held.grow_each(slots, positions)
        self.rows = RowArrays(slots, positions, cells, *self.held.next_states(slots))
        self.taken = take_chunks(chunks, self.held, self.pools)
        self.before = self.pools.memory.clone()
        self.last = np.cumsum([len(row.tokens) for row in chunks]) - 1

    def inputs(self, room: Room) -> ChunkInputs:
        packed = pack_chunks(room, self.taken, self.held, self.layout)
        return ChunkInputs.of(torch.from_numpy(packed.words).to(DEVICE), room, self.layout)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What plain operations say behind each token, and what they write."""
        batch = chunk_batch(self.taken, self.held, self.pools)
        found = PlainForward(self.decoder, self.pools).chunks(batch)
        return found, self.written()

    def in_room(self, room: Room, run: Any) -> torch.Tensor:
        """Behind each chunk's last token. The waste is no number here, and nobody sees it."""
        self.spoil_waste()
        inputs = self.inputs(room)
        found: torch.Tensor = run.hidden(inputs)[inputs.last.long()]
        assert found.isfinite().all()
        return found[: len(self.last)]

    def spoil_waste(self) -> None:
        waste = slice(WASTE_SLAB * self.layout.slab_bytes, 2 * self.layout.slab_bytes)
        self.pools.memory[waste].view(torch.float32).fill_(torch.nan)

    def written(self) -> torch.Tensor:
        """All that anybody reads, and back to how it was."""
        found = self.pools.memory[2 * self.layout.slab_bytes :].clone().view(torch.float32)
        assert not self.pools.memory[: self.layout.slab_bytes].any(), "the zeros were written"
        self.pools.memory.copy_(self.before)
        return found


class PlainPrompt:
    """What `chunk_steps` captures, with as few ideas of its own as possible."""

    def __init__(self, decoder: Decoder, pools: Pools, table: torch.Tensor) -> None:
        self._decoder, self._pools, self._table = decoder, pools, table

    def hidden(self, inputs: ChunkInputs) -> torch.Tensor:
        run = _PlainWords(self._pools, self._table, inputs)
        return self._decoder.norm(self._decoder.run(inputs.token.long(), run.mix))

    def choose(
        self, logits: torch.Tensor, inputs: SampleInputs, future: torch.Tensor, choice: Choice
    ) -> torch.Tensor:
        drawn = torch.zeros(2, len(logits), dtype=torch.int32, device=logits.device)
        drawn[1] = logits[:, 0].isnan()
        if choice is Choice.LOGITS:
            return drawn
        x = logits.float()
        if choice is not Choice.GREEDY:
            scaled = x * inputs.inverse_temperature[:, None]
            noisy = add_gumbel_noise(scaled, inputs.keys)
            x = torch.where(inputs.noisy[:, None] > 0, noisy, scaled)
            in_top_p = least_in_top_p(scaled, inputs.top_p, inputs.min_p)
            alone = is_top_p_alone(inputs)
            least = torch.where(alone, in_top_p, least_kept(logits, inputs))
            x = x - (scaled < least[:, None]) * FAR
        drawn[0] = x.argmax(dim=-1)
        future[inputs.slot.long()] = drawn[0]
        return drawn


class _PlainWords:
    def __init__(self, pools: Pools, table: torch.Tensor, inputs: ChunkInputs) -> None:
        self._pools, self._table, self._inputs = pools, table, inputs
        blocks = inputs.recurrent.blocks
        lines = (getattr(blocks, name).tolist() for name in blocks.__annotations__)
        names = tuple(blocks.__annotations__)
        self._blocks = [dict(zip(names, each, strict=True)) for each in zip(*lines, strict=True)]

    def mix(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        mixer = layer.mixer
        if isinstance(mixer, AttentionLayer):
            return self._attend(mixer, self._pools.kv[layer.number], x)
        return self._recur(mixer, layer.number, x)

    def _attend(self, mixer: AttentionLayer, kv: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        q, k, v, gate = mixer.project(x, self._inputs.position.long())
        kv[self._inputs.cell.long()] = torch.stack([k, v], dim=1)
        y = torch.zeros_like(q)
        shared = mixer.shape.num_heads // mixer.shape.num_kv_heads
        for block in self._blocks:
            for n in range(block["length"]):
                cells = self._table[block["slot"], : block["position"] + n + 1].long()
                keys, values = kv[cells].repeat_interleave(shared, dim=2).unbind(dim=1)
                token = block["start"] + n
                scores = torch.einsum("hd,thd->ht", q[token], keys) * mixer.shape.head_dim**-0.5
                y[token] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values)
        return mixer.finish(y, gate)

    def _recur(self, mixer: DeltaLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, gates = mixer.split(mixer.project(x))
        given = self._inputs.recurrent
        states_in = given.states_in.long()
        source = torch.cat([conv[states_in].flatten(0, 1), mixed])
        convolved = sum(
            source[places.long()] * tap
            for places, tap in zip(given.places, mixer.taps, strict=True)
        )
        inputs = mixer.inputs(convolved, gates)
        y = torch.zeros_like(inputs.v)
        writes = []
        firsts, counts = given.first_block.tolist(), given.num_blocks.tolist()
        for first, count, state_in in zip(firsts, counts, states_in.tolist(), strict=True):
            state = recurrent[state_in][None]
            for block in self._blocks[first : first + count]:
                assert block["state_in"] == state_in
                end = block["start"] + block["length"]
                for n in range(block["start"], end):
                    one = Inputs(*(each[n : n + 1] for each in inputs))
                    y[n : n + 1], state = gated_delta_step(one, state)
                last = torch.cat([conv[state_in], mixed[block["row_start"] : end]])
                writes.append((block["slab"], state[0], last[-conv.shape[1] :].clone()))
        for slab, state, last in writes:
            if slab:
                recurrent[slab], conv[slab] = state, last
        return mixer.finish(y, z)


def capture_chunks(backend: TorchBackend, recorder: Any) -> CapturedSteps[Room]:
    """On a GPU `TorchBackend` does the same with kernels."""
    prompt = PlainPrompt(backend._decoder, backend.runner.pools, backend.runner.rows.table)
    vocab, dtype = backend.spec.vocab_size, backend._decoder.dtype
    logits = torch.empty(ROOM_ROWS[-1], vocab, dtype=dtype, device=DEVICE)
    head, future = backend._decoder.head, backend._future_map.tokens
    graphs = chunk_steps(prompt, head, prompt.choose, future, backend._layout, recorder, logits)
    backend.runner.prompts.graphs = graphs
    return graphs


class PlainMixed:
    """What `mixed_steps` captures: the rows, and then the chunks."""

    def __init__(self, prompt: PlainPrompt, plain: PlainForward, table: torch.Tensor) -> None:
        self._prompt, self._plain, self._table = prompt, plain, table

    def hidden(self, rows: SampleInputs, chunks: ChunkInputs, future: torch.Tensor) -> torch.Tensor:
        slots, positions, cells = rows.slot.long(), rows.position.long(), rows.cell
        self._table[slots, positions] = cells
        places = zip(slots.tolist(), positions.tolist(), strict=True)
        seen = tuple(self._table[slot, : position + 1].long() for slot, position in places)
        states = rows.state_in.long(), rows.state_out.long()
        held = HeldCells(cells.long(), seen)
        batch = Batch([1] * len(seen), future[slots].long(), positions, *states, held, None)
        return torch.cat([self._plain.tokens(batch), self._prompt.hidden(chunks)])


def capture_mixed(backend: TorchBackend, recorder: Any) -> CapturedSteps[MixedSize]:
    """The same, of decode rows beside chunks."""
    runner, decoder = backend.runner, backend._decoder
    table, future = runner.rows.table, backend._future_map.tokens
    prompt = PlainPrompt(decoder, runner.pools, table)
    kernels = PlainMixed(prompt, PlainForward(decoder, runner.pools), table)
    logits = torch.empty(0, backend.spec.vocab_size, dtype=decoder.dtype, device=DEVICE)
    runner.mixed.steps = mixed_steps(
        kernels, decoder.head, prompt.choose, future, backend._layout, recorder, logits
    )
    return runner.mixed.steps
