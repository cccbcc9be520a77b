"""The toy backend: executes plans on the toy device. Knows no arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from pippin.backends.base import (
    Admit,
    Capture,
    DecodeRow,
    DeviceInfo,
    Load,
    PrefillRow,
    Retire,
    StepPlan,
    WarmUpShape,
    captured_bytes,
)
from pippin.backends.fake.device import FakeDevice, FutureMap
from pippin.backends.fake.drafter import ToyDrafter
from pippin.backends.fake.payloads import (
    FakePayload,
    Ledger,
    PayloadMaker,
    as_fake,
    content_of,
    contents,
    payload_arrays,
    spilled,
)
from pippin.backends.fake.pending import FakePending
from pippin.backends.fake.sampler import ToySampler
from pippin.backends.fake.toy import ARITHMETIC_VERSION, ToyRow
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import Component, LayerSpec, ModelSpec, Payload

BYTES_PER_TOKEN = 64
HIDDEN_BYTES = 40
STATE_TOKENS = 1500  # a state takes as much as the KV of this many tokens, as real ones do
MEMORY_BYTES = 1 << 30
A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE


def fake_device() -> DeviceInfo:
    return DeviceInfo("fake", "toy", MEMORY_BYTES, share=1.0, prefill_tokens=512, unified=False)


class FakeBackend:
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
        self.future_map = FutureMap(num_slots, max_depth)
        self.ledger = Ledger()
        self._payloads = PayloadMaker(self.spec, self.ledger)
        self._rows: dict[int, ToyRow] = {}
        self._sampler = ToySampler(self.spec, self._rows, self.future_map)
        self._drafter = ToyDrafter(self.spec, self._rows, self.future_map, draft_share)

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
        num_digests = 1 + len([c for c in self.spec.components if c is not Component.HIDDEN])
        return payload_arrays(component, num_tokens, num_digests)

    def host_memory(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, dtype=np.uint8)

    def make_way(self, *, busy: bool) -> None:
        """It has no work of its own."""

    def memory_used(self) -> int:
        """Rows and every payload that was not released."""
        rows = (self.row_bytes(len(r.cells), r.num_borrowed) for r in self._rows.values())
        return sum(rows) + self.ledger.nbytes

    def memory_parts(self) -> dict[str, int]:
        return {}

    def buffers_used(self) -> int:
        return len(self._rows) + self.ledger.num_live

    # ---- the contract ----------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> FakePending:
        pending = FakePending(
            plan,
            self._sampler.num_top_logprobs,
            dispatched=perf_counter(),
            device_queue=self.device_queue,
            sample_masked=self._sampler.sample_masked,
            score=self._sampler.score,
        )
        for retire in plan.retire:
            self._retire(pending, retire)
        for admit in plan.admit:
            self._admit(pending, admit)
        for prefill in plan.prefill:
            self._prefill(pending, prefill)
        self._decode(pending)
        pending.spilled += [spilled(spill) for spill in plan.spill]
        for load in plan.load:
            self._load(pending, load)
        return pending

    def close(self) -> None:
        self._rows.clear()

    # ---- device work -----------------------------------------------------------------------

    def _admit(self, pending: FakePending, admit: Admit) -> None:
        def work() -> None:
            assert admit.slot not in self._rows, f"slot {admit.slot} is still taken"
            self._rows[admit.slot] = ToyRow(admit, self.window)

        self.device_queue.enqueue(pending.plan.step, work)

    def _retire(self, pending: FakePending, retire: Retire) -> None:
        payloads = self._payloads.kv(retire.start, retire.end) if retire.captures else {}
        state = self._payloads.state() if retire.captures else None

        def work() -> None:
            row = self._rows.pop(retire.slot, None)
            if not retire.captures:
                return
            assert row is not None, f"slot {retire.slot} holds nothing to capture"
            assert not row.destroyed, "a destroyed row was captured"
            row.drop_behind(retire.end)
            _fill(row, payloads, retire.start, retire.end)
            if state is not None:
                state.write([row.folded_state])

        self.device_queue.enqueue(pending.plan.step, work)
        if retire.captures:
            states: dict[int, Payload] = {retire.end: state} if state is not None else {}
            pending.captures.append(
                Capture(retire.slot, retire.start, retire.end, True, payloads, states)
            )

    def _prefill(self, pending: FakePending, chunk: PrefillRow) -> None:
        payloads = self._payloads.kv(chunk.start, chunk.end) if chunk.captures else {}
        states = {at: s for at in chunk.checkpoints if (s := self._payloads.state()) is not None}
        hidden = self._payloads.hidden() if chunk.captures and chunk.samples else None

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
                    states[row.length].write([row.state])
            self.device_queue.tokens_run += len(chunk.tokens)
            _fill(row, payloads, chunk.start, chunk.end)
            if hidden is not None:
                hidden.write(row.digests(self.spec.components))
            if row.is_reply(chunk.start) and len(chunk.tokens):
                row.num_sampled += len(chunk.tokens) - 1  # these were never drawn
            if chunk.samples:
                self._sampler.score_prompt(pending, chunk.slot)
                self._sampler.add_hidden(pending, chunk.slot)
            if chunk.samples and not chunk.masked:
                self._sampler.sample(pending, chunk.slot)
                self._drafter.draft(chunk.slot, chunk.num_drafts)

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

    def _load(self, pending: FakePending, load: Load) -> None:
        payload = self._payloads.one(load.component, load.num_tokens)
        pending.loaded.append(payload)

        def work() -> None:
            payload.write(content_of(load))

        self.device_queue.enqueue(pending.plan.step, work)

    def _decode(self, pending: FakePending) -> None:
        plan = pending.plan
        for decode in plan.decode:
            if decode.checkpoint and (state := self._payloads.state()) is not None:
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
        row.num_rejected = 0
        row.run(self.future_map.take(decode.slot))
        if (state := pending.checkpoints.get(decode.slot)) is not None:
            state.write([row.state])
            pending.captured_at[decode.slot] = row.length
        if decode.depth:
            self._verify(pending, decode)
        elif decode.samples and not decode.masked:
            self._sampler.sample(pending, decode.slot)
        if not decode.masked:
            self._drafter.draft(decode.slot, decode.num_drafts)

    def _verify(self, pending: FakePending, decode: DecodeRow) -> None:
        row, proposal = self._rows[decode.slot], decode.proposal
        if proposal is None:
            drafts = self.future_map.take_drafts(decode.slot, decode.depth)
        else:
            assert row.destroyed or row.length >= proposal.start, "what is known is not proposed"
            first = max(0, row.length - proposal.start)
            drafts = proposal.tokens[first : first + decode.depth].tolist()
        row.write_drafts(drafts)
        self.device_queue.tokens_run += len(drafts)
        token = self._sampler.sample(pending, decode.slot)
        accepted = 0
        while accepted < len(drafts) and token == drafts[accepted]:
            if token in row.admit.stop_ids:
                break
            row.accept(token)
            accepted += 1
            token = self._sampler.sample(pending, decode.slot)
        row.num_rejected = decode.depth - accepted


def _fill(row: ToyRow, payloads: Mapping[Component, FakePayload], start: int, end: int) -> None:
    for payload in payloads.values():
        payload.write(row.tokens[start:end])
