"""KV of one layer as another layer sees it that asks that layer's cache for it. Knows no step.

Such a layer may take the number of columns for the number of tokens (AFM rotates its queries by
it). Columns are padded, and main and tail may lie apart, so it gets this in place of an array: a
shape that counts tokens. The substituted attention function reads the array inside; any other
operation on it is an error, at load already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.payloads.packing import KV


@dataclass(frozen=True)
class LentArray:
    array: mx.array
    num_tokens: int | mx.array  # of every row, or int32 [rows]

    @property
    def shape(self) -> tuple[int, int, int | mx.array, int]:
        num_rows, heads, _, dim = self.array.shape
        return num_rows, heads, self.num_tokens, dim


def lend(kv: KV, num_tokens: int | mx.array) -> tuple[LentArray, LentArray]:
    return LentArray(kv[0], num_tokens), LentArray(kv[1], num_tokens)


def array_of(side: Any) -> mx.array:
    array: mx.array = side.array if isinstance(side, LentArray) else side
    return array
