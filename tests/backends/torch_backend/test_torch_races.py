"""A museum of races: each by the name of what went wrong in other engines.

A CPU runs everything in order. On CUDA a kernel that only spins stands in front of every forward:
nothing has run yet when the host goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from builders import AMPLE_BYTES, Client, Reply, ToyGrammar
from families import VOCAB
from near_ties import assert_same
from pippin.backends.base import Admit, DecodeRow, PrefillRow, Restore, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.types import Component, SamplingParams
from serving import TORCH, make_client
from torch_serving import load_torch

ON_CUDA = torch.cuda.is_available()
SPIN_CYCLES = 20_000_000  # about ten milliseconds
PROMPT = np.arange(5, 25, dtype=np.int32)
OTHER = np.arange(40, 53, dtype=np.int32)


class Steps:
    """Launches plans; on CUDA nothing of them runs before the host has gone on."""

    def __init__(self, *, spin: bool = True) -> None:
        loaded = load_torch("qwen3_5")
        kernels = None if ON_CUDA else False  # the interpreter would take minutes
        self.backend = TorchBackend(
            loaded, num_slots=3, pool_bytes=AMPLE_BYTES >> 6, kernels=kernels, debug=True
        )
        self._spins = spin and ON_CUDA
        self._number = 0

    def launch(self, **fields: Any) -> Any:
        self._number += 1
        if self._spins:
            with self.backend._streams.forward():
                torch.cuda._sleep(SPIN_CYCLES)
        return self.backend.launch(StepPlan(self._number, **fields))

    def start(self, slot: int, prompt: np.ndarray, end: int | None = None, **params: Any) -> Any:
        """Admit a request and run its prompt, or the beginning of it."""
        end = len(prompt) if end is None else end
        chunk = PrefillRow(slot, 0, prompt[:end], samples=end == len(prompt))
        return self.launch(admit=(admit(slot, prompt, **params),), prefill=(chunk,))

    def states(self, slab: int) -> torch.Tensor:
        """A copy of all that a state slot holds, once everything has run."""
        if ON_CUDA:
            torch.cuda.synchronize()
        pools = self.backend.runner.pools
        views = [*pools.recurrent, *pools.conv]
        return torch.cat([view[slab].float().flatten() for view in views]).cpu()

    def state_of(self, slot: int) -> torch.Tensor:
        return self.states(int(self.backend.runner.rows.states[slot]))


def admit(slot: int, prompt: np.ndarray, **params: Any) -> Admit:
    return Admit(slot, SamplingParams(**{"temperature": 0.0} | params), (), prompt, seed=slot)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# ---- the exhibits ------------------------------------------------------------------------------


def state_donated_and_still_written() -> None:
    """The tree was given a state at a checkpoint; the row that it is from goes on."""
    steps = Steps()
    chunk = PrefillRow(1, 0, PROMPT, samples=True, captures=True, checkpoints=(20,))
    first = steps.launch(admit=(admit(1, PROMPT),), prefill=(chunk,))
    payload = first.wait().captures[0].states[20]
    before = steps.states(payload.slab)
    for number in range(3):
        steps.launch(decode=(DecodeRow(1, 20 + number),)).wait()
    assert torch.equal(steps.states(payload.slab), before)


def snapshot_on_the_wrong_stream() -> None:
    """A checkpoint in a decode step is the state after that step, whatever runs behind it."""
    steps = Steps()
    pending = [steps.start(1, PROMPT)]
    for number in range(3):
        row = DecodeRow(1, 20 + number, checkpoint=number == 1)
        pending.append(steps.launch(decode=(row,)))
    results = [step.wait() for step in pending]
    payload = results[2].captures[0].states[22]
    alone = Steps(spin=False)
    alone.start(1, PROMPT).wait()
    for number in range(2):
        alone.launch(decode=(DecodeRow(1, 20 + number),)).wait()
    assert_close(steps.states(payload.slab), alone.state_of(1))


def clear_at_allocation_instead_of_in_the_forward() -> None:
    """A request begins in the memory that another one, still running, has just left."""
    steps = Steps()
    pending = [steps.start(1, PROMPT), steps.launch(decode=(DecodeRow(1, 20),))]
    rows, per_slab = (
        steps.backend.runner.rows,
        steps.backend.runner.pools.layout.cells_per_slab(Component.ATTENTION),
    )
    left = {int(rows.states[1]), *(rows.held(1, 0, 21) // per_slab).tolist()}
    chunk = PrefillRow(2, 0, OTHER, samples=True)
    admits = (admit(2, OTHER),)
    pending.append(steps.launch(retire=(Retire(1),), admit=admits, prefill=(chunk,)))
    assert int(rows.states[2]) in left
    for step in pending:
        step.wait()
    alone = Steps(spin=False)
    alone.start(2, OTHER).wait()
    assert_close(steps.state_of(2), alone.state_of(2))


def copy_on_write_repeated_by_a_second_pass() -> None:
    """A prompt goes on from a restored state in two chunks: the second from what the first left."""
    steps = Steps()
    chunk = PrefillRow(1, 0, PROMPT[:8], captures=True, checkpoints=(8,))
    capture = steps.launch(admit=(admit(1, PROMPT),), prefill=(chunk,)).wait().captures[0]
    payloads = {
        Component.ATTENTION: (capture.kv[Component.ATTENTION],),
        Component.STATE: (capture.states[8],),
    }
    first = PrefillRow(2, 8, PROMPT[8:14], restore=Restore(8, payloads))
    second = PrefillRow(2, 14, PROMPT[14:], samples=True)
    pending = [
        steps.launch(retire=(Retire(1),), admit=(admit(2, PROMPT),), prefill=(first,)),
        steps.launch(prefill=(second,)),
    ]
    for step in pending:
        step.wait()
    alone = Steps(spin=False)
    alone.start(1, PROMPT).wait()
    assert_close(steps.state_of(2), alone.state_of(1))


def future_map_read_before_written() -> None:
    """A row decodes whose prompt has not been run to its end: nobody wrote its token."""
    steps = Steps()
    steps.start(1, PROMPT, end=12).wait()
    with pytest.raises(RuntimeError, match="has no token to read"):
        steps.launch(decode=(DecodeRow(1, 12),))


def row_reused_under_a_prebuilt_batch() -> None:
    """Batches of parameters are kept by their slots: another request in the slot has its own."""
    steps = Steps()
    for token in (7, 9):
        steps.start(1, PROMPT, logit_bias={token: 1000.0}).wait()
        pending = [steps.launch(decode=(DecodeRow(1, 20 + number),)) for number in range(2)]
        pending.append(steps.launch(retire=(Retire(1),)))
        expected: list[dict[int, tuple[int, ...]]] = [{1: (token,)}, {1: (token,)}, {}]
        assert [dict(step.wait().tokens) for step in pending] == expected


def slot_reused_while_its_step_is_in_flight() -> None:
    """Its last step has not run when the slot gets another request; both say what they should."""

    def run(wait: Callable[[Any], Any], steps: Steps) -> list[dict[int, int]]:
        last = (DecodeRow(1, 20), DecodeRow(2, 13))
        chunk = PrefillRow(1, 0, OTHER, samples=True)
        plans: list[dict[str, Any]] = [
            {"decode": last},
            {"retire": (Retire(1),), "admit": (admit(1, OTHER),), "prefill": (chunk,)},
            {"decode": (DecodeRow(2, 14), DecodeRow(1, 13))},
        ]
        pending = [wait(steps.start(1, PROMPT)), wait(steps.start(2, OTHER))]
        pending += [wait(steps.launch(**plan)) for plan in plans]
        return [dict(step.wait().tokens) for step in pending]

    def waited(step: Any) -> Any:
        if ON_CUDA:
            torch.cuda.synchronize()
        return step

    expected = run(waited, Steps(spin=False))
    assert run(lambda step: step, Steps()) == expected


class HostReads(TorchDispatchMode):
    """Fails where the host asks for a number that the device has to compute first."""

    ASKS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.ASKS, f"the host waits in {func}"
        return func(*args, **(kwargs or {}))


def host_sync_in_the_schedule_path() -> None:
    """Nothing between a plan and its launch asks the device."""
    sampled = {"temperature": 0.8, "top_k": 7, "presence_penalty": 0.5}
    for params in ({"temperature": 0.0}, {"temperature": 0.8}, sampled):
        steps = Steps(spin=False)

        def launch_all(steps: Steps = steps, params: dict[str, Any] = params) -> list[Any]:
            pending = [steps.start(1, PROMPT, **params)]
            pending += [steps.launch(decode=(DecodeRow(1, 20 + n),)) for n in range(2)]
            return [*pending, steps.launch(retire=(Retire(1),))]

        for step in launch_all():  # kernels are built and steps captured
            step.wait()
        with nobody_asks():
            pending = launch_all()
        for step in pending:
            step.wait()


@contextmanager
def nobody_asks() -> Iterator[None]:
    if not ON_CUDA:
        with HostReads():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


EXHIBITS = (
    snapshot_on_the_wrong_stream,
    clear_at_allocation_instead_of_in_the_forward,
    copy_on_write_repeated_by_a_second_pass,
    slot_reused_while_its_step_is_in_flight,
    future_map_read_before_written,
    host_sync_in_the_schedule_path,
    state_donated_and_still_written,
    row_reused_under_a_prebuilt_batch,
)


@pytest.mark.parametrize("show", EXHIBITS, ids=lambda show: show.__name__)
def test_it_cannot_happen_here(show: Callable[[], None]) -> None:
    show()


def play(name: str, rng: random.Random, *, overlap: bool) -> list[Reply]:
    """Four requests; some share a prefix, stop, are seeded, end early or obey a grammar."""
    client: Client = make_client(name, chunk=48, num_slots=3, overlap=overlap)
    shared = [rng.randrange(10, VOCAB) for _ in range(70)]
    ends: dict[str, int] = {}

    def step() -> None:
        client.step()
        for reply, num_tokens in ends.items():
            if len(client.replies[reply].tokens) >= num_tokens:
                client.loop.finish(reply)

    for number in range(4):
        own = [rng.randrange(10, VOCAB) for _ in range(rng.randrange(1, 20))]
        params: dict[str, Any] = {"max_tokens": rng.randrange(1, 7), "logprobs": 20}
        if rng.random() < 0.5:
            params |= {"temperature": 0.8, "top_p": 0.9, "seed": number, "presence_penalty": 0.5}
        if rng.random() < 0.3:
            params["stop_ids"] = range(VOCAB // 2)
        grammar = ToyGrammar(3, VOCAB) if rng.random() < 0.25 else None
        prompt = shared[: rng.choice([0, 30, 70])] + own
        reply = client.submit(prompt, grammar=grammar, **params)
        if rng.random() < 0.3:
            ends[reply.id] = rng.randrange(1, 4)
        for _ in range(rng.randrange(4)):
            step()
    while not client.loop.idle:
        step()
    return list(client.replies.values())


@pytest.mark.slow
@pytest.mark.skipif(not ON_CUDA, reason="a CPU runs launches in order: needs CUDA")
def test_two_hundred_random_schedules_say_what_they_say_without_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{TORCH}qwen3_5"
    expected = [play(name, random.Random(s), overlap=False) for s in range(200)]
    launch = TorchBackend.launch

    def launch_late(self: TorchBackend, plan: StepPlan) -> Any:
        with self._streams.forward():
            torch.cuda._sleep(SPIN_CYCLES // 10)
        return launch(self, plan)

    monkeypatch.setattr(TorchBackend, "launch", launch_late)
    for seed, replies in enumerate(expected):
        assert_same(play(name, random.Random(seed), overlap=True), replies)
