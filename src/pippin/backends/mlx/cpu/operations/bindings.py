"""The operations as Python sees them: arrays in, arrays out. Knows no model.

Each takes float32 alone, which the caller sees to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from pippin.backends.host import num_threads
from pippin.backends.mlx.cpu.operations.library import find_library
from pippin.backends.mlx.device import on_cpu

Address, Number, Count = ctypes.c_void_p, ctypes.c_float, ctypes.c_int
_CONTROLS = {
    "pippin_start": (Count,),
    "pippin_run_ahead": (Count,),
    "pippin_take_failure": (ctypes.c_char_p, ctypes.c_long),
    "pippin_is_array": (Address, Address, ctypes.c_long, Count),
    "pippin_panel": (),
}
_ARRAYS = (Address, Count, Address, Count)  # those to be made and those given, and how many
_NUMBERS = {  # what an operation takes behind them
    "pippin_attention": (Number, Count),
    "pippin_kv_table": (Address,),
    "pippin_row_attention": (Number, Count, Count),
    "pippin_delta_layer": (Count, Count, Number),
    "pippin_draft_head": (Count, Count, Number, Number),
    "pippin_rms_norm": (Number,),
    "pippin_linear": (Address,),
    "pippin_swiglu": (),
    "pippin_choose": (),
    "pippin_rope": (Number, Count),
}
_SIGNATURES = _CONTROLS | {name: (*_ARRAYS, *numbers) for name, numbers in _NUMBERS.items()}
FAILURE_BYTES = 256


class LinearWeights(NamedTuple):
    panels: mx.array  # as `Operations.pack` makes them
    bias: mx.array | None
    num_outputs: int


class LinearLayers:
    """Those of one input, as the library takes them."""

    def __init__(self, layers: Sequence[LinearWeights]) -> None:
        arrays = [array for layer in layers for array in (layer.panels, layer.bias)]
        self.arrays = [array for array in arrays if array is not None]
        self.num_outputs = (Count * len(layers))(*(layer.num_outputs for layer in layers))


class Operations:
    def __init__(
        self, path: Path, num_threads: int = 1, left_out: Collection[str] = frozenset()
    ) -> None:
        """`left_out`: names of those that failed when they were tried here."""
        self.left_out = frozenset(left_out)
        # Its functions make nodes and return, so they keep Python's lock.
        self._library = ctypes.PyDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, Count
        if self._library.pippin_start(num_threads):
            raise RuntimeError("threads for CPU operations could not be started")
        self._panel = self._library.pippin_panel()

    def is_array(self, x: mx.array, buffer: int) -> bool:
        """Whether the library finds in `x` what Python sees of it, which lies at `buffer`."""
        return bool(self._library.pippin_is_array(id(x), buffer, x.size, x.shape[-1]))

    def take_failure(self) -> str | None:
        """Why an operation could not be computed: its results are no numbers, or tokens of -1."""
        text = ctypes.create_string_buffer(FAILURE_BYTES)
        failed = self._library.pippin_take_failure(text, FAILURE_BYTES)
        return text.value.decode(errors="replace") if failed else None

    def run_ahead(self, num_tasks: int) -> None:
        """A thread that submits work may be so many tasks of ten dispatches further ahead of mlx's
        than mlx allows; with a negative number no longer."""
        self._library.pippin_run_ahead(num_tasks)

    def _make(
        self, name: str, num_made: int, given: Sequence[mx.array], *numbers: object
    ) -> list[mx.array]:
        """The arrays that an operation makes of these, all of them by one node."""
        made = [mx.array(0.0) for _ in range(num_made)]  # Python's objects; the rest is to come
        arrays = (_addresses(made), num_made, _addresses(given), len(given))
        if getattr(self._library, f"pippin_{name}")(*arrays, *numbers):
            raise RuntimeError("an operation could not be added to mlx's graph")
        return made

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        (y,) = self._make("rms_norm", 1, (x,) if weight is None else (x, weight), eps)
        return y

    def pack(self, weight: mx.array) -> mx.array:
        """[outputs, inputs] as panels.h has them: [panels, inputs, outputs of a panel]."""
        narrow = narrowed(weight)
        num_out, num_in = narrow.shape
        missing = -num_out % self._panel
        padded = mx.pad(narrow, [(0, missing), (0, 0)])
        panels = padded.reshape(-1, self._panel, num_in).transpose(0, 2, 1)
        return mx.contiguous(panels)

    def linear(self, x: mx.array, layers: LinearLayers) -> list[mx.array]:
        """Of each layer x @ weight.T + bias; all of them together are one operation."""
        num_outputs = layers.num_outputs
        return self._make("linear", len(num_outputs), [x, *layers.arrays], num_outputs)

    def swiglu(self, gate: mx.array, x: mx.array) -> mx.array:
        """silu(gate) * x, of one shape."""
        (y,) = self._make("swiglu", 1, (gate, x))
        return y

    def rope(
        self,
        x: mx.array,  # [B, H, T, D]
        frequencies: mx.array,  # [half of the channels that are turned]
        offset: int | mx.array,  # int32 [B] or [1]
        scale: float,
    ) -> mx.array:
        given, start = [x, frequencies], 0
        if isinstance(offset, int):
            start = offset
        else:
            given.append(offset)
        (y,) = self._make("rope", 1, given, scale, start)
        return y

    def attention(
        self,
        queries: mx.array,  # [B, Hq, S, D]
        keys: mx.array,  # [B, Hkv, L, D]
        values: mx.array,  # [B, Hkv, L, Dv]
        scale: float,
        mask: mx.array | None,  # bool [B or 1, 1, S, L]
        *,
        causal: bool,  # the last query sees all keys, each before it one less
    ) -> mx.array:
        given = (queries, keys, values) if mask is None else (queries, keys, values, mask)
        (y,) = self._make("attention", 1, given, scale, causal)
        return y

    def kv_table(self, arrays: Sequence[mx.array], numbers: Sequence[int]) -> mx.array:
        """Where rows' keys and values lie, as library.cpp has it; the arrays live as long."""
        (address,) = self._make("kv_table", 1, arrays, (Count * len(numbers))(*numbers))
        return address

    def row_attention(
        self,
        queries: mx.array,  # [W, Hq, n, D]
        tail: tuple[mx.array, mx.array],  # [W, Hkv, T, D], [W, Hkv, T, Dv]
        columns: tuple[mx.array, mx.array],  # [W, Hkv, n, D], [W, Hkv, n, Dv]: of the same tokens
        cursor: mx.array,  # int32 [W]: where these go in the tail, behind those that the row has
        kv_table: mx.array,
        scale: float,
        *,
        place: int,  # of the layer in the KV table
        window: int | None = None,  # tokens, the row's own one among them
        sinks: mx.array | None = None,  # [Hq]
    ) -> list[mx.array]:
        """A token of each row and drafts behind it, over its tail and what the KV table has: the
        tails with the columns, in the same memory, and what is read. For columns that no step
        reads which is in flight."""
        arrays = [*tail, *columns, cursor, queries, kv_table, *([] if sinks is None else [sinks])]
        return self._make("row_attention", 3, arrays, scale, place, window or 0)

    def delta_layer(
        self,
        inputs: Sequence[mx.array],  # as runs.h lists them
        *,
        k_heads: tuple[int, int],  # how many, and their size
        eps: float,
        num_made: int,
    ) -> list[mx.array]:
        """What the output product reads, the convolution's state, states as above; or where rows
        verify drafts the state behind the input token, and what is kept of the drafts, if any."""
        return self._make("delta_layer", num_made, inputs, *k_heads, eps)

    def draft_head(
        self,
        inputs: Sequence[mx.array],  # as draft_head.h lists them
        num_wrong: int,
        num_ids: int,
        eps: float,
        rope_scale: float,
    ) -> list[mx.array]:
        """Drafts int32 [rows, n], and the rings after them: keys and values."""
        return self._make("draft_head", 3, inputs, num_wrong, num_ids, eps, rope_scale)

    def choose(
        self,
        logits: mx.array,  # [rows, vocabulary]
        choices: mx.array,  # [rows, 4]: 1 / temperature, top_k, top_p, min_p, as choose.h has them
        keys: mx.array,  # uint32 [rows, 2]: of the rows' noise
    ) -> mx.array:
        """A token for each row, int32 [rows]."""
        (tokens,) = self._make("choose", 1, (logits, choices, keys))
        return tokens


@cache
def _loaded() -> Operations | None:
    found = find_library()
    if found.path is None:
        return None
    return Operations(found.path, num_threads(), found.left_out)


_in_use: ContextVar[bool] = ContextVar("pippin_operations", default=True)


def operations(*names: str) -> Operations | None:
    """None where mlx's own are to be used, as where one of these does not work here."""
    ours = _loaded() if _in_use.get() and on_cpu() else None
    return None if ours is None or not ours.left_out.isdisjoint(names) else ours


def check_operations() -> None:
    """Call once a step was computed: what fails in mlx's threads cannot raise there."""
    ours = _loaded() if _loaded.cache_info().currsize else None  # --safe needs no library
    failure = None if ours is None else ours.take_failure()
    if failure is not None:
        raise RuntimeError(
            f"a CPU operation of Pippin's failed: {failure}. --safe computes with mlx's own"
        )


@contextmanager
def without_operations() -> Iterator[None]:
    """mlx's own inside, in this thread: with --safe, and to compare with."""
    token = _in_use.set(False)
    try:
        yield
    finally:
        _in_use.reset(token)


def narrowed(x: mx.array) -> mx.array:
    """In 16 bits where that loses nothing, as where a checkpoint's numbers have no more."""
    for dtype in (mx.bfloat16, mx.float16):
        narrow = x.astype(dtype)
        if mx.array_equal(narrow.astype(x.dtype), x).item():
            return narrow
    return x


def are_float32(*arrays: mx.array) -> bool:
    return all(array.dtype == mx.float32 for array in arrays)


def _addresses(arrays: Sequence[mx.array]) -> ctypes.Array[ctypes.c_void_p]:
    return _array_type(len(arrays))(*map(id, arrays))


@cache
def _array_type(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return Address * count
