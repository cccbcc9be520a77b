"""States and KV of slots as payloads, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import mlx.core as mx

from pippin.backends.base import Capture, DecodeRow, PrefillRow, Restore, Retire
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV, Packer
from pippin.backends.mlx.payloads.payload import StatePayload
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.recurrent.taps import StateTaps, states_after
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.types import Component, Payload


class Captures:
    def __init__(self, layout: Layout, packer: Packer) -> None:
        self._layout = layout
        self._packer = packer

    def restore(self, prompt: PromptState, restore: Restore) -> None:
        """Let `prompt` begin with what the prefix cache holds."""
        prompt.length = restore.length
        for component, payloads in restore.payloads.items():
            if component is Component.STATE:
                prompt.states = self._packer.state_arrays(payloads[-1])
            elif payloads and component in self._packer.groups:
                prompt.kv |= self._packer.kv_arrays(component, payloads)

    def hidden_of(self, row: PrefillRow) -> mx.array:
        """What the head read after a prompt that is restored whole: [1, 1, hidden]."""
        assert row.restore is not None
        (payload,) = row.restore.payloads[Component.HIDDEN]
        assert isinstance(payload, StatePayload)
        return payload.arrays[0]

    def of_chunk(
        self,
        chunk: PrefillRow,
        row: int,
        new_kv: Mapping[int, KV],  # of all rows of the forward
        prompt: PromptState,  # after the chunk
        tapped: StateTaps | None,
        hidden: mx.array | None,  # [rows, 1, hidden]: what the head read after each row's chunk
    ) -> Capture:
        """The chunk's KV, states where checkpoints are wanted, and what it samples from."""
        kv: dict[Component, Payload] = {
            component: self._packer.kv_payload(component, new_kv, row, 0, len(chunk.tokens))
            for component in self._packer.groups
        }
        states: dict[int, Payload] = {}
        for at in chunk.checkpoints if prompt.states else ():
            if at == chunk.end:
                states[at] = self._packer.state_payload(prompt.states, 0)
                continue
            assert tapped is not None
            held, column_major = states_after(tapped, self._layout, at - chunk.start)
            states[at] = self._packer.state_payload(held, row, column_major=column_major)
        last = None
        if hidden is not None and chunk.samples:
            last = self._packer.hidden_payload(hidden, row)
        return Capture(chunk.slot, chunk.start, chunk.end, False, kv, states, last)

    def of_decode(self, decode: DecodeRow, rows: DecodeRows) -> Capture:
        """The state after a reply's token."""
        end = decode.position + 1
        payload = self.state_of(decode.slot, rows)
        return Capture(decode.slot, decode.position, end, states={end: payload})

    def state_of(self, slot: int, rows: DecodeRows) -> Payload:
        return self._packer.state_payload(rows.states, rows.rows[slot].index)

    def of_slot(self, retire: Retire, held: PromptState) -> Iterator[Capture]:
        """The slot's KV over [start, end) and its state at `end`.

        Windowed layers no longer hold tokens older than the window: those have no window KV.
        """
        slot, start, end = retire.slot, retire.start, retire.end
        assert held.length == end, f"slot {slot} holds {held.length} tokens, its plan says {end}"
        cut = max(start, end - _fewest_held(held.kv)) if held.kv else start
        for first, last in ((start, cut), (cut, end)) if start < cut else ((start, end),):
            payloads: dict[Component, Payload] = {}
            for component in self._packer.groups:
                if first == last or (component is Component.WINDOW and last != end):
                    continue
                caches = self._layout.indices(component)
                alike = _last_columns({cache: held.kv[cache] for cache in caches})
                lead = end - alike[caches[0]][0].shape[2]  # position of column 0
                payloads[component] = self._packer.kv_payload(
                    component, alike, 0, first - lead, last - lead
                )
            at_end = last == end and bool(held.states)
            captured = {end: self._packer.state_payload(held.states, 0)} if at_end else {}
            yield Capture(slot, first, last, True, payloads, captured)


def _fewest_held(kv: Mapping[int, KV]) -> int:
    return min(keys.shape[2] for keys, _ in kv.values())


def _last_columns(kv: Mapping[int, KV]) -> dict[int, KV]:
    """The tokens that every cache still holds: layers may have windows of several sizes."""
    fewest = _fewest_held(kv)
    return {cache: (k[:, :, -fewest:], v[:, :, -fewest:]) for cache, (k, v) in kv.items()}
