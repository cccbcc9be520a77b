"""Steps in made-up pools; and what their words say, read in the plainest way.

`PlainWords` looks at nothing but the words that a step over kernels reads: token by token, row by
row. It stands in for kernels where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pippin.backends.base import DecodeRow, PrefillRow
from pippin.backends.sampling.rules import FAR
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.device import arrays_on, find_device
from pippin.backends.torch.graphs.steps import CapturedSteps, Forwarded
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.mixers import AttentionLayer, DeltaLayer, Inputs
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.plain.recurrent import gated_delta_step
from pippin.backends.torch.pools.layout import WASTE_SLAB, PoolLayout
from pippin.backends.torch.pools.memory import KeptInputs, Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import (
    DecodeBatch,
    HeldCells,
    SeenCells,
    chunk_batch,
    decode_batch,
    take_chunks,
    take_rows,
)
from pippin.backends.torch.step.decode_inputs import FIELDS, Choice
from pippin.backends.torch.step.decode_inputs import Inputs as SampleInputs
from pippin.backends.torch.step.filters import is_top_p_alone, least_in_top_p, least_kept
from pippin.backends.torch.step.sampler import add_gumbel_noise
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.words import FIRST_CELL, StepInputs, StepSize, StepWords
from pippin.types import Component
from torch_serving import load_torch

DEVICE = find_device()
NO_ROWS: Mapping[int, int] = {}


def chunk(slot: int, start: int, length: int, *checkpoints: int) -> PrefillRow:
    tokens = np.random.default_rng(slot).integers(3, 90, length).astype(np.int32)
    return PrefillRow(slot, start, tokens, captures=True, checkpoints=checkpoints)


class MadeUpStep:
    """Rows with KV and states of noise: chunks to run behind them, and one token each of other
    rows: `beside` has positions by slot."""

    def __init__(
        self,
        name: str,
        chunks: tuple[PrefillRow, ...] = (),
        beside: Mapping[int, int] = NO_ROWS,
        max_len: int = 256,
    ) -> None:
        self.decoder: Decoder = load_torch(name, kernels=True).decoder
        self.layout = PoolLayout(self.decoder.shape, self.decoder.dtype)
        lengths = {row.slot: row.start for row in chunks} | dict(beside)
        num_slabs = 40 + sum(lengths.values()) // self.layout.cells_per_slab(Component.ATTENTION)
        self.pools = Pools(self.layout, num_slabs * self.layout.slab_bytes, DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(0)
        for views in (self.pools.kv, self.pools.recurrent, self.pools.conv):
            for view in views:
                view.normal_(generator=generator)
        self.pools.memory[: self.layout.slab_bytes] = 0
        self.held = Rows(self.pools, max(lengths), max_len=max_len)
        self.future = FutureMap(arrays_on(DEVICE), max(lengths))
        self.future.tokens[1:] = torch.arange(5, 5 + max(lengths))
        for slot, length in lengths.items():
            self.held.grow(slot, length)
            if length and (chunks or slot % 2):  # it may write its own state in place
                self.held.next_states(np.array([slot]))
        decodes = [DecodeRow(slot, position) for slot, position in beside.items()]
        self.rows = take_rows(decodes, self.held, self.pools) if decodes else None
        self.taken = take_chunks(chunks, self.held, self.pools) if chunks else None
        self.before = self.pools.memory.clone()
        self.last = np.cumsum([len(row.tokens) for row in chunks]) - 1

    def words(self, size: StepSize) -> StepWords:
        words = StepWords(size, self.layout)
        if self.rows is not None:
            slots = Slots(len(self.held.lengths) - 1, self.decoder.shape.vocab_size, torch.tensor)
            words.put_rows(self.rows, slots)
        if self.taken is not None:
            words.put_chunks(self.taken, self.held)
        return words

    def inputs(self, size: StepSize) -> StepInputs:
        words = torch.from_numpy(self.words(size).words).to(DEVICE)
        return StepInputs.of(words, size, self.layout)

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of rows and behind chunks by plain operations, and what they write."""
        forward, found = PlainForward(self.decoder, self.pools), []
        if self.rows is not None:
            batch = decode_batch(self.rows, self.held, self.future, self.pools)
            found.append(forward.hidden(batch))
        if self.taken is not None:
            chunks = chunk_batch(self.taken, self.held, self.pools)
            found.append(forward.hidden(chunks)[chunks.last])
        return self.decoder.head(torch.cat(found)), self.written()

    def by(self, forward: Any, size: StepSize) -> tuple[torch.Tensor, torch.Tensor]:
        """The same over kernels. The waste is no number here, and nobody sees it."""
        waste = slice(WASTE_SLAB * self.layout.slab_bytes, 2 * self.layout.slab_bytes)
        self.pools.memory[waste].view(torch.float32).fill_(torch.nan)
        run = forward(self.decoder, self.pools, self.held.table, self.future)
        found = run.run(size, torch.from_numpy(self.words(size).words).to(DEVICE)).logits
        num_rows = 0 if self.rows is None else len(self.rows.rows)
        chunks = found[size.num_rows :][: len(self.last)]
        found = torch.cat([found[:num_rows], chunks])
        assert found.isfinite().all()
        return found, self.written()

    def written(self) -> torch.Tensor:
        """All that anybody reads, and back to how it was."""
        found = self.pools.memory[2 * self.layout.slab_bytes :].clone().view(torch.float32)
        assert not self.pools.memory[: self.layout.slab_bytes].any(), "the zeros were written"
        self.pools.memory.copy_(self.before)
        return found


class PlainWords:
    """A `StepForward` with as few ideas of its own as possible."""

    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        table: torch.Tensor,
        future: FutureMap[torch.Tensor],
        kept: KeptInputs | None = None,
    ) -> None:
        self.decoder, self.pools, self.table, self.future = decoder, pools, table, future
        self.forward = PlainForward(decoder, pools, kept)

    def run(self, size: StepSize, words: torch.Tensor) -> Forwarded:
        inputs = StepInputs.of(words, size, self.pools.layout)
        samples, of_rows, last, every = SampleInputs(inputs.rows[: len(FIELDS)]), [], None, None
        if size.num_rows:
            batch = self.batch(inputs)
            hidden = self.forward.hidden(batch)
            padded = hidden.new_zeros(size.num_placed, hidden.shape[1])
            of_rows.append(padded.index_copy(0, batch.places, hidden))
        if size.num_tokens:
            every = self.chunks(inputs)
            last = every[inputs.last.long()]
            words = torch.cat([samples.words, inputs.samples.words], dim=1)
            samples = SampleInputs(words)
        parts = [*of_rows, *([] if last is None else [last])]
        return Forwarded(self.decoder.head(torch.cat(parts)), samples, last, every)

    def batch(self, inputs: StepInputs) -> DecodeBatch:
        size = inputs.size
        names = ("slot", "position", "cell", "state_in", "state_out")
        slots, starts, cells, *states = (inputs.column(name).long() for name in names)
        if not size.span:
            self.table[slots, starts] = cells.int()
        depths, num_kept = (
            inputs.column(name).long() if size.span else torch.zeros_like(slots)
            for name in ("depth", "num_kept")
        )
        place = torch.arange(size.width)
        places = torch.nonzero((place <= depths[:, None]).flatten()).flatten()
        drafts = inputs.rows[FIRST_CELL + size.span :][: size.depth].T
        tokens = torch.cat([self.future.tokens[slots, None], drafts], dim=1).long()
        if size.span:
            cells = inputs.rows[FIRST_CELL : FIRST_CELL + size.width].long().T.flatten()[places]
        ends = zip(*(x.tolist() for x in (slots, starts + 1 + depths)), strict=True)
        seen = tuple(SeenCells(self.table[slot, :end].long()) for slot, end in ends)
        return DecodeBatch(
            (1 + depths).tolist(),
            tokens.flatten()[places],
            (starts[:, None] + place).flatten()[places],
            *states,
            held=HeldCells(cells, seen),
            windows=None,
            width=size.width,
            slots=slots,
            starts=starts,
            drafts=drafts.int(),
            places=places,
            counts=torch.where(num_kept > 0, self.future.counts[slots].long(), 0),
            most_kept=int(num_kept.max()),
        )

    def chunks(self, inputs: StepInputs) -> torch.Tensor:
        run = _PlainChunks(self.pools, self.table, inputs)
        return self.decoder.norm(self.decoder.run(inputs.token.long(), run.mix))

    def choose(self, forwarded: Forwarded, choice: Choice) -> torch.Tensor:
        logits, inputs, *_ = forwarded
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
        self.future.tokens[inputs.slot.long()] = drawn[0]
        return drawn


class _PlainChunks:
    def __init__(self, pools: Pools, table: torch.Tensor, inputs: StepInputs) -> None:
        self._pools, self._table, self._inputs = pools, table, inputs
        blocks = inputs.recurrent.blocks
        names = blocks._fields
        lines = (line.tolist() for line in blocks)
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


def capture_chunks(backend: TorchBackend, recorder: Any, *, mixed: bool = False) -> CapturedSteps:
    """On a GPU `TorchBackend` does the same with kernels. `mixed`: beside decode rows, too."""
    runner = backend.runner
    forward = PlainWords(backend._decoder, runner.pools, runner.rows.table, backend._future_map)
    kinds = {"chunks of prompts", *(["decode rows beside chunks"] if mixed else [])}
    sizes = [StepSize(256, num_tokens=2048, num_chunks=16)]
    steps = CapturedSteps(forward, backend._layout, recorder, sizes, DEVICE, backend.fallbacks)
    runner.forwards.steps, runner.forwards.kinds = steps, frozenset(kinds)
    runner.forwards.chunk_graphs = True
    return steps
