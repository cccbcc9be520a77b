"""How prompts share what a step may compute, and the rows of those that get a share.

A prompt's turn is weighed by what it still needs and how long it has waited (the highest response
ratio is first), so a short one passes a long one, and a long one is not passed for ever. While a
short one waits, no long one takes all of a step; and the step that finishes it is short itself:

    |L L L L L L L L|L L L L L L L L|S L|L L L L L L L L|      S arrives during the first, L goes on
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pippin.backends.base import Admit, PrefillRow, Restore
from pippin.scheduler.admission import Admission, InflightPrefixes
from pippin.scheduler.memory import Claims
from pippin.scheduler.pace import SMALLEST_CHUNK, Pace
from pippin.scheduler.replies import ReplyRows
from pippin.scheduler.request import Limits, Quality, RunningSlot, SlotPool
from pippin.scheduler.speculation import Speculation
from pippin.types import GRID


@dataclass(frozen=True)
class Turn:
    """One prompt that has started."""

    num_left: int  # tokens it still needs
    num_waited: int  # tokens that steps have computed for any prompt since it arrived
    priority: int = 0  # the highest takes what it can use, then the next


def share(
    turns: Sequence[Turn],
    budget: int,
    *,
    shortest_waiting: int | None = None,
    for_unfinished: int | None = None,
) -> list[int]:
    """Tokens of this step for each of `turns`; what is left over is for those not started.

    `shortest_waiting`: what the shortest of these would need. Half of a step is kept for prompts of
    the same priority that can be finished with it. `for_unfinished`: what all those may take that
    are not finished with this step.
    """
    shares = [0] * len(turns)
    waiting = [] if shortest_waiting is None else [shortest_waiting]
    left = budget
    unfinished = budget if for_unfinished is None else for_unfinished
    order = sorted(range(len(turns)), key=lambda i: (turns[i].priority, _ratio(turns[i])))
    for _, alike in itertools.groupby(reversed(order), key=lambda i: turns[i].priority):
        level = list(alike)
        others = sorted([turns[i].num_left for i in level] + waiting)
        for index in level:
            if not left:
                return shares
            others.remove(turns[index].num_left)
            most = max(0, left - _finishable(others, budget // 2))
            if turns[index].num_left > most:
                most = min(most, unfinished)
                unfinished -= most
            shares[index] = min(turns[index].num_left, most)
            left -= shares[index]
    return shares


def _finishable(lengths: Sequence[int], most: int) -> int:
    """What the shortest need together, of those that `most` tokens finish. They are sorted."""
    return max(itertools.takewhile(most.__ge__, itertools.accumulate(lengths)), default=0)


def beside_short(
    turns: Sequence[Turn], budget: int, productive: int, *, shortest_waiting: int | None = None
) -> int:
    """What those may take of a step that it does not finish: finished ones wait for it, too.

    As much as those need that are done with half of the step, or a `productive` chunk if that is
    more; all where none is.
    """
    waiting = [] if shortest_waiting is None else [shortest_waiting]
    kept = _finishable(sorted([turn.num_left for turn in turns] + waiting), budget // 2)
    return min(max(kept, productive), budget) if kept else budget


def _ratio(turn: Turn) -> float:
    return (turn.num_waited + turn.num_left) / max(turn.num_left, 1)


MAX_SKIPPED = 8  # steps that compute other prompts, of a higher priority, before one that started


@dataclass
class PromptPlanner:
    admission: Admission
    slots: SlotPool
    claims: Claims
    running_slots: dict[int, RunningSlot]  # by slot
    limits: Limits
    speculation: Speculation | None = None
    num_planned: int = 0  # tokens, since the start: waits of requests are counted in these

    def __post_init__(self) -> None:
        self._spec = self.claims.costs.spec
        self._cache = self.claims.cache
        self._policy = None if self._cache is None else self._cache.policy
        # Tokens that are worth a forward if they do not end their prompt.
        self._smallest = min(SMALLEST_CHUNK, self.limits.prefill_tokens)
        # Whole grid blocks and a last, shorter chunk that is not shared.
        self._on_grid = self.limits.deterministic

    def may_start(self) -> bool:
        """Whether a prompt of the queue could have a slot, and bytes, in the next step."""
        return self._has_slot() and self.admission.may_start()

    def plan(
        self, step: int, started: Sequence[RunningSlot], replies: ReplyRows, pace: Pace
    ) -> tuple[tuple[Admit, ...], tuple[PrefillRow, ...]]:
        """Rows of the step, within its pace: of prompts that `started`, and of those that start."""
        queue = self.admission.queue
        num_streams = len(replies.decode) + len(replies.chunks)
        num_drafts = sum(row.depth for row in replies.decode)
        budget = pace.budget(num_streams, len(started) + len(queue), num_drafts)
        prompts = [*(running.request for running in started), *queue[:2]]
        if len(prompts) == 1 and prompts[0].handover:
            budget = min(budget, pace.part_tokens(prompts[0].num_tokens))
        turns = self._turns(started)
        top = max((turn.priority for turn in turns), default=None)
        waiting_top = self.admission.top_priority if self.slots.num_free else None
        shortest = None
        if waiting_top is not None:
            shortest = self.admission.shortest(waiting_top if top is None else top)
        productive = max(pace.productive_tokens, self._smallest)
        unfinished = beside_short(turns, budget, productive, shortest_waiting=shortest)
        # Those in the queue that have a higher priority are offered the step before these.
        ahead = [turn for turn in turns if waiting_top is None or turn.priority >= waiting_top]
        tentative = share(ahead, budget, shortest_waiting=shortest, for_unfinished=unfinished)
        admit, rows = self._start(step, budget - sum(tentative), unfinished)
        unfinished -= sum(len(row.tokens) for row in rows if not row.samples)
        shares = share(turns, budget - _num_tokens(rows), for_unfinished=max(unfinished, 0))
        rows = self._go_on(step, started, shares, budget) + rows
        self.num_planned += _num_tokens(rows)
        pace.spend(_num_tokens(rows))
        return tuple(admit), tuple(rows)

    def _turns(self, started: Sequence[RunningSlot]) -> list[Turn]:
        """A prompt that was skipped in many steps has the highest priority of all for one."""
        priorities = [running.priority for running in started]
        return [
            Turn(
                running.num_left,
                self.num_planned - running.request.arrived_at,
                max(priorities) if running.num_skipped >= MAX_SKIPPED else priority,
            )
            for running, priority in zip(started, priorities, strict=True)
        ]

    def _go_on(
        self, step: int, started: Sequence[RunningSlot], shares: Sequence[int], budget: int
    ) -> list[PrefillRow]:
        rows: list[PrefillRow] = []
        for running, num_tokens in zip(started, shares, strict=True):
            if num_tokens >= self._least(running, budget):
                running.num_skipped = 0
                rows.append(self._row(step, running, num_tokens))
            else:
                running.num_skipped += budget > 0
        return rows

    def _start(self, step: int, left: int, unfinished: int) -> tuple[list[Admit], list[PrefillRow]]:
        """Requests for which there is a slot, bytes and a part of the step.

        `left` tokens of it, and no more than `unfinished` for those that it does not finish.
        """
        admit: list[Admit] = []
        rows: list[PrefillRow] = []
        running_slots = self.running_slots
        inflight = InflightPrefixes(running_slots.values() if self._has_slot() else ())
        while self._has_slot():
            whole = None if left >= self._smallest else max(left, 0)
            running = self.admission.start_next(
                inflight, nothing_runs=not running_slots, max_to_compute=whole
            )
            if running is None:
                break
            running_slots[running.slot] = running
            inflight.add(running)
            admit.append(_admit(running))
            most = left if running.num_left <= left else min(left, unfinished)
            most = max(most, self._least(running, self._smallest))
            restore = None
            if self._cache is not None and running.lock is not None and running.start_len:
                restore = Restore(running.start_len, self._cache.payloads(running.lock))
            rows.append(self._row(step, running, most, restore))
            left -= len(rows[-1].tokens)
            unfinished -= 0 if rows[-1].samples else len(rows[-1].tokens)
        return admit, rows

    def _has_slot(self) -> bool:
        """Whether a request waits and a slot is free. One that is restored whole needs no more.

        A reply that may not be resumed (`deterministic`) must never need what others have, so it
        starts with all that it can need, or has the engine to itself.
        """
        if not self.admission.queue or not self.slots.num_free:
            return False
        if not self._on_grid:
            return True
        running = (running for running in self.running_slots.values() if running.runs)
        return all(running.row_tokens >= running.request.max_total for running in running)

    # ---- chunks ----------------------------------------------------------------------------

    def _least(self, running: RunningSlot, budget: int) -> int:
        """The fewest tokens of it that are worth running.

        A step whose whole `budget` is less explores what chunks cost.
        """
        return min(self._smallest, running.num_left, max(budget, 1))

    def _row(
        self, step: int, running: RunningSlot, num_tokens: int, restore: Restore | None = None
    ) -> PrefillRow:
        """At most `num_tokens` more of what is known; at least one, given `_least` or more.

        Where all that is known was restored, an empty chunk: only the next token is wanted.
        """
        request, start = running.request, running.row_len
        end = self._end(running, start, min(running.prefill_len, start + num_tokens))
        samples = end == running.prefill_len
        assert end > start or samples
        running.plan_row(step, end, samples=samples)
        if samples and self.speculation is not None:
            running.num_drafts = self.speculation.first_drafts(running)
        row = PrefillRow(
            slot=running.slot,
            start=start,
            tokens=request.tokens(end)[start:],
            samples=samples,
            restore=restore,
            checkpoints=self._checkpoints(running, start, end),
            captures=start < end and self._captures(running, end),
            masked=request.grammar is not None,
            num_drafts=running.num_drafts,
        )
        return self.claims.fit_chunk(step, running, row)

    def _end(self, running: RunningSlot, start: int, end: int) -> int:
        """Where a chunk that may reach `end` should stop.

        States inside it can be tapped only every GRID tokens from its start, and only if the
        backend taps at all: otherwise it ends at the first checkpoint wanted. So a chunk that does
        not end the prompt ends on the grid if a whole block fits; else it is one of the fewest
        pieces, all alike, up to the next checkpoint.
        """
        if self._on_grid:
            return max(end - end % GRID, min(start + GRID, running.prefill_len))
        if end < running.prefill_len and self._spec.state_bytes:
            end = end - end % GRID if end - start >= GRID else self._piece(running, start, end)
        for position in self._checkpoints(running, start, end):
            tappable = self._spec.state_taps and (position - start) % GRID == 0
            if not tappable:
                return position
        return end

    def _piece(self, running: RunningSlot, start: int, end: int) -> int:
        stop = next(iter(self._checkpoints(running, start, running.prefill_len)), None)
        left = (stop or running.prefill_len) - start
        num_pieces = -(-left // (end - start))
        return start + -(-left // num_pieces)

    def _checkpoints(self, running: RunningSlot, start: int, end: int) -> tuple[int, ...]:
        if self._policy is None or not self._spec.state_bytes or not self._captures(running, end):
            return ()
        found = self._policy.placements(
            start,
            end,
            prompt_len=running.prefill_len,
            boundaries=running.request.boundaries,
            branch=running.branch,
        )
        return tuple(found)

    def _captures(self, running: RunningSlot, end: int) -> bool:
        """Whether the tree wants a chunk that ends there."""
        if self._policy is None or end > running.capture_len:
            return False
        return running.quality is Quality.SOUND


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
