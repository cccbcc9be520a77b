"""What a step computes of prompts: who goes on, who starts, and how far. Samples nothing itself.

A retracted request's reply counts as its prompt here: whatever is known and has to be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pippin.backends.base import Admit, PrefillRow, Restore
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.claims import Claims
from pippin.scheduler.holding import Holding
from pippin.scheduler.pace import Pace
from pippin.scheduler.planning.admission import Admission
from pippin.scheduler.planning.arriving import Arriving
from pippin.scheduler.planning.chunks import Chunker
from pippin.scheduler.planning.turns import Turn, beside_short, share
from pippin.scheduler.slots import SlotPool

Holdings = dict[int, Holding]  # by slot

MAX_SKIPPED = 8  # steps that compute other prompts, of a higher priority, before one that started


@dataclass
class PromptPlanner:
    pace: Pace
    admission: Admission
    slots: SlotPool
    claims: Claims
    chunker: Chunker
    cache: PrefixCache | None
    num_planned: int = 0  # tokens, since the start: how long a request has waited is told in these

    def plan(
        self, step: int, holdings: Holdings, num_streams: int
    ) -> tuple[tuple[Admit, ...], tuple[PrefillRow, ...]]:
        """Rows of the step, within its pace; those that start are added to `holdings`."""
        started = [
            holding
            for holding in holdings.values()
            if holding.request.phase == "prefill" and not holding.retracting
        ]
        waiting = len(self.admission.queue)
        if not started and not waiting:
            return (), ()
        budget = self.pace.budget(num_streams, len(started) + waiting)
        turns = self._turns(started)
        top = max((turn.priority for turn in turns), default=None)
        waiting_top = self.admission.top_priority if self.slots.num_free else None
        shortest = None
        if waiting_top is not None:
            shortest = self.admission.shortest(waiting_top if top is None else top)
        unfinished = beside_short(
            turns,
            budget,
            max(self.pace.productive_tokens, self.chunker.smallest),
            shortest_waiting=shortest,
        )
        # Those in the queue that have a higher priority are offered the step before these.
        ahead = [turn for turn in turns if waiting_top is None or turn.priority >= waiting_top]
        tentative = share(ahead, budget, shortest_waiting=shortest, for_unfinished=unfinished)
        admit, rows = self._start(step, holdings, budget - sum(tentative), unfinished)
        unfinished -= sum(len(row.tokens) for row in rows if not row.samples)
        shares = share(turns, budget - _num_tokens(rows), for_unfinished=max(unfinished, 0))
        rows = self._go_on(step, started, shares, budget) + rows
        self.num_planned += _num_tokens(rows)
        self.pace.spend(_num_tokens(rows))
        return tuple(admit), tuple(rows)

    def _turns(self, started: Sequence[Holding]) -> list[Turn]:
        """A prompt that was skipped in many steps has the highest priority of all for one."""
        top = max((holding.priority for holding in started), default=0)
        return [
            Turn(
                holding.num_left,
                self.num_planned - holding.request.came_at,
                top if holding.num_skipped >= MAX_SKIPPED else holding.priority,
            )
            for holding in started
        ]

    def _go_on(
        self, step: int, started: Sequence[Holding], shares: Sequence[int], budget: int
    ) -> list[PrefillRow]:
        rows: list[PrefillRow] = []
        for holding, num_tokens in zip(started, shares, strict=True):
            if num_tokens >= self.chunker.least(holding.num_left, budget):
                holding.num_skipped = 0
                rows.append(self._row(step, holding, num_tokens))
            else:
                holding.num_skipped += budget > 0
        return rows

    def _start(
        self, step: int, holdings: Holdings, left: int, unfinished: int
    ) -> tuple[list[Admit], list[PrefillRow]]:
        """Whoever finds a slot, bytes and a part of the step.

        `left` tokens of it, and no more than `unfinished` for those that it does not finish.
        """
        admit: list[Admit] = []
        rows: list[PrefillRow] = []
        arriving = Arriving(holdings.values() if self._may_start(holdings) else ())
        while self._may_start(holdings):
            whole = None if left >= self.chunker.smallest else max(left, 0)
            holding = self.admission.start_next(
                arriving, nothing_runs=not holdings, max_to_compute=whole
            )
            if holding is None:
                break
            holdings[holding.slot] = holding
            arriving.add(holding)
            admit.append(_admit(holding))
            most = left if holding.num_left <= left else min(left, unfinished)
            most = max(most, self.chunker.least(holding.num_left, self.chunker.smallest))
            rows.append(self._row(step, holding, most, self._restore(holding)))
            left -= len(rows[-1].tokens)
            unfinished -= 0 if rows[-1].samples else len(rows[-1].tokens)
        return admit, rows

    def _may_start(self, holdings: Holdings) -> bool:
        """Whether somebody waits and finds a slot. One that was restored whole needs no more.

        A reply that may not be resumed (`deterministic`) must never need what others hold, so it
        starts with all that it can need, or has the engine to itself.
        """
        if not self.admission.queue or not self.slots.num_free:
            return False
        if not self.chunker.on_grid:
            return True
        running = (holding for holding in holdings.values() if holding.runs)
        return all(holding.row_tokens >= holding.request.max_total for holding in running)

    def _restore(self, holding: Holding) -> Restore | None:
        if self.cache is None or holding.lock is None or holding.start_len == 0:
            return None
        return Restore(holding.start_len, self.cache.payloads(holding.lock))

    def _row(
        self, step: int, holding: Holding, num_tokens: int, restore: Restore | None = None
    ) -> PrefillRow:
        chunk = self.chunker.next_chunk(holding, num_tokens)
        request = holding.request
        holding.plan_chunk(step, chunk.end)
        row = PrefillRow(
            slot=holding.slot,
            start=chunk.start,
            tokens=request.tokens(chunk.end)[chunk.start :],
            samples=chunk.end == holding.prefill_len,
            restore=restore,
            checkpoints=chunk.checkpoints,
            captures=chunk.captures,
            masked=request.grammar is not None,
        )
        return self.claims.fit_chunk(step, holding, row)


def _admit(holding: Holding) -> Admit:
    """A request that is resumed was told its prompt's log probabilities before."""
    request = holding.request
    params = request.params
    if request.output and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    return Admit(
        slot=holding.slot,
        params=params,
        stop_ids=tuple(sorted(request.stop_ids)),
        prompt=request.prompt,
        seed=request.seed,
        reply=np.asarray(request.output, dtype=np.int32),
        embeds=request.embeds,
    )


def _num_tokens(rows: Sequence[PrefillRow]) -> int:
    return sum(len(row.tokens) for row in rows)
