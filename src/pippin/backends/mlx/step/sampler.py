"""The stages of sampling in MLX operations. Knows no model, no text and no order of stages.

From the temperature on they are one operation where we have it (cpu/operations).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from pippin.backends.masks import WORD_BITS
from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.step.filters import candidates, dropped_tokens
from pippin.backends.sampling.batches import (
    BiasEdits,
    DrawGroup,
    PenaltyGroup,
    RowSubset,
    SampleBatch,
)
from pippin.backends.sampling.rules import FAR, Draw
from pippin.backends.sampling.sampler import (
    ANY_NUMBER,
    MAX_TOP_LOGPROBS,
    Logprobs,
    Sampler,
    SampleRow,
)
from pippin.backends.step.slots import Arrays, SlotTable

BEYOND_FAR = FAR * 100


class MLXSampler(Sampler[mx.array]):
    def __init__(self, vocab_size: int, num_slots: int, *, safe: bool = False) -> None:
        super().__init__(vocab_size, num_slots)
        self._safe = safe  # plain operations of mlx alone

    def _send(self, array: np.ndarray) -> mx.array:
        return send(array)

    def _stack(self, rows: Sequence[mx.array]) -> mx.array:
        return mx.stack(list(rows))

    def _count_each(self, counts: mx.array, tokens: mx.array) -> mx.array:
        return counts.at[mx.arange(len(tokens)), tokens].add(1.0)

    def _put(self, x: mx.array, subset: RowSubset[mx.array], part: mx.array) -> mx.array:
        if subset.index is None:
            return part
        out = mx.array(x.astype(part.dtype))
        out[subset.index] = part
        return out

    def _add_biases(self, x: mx.array, edits: BiasEdits[mx.array]) -> mx.array:
        return x.astype(mx.float32).at[edits.rows, edits.ids].add(edits.values)

    def _penalise(
        self, x: mx.array, in_prompt: mx.array, counts: mx.array, group: PenaltyGroup[mx.array]
    ) -> mx.array:
        x, written = x.astype(mx.float32), counts > 0
        if group.repetition is not None:
            factor = mx.where(in_prompt | written, group.repetition, 1.0)
            x = mx.where(x > 0, x / factor, x * factor)
        return x - group.frequency * counts - group.presence * written

    def _apply_masks(self, x: mx.array, masks: np.ndarray) -> mx.array:
        """Lowered beyond FAR where a grammar forbids. Not mx.where: ten times as slow on CPU."""
        bits = mx.array(1, dtype=mx.uint32) << mx.arange(WORD_BITS, dtype=mx.uint32)
        forbidden = ~mx.array(masks.view(np.uint32))[:, :, None] & bits  # 0, or some power of two
        forbidden = forbidden.astype(mx.float32).reshape(len(masks), -1)[:, : x.shape[-1]]
        return x.astype(mx.float32) - forbidden * BEYOND_FAR

    def draw_places(self, logits: mx.array, slots: Sequence[int], keys: mx.array) -> mx.array:
        """int32 [n] of logits [n, V], as the requests of these slots choose without biases, with
        noise of `keys` uint32 [n, 2]."""
        batch = self._batch([SampleRow(slot, ANY_NUMBER) for slot in slots])
        return self._draw(logits, batch, keys)

    def _draw(self, x: mx.array, batch: SampleBatch[mx.array], keys: Any) -> mx.array:
        ours = None if self._safe else operations()
        if ours is not None:
            tokens: mx.array = ours.choose(x.astype(mx.float32), batch.choices, mx.array(keys))
            return tokens
        return super()._draw(x, batch, keys)

    def _choose(self, x: mx.array, group: DrawGroup[mx.array], keys: np.ndarray) -> mx.array:
        if group.draw is not Draw.GREEDY:
            scaled = x.astype(mx.float32) * group.inverse_temperature
            x = add_gumbel_noise(scaled, mx.array(keys))
            dropped = dropped_tokens(scaled, group)
            if dropped is not None:
                # Not mx.where: its branches mispredict, five times as slow on CPU.
                x = x - dropped * FAR
        return mx.argmax(x, axis=-1).astype(mx.int32)

    def _token_logprobs(self, logits: mx.array, tokens: mx.array, k: int) -> Logprobs[mx.array]:
        return token_logprobs(logits, tokens, k)


def send(array: np.ndarray) -> mx.array:
    return mx.array(array.astype(np.int32) if array.dtype == np.int64 else array)


def _put(into: mx.array, at: Any, numbers: mx.array) -> None:
    into[at] = numbers.astype(into.dtype)


ARRAYS = Arrays(
    zeros=lambda *shape: mx.zeros(shape, mx.int32),
    index=send,
    put=_put,
    join=lambda parts: mx.concatenate(list(parts)),
)


def token_logprobs(logits: mx.array, tokens: mx.array, k: int) -> Logprobs[mx.array]:
    """Of `tokens` [n] and of the k likeliest tokens, under log_softmax of logits [n, V]."""
    x = logits.astype(mx.float32)
    normaliser = mx.logsumexp(x, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(x, tokens[:, None], axis=-1) - normaliser
    if k == 0:
        empty = [len(tokens), 0]
        return Logprobs(chosen[:, 0], mx.zeros(empty, dtype=mx.int32), mx.zeros(empty))
    # A fixed width, so that ties fall alike whatever others ask; sorted ids order them.
    width = min(max(k, MAX_TOP_LOGPROBS), x.shape[-1])
    found, where = candidates(x, width)
    places = mx.argpartition(found, -width, axis=-1)[:, -width:]
    ids = mx.sort(mx.take_along_axis(where, places, axis=-1), axis=-1)
    values = mx.take_along_axis(x, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)[:, :k]
    top = mx.take_along_axis(values, order, axis=-1) - normaliser
    return Logprobs(chosen[:, 0], mx.take_along_axis(ids, order, axis=-1).astype(mx.int32), top)


_ONE = 0x3F800000  # the bits of 1.0; the 23 below the exponent count in steps of 2^-23
_ALL_BUT_NINE = 0xFFFFFE00


def noise_words(
    slots: SlotTable[mx.array], owners: np.ndarray, firsts: mx.array, num_tokens: int
) -> mx.array:
    """uint32 [rows, num_tokens, 2]: `noise_keys` of tokens from positions `firsts` [rows] on, in
    rows of these slots: where drafts are in flight, the device alone knows a token's number."""
    if not num_tokens or slots.are_greedy(owners):
        return mx.zeros((len(owners), num_tokens, 2), mx.uint32)  # none is made
    numbers = (firsts - mx.array(slots.prompt_lens[owners]))[:, None] + mx.arange(num_tokens)
    words = mx.array(slots.streams[owners])[:, None] + numbers.astype(mx.uint64)
    return words.view(mx.uint32).reshape(len(owners), num_tokens, 2)


def add_gumbel_noise(x: mx.array, keys: mx.array) -> mx.array:
    """Logits, float32 [n, V], with the noise of the rows' keys, uint32 [n, 2]."""
    return x - mx.log(exponential(random_bits(keys, x.shape[-1])))


def random_bits(keys: mx.array, vocab_size: int) -> mx.array:
    """uint32 [n, vocab_size].

    Subkeys are the bare words of mlx's generator, which Python can reach in no other way. Those of
    m subkeys are Threefry's first words of the counters (j, j + m), then its second ones.
    """
    num_subkeys = (vocab_size + 1) // 2
    subkeys = mx.vmap(lambda key: mx.random.split(key, num_subkeys))(keys)
    return subkeys.reshape(len(keys), -1)[:, :vocab_size]


def exponential(bits: mx.array) -> mx.array:
    """float32, always positive and finite."""
    coarse = 2 - ((bits >> 9) | _ONE).view(mx.float32)
    nine_bits_less_512 = (bits | _ALL_BUT_NINE).view(mx.int32)
    fine = nine_bits_less_512.astype(mx.float32) * -(2.0**-32)
    return fine - mx.log(coarse)
