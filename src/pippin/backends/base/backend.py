"""A backend: the device it computes on, the bytes it needs, and a step in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from pippin.backends.base.plan import StepPlan
from pippin.backends.base.result import StepResult
from pippin.backends.fallbacks import Fallback
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import Component, ModelSpec


@dataclass(frozen=True)
class DeviceInfo:
    """What a backend computes on, and what suits it where the user does not say."""

    kind: Literal["metal", "cuda", "cpu", "fake"]
    name: str
    memory_bytes: int  # what one process can reasonably hold
    share: float  # of `memory_bytes` to use
    prefill_tokens: int  # of a step: enough that products, not launches, take the time
    max_buffers: int | None = None  # that one process can have, where that is limited
    max_buffer_bytes: int | None = None  # of one array, where that is limited
    unified: bool = True  # it computes in the host's memory: there is no other to move things to


class PendingStep(Protocol):
    def dispatch(self) -> None:
        """Submit to the device what `launch` may have deferred.

        Where submitting blocks the host, `launch` may submit only what running streams need: the
        tokens of the step before reach their clients first. Called before the next plan is made;
        `wait` does it too.
        """
        ...

    def sample(self, masks: np.ndarray) -> None:
        """Launch sampling of the plan's masked rows, among what their masks allow.

        `masks`: int32 [masked rows, words], packed (`backends/masks.py`), in the order of
        `StepPlan.masked_rows`. Must be called exactly once when a plan has such rows, before
        `wait`.
        """
        ...

    def wait(self) -> StepResult:
        """The only call that waits for results: this step's tokens, nothing of a later step."""
        ...

    def discard(self) -> None:
        """Release what the step captured, spilled and loaded.

        Called instead of `wait`, or after it raised; at most once. The rows stay as they are.
        """
        ...


class Costs(Protocol):
    """Bytes that things need; the scheduler adds them up. Asking has no effect."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def restores_by_reference(self) -> bool:
        """Whether a restored row reads the tree's own payloads instead of a copy of them."""
        ...

    @property
    def max_depth(self) -> int:
        """Drafts that one row of a step can verify; 0: it verifies none."""
        ...

    @property
    def drafts_itself(self) -> int:
        """Drafts that a step can leave for a row's next one, as its `num_drafts` asks; 0: the
        backend has no drafter of its own."""
        ...

    def row_bytes(self, num_tokens: int, num_borrowed: int = 0) -> int:
        """What a row of `num_tokens` occupies at most, its share of moving rows about included.

        The first `num_borrowed` of them were restored: a backend that restores by reference does
        not count them again. Grows with `num_tokens`.
        """
        ...

    def transient_bytes(self, plan: StepPlan) -> int:
        """What a launched plan holds beside rows and tree until it is committed: its captures, and
        what it loads.

        A sum over the plan's rows and loads, so that a scheduler may ask for each alone.
        Activations are not in it: `limit_memory` sets them aside.
        """
        ...


@dataclass(frozen=True)
class WarmUpShape:
    """What a step's cost depends on where a device has to see a shape first (warm_up.py)."""

    num_rows: int
    num_tokens: int  # of a chunk
    num_before: int = 0  # tokens before it
    num_steps: int = 0  # tokens of the reply,
    depth: int = 0  # and drafts that every other of these steps verifies, from the first on
    drafts_itself: bool = False  # the first ones are the backend's own, and as many are left then
    beside: int = 0  # other requests, which decode in the step of the chunk


class Backend(Costs, Protocol):
    @property
    def device(self) -> DeviceInfo: ...

    @property
    def fallbacks(self) -> Iterable[Fallback]:
        """What it does in a slower way than it could on this device, and why: noted at load, or
        when something failed."""
        ...

    @property
    def arithmetic(self) -> str:
        """What computes: the backend with its ARITHMETIC_VERSION, and its libraries with theirs.

        What was computed otherwise is never read from disk.
        """
        ...

    @property
    def shapes_to_warm_up(self) -> Sequence[WarmUpShape]:
        """The most likely ones first; none where nothing has to be warmed up."""
        ...

    @property
    def warm_up_seconds(self) -> float:
        """At load. What is left then is warmed up while no request runs."""
        ...

    def limit_memory(self, budget_bytes: int) -> int:
        """Keep within a budget that includes the weights; returns what is left for rows, tree and
        transients together. It may be negative: then the weights alone are too much."""
        ...

    def payload_arrays(self, component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
        """How a payload looks as bytes; KV with its tokens along the first axis.

        Where two agree, one can read what the other wrote.
        """
        ...

    def host_memory(self, nbytes: int) -> Bytes:
        """Memory of the host from which a `Load` is made without waiting; any other will do."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Enqueue; wait for no result."""
        ...

    def make_way(self, *, busy: bool) -> None:
        """Requests run from now on, or none does: work of the backend's own waits meanwhile."""
        ...

    def memory_used(self) -> int:
        """Bytes the device holds now, weights included."""
        ...

    def memory_parts(self) -> dict[str, int]:
        """Where the bytes of its budget go, by name; empty where nothing sets them apart."""
        ...

    def buffers_used(self) -> int:
        """In how many buffers, except those of steps in flight."""
        ...

    def close(self) -> None: ...
