"""The operations as Python sees them: arrays in, arrays out. Knows no model.

Each takes float32 alone, which the caller sees to.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator, Sequence
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
_ARGUMENTS = {
    "pippin_start": (Count,),
    "pippin_run_ahead": (Count,),
    "pippin_take_failure": (ctypes.c_char_p, ctypes.c_long),
    "pippin_is_array": (Address, Address, ctypes.c_long, Count),
    "pippin_attention": (Address, Address, Count, Number, Count),
    "pippin_kv_table": (Address, Address, Count, Address),
    "pippin_row_attention": (Address, Address, Count, Number, Count, Count),
    "pippin_delta_layer": (Address, Count, Address, Count, Count, Count, Number),
    "pippin_draft_layer": (Address, Count, Address, Count, Count, Number),
    "pippin_draft_head": (Address, Address, Count, Count, Number, Number),
    "pippin_rms_norm": (Address, Address, Address, Number),
    "pippin_linear": (Address, Count, Address, Address, Address),
    "pippin_panel": (),
    "pippin_swiglu": (Address, Address, Address),
    "pippin_choose": (Address, Address, Address, Address),
    "pippin_rope": (Address, Address, Address, Address, Number, Count),
}
FAILURE_BYTES = 256


class LinearWeights(NamedTuple):
    panels: mx.array  # as `Operations.pack` makes them
    bias: mx.array | None
    num_outputs: int


class LinearLayers:
    """Those of one input, as the library takes them."""

    def __init__(self, layers: Sequence[LinearWeights]) -> None:
        self.count = len(layers)
        self._layers = tuple(layers)  # as long as their addresses
        arrays = [array for layer in layers for array in (layer.panels, layer.bias)]
        ids = [None if array is None else id(array) for array in arrays]
        self.addresses = _array_type(len(ids))(*ids)
        self.num_outputs = (Count * self.count)(*(layer.num_outputs for layer in layers))


class Operations:
    def __init__(
        self, path: Path, num_threads: int = 1, left_out: Collection[str] = frozenset()
    ) -> None:
        """`left_out`: names of those that failed when they were tried here."""
        self.left_out = frozenset(left_out)
        # Its functions make nodes and return, so they keep Python's lock.
        self._library = ctypes.PyDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        for name, types in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, Count
        _check(self._library.pippin_start(num_threads))
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
        _check(self._library.pippin_run_ahead(num_tasks))

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        given = None if weight is None else id(weight)
        return _made(self._library.pippin_rms_norm, id(x), given, eps)

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
        outs = [_blank() for _ in range(layers.count)]
        _check(
            self._library.pippin_linear(
                _addresses(outs), layers.count, id(x), layers.addresses, layers.num_outputs
            )
        )
        return outs

    def swiglu(self, gate: mx.array, x: mx.array) -> mx.array:
        """silu(gate) * x, of one shape."""
        return _made(self._library.pippin_swiglu, id(gate), id(x))

    def rope(
        self,
        x: mx.array,  # [B, H, T, D]
        frequencies: mx.array,  # [half of the channels that are turned]
        offset: int | mx.array,  # int32 [B] or [1]
        scale: float,
    ) -> mx.array:
        fixed = isinstance(offset, int)
        offsets, start = (None, offset) if fixed else (id(offset), 0)
        return _made(self._library.pippin_rope, id(x), id(frequencies), offsets, scale, start)

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
        ins = _addresses(given)
        return _made(self._library.pippin_attention, ins, len(given), scale, causal)

    def kv_table(self, arrays: Sequence[mx.array], numbers: Sequence[int]) -> mx.array:
        """Where rows' keys and values lie, as library.cpp has it; the arrays live as long."""
        ins, counts = _addresses(arrays), (Count * len(numbers))(*numbers)
        return _made(self._library.pippin_kv_table, ins, len(arrays), counts)

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
        outs = [_blank() for _ in range(3)]
        numbers = (scale, place, window or 0)
        _check(
            self._library.pippin_row_attention(
                _addresses(outs), _addresses(arrays), len(arrays), *numbers
            )
        )
        return outs

    def delta_layer(
        self,
        inputs: Sequence[mx.array],  # as runs.h lists them
        *,
        k_heads: tuple[int, int],  # how many, and their size
        eps: float,
        num_states: int,
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """What the output product reads, the convolution's state, and states as above."""
        outs = [_blank() for _ in range(2 + num_states)]
        ins = _addresses(inputs)
        _check(
            self._library.pippin_delta_layer(
                _addresses(outs), len(outs), ins, len(inputs), *k_heads, eps
            )
        )
        return outs[0], outs[1], outs[2:]

    def draft_layer(
        self,
        inputs: Sequence[mx.array],  # as runs.h lists them
        *,
        k_heads: tuple[int, int],
        eps: float,
    ) -> list[mx.array]:
        """What the output product reads, the states behind the input token, what is kept of the
        drafts, where there are some."""
        has_drafts = inputs[0].shape[1] > 1
        outs = [_blank() for _ in range(6 if has_drafts else 3)]
        ins = _addresses(inputs)
        _check(self._library.pippin_draft_layer(_addresses(outs), len(outs), ins, *k_heads, eps))
        return outs

    def draft_head(
        self,
        inputs: Sequence[mx.array],  # as draft_head.h lists them
        num_wrong: int,
        num_ids: int,
        eps: float,
        rope_scale: float,
    ) -> list[mx.array]:
        """Drafts int32 [rows, n], and the rings after them: keys and values."""
        outs, ins = [_blank() for _ in range(3)], _addresses(inputs)
        numbers = (num_wrong, num_ids, eps, rope_scale)
        _check(self._library.pippin_draft_head(_addresses(outs), ins, *numbers))
        return outs

    def choose(
        self,
        logits: mx.array,  # [rows, vocabulary]
        choices: mx.array,  # [rows, 4]: 1 / temperature, top_k, top_p, min_p, as choose.h has them
        keys: mx.array,  # uint32 [rows, 2]: of the rows' noise
    ) -> mx.array:
        """A token for each row, int32 [rows]."""
        return _made(self._library.pippin_choose, id(logits), id(choices), id(keys))


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


def _made(function: Callable[..., int], *arguments: object) -> mx.array:
    """The one array that a function of the library makes of these."""
    y = _blank()
    _check(function(id(y), *arguments))
    return y


def _blank() -> mx.array:
    """A Python object for an array that does not exist yet."""
    return mx.array(0.0)


def _addresses(arrays: Sequence[mx.array]) -> ctypes.Array[ctypes.c_void_p]:
    return _array_type(len(arrays))(*map(id, arrays))


@cache
def _array_type(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return Address * count


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError("an operation could not be added to mlx's graph")
