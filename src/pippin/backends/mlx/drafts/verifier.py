"""Samples behind input tokens and drafts, and accepts drafts, on the device. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.base import DecodeRow
from pippin.backends.mlx.drafts.draft_rows import DraftRows, Unsure, VerifyStep
from pippin.backends.mlx.step.noise import noise_words
from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.mlx.step.sampler import send
from pippin.backends.sampling.rules import Draw
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.step.slots import FutureMap, SlotTable

PADDING = SampleRow(0, 0)


class Verifier:
    def __init__(self, slots: SlotTable[mx.array], future_map: FutureMap[mx.array]) -> None:
        self._slots = slots
        self._future_map = future_map
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
            stop_ids = mx.array(self._slots.stop_ids[ran.slots])
            counts = self._num_accepted(tokens, ran.drafts, stop_ids)
        is_row = mx.array(ran.slots > 0)  # padding holds nothing
        lengths = (ran.lengths + 1 + counts) * is_row
        self._future_map.stash_lengths(send(ran.slots), lengths, counts * is_row)
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
        return SampleRow(slot, length + 1 + behind - int(self._slots.prompt_lens[slot]))

    def _sample(self, step: MLXPending, ran: VerifyStep, lines: Sequence[SampleRow]) -> mx.array:
        """int32 [width, tokens]"""
        width, num_tokens, vocab_size = ran.logits.shape
        logits, keys = ran.logits.reshape(-1, vocab_size), self._keys(ran, lines)
        chosen = [number for number, row in enumerate(lines) if row.slot]
        if len(chosen) > len(lines) // 2:  # nothing is copied
            sampled = self._slots.sampler.sample(logits, lines, keys=keys)
            tokens = sampled.tokens
        else:
            at = mx.array(chosen)
            rows = [lines[number] for number in chosen]
            sampled = self._slots.sampler.sample(logits[at], rows, keys=keys[at])
            tokens = mx.zeros((len(lines),), mx.int32)
            tokens[at] = sampled.tokens
            lines = rows
        step.bring_logprobs([row.slot for row in lines], sampled)
        step.written += sampled.arrays
        return tokens.reshape(width, num_tokens)

    def _keys(self, ran: VerifyStep, lines: Sequence[SampleRow]) -> mx.array:
        """uint32 [lines, 2]"""
        _, num_tokens, vocab_size = ran.logits.shape
        states = [self._slots.sampler.of(row.slot) for row in lines[::num_tokens]]
        if all(state.draw(vocab_size) is Draw.GREEDY for state in states):
            return mx.zeros((len(lines), 2), mx.uint32)  # none is made
        # Where drafts are in flight the device alone knows a token's number in its reply.
        first = ran.lengths + 1 - mx.array(self._slots.prompt_lens[ran.slots])
        numbers = first[:, None] + mx.arange(num_tokens)
        streams = np.array([state.stream for state in states], dtype=np.uint64)
        return noise_words(streams.repeat(num_tokens), numbers.flatten())

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
        owners = np.array(slots, dtype=np.int32)
        self._future_map.stash(send(owners), last)
        self._future_map.note_written(owners)
        step.samples = True

        def read(tokens: np.ndarray, counts: np.ndarray) -> None:
            step.read_accepted(slots, tokens, counts)
            for slot, part in unsure.items():
                rows.note_accepted(slot, part, len(step.tokens[slot]) - 1)

        step.read_later(step.bring([tokens, counts]), read)


def num_accepted(tokens: mx.array, drafts: mx.array, stop_ids: mx.array) -> mx.array:
    """int32 [rows]: of drafts [rows, depth] those that equal what was sampled before them, tokens
    [rows, depth + 1]; none behind a stop id."""
    sampled = tokens[:, :-1]
    stops = (sampled[:, :, None] == stop_ids[:, None]).any(axis=-1)
    agrees = (sampled == drafts) & ~stops
    return mx.cumprod(agrees.astype(mx.int32), axis=1).sum(axis=1)
