"""A decoder over the pools, in plain torch operations.

Every write to a pool is here, or in the kernels that stand in for it, and runs where the forward
runs: in the order of launches. A recurrent layer runs the kept drafts that a row's last step
accepted, then the input token, whose state it writes, then the drafts, whose inputs it keeps.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, RecurrentLayer
from pippin.backends.torch.models.mixers import AttentionLayer, LatentLayer
from pippin.backends.torch.plain.attention import attend_latent, attend_row
from pippin.backends.torch.plain.recurrent import Blocks, convolve_step, recur_blocks, recur_step
from pippin.backends.torch.pools.memory import KeptInputs, Pools
from pippin.backends.torch.step.batches import Batch, ChunkBatch, DecodeBatch


class PlainForward:
    def __init__(self, decoder: Decoder, pools: Pools, kept: KeptInputs | None = None) -> None:
        """`kept`: of rows that verify drafts."""
        self.decoder = decoder
        self.pools = pools
        self.kept = kept

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[tokens, hidden]: what the head reads."""
        run = _Run(batch, self.pools, self.kept)
        return self.decoder.norm(self.decoder.run(batch.tokens, run.mix))

    def fold(
        self,
        slots: torch.Tensor,  # int64 [rows]
        counts: torch.Tensor,  # int64 [rows]: kept drafts, of `most` at most
        most: int,
        states_in: torch.Tensor,  # int64 [rows]
        states_out: torch.Tensor,
    ) -> None:
        """Run kept drafts, so that the states are those behind them."""
        assert self.kept is not None
        for layer in self.decoder.layers:
            mixer, number = layer.mixer, layer.number
            if not isinstance(mixer, RecurrentLayer):
                continue
            recurrent, conv = self.pools.recurrent[number], self.pools.conv[number]
            kept = self.kept.of(number, slots, most)
            recurrent[states_out], conv[states_out] = _fold(
                mixer, recurrent[states_in], conv[states_in], kept, counts
            )


class _Run:
    """Mixes the tokens of one batch, layer by layer."""

    def __init__(self, batch: Batch, pools: Pools, kept: KeptInputs | None) -> None:
        self._batch = batch
        self._pools = pools
        self._kept = kept

    def mix(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        mixer, number, batch = layer.mixer, layer.number, self._batch
        assert mixer is not None
        if isinstance(mixer, AttentionLayer):
            return self._attend(mixer, number, x)
        if isinstance(mixer, LatentLayer):
            q, cells = mixer.placed(mixer.project(x), batch.positions)
            kept = self._pools.kv[number].flatten(1)
            kept[batch.held.cells] = cells
            rows = zip(q.split(batch.lengths), batch.held.seen, strict=True)
            found = [attend_latent(mixer, part, kept, seen) for part, seen in rows]
            return mixer.out(torch.cat(found).flatten(1))
        if isinstance(batch, ChunkBatch):
            return self._recur_blocks(batch, mixer, number, x)
        assert isinstance(batch, DecodeBatch)
        return self._recur_tokens(batch, mixer, number, x)

    def _attend(self, mixer: AttentionLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        kv, held = self._pools.kv, self._batch.held
        if mixer.shape.window and not mixer.shape.keeps_all:
            assert self._batch.windows is not None
            kv, held = self._pools.window_kv, self._batch.windows
        q, k, v, gate = mixer.project(x, self._batch.positions)
        kv[number][held.cells] = torch.stack([k, v], dim=1)
        rows = zip(q.split(self._batch.lengths), held.seen, strict=True)
        found = [attend_row(part, kv[number], seen, mixer.scoring) for part, seen in rows]
        return mixer.finish(torch.cat(found), gate)

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._batch.lengths, self._pools.device)

    def _recur_blocks(
        self, batch: ChunkBatch, mixer: RecurrentLayer, number: int, x: torch.Tensor
    ) -> torch.Tensor:
        index = batch.conv
        assert index is not None
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, gates = mixer.split(mixer.project(x))
        source = torch.cat([conv[batch.states_in].flatten(0, 1), mixed])
        convolved = mixed * mixer.taps[-1]
        if mixer.conv_bias is not None:
            convolved += mixer.conv_bias
        for inputs, tap in zip(index.inputs, mixer.taps[:-1], strict=False):
            convolved += source[inputs] * tap
        y, after = recur_blocks(mixer, convolved, gates, self._blocks, recurrent[batch.states_in])
        blocks, slabs = self._states_kept
        conv[slabs] = source[index.after]
        recurrent[slabs] = after[blocks]
        return mixer.finish(y, z)

    @cached_property
    def _states_kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks behind which states are kept, each row's last one and the tapped ones; and
        where these go."""
        batch, index = self._batch, self._pools.index
        assert isinstance(batch, ChunkBatch)
        taken = batch.taken
        ends = taken.first_blocks + taken.block_counts - 1
        tapped = np.array([tap.slab for tap in taken.taps], dtype=np.int64)
        slabs = torch.cat([batch.states_out, index(tapped)])
        return index(np.array([*ends.tolist(), *taken.tap_blocks])), slabs

    def _recur_tokens(
        self, batch: DecodeBatch, mixer: RecurrentLayer, number: int, x: torch.Tensor
    ) -> torch.Tensor:
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, gates = mixer.split(mixer.project(x))
        inputs = self._pad(batch, torch.cat([mixed, gates], dim=1))
        state, before = recurrent[batch.states_in], conv[batch.states_in]
        if batch.most_kept:
            assert self._kept is not None
            kept = self._kept.of(number, batch.slots, batch.most_kept)
            state, before = _fold(mixer, state, before, kept, batch.counts)
        found = []
        for place in range(batch.width):
            y, state, before = _step(mixer, state, before, inputs[:, place])
            found.append(y)
            if not place:
                recurrent[batch.states_out] = state
                conv[batch.states_out] = before
        if batch.width > 1:
            assert self._kept is not None
            self._kept.keep(number, batch.slots, inputs[:, 1:])
        return mixer.finish(torch.stack(found, dim=1).flatten(0, 1)[batch.places], z)

    def _pad(self, batch: DecodeBatch, x: torch.Tensor) -> torch.Tensor:
        """[tokens, n] to [rows, width, n], zeros behind a row's drafts."""
        padded = x.new_zeros(len(batch.lengths) * batch.width, x.shape[1])
        padded[batch.places] = x
        return padded.unflatten(0, (len(batch.lengths), batch.width))


def _fold(
    mixer: RecurrentLayer,
    states: torch.Tensor,  # [rows, ..]
    before: torch.Tensor,  # [rows, taps - 1, channels]: the convolution's last inputs
    kept: torch.Tensor,  # [rows, drafts, width]: behind a row's count they are anything, NaN too
    counts: torch.Tensor,  # int64 [rows]
) -> tuple[torch.Tensor, torch.Tensor]:
    """States and last inputs behind the first `counts` of the kept drafts."""
    for place in range(kept.shape[1]):
        _, after, inputs = _step(mixer, states, before, kept[:, place])
        is_accepted = (place < counts)[:, None, None]
        states = torch.where(is_accepted[..., None], after, states)
        before = torch.where(is_accepted, inputs, before)
    return states, before


def _step(
    mixer: RecurrentLayer, states: torch.Tensor, before: torch.Tensor, inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of each row, of what was kept of it [rows, width]: y, the states and the
    convolution's last inputs behind it."""
    num_channels = mixer.shape.num_channels
    mixed, gates = inputs[:, :num_channels], inputs[:, num_channels:]
    source = torch.cat([before, mixed[:, None]], dim=1)
    y, after = recur_step(mixer, convolve_step(mixer, source), gates, states)
    return y, after, source[:, 1:]


def accepted(drawn: torch.Tensor, drafts: torch.Tensor, stop_ids: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: how many drafts, [rows, depth], equal what was drawn before them, [rows,
    depth + 1]; none behind one that differs, nor behind a stop id, [rows, n]."""
    before = drawn[:, :-1]
    is_stop = (before[:, :, None] == stop_ids[:, None, :]).any(dim=-1)
    right = (before == drafts) & ~is_stop
    return right.long().cumprod(dim=1).sum(dim=1)


def noise_words(streams: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int32 [n, 2]: `noise_keys` of streams, the bits of uint64 [n], and of tokens' numbers."""
    return (streams + numbers).view(torch.int32).view(-1, 2)
