"""What the toy device says after its rows, and how it scores that. Knows no plans."""

from __future__ import annotations

import numpy as np

from pippin.backends.fake.device import FutureMap
from pippin.backends.fake.pending import FakePending
from pippin.backends.fake.toy import ToyRow
from pippin.backends.masks import allowed_ids
from pippin.types import ModelSpec, TokenLogprobs


class ToySampler:
    def __init__(self, spec: ModelSpec, rows: dict[int, ToyRow], future_map: FutureMap) -> None:
        self._spec = spec
        self._rows = rows
        self._future_map = future_map

    def sample_masked(self, pending: FakePending) -> None:
        for slot in pending.plan.masked_slots:
            self.sample(pending, slot)

    def sample(self, pending: FakePending, slot: int) -> int:
        row = self._rows[slot]
        token = row.next_token(self._spec.components, self._spec.vocab_size)
        if pending.masks is not None and slot in pending.masks:
            allowed = allowed_ids(pending.masks[slot], self._spec.vocab_size)
            token = int(allowed[token % len(allowed)])
        row.num_sampled += 1
        pending.tokens[slot] = (*pending.tokens.get(slot, ()), token)
        self._future_map.stash(np.array([slot]), np.array([[token]], dtype=np.int32))
        return token

    def score_prompt(self, pending: FakePending, slot: int) -> None:
        row = self._rows[slot]
        num_top = row.admit.params.prompt_logprobs
        if num_top is not None:
            tokens = row.admit.prompt[1:].tolist()
            pending.prompt_logprobs[slot] = [self.score(token, num_top) for token in tokens]

    def add_hidden(self, pending: FakePending, slot: int) -> None:
        row = self._rows[slot]
        if row.admit.embeds:
            digests = row.hidden or row.digests(self._spec.components)
            pending.hidden[slot] = np.array(digests, dtype=np.float32)

    def num_top_logprobs(self, slot: int) -> int | None:
        return self._rows[slot].admit.params.logprobs if slot in self._rows else None

    def score(self, token: int, num_top: int) -> TokenLogprobs:
        top = range(min(num_top, self._spec.vocab_size))
        ids = tuple((token + i) % self._spec.vocab_size for i in top)
        return TokenLogprobs(-0.5, ids, tuple(-0.5 - i for i in top))
