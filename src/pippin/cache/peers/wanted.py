"""A prompt that a decode engine asks a prefill engine for. Knows tokens and entries, no sockets.

The decode engine names every entry itself, by its own tokens: what arrives says which component and
which tokens it is, and its chain key has to be the one that follows from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import xxhash

from pippin.cache.entries import blocks
from pippin.cache.entries.chain import Chain
from pippin.cache.entries.entry import Bytes, Entry, Key
from pippin.cache.tiers.tier_tree import Format
from pippin.types import Component

DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class Wanted:
    id: str  # of the hand-over, unique on the decode engine
    tokens: np.ndarray = field(repr=False)  # int32: the whole prompt
    salt: bytes
    held: int  # tokens whose attention KV the decode engine has: not to be sent
    boundaries: tuple[int, ...] = ()  # where messages end
    priority: int = 0

    @cached_property
    def nbytes(self) -> int:
        return int(self.tokens.nbytes)

    def entry(
        self, fingerprint: bytes, format: Format, component: Component, start: int, end: int
    ) -> Entry:
        """The entry of a component of [start, end). ValueError: there is none such in it."""
        num_tokens = end - start if component.divides else 0
        if not 0 <= start <= end <= len(self.tokens) or not end or num_tokens < component.divides:
            raise ValueError(f"tokens {start} to {end} of a prompt of {len(self.tokens)}")
        chain = Chain(fingerprint, self.salt)
        if start:
            chain = chain.extended(self.tokens[:start])
        tokens = self.tokens[start:end]
        return Entry(
            Key(chain.extended(tokens).key if end > start else chain.key, component, num_tokens),
            chain.key,
            start,
            tokens.tobytes(),
            format(component, num_tokens or 1),
        )


class PrefillPeers(Protocol):
    """The engines that compute prompts for this one. No verb blocks."""

    def ask(self, wanted: Wanted) -> bool:
        """Ask one of them; False if none is connected. What comes of it, the store announces."""
        ...

    def cancel(self, id: str) -> None:
        """It is not wanted any more."""
        ...

    def report(self) -> list[dict[str, Any]]:
        """For each of them, its address and whether it is connected."""
        ...

    def close(self) -> None: ...


class DecodePeer(Protocol):
    """An engine that asked for a prompt."""

    def send(self, id: str, entry: Entry, data: Sequence[Bytes], digest: bytes) -> bool:
        """Whether it was sent; blocks while the connection is slower than the caller."""
        ...

    def end(self, id: str, reason: str) -> None:
        """Nothing else is sent of this hand-over. `reason`: why not all was; "" if all was."""
        ...


def payload_digest(data: Sequence[Bytes]) -> bytes:
    """Of all arrays of an entry."""
    digest = xxhash.xxh3_128()
    for view in blocks.views(data):
        digest.update(view)
    return digest.digest()
