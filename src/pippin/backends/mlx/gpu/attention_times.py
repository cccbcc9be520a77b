"""Times the ways of attending on a GPU with a model's own shapes, and remembers what they took.

What is timed are steps of a model that has nothing but a few attention layers, with the rows,
views and kernels that serve. Whatever fails here costs speed at the most: the kernel for packed
rows stays if it computed right, and plain operations run everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from time import perf_counter
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention import packed_kv, plain_attention
from pippin.backends.mlx.attention.decode_step import StepShape, Tree
from pippin.backends.mlx.attention.paths import (
    AttendPacked,
    AttentionPaths,
    PackedCall,
    Path,
    PathTimes,
    Size,
    can_join,
    kind_of,
)
from pippin.backends.mlx.attention.plain_attention import held_against_plain
from pippin.backends.mlx.gpu import (
    latent_attention,
    latent_kernel,
    packed_attention,
    packed_kernels,
)
from pippin.backends.mlx.layout import ROUNDING, LayerCache, Layout, Reads
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.rows.decode_forward import DecodeForward, StepResult
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.timing import (
    RememberedTimes,
    Timer,
    machine,
    shortest_seconds,
    times_file,
)
from pippin.types import Component

SUBJECT = "attention"
# The likeliest first: the time there is may not do for all of them.
SIZES = (
    *(Size(1, 512), Size(4, 512), Size(1, 4096), Size(16, 512), Size(4, 4096)),
    *(Size(16, 2048), Size(1, 16_384)),
)
LOAD_SECONDS = 2.0  # of timing, for one load; the rest is for the next one
LAYERS = 4
CALLS = 4  # that are launched together: fetching a result takes longer than a layer
MOST_BYTES = 1 << 30  # of all layers' KV

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionLayer:
    """How a layer of the model attends, but for rows and columns."""

    kind: str
    num_query_heads: int
    shapes: tuple[tuple[int, int], tuple[int, int]]  # heads and channels of keys and of values
    dtype: mx.Dtype
    scale: float
    sinks: mx.array | None
    latents: bool = False  # for keys and values, and positions beside them

    @classmethod
    def of(cls, call: PackedCall) -> AttentionLayer:
        keys, values = ((side.shape[1], side.shape[3]) for side in call.tail)
        kind = kind_of(call.q, call.tail, call.sinks)
        latents = call.rotated is not None
        shapes = keys, values
        return cls(kind, call.q.shape[1], shapes, call.q.dtype, call.scale, call.sinks, latents)

    @property
    def token_bytes(self) -> int:
        return sum(heads * dim for heads, dim in self.shapes) * self.dtype.size


def choose_attention(
    layers: Mapping[str, AttentionLayer],
    kernel: AttendPacked,
    *,
    path: FilePath | None = None,
    seconds_of: Timer = shortest_seconds,
) -> AttentionPaths:
    """By the times in the file at `path`, and new ones for what is not there."""
    kernels = (packed_attention, packed_kernels, latent_attention, latent_kernel)
    timed = (*kernels, plain_attention, packed_kv)
    ours = machine(timed)
    remembered = RememberedTimes(path or times_file(SUBJECT), ours)
    began = perf_counter()
    times: dict[str, dict[Size, Mapping[Path, float]]] = {kind: {} for kind in layers}
    try:
        for size, layer in ((size, layer) for size in SIZES for layer in layers.values()):
            if LAYERS * size.num_rows * size.num_columns * layer.token_bytes > MOST_BYTES:
                continue
            key = f"{layer.kind}: {size.num_rows} x {size.num_columns}"
            found = remembered.get(key)
            if found is None:
                if perf_counter() - began > LOAD_SECONDS:
                    continue
                found = _time_ways(layer, size, kernel, seconds_of)
                remembered.add(key, found)
            times[layer.kind][size] = {Path(name): ms for name, ms in found.items()}
    except KernelIsOff as error:
        logger.warning("no kernel attends to decode rows: %s", error)
        return AttentionPaths()
    except Exception as error:  # whatever a device that we have never seen can do
        logger.warning("how to attend is not chosen by timing: %s", error, exc_info=error)
        return AttentionPaths(kernel)
    finally:
        mx.clear_cache()
    remembered.save()
    return AttentionPaths(kernel, times)


def _time_ways(
    layer: AttentionLayer, size: Size, kernel: AttendPacked, seconds_of: Timer
) -> dict[str, float]:
    ways = [Path.KERNEL]
    if can_join(size, layer.token_bytes):
        ways.append(Path.JOINED)
    _check(layer, size, kernel)
    steps = {path: TimedStep(layer, size, path, kernel) for path in ways}
    return {path.value: 1e3 * seconds_of(steps[path].run) / (LAYERS * CALLS) for path in ways}


def _check(layer: AttentionLayer, size: Size, kernel: AttendPacked) -> None:
    """A kernel that a device cannot run for want of registers says nothing, and takes no time."""
    errors: list[mx.array] = []
    checked = held_against_plain(kernel, errors)
    TimedStep(layer, size, Path.KERNEL, checked, compiled=False)
    error = float(mx.stack(errors).max())
    if not error <= ROUNDING:
        raise KernelIsOff(f"the kernel is off by {error:.1g} for rows and columns of {size}")


class KernelIsOff(Exception):
    pass


class TimedStep:
    """A step of rows that attend one way."""

    def __init__(
        self,
        layer: AttentionLayer,
        size: Size,
        path: Path,
        kernel: AttendPacked,
        *,
        compiled: bool = True,
    ) -> None:
        reads = Reads.LATENT if layer.latents else Reads.PIECES
        cache = LayerCache(0, Component.ATTENTION, None, layer.shapes, (layer.dtype,) * 2, reads)
        layout = Layout((cache,) * LAYERS, nesting=(0,) * LAYERS)
        rows = DecodeRows(layout, AttentionPaths(kernel, {layer.kind: only_way(path)}))
        slots = range(1, size.num_rows + 1)
        rows.join([(slot, _prompt(layer, size.num_columns)) for slot in slots])
        rows.flush()
        self._forward = DecodeForward(layout, OnlyAttention(layer, rows.width), compiled=compiled)
        rows.advance(slots, lambda at: mx.zeros(len(at), mx.int32), self._note)
        mx.eval(self._tree)

    def run(self) -> None:
        """A few times over, launched together."""
        mx.eval([self._forward(self._shape, self._tree) for _ in range(CALLS)])

    def _note(self, shape: StepShape, tree: Tree) -> StepResult:
        self._shape, self._tree = shape, tree
        return self._forward(shape, tree)


def only_way(path: Path) -> PathTimes:
    """Times by which it is this way wherever it can be."""
    return {Size(1, 1): {way: float(way is not path) for way in Path}}


def _prompt(layer: AttentionLayer, num_tokens: int) -> PromptState:
    keys, values = (_random(layer, (1, heads, num_tokens, dim)) for heads, dim in layer.shapes)
    return PromptState(num_tokens, dict.fromkeys(range(LAYERS), (keys, values)))


class OnlyAttention:
    """A model of attention alone: each layer asks with what the one before it found."""

    def __init__(self, layer: AttentionLayer, num_rows: int) -> None:
        self._layer = layer
        self._queries, self._rotated = (
            _random(layer, (num_rows, layer.num_query_heads, 1, dim)) for _, dim in layer.shapes
        )
        self._new = [_random(layer, (num_rows, heads, 1, dim)) for heads, dim in layer.shapes]
        mx.eval(self._queries, self._rotated, self._new)

    def __call__(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        layer, q = self._layer, self._queries
        for cache in caches:
            cache.update_and_fetch(*self._new)
            mask = self._rotated if layer.latents else cache.make_mask(1)
            out = cache.attend(q, layer.scale, mask, layer.sinks)
            q = q + out[..., :1]
        return q.reshape(tokens.shape[0], 1, -1)


def _random(layer: AttentionLayer, shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, dtype=layer.dtype, key=mx.random.key(sum(shape)))
