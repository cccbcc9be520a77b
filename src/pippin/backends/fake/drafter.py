"""What the toy device drafts for its rows' next steps. Knows no plans."""

from __future__ import annotations

from pippin.backends.fake.device import FutureMap
from pippin.backends.fake.toy import ToyRow, mix
from pippin.types import ModelSpec


class ToyDrafter:
    def __init__(
        self, spec: ModelSpec, rows: dict[int, ToyRow], future_map: FutureMap, share_right: float
    ) -> None:
        """`share_right`: of the places at which a draft is right."""
        self._spec = spec
        self._rows = rows
        self._future_map = future_map
        self._share_right = share_right

    def draft(self, slot: int, num_drafts: int) -> None:
        """For the slot's next step: what the toy says next, with errors."""
        drafts: list[int] = []
        if num_drafts:
            ahead, token = self._rows[slot].copy(), self._future_map.peek(slot)
        for _ in range(num_drafts):
            ahead.run(token)
            token = ahead.next_token(self._spec.components, self._spec.vocab_size)
            ahead.num_sampled += 1
            if mix(ahead.admit.seed, ahead.length) % 1000 >= 1000 * self._share_right:
                token = (token + 1) % self._spec.vocab_size
            drafts.append(token)
        self._future_map.stash_drafts(slot, drafts)
