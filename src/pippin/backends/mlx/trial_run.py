"""Runs ragged rows through a model once at load: what does not work is refused or avoided.

mlx-lm's models differ in how they attend: some lend one layer's KV to others, some need every row
at the same position. A graph that cannot be built says so now, not in a user's first request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from pippin.backends.fallbacks import note_fallback
from pippin.backends.mlx.attention.head_ropes import HeadNorms
from pippin.backends.mlx.attention.packed_rows import (
    AttendPacked,
    AttentionPaths,
    PackedCall,
    attend_joined,
    held_against_plain,
    of_drafts,
    of_long_rows,
)
from pippin.backends.mlx.device import on_metal
from pippin.backends.mlx.gpu import latent_attention, packed_attention
from pippin.backends.mlx.gpu.kernels import agrees, off_by
from pippin.backends.mlx.layout import ROUNDING, Layout, Reads
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows.decode_forward import DecodeForward, Forward
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.errors import UnsupportedLayout

OTHER_TOKENS = 0.25  # of a state, if padding were taken for tokens; rounding changes less

logger = logging.getLogger(__name__)


def runnable_layout(layout: Layout, forward: Forward) -> Layout:
    """The layout as this model can run it: as discovered, else with all KV joined, else refused."""
    joined = layout.reading(Reads.JOINED, instead_of=set(Reads))
    failure: Exception | None = None
    for candidate in dict.fromkeys((layout, joined, replace(joined, groups_heads=True))):
        try:
            _run_rows(candidate, forward)
        except Exception as error:  # whatever the model's own code raises, reported below
            failure = failure or error
        else:
            return replace(
                candidate,
                pads=_passes_over_padding(candidate, forward),
                compiles=_compiles(candidate, forward),
            )
    raise UnsupportedLayout(
        f"the model cannot run rows of different lengths in one forward: {failure}"
    ) from failure


def _run_rows(layout: Layout, forward: Forward) -> None:
    """Three rows: a mask that is broadcast along the wrong axis meets no axis of that length."""
    prompts = [PromptState(), PromptState(), PromptState()]
    for lens in ((2, 3, 1), (3, 1, 2)):  # ragged, and then with prefixes of several lengths
        _prefill(layout, forward, lens, prompts)
    _advance(DecodeRows(layout), prompts, DecodeForward(layout, forward))


def _compiles(layout: Layout, forward: Forward) -> bool:
    """Some models read values back inside a forward, to choose experts on the host: such a step
    cannot be compiled. Evaluates nothing."""
    prompt = PromptState()
    _prefill(layout, forward, (1,), [prompt])
    try:
        _advance(DecodeRows(layout), [prompt], DecodeForward(layout, forward, compiled=True))
    except Exception as error:  # whatever the model's own code raises
        note_fallback("decode steps are not compiled", error)
        return False
    return True


def kernel_of(layout: Layout) -> AttendPacked | None:
    """Over packed rows, on Metal; None elsewhere, and where there is none for each layer."""
    if not on_metal() or not layout.packs_rows:
        return None
    caches = [layout.caches[index] for index in layout.kv_indices]
    if layout.has_latents:
        return latent_attention.attend_latents if all(map(latent_attention.takes, caches)) else None
    return packed_attention.attend_packed if all(map(packed_attention.takes, caches)) else None


def packed_rows(layout: Layout, forward: Forward) -> AttendPacked | None:
    """The kernel for packed rows, where there is one for this device and it runs this model.

    Every layer's attention is held against plain operations on the very same numbers, and each kind
    of layer's over long rows. (What a device cannot run for want of registers is silent.) Rows that
    verify drafts need another form of the kernel: where that is off, plain operations attend.
    """
    kernel = kernel_of(layout)
    if kernel is None:
        if on_metal():
            reason = "there is no kernel for the KV or the heads of each of this model's layers"
            note_fallback("no kernel attends to decode rows", reason)
        return None
    errors: list[mx.array] = []
    attend = held_against_plain(kernel, errors)
    calls: dict[object, PackedCall] = {}  # by kind of layer

    def attend_both(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        kind = call.q.shape, *(side.shape for side in call.tail), call.sinks is None
        if kind not in calls:
            calls[kind] = call
            attend(of_long_rows(call))
        return attend(call)

    def run() -> list[mx.array]:
        _logits(layout, forward, AttentionPaths(attend_both))
        return errors

    def run_drafts() -> list[mx.array]:
        of_kernel: list[mx.array] = []
        verify = held_against_plain(kernel, of_kernel)
        for call in calls.values():
            verify(of_drafts(call))
            verify(of_drafts(of_long_rows(call)))
        return of_kernel

    if not agrees("no kernel attends to decode rows", run):
        return None
    if layout.packs and not agrees("plain operations attend to drafts", run_drafts):
        return lambda call: (kernel if call.q.shape[2] == 1 else attend_joined)(call)
    return kernel


def deferred_norms(
    layout: Layout, forward: Forward, kernel: AttendPacked, norms: HeadNorms
) -> HeadNorms | None:
    """Of these norms those that can be left to the kernel, with the rotations after them; None:
    rotations neither."""
    usual = AttentionPaths(kernel)
    for left in (norms, {}):
        if _keeps_logits(layout, forward, usual, replace(usual, norms=left)):
            return left
    return None


def adds_later(layout: Layout, forward: Forward, paths: AttentionPaths) -> bool:
    """Whether layers' sums can be left to the norms that follow."""
    return _keeps_logits(layout, forward, paths, replace(paths, adds_later=True))


def _keeps_logits(
    layout: Layout, forward: Forward, usual: AttentionPaths, other: AttentionPaths
) -> bool:
    """Whether the logits of a step stay what they were."""
    plain = _logits(layout, forward, usual)
    try:
        return float(off_by(_logits(layout, forward, other), plain)) <= ROUNDING
    except Exception as error:  # whatever the model's own code raises
        logger.info("norms, rotations or sums stay in layers of their own: %s", error)
        return False


def _logits(layout: Layout, forward: Forward, paths: AttentionPaths) -> mx.array:
    """Of three rows of different lengths."""
    prompts = [PromptState(), PromptState(), PromptState()]
    _prefill(layout, forward, (2, 3, 1), prompts)
    return _advance(DecodeRows(layout, paths), prompts, DecodeForward(layout, forward))


def _advance(rows: DecodeRows, prompts: Sequence[PromptState], forward: DecodeForward) -> mx.array:
    """Logits of one step of all rows."""
    rows.join(list(enumerate(prompts, start=1)))
    slots = [slot for slot, _ in enumerate(prompts, start=1)]
    return rows.advance(slots, lambda at: mx.zeros(len(at), mx.int32), forward)[1]


def _passes_over_padding(layout: Layout, forward: Forward) -> bool:
    """Whether a padded row's states are those of the same row alone. Evaluates two tiny forwards.

    Some recurrent layers take padding for tokens, which shapes do not show.
    """
    alone, padded = PromptState(), PromptState()
    _prefill(layout, forward, (1,), [alone])
    _prefill(layout, forward, (1, 3), [padded, PromptState()])
    return all(
        bool(mx.linalg.norm(a - b) <= OTHER_TOKENS * mx.linalg.norm(b))
        for cache in alone.states
        for a, b in zip(padded.states[cache], alone.states[cache], strict=True)
    )


def _prefill(
    layout: Layout, forward: Forward, lens: Sequence[int], prompts: Sequence[PromptState]
) -> None:
    # Tokens differ: what weighs values that are all the same does not matter.
    batch = ChunkBatch(layout, [np.arange(n, dtype=np.int32) for n in lens], prompts)
    forward(batch.tokens, batch.caches)
    batch.advance()
