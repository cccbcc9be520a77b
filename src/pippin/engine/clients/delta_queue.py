"""The deltas of one request between an engine and its reader. Knows no request and no text.

A reader that is behind gets all that has arrived as one delta, as of a step of several tokens: the
further it is behind, the less a token costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

import msgspec

from pippin.messages import TokenDelta

FAILED = ("error", "abort")


class DeltaQueue:
    """Written by the event loop's own calls, read by one task."""

    def __init__(self) -> None:
        self._waiting: list[TokenDelta] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        self._waiting.append(delta)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TokenDelta:
        """All that has arrived. What failed is a delta by itself: tokens before it are shown."""
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        waiting = self._waiting
        if len(waiting) == 1:
            self._waiting = []
            return waiting[0]
        num_joined = len(waiting) - (waiting[-1].finish in FAILED)
        self._waiting = waiting[num_joined:]
        return joined_deltas(waiting[:num_joined])


def joined_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """One delta of the same tokens. The first says what the cache saved, the last how it ended."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return msgspec.structs.replace(
        last,
        tokens=list(chain.from_iterable(delta.tokens for delta in deltas)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
        host_tokens=first.host_tokens,
        disk_tokens=first.disk_tokens,
        peer_tokens=first.peer_tokens,
        queued_s=first.queued_s,
    )
