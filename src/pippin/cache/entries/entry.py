"""What a store keeps: entries, each a run of tokens of one path and one component. Knows no files.

                  tokens [start, end)                       payload                      divides
    attention     those that the KV is of                   KV of these tokens           yes
    window        those that the KV is of                   KV of these tokens           yes
    state         from the end of any entry above           what holds after `end`       no
    hidden        the same                                  what the head read there     no

**When a node is split** after its entry was written, nothing is written again: both nodes name the
one entry, and each uses its range of tokens of what was read (`ArraySpec.tokens`). A digest covers
a whole entry, so a part is read with the rest of it; several parts of one entry that are read
together cost one read. What is inserted below the split names it by its chain key, which does not
depend on where nodes end; `rebuild` finds it inside of the longer entry.

**Between backends.** A payload is a list of named arrays with dtype and shape. A reader compares
`Entry.arrays` with what it would have written itself: a difference is a miss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pippin.types import Component

# Bytes of one element. Names are those of numpy, mlx and torch, which agree on all of these.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}

Bytes = npt.NDArray[np.uint8]


class Key(NamedTuple):
    """The name of an entry. Equal keys mean equal contents, but for rounding."""

    chain: bytes  # the chain key at the entry's end: all tokens from the root, and the model
    component: Component
    num_tokens: int  # that the payload divides into, before the end; 0: it holds at the end alone


@dataclass(frozen=True)
class ArraySpec:
    """One array of a payload: contiguous, in row order, little-endian."""

    name: str  # for instance "3.keys"; says which of a model's arrays this is
    dtype: str  # one of ITEM_BYTES
    shape: tuple[int, ...]
    token_axis: int | None = None  # 0: it divides into tokens along its first axis

    @cached_property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    def tokens(self, data: Bytes, start: int, stop: int) -> Bytes:
        """A view of the bytes of tokens [start, stop); of an array that does not divide, all."""
        if self.token_axis is None:
            return data
        size = self.nbytes // max(self.shape[0], 1)
        return data[start * size : stop * size]


@dataclass(frozen=True)
class Entry:
    """All that is known of an entry without reading its payload: enough to rebuild a tree."""

    key: Key
    parent: bytes  # the chain key at `start`; that of an empty chain at the root
    start: int
    tokens: bytes  # int32 of this machine's order, as tree nodes keep them; [start, end)
    arrays: tuple[ArraySpec, ...]

    def __post_init__(self) -> None:
        num_tokens = self.end - self.start
        if self.key.num_tokens not in (0, num_tokens):
            raise ValueError(f"a payload of {self.key.num_tokens} tokens over {num_tokens}")
        for array in self.arrays:
            divides = array.token_axis == 0 and array.shape[0] == self.key.num_tokens
            if array.dtype not in ITEM_BYTES or divides != (self.key.num_tokens > 0):
                raise ValueError(f"{array} does not divide into {self.key.num_tokens} tokens")

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // 4

    @cached_property
    def nbytes(self) -> int:
        """Of the payload."""
        return sum(array.nbytes for array in self.arrays)

    def new_buffers(self) -> list[Bytes]:
        """Memory to read its arrays to."""
        return [np.empty(array.nbytes, np.uint8) for array in self.arrays]


@dataclass(frozen=True)
class Loaded:
    """An entry with its payload, as it was written: verified."""

    entry: Entry
    arrays: tuple[Bytes, ...]  # in the order of `entry.arrays`
