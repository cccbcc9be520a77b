"""Drafts by the checkpoint's MTP head, in the launch of the step before. Knows no plans.

A step's tokens and the hidden vectors before them are run through the head: those of accepted
drafts, and the token behind them. The last one's hidden vector gives the first draft, and a draft
gives the next. Nothing waits for the device.

Keys and values of the head are a ring of columns for each slot, beside rows and prefix cache:

    column of position p:   p % RING, overwritten by later positions

A slot's ring starts where it is first run, and is dropped with the slot and where a step runs its
row without the head. Then drafts are worse for some tokens. They affect speed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pippin.backends.base import Admit
from pippin.backends.mlx import substitutions
from pippin.backends.mlx.cpu.operations.bindings import operations
from pippin.backends.mlx.drafts.mtp_head import MTPHead
from pippin.backends.mlx.step.future_map import FutureMap
from pippin.backends.mlx.step.sampler import MLXSampler
from pippin.backends.sampling.noise import noise_keys
from pippin.backends.sampling.rules import Draw

RING = 32


def ring_bytes(head: MTPHead) -> int:
    """Of a slot: a ring that is read, and one that is written."""
    heads, dim = head.kv_shape
    return 2 * 2 * heads * RING * dim * 4


@dataclass(frozen=True)
class Ran:
    """Tokens that rows got in a step, and what they were sampled from. By line."""

    slots: np.ndarray  # int32 [width]; 0: no row
    least: np.ndarray  # int32 [width]: tokens that the row held before the step, at least
    num_unsure: int  # no row held more than this many beyond that
    lengths: mx.array  # int32 [width]: as the device has them
    hidden: mx.array  # [width, n, hidden]: of the input token and of drafts behind it
    tokens: mx.array  # int32 [width, n]: sampled behind these
    counts: mx.array  # int32 [width]: of these how many are behind accepted drafts


@dataclass(frozen=True, eq=False)
class Rings:
    """Of several slots: keys and values [slots, heads, RING, dim], and the first position of each,
    int32 [slots]."""

    keys: mx.array
    values: mx.array
    starts: mx.array


class MTPDrafter:
    def __init__(
        self,
        head: MTPHead,
        sampler: MLXSampler,
        future_map: FutureMap,
        admitted: Mapping[int, Admit],
        max_depth: int,
    ) -> None:
        self._head = head
        self._sampler = sampler
        self._future_map = future_map
        self._admitted = admitted
        # A step before may have written so many columns for drafts that were rejected.
        self._last = RING - max_depth - 1  # tokens before one that it sees
        self._rings: dict[int, tuple[Rings, int]] = {}  # by slot, and its place there
        self._run = mx.compile(self._drafts)

    @property
    def row_bytes(self) -> int:
        return ring_bytes(self._head)

    def forget(self, slot: int) -> None:
        """It ended, or its row goes on without the head."""
        self._rings.pop(slot, None)

    def arrays(self) -> list[mx.array]:
        found = {id(rings): rings for rings, _ in self._rings.values()}
        return [a for rings in found.values() for a in (rings.keys, rings.values, rings.starts)]

    def draft(self, ran: Ran, num_drafts: int) -> list[mx.array]:
        """Leave drafts for the next step of each row; all that was written."""
        rings = self._joined(ran.slots.tolist(), ran.lengths)
        drafts, keys, values = self._run(
            ran.hidden,
            ran.tokens,
            ran.counts,
            ran.lengths,
            (rings.keys, rings.values, rings.starts),
            self._choices(ran.slots),
            self._noise(ran, num_drafts),
        )
        after = Rings(keys, values, rings.starts)
        self._rings |= {slot: (after, i) for i, slot in enumerate(ran.slots.tolist()) if slot}
        self._future_map.stash_drafts(ran.slots, drafts)
        return [drafts, keys, values, rings.starts, *self._future_map.arrays()]

    # ---- rings -----------------------------------------------------------------------------

    def _joined(self, slots: Sequence[int], lengths: mx.array) -> Rings:
        found = [self._rings.get(slot) for slot in slots]
        fresh = np.array([place is None for place in found])
        if not fresh.all():
            first = next(place[0] for place in found if place is not None)
            if len(first.keys) == len(slots) and all(
                place is None or (place[0] is first and place[1] == i)
                for i, place in enumerate(found)
            ):
                if not fresh.any():
                    return first
                starts = mx.where(mx.array(fresh), lengths, first.starts)
                return Rings(first.keys, first.values, starts)
        heads, dim = self._head.kv_shape
        blank = mx.zeros((1, heads, RING, dim))
        parts = [
            (blank, blank, lengths[i : i + 1])
            if place is None
            else tuple(a[place[1] : place[1] + 1] for a in vars(place[0]).values())
            for i, place in enumerate(found)
        ]
        return Rings(*(mx.concatenate(list(side)) for side in zip(*parts, strict=True)))

    # ---- one step --------------------------------------------------------------------------

    def _drafts(self, *inputs: Any) -> tuple[mx.array, mx.array, mx.array]:
        """int32 [width, as many as there is noise for], and the rings after them."""
        with substitutions.active():
            return self._run_head(*inputs)

    def _run_head(
        self,
        hidden: mx.array,
        tokens: mx.array,
        counts: mx.array,
        lengths: mx.array,
        rings: tuple[mx.array, mx.array, mx.array],
        choices: mx.array,
        noise: mx.array,
    ) -> tuple[mx.array, mx.array, mx.array]:
        ours = operations("choose", "linear")
        assert ours is not None, "rows that verify drafts have these"
        num_tokens, num_drafts = tokens.shape[1], noise.shape[1]
        first = lengths[:, None] + mx.arange(num_tokens, dtype=mx.int32)
        view = RingKV(rings[0], rings[1], lengths, first % RING)
        newest = first[:, -1:]
        mask = self._mask(first, newest, rings[2])
        out = self._head(hidden, tokens, view, mask[:, None])
        last = mx.take_along_axis(out, counts[:, None, None], axis=1)
        behind = (lengths + counts)[:, None] + mx.arange(1, num_drafts, dtype=mx.int32)
        columns = behind % RING
        masks = self._mask(behind, mx.maximum(newest, behind), rings[2])
        drafts: list[mx.array] = []
        for number in range(num_drafts):
            logits = self._head.logits(last)[:, 0]
            drafts.append(ours.choose(logits, choices, noise[:, number]))
            if number + 1 < num_drafts:
                view.offset, view.columns = behind[:, number], columns[:, number : number + 1]
                mask = masks[:, None, number : number + 1]
                last = self._head(last, drafts[-1][:, None], view, mask)
        return mx.stack(drafts, axis=1), view.keys, view.values

    def _mask(self, positions: mx.array, newest: mx.array, starts: mx.array) -> mx.array:
        """bool [rows, n, RING]: what tokens at these positions [rows, n] see. `newest`: the last
        position that a column was written for by then."""
        newest = newest[:, :, None]
        held = newest - (newest - mx.arange(RING, dtype=mx.int32)) % RING
        seen = positions[:, :, None]
        return (held <= seen) & (held >= mx.maximum(starts[:, None, None], seen - self._last))

    def _choices(self, slots: np.ndarray) -> mx.array:
        """float32 [width, 4]: as rows choose their tokens."""
        states = [self._sampler.of(slot) for slot in slots.tolist()]
        return mx.array([state.choice(self._head.vocab_size) for state in states], mx.float32)

    def _noise(self, ran: Ran, num_drafts: int) -> mx.array:
        """uint32 [width, drafts, 2]: that of the tokens which the drafts are guesses of."""
        slots = ran.slots.tolist()
        states = [self._sampler.of(slot) for slot in slots]
        vocab_size = self._head.vocab_size
        if all(state.draw(vocab_size) is Draw.GREEDY for state in states):
            return mx.zeros((len(slots), num_drafts, 2), mx.uint32)
        num_tokens = ran.tokens.shape[1]
        num_candidates = ran.num_unsure + num_tokens - 1 + num_drafts
        prompts = [len(self._admitted[slot].prompt) if slot else 0 for slot in slots]
        numbers = ran.least + 2 - np.array(prompts)  # of the first draft behind the first token
        streams = np.array([state.stream for state in states], dtype=np.uint64)
        table = noise_keys(
            np.repeat(streams, num_candidates),
            (numbers[:, None] + np.arange(num_candidates)).reshape(-1).tolist(),
        )
        place = mx.clip(
            ran.lengths - mx.array(ran.least) + ran.counts, 0, num_candidates - num_drafts
        )
        place = place + mx.arange(len(slots)) * num_candidates
        return mx.array(table)[place[:, None] + mx.arange(num_drafts)]


class RingKV:
    """What the head's layer sees of rings."""

    def __init__(
        self, keys: mx.array, values: mx.array, offset: mx.array, columns: mx.array
    ) -> None:
        self.keys, self.values = keys, values
        self.offset = offset  # int32 [rows]: the position of the first token
        self.columns = columns  # int32 [rows, n]: of all of them

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at = mx.broadcast_to(self.columns[:, None, :, None], keys.shape)
        self.keys = mx.put_along_axis(self.keys, at, keys, axis=2)
        self.values = mx.put_along_axis(self.values, at, values, axis=2)
        return self.keys, self.values
