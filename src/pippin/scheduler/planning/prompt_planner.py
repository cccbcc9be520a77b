"""What a step computes of prompts: which go on, which start, and how far. Samples nothing itself.

A preempted request's reply counts as its prompt here: whatever is known and has to be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pippin.backends.base import Admit, PrefillRow, Restore
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.memory.claims import Claims
from pippin.scheduler.pacing.pace import Pace
from pippin.scheduler.planning.admission import Admission
from pippin.scheduler.planning.chunks import Chunker
from pippin.scheduler.planning.inflight_prefixes import InflightPrefixes
from pippin.scheduler.planning.turns import Turn, beside_short, share
from pippin.scheduler.running_slot import RunningSlot, Stage
from pippin.scheduler.slot_pool import SlotPool
from pippin.scheduler.speculation.speculation import Speculation

RunningSlots = dict[int, RunningSlot]  # by slot

MAX_SKIPPED = 8  # steps that compute other prompts, of a higher priority, before one that started


@dataclass
class PromptPlanner:
    admission: Admission
    slots: SlotPool
    claims: Claims
    chunker: Chunker
    cache: PrefixCache | None
    speculation: Speculation | None = None
    num_planned: int = 0  # tokens, since the start: waits of requests are counted in these

    def may_start(self, running_slots: RunningSlots) -> bool:
        """Whether a prompt of the queue could have a slot, and bytes, in the next step."""
        return self._may_start(running_slots) and self.admission.may_start()

    def plan(
        self,
        step: int,
        running_slots: RunningSlots,
        num_streams: int,
        pace: Pace,
        num_drafts: int = 0,
    ) -> tuple[tuple[Admit, ...], tuple[PrefillRow, ...]]:
        """Rows of the step, within its pace; those that start are added to `running_slots`."""
        started = [
            running
            for running in running_slots.values()
            if running.request.phase == "prefill" and running.stage is Stage.RUNNING
        ]
        waiting = len(self.admission.queue)
        if not started and not waiting:
            return (), ()
        budget = pace.budget(num_streams, len(started) + waiting, num_drafts)
        prompts = [*(running.request for running in started), *self.admission.queue[:2]]
        if len(prompts) == 1 and prompts[0].handover:
            budget = min(budget, pace.part_tokens(prompts[0].num_tokens))
        turns = self._turns(started)
        top = max((turn.priority for turn in turns), default=None)
        waiting_top = self.admission.top_priority if self.slots.num_free else None
        shortest = None
        if waiting_top is not None:
            shortest = self.admission.shortest(waiting_top if top is None else top)
        unfinished = beside_short(
            turns,
            budget,
            max(pace.productive_tokens, self.chunker.smallest),
            shortest_waiting=shortest,
        )
        # Those in the queue that have a higher priority are offered the step before these.
        ahead = [turn for turn in turns if waiting_top is None or turn.priority >= waiting_top]
        tentative = share(ahead, budget, shortest_waiting=shortest, for_unfinished=unfinished)
        admit, rows = self._start(step, running_slots, budget - sum(tentative), unfinished)
        unfinished -= sum(len(row.tokens) for row in rows if not row.samples)
        shares = share(turns, budget - _num_tokens(rows), for_unfinished=max(unfinished, 0))
        rows = self._go_on(step, started, shares, budget) + rows
        self.num_planned += _num_tokens(rows)
        pace.spend(_num_tokens(rows))
        return tuple(admit), tuple(rows)

    def _turns(self, started: Sequence[RunningSlot]) -> list[Turn]:
        """A prompt that was skipped in many steps has the highest priority of all for one."""
        top = max((running.priority for running in started), default=0)
        return [
            Turn(
                running.num_left,
                self.num_planned - running.request.arrived_at,
                top if running.num_skipped >= MAX_SKIPPED else running.priority,
            )
            for running in started
        ]

    def _go_on(
        self, step: int, started: Sequence[RunningSlot], shares: Sequence[int], budget: int
    ) -> list[PrefillRow]:
        rows: list[PrefillRow] = []
        for running, num_tokens in zip(started, shares, strict=True):
            if num_tokens >= self.chunker.least(running.num_left, budget):
                running.num_skipped = 0
                rows.append(self._row(step, running, num_tokens))
            else:
                running.num_skipped += budget > 0
        return rows

    def _start(
        self, step: int, running_slots: RunningSlots, left: int, unfinished: int
    ) -> tuple[list[Admit], list[PrefillRow]]:
        """Requests for which there is a slot, bytes and a part of the step.

        `left` tokens of it, and no more than `unfinished` for those that it does not finish.
        """
        admit: list[Admit] = []
        rows: list[PrefillRow] = []
        inflight = InflightPrefixes(
            running_slots.values() if self._may_start(running_slots) else ()
        )
        while self._may_start(running_slots):
            whole = None if left >= self.chunker.smallest else max(left, 0)
            running = self.admission.start_next(
                inflight, nothing_runs=not running_slots, max_to_compute=whole
            )
            if running is None:
                break
            running_slots[running.slot] = running
            inflight.add(running)
            admit.append(_admit(running))
            most = left if running.num_left <= left else min(left, unfinished)
            most = max(most, self.chunker.least(running.num_left, self.chunker.smallest))
            rows.append(self._row(step, running, most, self._restore(running)))
            left -= len(rows[-1].tokens)
            unfinished -= 0 if rows[-1].samples else len(rows[-1].tokens)
        return admit, rows

    def _may_start(self, running_slots: RunningSlots) -> bool:
        """Whether a request waits and a slot is free. One that is restored whole needs no more.

        A reply that may not be resumed (`deterministic`) must never need what others have, so it
        starts with all that it can need, or has the engine to itself.
        """
        if not self.admission.queue or not self.slots.num_free:
            return False
        if not self.chunker.on_grid:
            return True
        running = (running for running in running_slots.values() if running.runs)
        return all(running.row_tokens >= running.request.max_total for running in running)

    def _restore(self, running: RunningSlot) -> Restore | None:
        if self.cache is None or running.lock is None or running.start_len == 0:
            return None
        return Restore(running.start_len, self.cache.payloads(running.lock))

    def _row(
        self, step: int, running: RunningSlot, num_tokens: int, restore: Restore | None = None
    ) -> PrefillRow:
        chunk = self.chunker.next_chunk(running, num_tokens)
        request = running.request
        running.plan_chunk(step, chunk.end)
        samples = chunk.end == running.prefill_len
        if samples and self.speculation is not None:
            running.num_drafts = self.speculation.first_drafts(running)
        row = PrefillRow(
            slot=running.slot,
            start=chunk.start,
            tokens=request.tokens(chunk.end)[chunk.start :],
            samples=samples,
            restore=restore,
            checkpoints=chunk.checkpoints,
            captures=chunk.captures,
            masked=request.grammar is not None,
            num_drafts=running.num_drafts,
        )
        return self.claims.fit_chunk(step, running, row)


def _admit(running: RunningSlot) -> Admit:
    """A resumed request has sent its prompt's log probabilities before."""
    request = running.request
    params = request.params
    if request.output and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    return Admit(
        slot=running.slot,
        params=params,
        stop_ids=tuple(sorted(request.stop_ids)),
        prompt=request.prompt,
        seed=request.seed,
        reply=np.asarray(request.output, dtype=np.int32),
        embeds=request.embeds,
    )


def _num_tokens(rows: Sequence[PrefillRow]) -> int:
    return sum(len(row.tokens) for row in rows)
