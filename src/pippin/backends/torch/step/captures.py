"""What a step gives to the tree: one more holder of what its rows hold. Copies nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pippin.backends.base import Capture, DecodeRow, Retire
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import KVPayload, StatePayload
from pippin.backends.torch.pools.rows import RowCells, Rows
from pippin.backends.torch.step.batches import TakenChunks
from pippin.types import Component, Payload


class Captures:
    def __init__(self, pools: Pools, rows: Rows) -> None:
        self._pools = pools
        self._rows = rows
        held = {Component.ATTENTION: rows.cells, Component.WINDOW: rows.windows}
        self._kinds: dict[Component, RowCells] = {
            kind: cells
            for kind, cells in held.items()
            if cells is not None and pools.layout.cell_bytes(kind)
        }

    def of_slot(self, retire: Retire) -> Iterator[Capture]:
        """A slot's KV over [start, end), and its state at `end`.

        What has fallen behind a window is held no more: those tokens come without it.
        """
        slot, start, end = retire.slot, retire.start, retire.end
        assert self._rows.holds(slot, end), "a row must hold what its Retire says"
        windows = self._rows.windows
        cut = start if windows is None else max(start, windows.first_held(slot))
        if start < cut < end:
            kinds = [kind for kind in self._kinds if kind is not Component.WINDOW]
            yield Capture(slot, start, cut, True, self._kv(kinds, slot, start, cut))
        else:
            cut = start
        kv = self._kv([*self._kinds], slot, cut, end)
        yield Capture(slot, cut, end, True, kv, self.state(slot, end))

    def of_chunks(self, taken: TakenChunks) -> Iterator[Capture]:
        """What the forward will write belongs to the tree too, from now on."""
        taps: dict[int, dict[int, Payload]] = {}
        for tap in taken.taps:
            taps.setdefault(tap.row, {})[tap.position] = StatePayload(self._pools, tap.slab)
        for number, chunk in enumerate(taken.rows):
            if not chunk.captures:
                continue
            states = taps.get(number, {})
            if chunk.end in chunk.checkpoints:
                states |= self.state(chunk.slot, chunk.end)
            kv = self._kv([*self._kinds], chunk.slot, chunk.start, chunk.end)
            yield Capture(chunk.slot, chunk.start, chunk.end, kv=kv, states=states)

    def of_decodes(self, decodes: Sequence[DecodeRow]) -> Iterator[Capture]:
        for decode in decodes:
            if decode.checkpoint and self._rows.keeps_states:
                end = decode.position + 1
                states = self.state(decode.slot, end)
                yield Capture(decode.slot, decode.position, end, states=states)

    def state(self, slot: int, position: int) -> dict[int, Payload]:
        if not self._rows.keeps_states:
            return {}
        return {position: StatePayload.of(self._pools, int(self._rows.states[slot]))}

    def _kv(
        self, kinds: Sequence[Component], slot: int, start: int, end: int
    ) -> dict[Component, Payload]:
        if start == end:
            return {}
        return {
            kind: KVPayload.of(self._pools, kind, self._kinds[kind].held(slot, start, end))
            for kind in kinds
        }
