"""The toy's payloads as bytes, and back. Knows no device and no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pippin.backends.base import Load, Spill
from pippin.backends.fake.payloads import as_fake, contents
from pippin.cache.entries.entry import ArraySpec, Bytes
from pippin.types import Component


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
