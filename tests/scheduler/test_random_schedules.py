"""Random workloads: overlap changes no token, and neither does anything else the engine does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from builders import (
    ALL,
    AMPLE_BYTES,
    Client,
    ToyGrammar,
    check_idle,
    make_loop,
    make_prompt,
    oracle,
)
from pippin.backends.base import StepPlan
from pippin.backends.fake import FakeBackend, FakePending
from pippin.cache.policy import MAX_STRIDE
from pippin.types import Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
NO_TOKEN = -1  # what no prompt and no reply goes on with
LAYOUTS: list[tuple[Component, ...]] = [ALL, (A,), (A, S), (A, W), (S,), (W, S), (W,)]
SCHEDULES = settings(
    max_examples=350,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate],  # examples are small; shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class JitteryBackend(FakeBackend):
    """Its device finishes some of its queue at arbitrary moments around each launch."""

    def __init__(self, jitter: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._jitter = list(jitter)

    def launch(self, plan: StepPlan) -> FakePending:
        self.device_queue.advance(self._next())
        pending = super().launch(plan)
        self.device_queue.advance(self._next())
        return pending

    def _next(self) -> int:
        self._jitter.append(self._jitter.pop(0))
        return self._jitter[0]


@dataclass(frozen=True)
class Job:
    family: int
    shared_len: int
    own_len: int
    follows: bool  # the prompt goes on from the previous job's prompt and reply
    arrives: int  # step
    max_tokens: int
    num_stop_ids: int
    min_tokens: int
    seed: int | None
    modulus: int | None  # of a toy grammar
    ends: Literal["by itself", "abort", "finish", "abort at step"]
    ends_after: int  # tokens, or steps after its arrival


@dataclass(frozen=True)
class Engine:
    components: tuple[Component, ...]
    state_taps: bool
    num_slots: int
    chunk: int
    cache: bool
    deterministic: bool
    capacity_bytes: int
    jitter: tuple[int, ...]

    def client(self, overlap: bool) -> Client:
        backend = JitteryBackend(
            self.jitter, components=self.components, state_taps=self.state_taps, num_slots=8
        )
        loop = make_loop(
            overlap=overlap,
            backend=backend,
            num_slots=self.num_slots,
            chunk=self.chunk,
            cache=self.cache,
            deterministic=self.deterministic,
            capacity_bytes=self.capacity_bytes,
        )
        return Client(loop)


jobs = st.builds(
    Job,
    family=st.integers(0, 1),
    shared_len=st.sampled_from([0, 1, 40, 63, 64, 65, 128, 150]),
    own_len=st.sampled_from([1, 2, 20, 63, 64, 65]),
    follows=st.booleans(),
    arrives=st.integers(0, 10),
    max_tokens=st.sampled_from([1, 2, 3, 6, 12, 66, 140]),
    num_stop_ids=st.sampled_from([0, 0, 8, 30]),
    min_tokens=st.sampled_from([0, 0, 3]),
    seed=st.sampled_from([None, 1, 2]),
    modulus=st.sampled_from([None, None, None, 3]),
    ends=st.sampled_from(["by itself", "by itself", "abort", "finish", "abort at step"]),
    ends_after=st.integers(0, 8),
)
engines = st.builds(
    Engine,
    components=st.sampled_from(LAYOUTS),
    state_taps=st.booleans(),
    num_slots=st.integers(1, 4),
    chunk=st.sampled_from([17, 64, 100, 256, 256]),
    cache=st.sampled_from([True, True, True, False]),
    deterministic=st.sampled_from([False, False, True]),
    capacity_bytes=st.sampled_from([AMPLE_BYTES, AMPLE_BYTES, 70_000, 40_000]),
    jitter=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
)


@dataclass(frozen=True)
class Ask:
    """A job made concrete: what is submitted, and what must come back if it ends by itself."""

    job: Job
    prompt: list[int]
    kwargs: dict[str, Any]
    tokens: list[int]
    finish: str

    def grammar(self) -> ToyGrammar | None:
        return None if self.job.modulus is None else ToyGrammar(self.job.modulus)

    @property
    def expected(self) -> tuple[list[int], str] | None:
        """Tokens and finish reason, or None where an abort may come at any moment."""
        job, n = self.job, max(1, self.job.ends_after)
        if job.ends == "abort at step":
            return None
        if job.ends == "by itself" or len(self.tokens) <= n:
            return self.tokens, self.finish
        return self.tokens[:n], "abort" if job.ends == "abort" else "stop"


def concrete(workload: Sequence[Job], components: tuple[Component, ...]) -> list[Ask]:
    asks: list[Ask] = []
    for number, job in enumerate(workload):
        prompt = make_prompt(job.shared_len, job.family)
        if job.follows and asks:
            prompt = asks[-1].prompt + asks[-1].tokens
        prompt = prompt + make_prompt(job.own_len, 1000 + number)
        kwargs: dict[str, Any] = {
            "max_tokens": job.max_tokens,
            "min_tokens": job.min_tokens,
            "stop_ids": range(job.num_stop_ids),
            "temperature": 0.0 if job.seed is None else 1.0,
            "seed": job.seed,
        }
        grammar = None if job.modulus is None else ToyGrammar(job.modulus)
        tokens, finish = oracle(prompt, components=components, grammar=grammar, **kwargs)
        asks.append(Ask(job, prompt, kwargs, tokens, finish))
    return asks


def serve(client: Client, asks: Sequence[Ask]) -> None:
    """Play the workload: arrivals by step, ends when a client has seen enough."""
    replies = client.replies
    for step in range(5_000):
        for number, ask in enumerate(asks):
            name = f"r{number}"
            if ask.job.arrives == step:
                client.submit(
                    ask.prompt, id=name, grammar=ask.grammar(), boundaries=[40], **ask.kwargs
                )
            end_early(client, name, ask.job, step)
        client.step()
        if client.loop.idle and len(replies) == len(asks):
            return
    raise AssertionError("the loop did not come to rest")


def end_early(client: Client, name: str, job: Job, step: int) -> None:
    reply = client.replies.get(name)
    if reply is None or job.ends == "by itself":
        return
    if job.ends == "abort at step":
        if step == job.arrives + job.ends_after:
            client.loop.abort(name)
    elif reply.finish is None and len(reply.tokens) >= max(1, job.ends_after):
        (client.loop.abort if job.ends == "abort" else client.loop.finish)(name)


def has_no_room(error: str, capacity: int) -> bool:
    """Whether what the request needs, beside what others hold, is indeed more than there is."""
    found = re.search(r"needs ([\d,]+) bytes(?:; other requests hold ([\d,]+))?", error)
    assert found, error
    need, others = (int(n.replace(",", "")) for n in found.groups(default="0"))
    return need + others > capacity


@pytest.mark.slow
@SCHEDULES
@given(engine=engines, workload=st.lists(jobs, min_size=1, max_size=6))
def test_overlap_on_and_off_give_the_oracles_tokens(engine: Engine, workload: list[Job]) -> None:
    asks = concrete(workload, engine.components)
    for overlap in (True, False):
        client = engine.client(overlap)
        serve(client, asks)
        check_idle(client)
        for number, ask in enumerate(asks):
            reply = client.replies[f"r{number}"]
            if reply.finish == "error":
                assert has_no_room(reply.error or "", engine.capacity_bytes)
                assert engine.capacity_bytes < AMPLE_BYTES
                assert not reply.tokens or "the request reached" in (reply.error or "")
                assert reply.tokens == ask.tokens[: len(reply.tokens)]
            elif ask.expected is None:
                assert reply.tokens == ask.tokens[: len(reply.tokens)]
            else:
                assert (reply.tokens, reply.finish) == ask.expected


@pytest.mark.slow
@settings(SCHEDULES, max_examples=250)
@given(
    engine=engines.map(
        lambda e: replace(e, cache=True, deterministic=False, capacity_bytes=AMPLE_BYTES)
    ),
    workload=st.lists(jobs, min_size=1, max_size=4),
)
def test_replies_are_cached_under_overlap_exactly_as_without(
    engine: Engine, workload: list[Job]
) -> None:
    """To the last token, for the next turn; and at every checkpoint on the way there."""
    workload = [job for job in workload if not job.ends.startswith("abort")]
    asks = concrete(workload, engine.components)
    for overlap in (True, False):
        client = engine.client(overlap)
        serve(client, asks)
        cache = client.loop.scheduler.cache
        assert cache is not None
        for number, ask in enumerate(asks):
            whole = ask.prompt + client.replies[f"r{number}"].tokens
            assert cache.probe(whole) == cache.probe([*whole, NO_TOKEN]) == len(whole)
            for position in range(MAX_STRIDE, len(whole), MAX_STRIDE):
                assert cache.probe(whole, limit=position) == position
