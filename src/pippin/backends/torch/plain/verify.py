"""Rows that verify drafts, over the pools, in plain torch operations. Knows no sampling.

A recurrent layer runs the kept drafts that the last step accepted, then the input token, whose
state it writes, then the drafts, whose inputs it keeps.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.models.attention_layer import Scoring
from pippin.backends.torch.models.decoder import Decoder, RecurrentLayer
from pippin.backends.torch.models.latent_layer import LatentLayer
from pippin.backends.torch.plain.attention import attend_masked, attend_rows
from pippin.backends.torch.plain.forward import LayerRun
from pippin.backends.torch.plain.latent import attend_latent
from pippin.backends.torch.plain.recurrent import convolve_step, recur_step
from pippin.backends.torch.pools.kept_inputs import KeptInputs
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.verify.batch import VerifiedCells, VerifyBatch


class PlainVerify:
    def __init__(self, decoder: Decoder, pools: Pools, kept: KeptInputs) -> None:
        self._decoder = decoder
        self._pools = pools
        self._kept = kept

    def hidden(self, batch: VerifyBatch) -> torch.Tensor:
        """[tokens, hidden], what the head reads, of an input token of each row and its drafts."""
        run = _VerifyRun(batch, self._pools, self._kept)
        decoder = self._decoder
        return decoder.norm(decoder.run(batch.tokens, run.mix))

    def fold(
        self,
        slots: torch.Tensor,  # int64 [rows]
        counts: torch.Tensor,  # int64 [rows]: kept drafts, of `most` at most
        most: int,
        states_in: torch.Tensor,  # int64 [rows]
        states_out: torch.Tensor,
    ) -> None:
        """Run kept drafts, so that the states are those behind them."""
        for layer in self._decoder.layers:
            mixer, number = layer.mixer, layer.number
            if not isinstance(mixer, RecurrentLayer):
                continue
            recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
            kept = self._kept.of(number, slots, most)
            recurrent[states_out], conv[states_out] = _fold(
                mixer, recurrent[states_in], conv[states_in], kept, counts
            )


class _VerifyRun(LayerRun[VerifiedCells]):
    def __init__(self, batch: VerifyBatch, pools: Pools, kept: KeptInputs) -> None:
        super().__init__(pools, batch.positions, batch.held, batch.windows)
        self._batch = batch
        self._kept = kept

    def _look(
        self, q: torch.Tensor, kv: torch.Tensor, held: VerifiedCells, scoring: Scoring
    ) -> torch.Tensor:
        rows = []
        for part, seen in zip(q.split(self._batch.lengths), held.seen, strict=True):
            if seen.mask is None or seen.written is None:
                rows.append(attend_rows(part, kv, [len(part)], [seen.cells], scoring))
            else:
                known = kv[seen.cells]
                rows.append(attend_masked(part, known, seen.written, seen.mask, scoring))
        return torch.cat(rows)

    def _look_at_latents(
        self, mixer: LatentLayer, q: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        rows = []
        for part, seen in zip(q.split(self._batch.lengths), self._held.seen, strict=True):
            cells = kept[seen.cells]
            if seen.written is not None:
                cells.masked_fill_(~seen.written[:, None], 0.0)
            rows.append(attend_latent(mixer, part, cells, seen.mask))
        return torch.cat(rows)

    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, gates = mixer.split(mixer.project(x))
        inputs = self._pad(torch.cat([mixed, gates], dim=1))
        kept = self._kept.of(number, batch.slots, batch.most_kept)
        states = (recurrent[batch.states_in], conv[batch.states_in])
        state, before = _fold(mixer, *states, kept, batch.counts)
        found = []
        for place in range(batch.width):
            y, state, before = _step(mixer, state, before, inputs[:, place])
            found.append(y)
            if not place:
                recurrent[batch.states_out] = state
                conv[batch.states_out] = before
        self._kept.keep(number, batch.slots, inputs[:, 1:])
        return mixer.finish(torch.stack(found, dim=1).flatten(0, 1)[batch.places], z)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, n] to [rows, width, n], zeros behind a row's drafts."""
        batch = self._batch
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
