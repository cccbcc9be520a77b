"""What a decode step reads, as one array of words: sent in one copy, read by kernels as columns.

    int32    slot | position | cell | state in | state out | noise key, two words | noisy | top_k
    float32  1 / temperature | top_p | min_p

A captured graph reads the same array each time; rows that it has and a step has not are padding.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pippin.backends.sampling.rules import Draw, SlotSampling
from pippin.backends.torch.pools.layout import WASTE_SLAB, ZERO_SLAB

FIELDS = (
    *("slot", "position", "cell", "state_in", "state_out", "key_low", "key_high", "noisy"),
    *("top_k", "inverse_temperature", "top_p", "min_p"),
)
_FLOATS = ("inverse_temperature", "top_p", "min_p")
KEYS = slice(FIELDS.index("key_low"), FIELDS.index("key_high") + 1)
_NOISY, _TOP_K, _INVERSE_TEMPERATURE, _TOP_P, _MIN_P = range(FIELDS.index("noisy"), len(FIELDS))


@dataclass(frozen=True)
class Inputs:
    """Columns of one tensor on the device, int32 [fields, rows]."""

    words: torch.Tensor

    def __getattr__(self, name: str) -> torch.Tensor:
        column = self.words[FIELDS.index(name)]
        return column.view(torch.float32) if name in _FLOATS else column

    @property
    def keys(self) -> torch.Tensor:
        """int32 [rows, 2]"""
        return self.words[KEYS].T.contiguous()


class RowArrays(NamedTuple):
    """Rows that run one token each, on the host: int [rows]."""

    slots: np.ndarray
    positions: np.ndarray
    cells: np.ndarray  # where their KV goes
    states_in: np.ndarray
    states_out: np.ndarray


NO_ROWS = RowArrays(*(np.zeros(0, dtype=np.int64) for _ in RowArrays._fields))


def pack_inputs(width: int, rows: RowArrays, waste_cell: int) -> np.ndarray:
    """int32 [fields, width]; rows behind the given ones are padding, and all are greedy."""
    words = np.zeros((len(FIELDS), width), dtype=np.int32)
    words[2] = waste_cell
    words[3], words[4] = ZERO_SLAB, WASTE_SLAB
    for field, values in enumerate(rows):
        words[field, : len(values)] = values
    words.view(np.float32)[_INVERSE_TEMPERATURE] = 1.0
    return words


class Choice(enum.IntEnum):
    """What a step has to do about its tokens: that of its most demanding row."""

    GREEDY = 0
    DRAWN = 1  # with noise, perhaps with a short top_k and min_p
    TOP_P = 2  # some rows with top_p of the whole vocabulary
    LOGITS = 3  # leave them to the sampler: penalties, biases, log probabilities, long filters


_CHOICES = {
    Draw.GREEDY: Choice.GREEDY,
    Draw.PLAIN: Choice.DRAWN,
    Draw.SHORT_TOP_K: Choice.DRAWN,
    Draw.TOP_P: Choice.TOP_P,
}


class SamplingColumns:
    """By slot, how it chooses: set when a request starts, read at every step."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = np.zeros((len(FIELDS), num_slots + 1), dtype=np.int32)
        self._streams = np.zeros(num_slots + 1, dtype=np.uint64)
        self._choices = np.zeros(num_slots + 1, dtype=np.int32)
        self._min_tokens = np.zeros(num_slots + 1, dtype=np.int64)

    def admit(self, slot: int, state: SlotSampling) -> None:
        params, draw = state.params, state.draw(self._vocab_size)
        greedy = draw is Draw.GREEDY
        choice = _CHOICES.get(draw, Choice.LOGITS)
        if params.has_penalties or params.logit_bias or params.logprobs is not None:
            choice = Choice.LOGITS
        self._choices[slot] = choice
        self._streams[slot] = state.stream
        self._min_tokens[slot] = params.min_tokens if state.stop_ids else 0
        words, floats = self._words, self._words.view(np.float32)
        words[_NOISY, slot] = not greedy
        words[_TOP_K, slot] = params.top_k if draw is Draw.SHORT_TOP_K else self._vocab_size
        floats[_INVERSE_TEMPERATURE, slot] = 1.0 if greedy else state.inverse_temperature
        floats[_TOP_P, slot] = state.top_p
        floats[_MIN_P, slot] = params.min_p

    def choice(self, slots: np.ndarray, num_generated: np.ndarray) -> Choice:
        return Choice(int(self.choices(slots, num_generated).max()))

    def choices(self, slots: np.ndarray, num_generated: np.ndarray) -> np.ndarray:
        """Of each row, int32."""
        is_short = num_generated < self._min_tokens[slots]
        found: np.ndarray = np.where(is_short, Choice.LOGITS, self._choices[slots])
        return found

    def fill(self, words: np.ndarray, slots: np.ndarray, num_generated: np.ndarray) -> None:
        """Into the columns of `pack_inputs`."""
        words[_NOISY:, : len(slots)] = self._words[_NOISY:, slots]
        keys = self._streams[slots] + num_generated.astype(np.uint64)  # wraps
        words[KEYS, : len(slots)] = keys.astype("<u8").view("<i4").reshape(-1, 2).T
