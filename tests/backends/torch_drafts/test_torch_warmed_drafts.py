"""Warming up runs every size of a step with drafts that requests can ask for afterwards.

On CPUs without Triton: plain operations run the steps, and what would be captured is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

from builders import Client
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.step.verify.words import VerifySize
from pippin.backends.torch.verifies import Verifies
from pippin.backends.warm_up import WarmUp
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import DeviceDrafter, Drafter, Speculation
from serving import DRAFTED_BY, TORCH, make_client, make_prompt
from torch_serving import load_torch

MAX_DEPTH, NUM_SLOTS, NUM_REQUESTS = 3, 6, 24
DEVICES = {
    "qwen3_5": None,
    "qwen3_5_mtp": DeviceDrafter("mtp", MAX_DEPTH),
    f"qwen3{DRAFTED_BY}qwen3": DeviceDrafter("draft", MAX_DEPTH),
}


class Guesses(Drafter):
    """Tokens at random, which no reply has but by chance."""

    name = "guesses"

    def propose(self, request: Request, num_tokens: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng(request.num_tokens)
        return rng.integers(3, 90, num_tokens).astype(np.int32), 0


@dataclass
class Sizes:
    """Stands for captured steps."""

    prepared: set[VerifySize] = field(default_factory=set)
    asked: set[VerifySize] = field(default_factory=set)
    folded: set[int] = field(default_factory=set)  # drafts that were kept of a row
    busy: bool = False
    graphs: dict[Any, Any] = field(default_factory=dict)

    def prepare(self, size: VerifySize) -> None:
        self.prepared.add(size)

    def can_run(self, size: VerifySize) -> bool:
        return True


def noted_sizes(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    sizes = Sizes()

    def replay(
        self: Verifies, step: Any, steps: Sizes, decodes: Any, size: VerifySize, choice: Any
    ) -> None:
        if steps.busy:
            steps.asked.add(size)
        else:
            steps.prepare(size)
        self._launch(step, decodes)

    def fold(self: Verifies, slot: int, end: int) -> None:
        if num_kept := int(self._parts.rows.num_kept[slot]):
            sizes.folded.add(num_kept)
        run_fold(self, slot, end)

    run_fold = Verifies.fold
    monkeypatch.setattr(Verifies, "_replay", replay)
    monkeypatch.setattr(Verifies, "fold", fold)
    backend.runner._verifies.steps = sizes  # type: ignore[assignment]
    ways = replace(backend._ways, kernels=True, draft_kernels=True)
    backend.shapes_to_warm_up = [shape for shape in ways.shapes_to_warm_up() if shape.num_steps]
    return sizes


def run_requests(client: Client, name: str, random: Random) -> None:
    """They come and go, some beside a prompt, some that cannot have drafts."""
    for number in range(NUM_REQUESTS):
        params: dict[str, Any] = {"max_tokens": random.choice((1, 2, 5, 20, 40))}
        params |= random.choice(({}, {"temperature": 1.0, "seed": number}, {"speculate": False}))
        client.submit(make_prompt(name, random.randrange(3, 40), number), **params)
        client.step(random.randrange(8))
    client.run()


def drafters(name: str) -> Iterator[Drafter | None]:
    if DEVICES[name] is not None:
        yield None
    yield Guesses()


@pytest.mark.parametrize(
    ("name", "drafter"), [(name, drafter) for name in DEVICES for drafter in drafters(name)]
)
def test_steps_of_requests_have_sizes_that_were_warmed_up(
    name: str, drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(0)
    name = f"{TORCH}{name}"
    device = DEVICES[name.removeprefix(TORCH)]
    speculation = Speculation(
        drafter,
        MAX_DEPTH,
        lambda _: random.choice((0, 0, 1, 2, MAX_DEPTH)),
        device=device,
    )
    client = make_client(name, num_slots=NUM_SLOTS, speculation=speculation)
    backend = client.loop.backend
    assert isinstance(backend, TorchBackend)
    sizes = noted_sizes(backend, monkeypatch)
    WarmUp(backend, lambda _: True).run_at_load(lambda _: None)
    assert not sizes.asked
    backend.make_way(busy=True)
    monkeypatch.setattr(backend, "make_way", lambda *, busy: None)
    warmed_up = set(sizes.folded)
    run_requests(client, name, random)
    assert {size.depth for size in sizes.asked} == {0, 1, 2, MAX_DEPTH}
    assert len({size.num_rows for size in sizes.asked}) > 2
    assert sizes.asked <= sizes.prepared
    assert sizes.folded <= warmed_up
    assert sizes.folded


def test_steps_that_are_too_wide_for_drafts_are_captured_for_rows_that_had_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TorchBackend(load_torch("qwen3_5"), num_slots=200, max_depth=MAX_DEPTH)
    sizes = noted_sizes(backend, monkeypatch)
    backend.runner.capture_largest()
    assert {size.num_rows for size in sizes.prepared if not size.depth} == {192, 256}
    assert max(shape.num_rows for shape in backend.shapes_to_warm_up if shape.depth) == 128
