"""A deterministic toy model behind the real contract, for tests of the scheduler and the cache.

Its next token depends on three digests, one per component: a rolling hash of all tokens (state), a
sum over all positions (attention) and a sum over the last `window` positions (window). A restore
of the wrong thing, a missing token or a polluted state therefore changes the text.

Its device is a queue: `launch` only enqueues, and work runs when somebody waits for it or calls
`device.advance`. Reading what has not been written yet raises, as a race would corrupt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from pippin.backends.base import Admit, Capture, PrefillRow, Retire, StepPlan, StepResult
from pippin.types import Component, LayerSpec, ModelSpec, Payload, TokenLogprobs

MASK = (1 << 61) - 1
BYTES_PER_TOKEN = 64
BYTES_PER_STATE = 4096


def mix(*values: int) -> int:
    h = 0x9E3779B97F4A7C15
    for value in values:
        h = (h ^ (value + 1)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 31
    return h & MASK


class FakeDevice:
    """A queue of work in launch order, and what it has done so far."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self.done_step = -1
        self.tokens_run = 0  # tokens put through the toy model: the honest count of work

    def enqueue(self, step: int, work: Callable[[], None]) -> None:
        self._queue.append((step, work))

    def advance(self, num_items: int = 1) -> None:
        for _ in range(min(num_items, len(self._queue))):
            step, work = self._queue.popleft()
            work()
            if not self._queue or self._queue[0][0] != step:
                self.done_step = step

    def run_until(self, step: int) -> None:
        while self._queue and self._queue[0][0] <= step:
            self.advance()


@dataclass
class FakePayload:
    """Token values (KV) or a hash (state), written by the device some time after the launch."""

    num_tokens: int
    nbytes: int
    content: list[int] | None = None
    released: bool = False

    def read(self) -> list[int]:
        if self.content is None:
            raise RuntimeError("payload read before the device wrote it")
        if self.released:
            raise RuntimeError("payload read after its release")
        return self.content

    def split(self, at: int) -> tuple[Payload, Payload]:
        content = self.read()
        cut = self.nbytes * at // self.num_tokens
        head = FakePayload(at, cut, content[:at])
        return head, FakePayload(self.num_tokens - at, self.nbytes - cut, content[at:])

    def release(self) -> None:
        if self.released:
            raise RuntimeError("payload released twice")
        self.released = True

    def fingerprint(self) -> int:
        return mix(*self.read())


class FutureMap:
    """The sampled token of each slot. A row that was read is poisoned: reading it twice raises."""

    POISON = -1

    def __init__(self, num_slots: int) -> None:
        self._tokens = np.full(num_slots + 1, self.POISON, dtype=np.int64)

    def stash(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        if len(slots):
            self._tokens[slots] = np.asarray(tokens).reshape(-1).astype(self._tokens.dtype)

    def take(self, slot: int) -> int:
        token = int(self._tokens[slot])
        if token == self.POISON:
            raise RuntimeError(f"slot {slot} has no token to read, or it was read twice")
        self._tokens[slot] = self.POISON
        return token


@dataclass
class _Row:
    admit: Admit
    tokens: list[int] = field(default_factory=list)
    state: int = 0
    attention: int = 0
    num_sampled: int = 0

    def run(self, token: int) -> None:
        self.attention = self.attention + mix(len(self.tokens), token) & MASK
        self.tokens.append(token)
        self.state = mix(self.state, token)


@dataclass
class FakePending:
    backend: FakeBackend
    plan: StepPlan
    tokens: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    masks: Mapping[int, np.ndarray] | None = None
    dispatched: float = field(default_factory=perf_counter)

    def sample(self, masks: Mapping[int, np.ndarray]) -> None:
        assert self.masks is None, "masked rows are sampled once"
        self.masks = masks
        device = self.backend.device
        device.enqueue(self.plan.step, lambda: self.backend.sample_masked(self))

    def done(self) -> bool:
        sampled = self.masks is not None or not self.plan.masked_slots
        return sampled and self.backend.device.done_step >= self.plan.step

    def wait(self) -> StepResult:
        self.backend.device.run_until(self.plan.step)
        return StepResult(
            tokens=self.tokens,
            logprobs=self.backend.logprobs(self.tokens),
            prompt_logprobs=self.prompt_logprobs,
            captures=tuple(self.captures),
            dispatched=self.dispatched,
        )


class FakeBackend:
    def __init__(
        self,
        *,
        components: tuple[Component, ...] = tuple(Component),
        window: int = 8,
        vocab_size: int = 97,
        max_len: int = 8192,
        num_slots: int = 64,
        state_taps: bool = True,
    ) -> None:
        self.window = window if Component.WINDOW in components else 0
        self.spec = ModelSpec(
            name="fake",
            vocab_size=vocab_size,
            max_len=max_len,
            layers=tuple(self._layer(i, c) for i, c in enumerate(components)),
            state_taps=state_taps,
        )
        self.device = FakeDevice()
        self.future_map = FutureMap(num_slots)
        self._rows: dict[int, _Row] = {}

    def _layer(self, index: int, component: Component) -> LayerSpec:
        nbytes = BYTES_PER_STATE if component is Component.STATE else BYTES_PER_TOKEN
        window = self.window if component is Component.WINDOW else None
        return LayerSpec(index, component, nbytes, window)

    def launch(self, plan: StepPlan) -> FakePending:
        pending = FakePending(self, plan)
        for retire in plan.retire:
            self._retire(pending, retire)
        for admit in plan.admit:
            self.device.enqueue(plan.step, lambda admit=admit: self._admit(admit))  # type: ignore[misc]
        for prefill in plan.prefill:
            self._prefill(pending, prefill)
        self.device.enqueue(plan.step, lambda: self._decode(pending))
        return pending

    def memory_used(self) -> int:
        return sum(len(row.tokens) * BYTES_PER_TOKEN for row in self._rows.values())

    def close(self) -> None:
        self._rows.clear()

    # ---- device work -----------------------------------------------------------------------

    def _admit(self, admit: Admit) -> None:
        assert admit.slot not in self._rows, f"slot {admit.slot} is still taken"
        self._rows[admit.slot] = _Row(admit)

    def _retire(self, pending: FakePending, retire: Retire) -> None:
        payloads = self._empty_payloads(retire.start, retire.end) if retire.captures else {}
        state = self._empty_state() if retire.captures else None

        def work() -> None:
            row = self._rows.pop(retire.slot, None)
            if not retire.captures:
                return
            assert row is not None, f"slot {retire.slot} holds nothing to capture"
            assert len(row.tokens) == retire.end, "a row must hold what its Retire says"
            self._fill(row, payloads, retire.start, retire.end)
            if state is not None:
                state.content = [row.state]

        self.device.enqueue(pending.plan.step, work)
        if retire.captures:
            states: dict[int, Payload] = {retire.end: state} if state is not None else {}
            pending.captures.append(
                Capture(retire.slot, retire.start, retire.end, True, payloads, states)
            )

    def _prefill(self, pending: FakePending, chunk: PrefillRow) -> None:
        payloads = self._empty_payloads(chunk.start, chunk.end) if chunk.captures else {}
        states = {at: s for at in chunk.checkpoints if (s := self._empty_state()) is not None}

        def work() -> None:
            row = self._rows[chunk.slot]
            if chunk.restore is not None:
                self._restore(row, chunk)
            assert len(row.tokens) == chunk.start, "chunks follow each other"
            for token in chunk.tokens.tolist():
                row.run(token)
                if len(row.tokens) in states:
                    states[len(row.tokens)].content = [row.state]
            self.device.tokens_run += len(chunk.tokens)
            self._fill(row, payloads, chunk.start, chunk.end)
            if chunk.samples:
                self._score_prompt(pending, chunk.slot)
            if chunk.samples and not chunk.masked:
                self._sample(pending, chunk.slot)

        self.device.enqueue(pending.plan.step, work)
        if chunk.captures and (payloads or states):
            pending.captures.append(
                Capture(chunk.slot, chunk.start, chunk.end, False, payloads, dict(states))
            )

    def _restore(self, row: _Row, chunk: PrefillRow) -> None:
        """Rebuild the row from payloads alone; what no payload covers stays unknown (-1)."""
        assert chunk.restore is not None
        length = chunk.restore.length
        row.tokens = [-1] * length
        for component in (Component.WINDOW, Component.ATTENTION):
            content = [t for p in chunk.restore.payloads.get(component, ()) for t in _read(p)]
            if content:
                row.tokens[length - len(content) :] = content
        row.attention = sum(mix(i, t) for i, t in enumerate(row.tokens)) & MASK
        for payload in chunk.restore.payloads.get(Component.STATE, ()):
            row.state = _read(payload)[0]

    def _decode(self, pending: FakePending) -> None:
        for decode in pending.plan.decode:
            row = self._rows[decode.slot]
            assert len(row.tokens) == decode.position, "positions follow each other"
            row.run(self.future_map.take(decode.slot))
            if decode.checkpoint and (state := self._empty_state()) is not None:
                state.content = [row.state]
                at = decode.position + 1
                pending.captures.append(
                    Capture(decode.slot, decode.position, at, states={at: state})
                )
            if decode.samples and not decode.masked:
                self._sample(pending, decode.slot)

    def sample_masked(self, pending: FakePending) -> None:
        for slot in pending.plan.masked_slots:
            self._sample(pending, slot)

    def _sample(self, pending: FakePending, slot: int) -> None:
        row = self._rows[slot]
        token = self.next_token(row)
        if pending.masks is not None and slot in pending.masks:
            allowed = np.flatnonzero(pending.masks[slot])
            token = int(allowed[token % len(allowed)])
        row.num_sampled += 1
        pending.tokens[slot] = token
        self.future_map.stash(np.array([slot]), np.array([[token]], dtype=np.int32))

    def next_token(self, row: _Row) -> int:
        digests = [len(row.tokens)]
        if Component.STATE in self.spec.components:
            digests.append(row.state)
        if Component.ATTENTION in self.spec.components:
            digests.append(row.attention)
        if self.window:
            first = max(0, len(row.tokens) - self.window)
            recent = enumerate(row.tokens[first:], first)
            digests.append(sum(mix(i, t) for i, t in recent) & MASK)
        if not row.admit.params.greedy:
            digests += [row.admit.seed, row.num_sampled]
        token = mix(*digests) % self.spec.vocab_size
        if row.num_sampled < row.admit.params.min_tokens:
            while token in row.admit.stop_ids:
                token = (token + 1) % self.spec.vocab_size
        return token

    def _score_prompt(self, pending: FakePending, slot: int) -> None:
        row = self._rows[slot]
        num_top = row.admit.params.prompt_logprobs
        if num_top is not None:
            scores = tuple(self._score(token, num_top) for token in row.admit.prompt[1:].tolist())
            pending.prompt_logprobs[slot] = scores

    def logprobs(self, tokens: Mapping[int, int]) -> dict[int, TokenLogprobs]:
        logprobs = {}
        for slot, token in tokens.items():
            asked = self._rows[slot].admit.params.logprobs if slot in self._rows else None
            if asked is not None:
                logprobs[slot] = self._score(token, asked)
        return logprobs

    def _score(self, token: int, num_top: int) -> TokenLogprobs:
        top = range(min(num_top, self.spec.vocab_size))
        ids = tuple((token + i) % self.spec.vocab_size for i in top)
        return TokenLogprobs(-0.5, ids, tuple(-0.5 - i for i in top))

    # ---- payloads --------------------------------------------------------------------------

    def _empty_payloads(self, start: int, end: int) -> dict[Component, FakePayload]:
        if start == end:
            return {}
        kinds = [c for c in self.spec.components if c is not Component.STATE]
        return {c: FakePayload(end - start, (end - start) * BYTES_PER_TOKEN) for c in kinds}

    def _empty_state(self) -> FakePayload | None:
        if Component.STATE not in self.spec.components:
            return None
        return FakePayload(1, BYTES_PER_STATE)

    def _fill(
        self, row: _Row, payloads: Mapping[Component, FakePayload], start: int, end: int
    ) -> None:
        for payload in payloads.values():
            payload.content = row.tokens[start:end]


def _read(payload: Payload) -> list[int]:
    assert isinstance(payload, FakePayload)
    return payload.read()
