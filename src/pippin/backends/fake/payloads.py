"""The toy's payloads, also as bytes, and an account of all. Knows no rows and no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from pippin.backends.base import Load, Spill, loaded_bytes
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import Component, ModelSpec, Payload


@dataclass
class Ledger:
    """Every payload that was made and has not been released."""

    nbytes: int = 0
    num_live: int = 0

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.num_live += 1

    def remove(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self.num_live -= 1


@dataclass(eq=False)
class FakePayload:
    """Token values (KV) or a hash (state), written by the device some time after the launch."""

    num_tokens: int
    nbytes: int
    ledger: Ledger = field(repr=False)
    content: list[int] | None = None
    prints: list[int] | None = None  # of what the device wrote, value by value
    released: bool = False
    parts: tuple[FakePayload, ...] = ()  # after a split

    def __post_init__(self) -> None:
        self.ledger.add(self.nbytes)

    def write(self, content: list[int]) -> None:
        self.content = content
        self.prints = list(map(hash, content))

    @property
    def intact(self) -> bool:
        """Whether it holds what the device wrote."""
        return self.prints == list(map(hash, self.read()))

    def read(self) -> list[int]:
        if self.content is None:
            raise RuntimeError("payload read before the device wrote it")
        self.check_alive()
        return self.content

    def check_alive(self) -> None:
        """Raise if it, or a part of it, was released."""
        if self.released:
            raise RuntimeError("payload read after its release")
        for part in self.parts:
            part.check_alive()

    def split(self, at: int) -> tuple[Payload, Payload]:
        content = self.read()
        cut = self.nbytes * at // self.num_tokens
        self.ledger.remove(self.nbytes)
        prints = self.prints or []
        head = FakePayload(at, cut, self.ledger, content[:at], prints[:at])
        tail = FakePayload(
            self.num_tokens - at, self.nbytes - cut, self.ledger, content[at:], prints[at:]
        )
        self.parts = (head, tail)
        return head, tail

    def release(self) -> None:
        if self.released:
            raise RuntimeError("payload released twice")
        self.released = True
        self.ledger.remove(self.nbytes)

    def fingerprint(self) -> int:
        return hash(tuple(self.read()))


@dataclass(frozen=True)
class PayloadMaker:
    """Makes the payloads of the components that a model keeps, for the device to write."""

    spec: ModelSpec
    ledger: Ledger

    def kv(self, start: int, end: int) -> dict[Component, FakePayload]:
        if start == end:
            return {}
        kept = [component for component in self.spec.components if component.divides]
        return {component: self.one(component, end - start) for component in kept}

    def state(self) -> FakePayload | None:
        kept = Component.STATE in self.spec.components
        return self.one(Component.STATE, 1) if kept else None

    def hidden(self) -> FakePayload | None:
        return self.one(Component.HIDDEN, 1) if self.spec.hidden_bytes else None

    def one(self, component: Component, num_tokens: int) -> FakePayload:
        nbytes = loaded_bytes(self.spec, component, num_tokens)
        return FakePayload(num_tokens, nbytes, self.ledger)


def as_fake(payloads: tuple[Payload, ...]) -> tuple[FakePayload, ...]:
    assert all(isinstance(payload, FakePayload) for payload in payloads)
    return cast(tuple[FakePayload, ...], payloads)


def contents(payloads: tuple[Payload, ...]) -> list[int]:
    return [value for payload in as_fake(payloads) for value in payload.read()]


def payload_arrays(
    component: Component, num_tokens: int, num_digests: int
) -> tuple[ArraySpec, ...]:
    """Token ids of KV, the rolling hash of a state, or what a hidden vector is made of."""
    if component.divides:
        return (ArraySpec("tokens", "int64", (num_tokens,), token_axis=0),)
    length = num_digests if component is Component.HIDDEN else 1
    return (ArraySpec(component.value, "int64", (length,)),)


@dataclass
class FakeSpilled:
    """Read at once: what the tree holds has been written."""

    content: list[int]
    intact: bool = True
    released: bool = False

    def arrays(self) -> Sequence[Bytes]:
        assert not self.released, "read after its release"
        return [np.array(self.content, dtype="<i8").view(np.uint8)]

    def release(self) -> None:
        assert not self.released, "released twice"
        self.released = True


def spilled(spill: Spill) -> FakeSpilled:
    payloads = as_fake(spill.payloads)
    return FakeSpilled(contents(payloads), all(payload.intact for payload in payloads))


def content_of(load: Load) -> list[int]:
    (array,) = load.arrays
    return [int(value) for value in np.ascontiguousarray(array).view("<i8")]
