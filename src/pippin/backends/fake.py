"""A deterministic toy model behind the real contract: `--backend fake`, and the tests' double.

It has no arrays, and is as strict as a real device: work runs late, bytes are counted, and reading
what has not been written yet, or was released, raises.

Its next token depends on three digests, one per component: a rolling hash of all tokens (state), a
sum over all positions (attention) and a sum over the last `window` positions (window). A restore
of the wrong thing, a missing token or a polluted state therefore changes the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from time import perf_counter, sleep
from typing import Any, cast

import numpy as np

from pippin.backends.base import (
    Admit,
    Capture,
    Damage,
    DecodeRow,
    DeviceInfo,
    Load,
    PrefillRow,
    Restore,
    Retire,
    Spill,
    StepPlan,
    StepResult,
    WarmUpShape,
    captured_bytes,
    loaded_bytes,
)
from pippin.backends.masks import allowed_ids
from pippin.backends.step.pending import Arrival, Evaluated, SpilledArrays, StepOutputs
from pippin.backends.step.runner import StepRunner
from pippin.backends.step.slots import Arrays, FutureMap
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import Component, LayerSpec, ModelSpec, Payload, TokenLogprobs

# Raise it whenever a digest is computed differently: what is on disk from before is not read then.
ARITHMETIC_VERSION = 1
MASK = (1 << 61) - 1


def mix(*values: int) -> int:
    h = 0x9E3779B97F4A7C15
    for value in values:
        h = (h ^ (value + 1)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 31
    return h & MASK


@lru_cache(maxsize=1 << 16)
def placed(position: int, token: int) -> int:
    """What a token adds to sums over positions."""
    return mix(position, token)


@dataclass
class ToyRow:
    """What one slot holds; `states` and `sums` after each of its tokens, and before the first."""

    admit: Admit
    window: int  # 0: the model keeps none
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=lambda: [0])
    sums: list[int] = field(default_factory=lambda: [0])
    num_cells: int = 0  # at most so far: rejected drafts had some
    num_sampled: int = 0
    hidden: list[int] = field(default_factory=list)  # restored, until a token is run
    num_accepted: int = 0  # drafts of the last step,
    num_rejected: int = 0  # of which a plan may not know yet
    borrowed: tuple[FakePayload, ...] = ()  # restored by reference: must not be released
    destroyed: bool = False  # a failed step left it undefined

    def __post_init__(self) -> None:
        self.num_sampled = len(self.admit.reply)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def most_held(self) -> int:
        return max(self.num_cells, self.length)

    @property
    def num_borrowed(self) -> int:
        return sum(payload.num_tokens for payload in self.borrowed)

    def is_reply(self, position: int) -> bool:
        """Whether its token has been sampled in this slot, or forced."""
        return position >= len(self.admit.prompt) + len(self.admit.reply)

    def run(self, token: int) -> None:
        self.states.append(mix(self.states[-1], token))
        self.sums.append(self.sums[-1] + placed(self.length, token) & MASK)
        self.tokens.append(token)
        self.hidden = []

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.states[length + 1 :], self.sums[length + 1 :]

    def restore(
        self, length: int, window: Sequence[int], tokens: Sequence[int], state: int
    ) -> None:
        """Rebuild the row from payloads alone; what no payload covers stays unknown (-1)."""
        self.tokens = [-1] * length
        for known in (window, tokens):
            if known:
                self.tokens[length - len(known) :] = known
        self.sums = [0] * length + [sum(placed(i, t) for i, t in enumerate(self.tokens)) & MASK]
        self.states = [0] * length + [state]

    def check_borrowed(self) -> None:
        for payload in self.borrowed:
            payload.check_alive()

    def destroy(self) -> None:
        """What a failed step may leave: other tokens, another state."""
        self.destroyed = True
        self.states[-1] ^= 1
        self.sums[-1] ^= 1
        self.hidden = []
        self.tokens = [-2] * self.length

    def digests(self, components: Sequence[Component]) -> list[int]:
        """What the next token depends on: the toy's hidden vector."""
        digests = [self.length]
        if Component.STATE in components:
            digests.append(self.states[-1])
        if Component.ATTENTION in components:
            digests.append(self.sums[-1])
        if self.window:
            first = max(0, self.length - self.window)
            recent = enumerate(self.tokens[first:], first)
            digests.append(sum(placed(i, t) for i, t in recent) & MASK)
        return digests

    def next_token(self, components: Sequence[Component], vocab_size: int) -> int:
        digests = self.hidden or self.digests(components)
        if not self.admit.params.greedy:
            digests += [self.admit.seed, self.num_sampled]
        token = mix(*digests) % vocab_size
        if self.num_sampled < self.admit.params.min_tokens:
            while token in self.admit.stop_ids:
                token = (token + 1) % vocab_size
        return token


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


def as_fake(payloads: tuple[Payload, ...]) -> tuple[FakePayload, ...]:
    assert all(isinstance(payload, FakePayload) for payload in payloads)
    return cast(tuple[FakePayload, ...], payloads)


def contents(payloads: tuple[Payload, ...]) -> list[int]:
    return [value for payload in as_fake(payloads) for value in payload.read()]


class FakeDevice:
    def __init__(self, step_seconds: float = 0.0) -> None:
        """`step_seconds`: a step ends so long after its launch, or after the one before it."""
        self._step_seconds = step_seconds
        self._last: tuple[int, float] = (-1, 0.0)  # the last step, and when it ends
        self._ends: dict[int, float] = {}  # on time.perf_counter()
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self.done_step = -1
        self.tokens_run = 0  # tokens put through the toy model: the honest count of work

    def enqueue(self, step: int, work: Callable[[], None]) -> None:
        if self._step_seconds and step != self._last[0]:
            end = self._ends[step] = max(perf_counter(), self._last[1]) + self._step_seconds
            self._last = step, end
        self._queue.append((step, work))

    def advance(self, num_items: int = 1) -> None:
        for _ in range(min(num_items, len(self._queue))):
            step, work = self._queue.popleft()
            work()
            if not self._queue or self._queue[0][0] != step:
                self.done_step = step

    def run_until(self, step: int) -> None:
        if (end := self._ends.pop(step, None)) is not None:
            sleep(max(0.0, end - perf_counter()))
        while self._queue and self._queue[0][0] <= step:
            self.advance()


def _put(into: np.ndarray, at: Any, numbers: np.ndarray) -> None:
    into[at] = numbers


# Every map of the fake raises where a cell is read twice.
ARRAYS: Arrays[np.ndarray] = Arrays(
    zeros=lambda *shape: np.zeros(shape, np.int32),
    index=lambda numbers: numbers,
    put=_put,
    join=np.concatenate,
)


@dataclass(kw_only=True)
class FakePending(StepOutputs):
    """A step in flight: its result is there when the device has run it."""

    backend: FakeBackend
    captured_at: dict[int, int] = field(default_factory=dict)  # their lengths, once they have run
    damaged: list[Damage] = field(default_factory=list)
    masks: dict[int, np.ndarray] | None = None  # by slot, once they are known

    def bring(self, arrays: Sequence[np.ndarray]) -> Arrival:
        return Evaluated(arrays)

    def spill(self, spill: Spill, arrays: Sequence[np.ndarray]) -> None:
        spilled = SpilledArrays(self.bring(arrays))
        spilled.intact = all(payload.intact for payload in as_fake(spill.payloads))
        self.spilled.append(spilled)

    def check(self, slot: int, restore: Restore) -> None:
        """Report payloads whose content is not what the device wrote."""
        for component, start, end, payload in restore.placed():
            if not as_fake((payload,))[0].intact:
                self.damaged.append(Damage(slot, component, start, end))

    def dispatch(self) -> None:
        """`launch` has enqueued everything."""

    def sample(self, masks: np.ndarray) -> None:
        assert self.masks is None, "masked rows are sampled once"
        self.masks = dict(zip(self.plan.masked_slots, masks, strict=True))
        self.backend.device_queue.enqueue(self.plan.step, self._sample_masked)

    def _sample_masked(self) -> None:
        for slot in self.plan.masked_slots:
            self.backend.sample(self, slot)

    def done(self) -> bool:
        sampled = self.masks is not None or not self.plan.masked_slots
        return sampled and self.backend.device_queue.done_step >= self.plan.step

    def wait(self) -> StepResult:
        self.backend.device_queue.run_until(self.plan.step)
        for slot, tokens in self.tokens.items():
            num_top = self.backend.num_top_logprobs(slot)
            if num_top is not None:
                self.logprobs[slot] = tuple(self.backend.score(token, num_top) for token in tokens)
        for slot, end in self.captured_at.items():
            self.keep_checkpoint(slot, end)
        return replace(self.result(), damaged=tuple(self.damaged))


BYTES_PER_TOKEN = 64
HIDDEN_BYTES = 40
STATE_TOKENS = 1500  # a state takes as much as the KV of this many tokens, as real ones do
MEMORY_BYTES = 1 << 30
A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE


def fake_device() -> DeviceInfo:
    return DeviceInfo("fake", "toy", MEMORY_BYTES, share=1.0, prefill_tokens=512, unified=False)


class FakeBackend(StepRunner[FakePending]):
    fallbacks = ()

    def __init__(
        self,
        *,
        components: tuple[Component, ...] = (A, W, S),
        window: int = 8,
        vocab_size: int = 97,
        max_len: int = 8192,
        num_slots: int = 64,
        state_taps: bool = True,
        state_tokens: int = STATE_TOKENS,
        knows_head: bool = True,
        restores_by_reference: bool = False,
        max_depth: int = 0,
        draft_share: float = 1.0,
        step_seconds: float = 0.0,
    ) -> None:
        """`draft_share`: of the places at which a draft of its own is right.
        `step_seconds`: the least that a step takes.
        """
        self.max_depth = self.drafts_itself = max_depth
        self.window = window if Component.WINDOW in components else 0
        self.restores_by_reference = restores_by_reference
        self.shapes_to_warm_up: Sequence[WarmUpShape] = ()
        self.warm_up_seconds = 0.0
        self._state_bytes = state_tokens * BYTES_PER_TOKEN
        self.spec = ModelSpec(
            name="fake",
            vocab_size=vocab_size,
            max_len=max_len,
            layers=tuple(self._layer(i, c) for i, c in enumerate(components)),
            state_taps=state_taps,
            hidden_bytes=HIDDEN_BYTES if knows_head else 0,
        )
        self.device_queue = FakeDevice(step_seconds)
        self.future_map = FutureMap(ARRAYS, num_slots, max_depth=max_depth, debug=True)
        self.ledger = Ledger()
        self._rows: dict[int, ToyRow] = {}
        self._draft_share = draft_share

    def _layer(self, index: int, component: Component) -> LayerSpec:
        nbytes = self._state_bytes if component is Component.STATE else BYTES_PER_TOKEN
        window = self.window if component is Component.WINDOW else None
        return LayerSpec(index, component, nbytes, window)

    # ---- bytes -----------------------------------------------------------------------------

    @property
    def device(self) -> DeviceInfo:
        return fake_device()

    @property
    def arithmetic(self) -> str:
        return f"fake {ARITHMETIC_VERSION}"

    def row_bytes(self, num_tokens: int, num_borrowed: int = 0) -> int:
        spec = self.spec
        own = num_tokens - (num_borrowed if self.restores_by_reference else 0)
        windowed = min(num_tokens, spec.window) * spec.window_bytes_per_token
        return own * spec.kv_bytes_per_token + windowed + 2 * spec.state_bytes

    def transient_bytes(self, plan: StepPlan) -> int:
        return captured_bytes(self.spec, plan)

    def limit_memory(self, budget_bytes: int) -> int:
        return budget_bytes

    def payload_arrays(self, component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
        """Token ids of KV, the rolling hash of a state, or what a hidden vector is made of."""
        if component.divides:
            return (ArraySpec("tokens", "int64", (num_tokens,), token_axis=0),)
        num_digests = 1 + len([c for c in self.spec.components if c is not Component.HIDDEN])
        length = num_digests if component is Component.HIDDEN else 1
        return (ArraySpec(component.value, "int64", (length,)),)

    def host_memory(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, dtype=np.uint8)

    def make_way(self, *, busy: bool) -> None:
        """It has no work of its own."""

    def memory_used(self) -> int:
        """Rows and every payload that was not released."""
        rows = (
            self.row_bytes(max(r.num_cells, r.length), r.num_borrowed) for r in self._rows.values()
        )
        return sum(rows) + self.ledger.nbytes

    def memory_parts(self) -> dict[str, int]:
        return {}

    def buffers_used(self) -> int:
        return len(self._rows) + self.ledger.num_live

    # ---- the contract ----------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> FakePending:
        pending = FakePending(plan=plan, dispatched=perf_counter(), backend=self)
        self.execute(pending, plan)
        return pending

    def close(self) -> None:
        self._rows.clear()

    # ---- device work -----------------------------------------------------------------------

    def _start(self, pending: FakePending, admit: Admit) -> None:
        def work() -> None:
            assert admit.slot not in self._rows, f"slot {admit.slot} is still taken"
            self._rows[admit.slot] = ToyRow(admit, self.window)

        self.device_queue.enqueue(pending.plan.step, work)

    def _captured(self, pending: FakePending, retire: Retire) -> Iterator[Capture]:
        payloads, state = self._kv(retire.start, retire.end), self._new_state()

        def work() -> None:
            row = self._rows[retire.slot]
            assert not row.destroyed, "a destroyed row was captured"
            dropped = row.length - retire.end
            assert 0 <= dropped <= row.num_accepted, "a row can drop accepted drafts alone"
            row.cut(retire.end)
            _fill(row, payloads, retire.start, retire.end)
            if state is not None:
                state.write([row.states[-1]])

        self.device_queue.enqueue(pending.plan.step, work)
        states: dict[int, Payload] = {retire.end: state} if state is not None else {}
        yield Capture(retire.slot, retire.start, retire.end, True, payloads, states)

    def _free(self, pending: FakePending, slot: int) -> None:
        def work() -> None:
            self._rows.pop(slot, None)

        self.device_queue.enqueue(pending.plan.step, work)

    def _run(self, pending: FakePending, plan: StepPlan) -> None:
        for prefill in plan.prefill:
            self._prefill(pending, prefill)
        self._decode(pending)

    def _gathered(self, spill: Spill) -> list[np.ndarray]:
        return [np.array(contents(spill.payloads), dtype="<i8").view(np.uint8)]

    def _prefill(self, pending: FakePending, chunk: PrefillRow) -> None:
        payloads = self._kv(chunk.start, chunk.end) if chunk.captures else {}
        states = {at: s for at in chunk.checkpoints if (s := self._new_state()) is not None}
        hidden = self._new_hidden() if chunk.captures and chunk.samples else None

        def work() -> None:
            row = self._rows[chunk.slot]
            if chunk.restore is not None:
                pending.check(chunk.slot, chunk.restore)
                self._restore(row, chunk)
            row.check_borrowed()
            assert row.destroyed or row.length == chunk.start, "chunks follow each other"
            for token in chunk.tokens.tolist():
                row.run(token)
                if row.length in states:
                    states[row.length].write([row.states[-1]])
            self.device_queue.tokens_run += len(chunk.tokens)
            _fill(row, payloads, chunk.start, chunk.end)
            if hidden is not None:
                hidden.write(row.digests(self.spec.components))
            if row.is_reply(chunk.start) and len(chunk.tokens):
                row.num_sampled += len(chunk.tokens) - 1  # these were never drawn
            if chunk.samples:
                self._score_prompt(pending, chunk.slot)
                self._add_hidden(pending, chunk.slot)
            if chunk.samples and not chunk.masked:
                self.sample(pending, chunk.slot)
                self._draft(chunk.slot, chunk.num_drafts)

        self.device_queue.enqueue(pending.plan.step, work)
        if chunk.captures and (payloads or states or hidden is not None):
            pending.captures.append(
                Capture(chunk.slot, chunk.start, chunk.end, False, payloads, dict(states), hidden)
            )

    def _restore(self, row: ToyRow, chunk: PrefillRow) -> None:
        assert chunk.restore is not None
        payloads = chunk.restore.payloads
        kept = {component: contents(payloads.get(component, ())) for component in Component}
        state = kept[S][-1] if kept[S] else 0
        row.restore(chunk.restore.length, kept[W], kept[A], state)
        if not len(chunk.tokens):
            assert kept[Component.HIDDEN], "all of a prompt is restored, and nothing to sample from"
            row.hidden = kept[Component.HIDDEN]
        if self.restores_by_reference:
            row.borrowed = as_fake(payloads.get(Component.ATTENTION, ()))

    def _loaded_payloads(self, pending: FakePending, loads: Sequence[Load]) -> Iterator[Payload]:
        for load in loads:
            payload = self._payload(load.component, load.num_tokens)
            values = np.ascontiguousarray(load.arrays[0]).view("<i8")
            write = partial(_write, payload, values)
            self.device_queue.enqueue(pending.plan.step, write)
            yield payload

    def _decode(self, pending: FakePending) -> None:
        plan = pending.plan
        for decode in plan.decode:
            if decode.checkpoint and (state := self._new_state()) is not None:
                pending.checkpoints[decode.slot] = state

        def work() -> None:
            for decode in plan.decode:
                self._run_token(pending, decode)

        self.device_queue.enqueue(plan.step, work)

    def _run_token(self, pending: FakePending, decode: DecodeRow) -> None:
        row = self._rows[decode.slot]
        row.check_borrowed()
        unsure = decode.position - row.length  # the plan was made before the last step's end
        assert row.destroyed or unsure in (0, row.num_rejected), "positions follow each other"
        row.num_accepted = row.num_rejected = 0
        row.run(self._take(decode.slot))
        if (state := pending.checkpoints.get(decode.slot)) is not None:
            as_fake((state,))[0].write([row.states[-1]])
            pending.captured_at[decode.slot] = row.length
        if decode.depth:
            self._verify(pending, decode)
        elif decode.samples and not decode.masked:
            self.sample(pending, decode.slot)
        if not decode.masked:
            self._draft(decode.slot, decode.num_drafts)

    def _verify(self, pending: FakePending, decode: DecodeRow) -> None:
        row, proposal = self._rows[decode.slot], decode.proposal
        if proposal is None:
            self.future_map.note_drafts_read(decode.slot, decode.depth)
            drafts: list[int] = self.future_map.drafts[decode.slot, : decode.depth].tolist()
        else:
            assert row.destroyed or row.length >= proposal.start, "what is known is not proposed"
            first = max(0, row.length - proposal.start)
            drafts = proposal.tokens[first : first + decode.depth].tolist()
        row.num_cells = max(row.num_cells, row.length + len(drafts))
        self.device_queue.tokens_run += len(drafts)
        token = self.sample(pending, decode.slot)
        for draft in drafts:
            if token != draft or token in row.admit.stop_ids:
                break
            row.run(token)
            row.num_accepted += 1
            token = self.sample(pending, decode.slot)
        row.num_rejected = decode.depth - row.num_accepted

    # ---- what rows say next -----------------------------------------------------------------

    def sample(self, pending: FakePending, slot: int) -> int:
        row = self._rows[slot]
        token = row.next_token(self.spec.components, self.spec.vocab_size)
        if pending.masks is not None and slot in pending.masks:
            allowed = allowed_ids(pending.masks[slot], self.spec.vocab_size)
            token = int(allowed[token % len(allowed)])
        row.num_sampled += 1
        pending.tokens[slot] = (*pending.tokens.get(slot, ()), token)
        self.future_map.stash(np.array([slot]), np.array([token]))
        self.future_map.note_written(np.array([slot]))
        return token

    def _take(self, slot: int) -> int:
        self.future_map.note_read(np.array([slot]))
        return int(self.future_map.tokens[slot])

    def _score_prompt(self, pending: FakePending, slot: int) -> None:
        row = self._rows[slot]
        num_top = row.admit.params.prompt_logprobs
        if num_top is not None:
            tokens = row.admit.prompt[1:].tolist()
            pending.prompt_logprobs[slot] = [self.score(token, num_top) for token in tokens]

    def _add_hidden(self, pending: FakePending, slot: int) -> None:
        row = self._rows[slot]
        if row.admit.embeds:
            digests = row.hidden or row.digests(self.spec.components)
            pending.hidden[slot] = np.array(digests, dtype=np.float32)

    def num_top_logprobs(self, slot: int) -> int | None:
        return self._rows[slot].admit.params.logprobs if slot in self._rows else None

    def score(self, token: int, num_top: int) -> TokenLogprobs:
        top = range(min(num_top, self.spec.vocab_size))
        ids = tuple((token + i) % self.spec.vocab_size for i in top)
        return TokenLogprobs(-0.5, ids, tuple(-0.5 - i for i in top))

    def _draft(self, slot: int, num_drafts: int) -> None:
        """For the slot's next step: what the toy says next, with errors."""
        row, drafts = self._rows[slot], list[int]()
        held, hidden, token = row.length, row.hidden, int(self.future_map.tokens[slot])
        for _ in range(num_drafts):
            row.run(token)
            token = row.next_token(self.spec.components, self.spec.vocab_size)
            row.num_sampled += 1
            if mix(row.admit.seed, row.length) % 1000 >= 1000 * self._draft_share:
                token = (token + 1) % self.spec.vocab_size
            drafts.append(token)
        row.cut(held)
        row.num_sampled, row.hidden = row.num_sampled - num_drafts, hidden
        self.future_map.stash_drafts(np.array([slot]), np.array([drafts], dtype=np.int32))
        self.future_map.note_drafts_written(np.array([slot]), len(drafts))

    # ---- payloads, for the device to write ---------------------------------------------------

    def _kv(self, start: int, end: int) -> dict[Component, FakePayload]:
        if start == end:
            return {}
        kept = [component for component in self.spec.components if component.divides]
        return {component: self._payload(component, end - start) for component in kept}

    def _new_state(self) -> FakePayload | None:
        return self._payload(S, 1) if S in self.spec.components else None

    def _new_hidden(self) -> FakePayload | None:
        return self._payload(Component.HIDDEN, 1) if self.spec.hidden_bytes else None

    def _payload(self, component: Component, num_tokens: int) -> FakePayload:
        nbytes = loaded_bytes(self.spec, component, num_tokens)
        return FakePayload(num_tokens, nbytes, self.ledger)


def _fill(row: ToyRow, payloads: Mapping[Component, FakePayload], start: int, end: int) -> None:
    for payload in payloads.values():
        payload.write(row.tokens[start:end])


def _write(payload: FakePayload, values: np.ndarray) -> None:
    payload.write(values.tolist())
