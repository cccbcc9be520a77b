"""Samples behind input tokens and drafts, and accepts drafts, on the device. Knows no model.

Noise is a function of a token's number in its reply. Where drafts are in flight the host knows that
number up to a few: it makes the keys of all that it may be, and the device takes its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.base import Admit, DecodeRow
from pippin.backends.mlx.drafts.acceptance import num_accepted, stop_table
from pippin.backends.mlx.drafts.draft_rows import DraftRows, Unsure, VerifyStep
from pippin.backends.mlx.step.future_map import FutureMap
from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.mlx.step.sampler import MLXSampler
from pippin.backends.sampling.noise import noise_keys
from pippin.backends.sampling.rules import Draw
from pippin.backends.sampling.sampler import SampleRow

PADDING = SampleRow(0, 0)


class Verifier:
    def __init__(
        self, sampler: MLXSampler, future_map: FutureMap, admitted: Mapping[int, Admit]
    ) -> None:
        self._sampler = sampler
        self._future_map = future_map
        self._admitted = admitted
        self._num_accepted = mx.compile(num_accepted) if future_map.drafts.size else num_accepted

    def verify(
        self,
        step: MLXPending,
        rows: DraftRows,
        decodes: Sequence[DecodeRow],
        ran: VerifyStep,
        unsure: Mapping[int, Unsure],
    ) -> tuple[mx.array | None, mx.array]:
        """Sample rows without a mask.

        int32 [width, tokens], if any was sampled, and [width]: how many drafts were accepted.
        """
        by_slot = {decode.slot: decode for decode in decodes}
        places = [None if not slot else by_slot[slot] for slot in ran.slots.tolist()]
        lines = self._sampled_lines(ran, places)
        tokens = self._sample(step, ran, lines) if any(row.slot for row in lines) else None
        counts = mx.zeros_like(ran.lengths)
        if tokens is not None and ran.drafts.shape[1]:
            stops = [self._sampler.of(slot).stop_ids for slot in ran.slots.tolist()]
            counts = self._num_accepted(tokens, ran.drafts, stop_table(stops))
        self._future_map.stash_lengths(ran.slots, ran.lengths + 1 + counts, counts)
        if tokens is not None:
            self._read(step, rows, ran, lines, tokens, counts, unsure)
        step.written += [*self._future_map.arrays(), counts]
        return tokens, counts

    def _sampled_lines(
        self, ran: VerifyStep, places: Sequence[DecodeRow | None]
    ) -> list[SampleRow]:
        """Of each row, its input token and its drafts; PADDING where nothing is sampled."""
        lines = [PADDING] * (len(places) * ran.logits.shape[1])
        for place, decode in enumerate(places):
            if decode is not None and decode.samples and not decode.masked:
                for behind in range(1 + decode.depth):
                    row = self._row(decode.slot, int(ran.least[place]), behind)
                    lines[place * ran.logits.shape[1] + behind] = row
        return lines

    def _row(self, slot: int, length: int, behind: int) -> SampleRow:
        return SampleRow(slot, length + 1 + behind - len(self._admitted[slot].prompt))

    def _sample(self, step: MLXPending, ran: VerifyStep, lines: Sequence[SampleRow]) -> mx.array:
        """int32 [width, tokens]"""
        width, num_tokens, vocab_size = ran.logits.shape
        logits, keys = ran.logits.reshape(-1, vocab_size), self._keys(ran, lines)
        chosen = [number for number, row in enumerate(lines) if row.slot]
        if len(chosen) > len(lines) // 2:  # nothing is copied
            sampled = self._sampler.sample(logits, lines, keys=keys)
            tokens = sampled.tokens
        else:
            at = mx.array(chosen)
            rows = [lines[number] for number in chosen]
            sampled = self._sampler.sample(logits[at], rows, keys=keys[at])
            tokens = mx.zeros((len(lines),), mx.int32)
            tokens[at] = sampled.tokens
            lines = rows
        step.read_logprobs_of([row.slot for row in lines], sampled)
        step.written += sampled.arrays
        return tokens.reshape(width, num_tokens)

    def _keys(self, ran: VerifyStep, lines: Sequence[SampleRow]) -> mx.array:
        """uint32 [lines, 2]"""
        width, num_tokens, vocab_size = ran.logits.shape
        states = [self._sampler.of(row.slot) for row in lines[::num_tokens]]
        if all(state.draw(vocab_size) is Draw.GREEDY for state in states):
            return mx.zeros((len(lines), 2), mx.uint32)  # none is made
        num_candidates = ran.num_unsure + num_tokens
        firsts = lines[::num_tokens]  # of rows that are as short as they may be
        streams = np.array([state.stream for state in states], dtype=np.uint64)
        numbers = np.array([row.num_generated for row in firsts], dtype=np.int64)
        table = noise_keys(
            np.repeat(streams, num_candidates),
            (numbers[:, None] + np.arange(num_candidates)).reshape(-1).tolist(),
        )
        if not ran.num_unsure:
            return mx.array(table)
        place = ran.lengths - mx.array(ran.least) + mx.arange(width) * num_candidates
        place = mx.clip(place, 0, len(table) - num_tokens)
        return mx.array(table)[(place[:, None] + mx.arange(num_tokens)).reshape(-1)]

    def _read(
        self,
        step: MLXPending,
        rows: DraftRows,
        ran: VerifyStep,
        lines: Sequence[SampleRow],
        tokens: mx.array,
        counts: mx.array,
        unsure: Mapping[int, Unsure],
    ) -> None:
        num_tokens = tokens.shape[1]
        slots = [row.slot for row in lines[::num_tokens]]
        last = mx.take_along_axis(tokens, counts[:, None], axis=1)
        self._future_map.stash(np.array(slots, dtype=np.int32), last)
        step.samples = True
        step.written.append(tokens)

        def read() -> None:
            step.read_accepted(slots, np.asarray(tokens), np.asarray(counts))
            for slot, part in unsure.items():
                rows.note_accepted(slot, part, len(step.tokens[slot]) - 1)

        step.reads.append(read)
