"""What running requests claim of the budget: rows that grow, captures and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pippin.backends.base import Capture, Costs, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.request import ByteBudget, Request, RunningSlot

GROWTH_TOKENS = 256  # a row's claim grows by this much at a time


@dataclass
class Claims:
    costs: Costs
    budget: ByteBudget
    cache: PrefixCache | None
    _transient_bytes: int = 0  # of the plan that is being made

    def __post_init__(self) -> None:
        self._has_kv = any(component.divides for component in self.costs.spec.components)

    def take_transient(self) -> int:
        """What the plan that was made has claimed: to be released when it is committed."""
        nbytes, self._transient_bytes = self._transient_bytes, 0
        return nbytes

    # ---- rows ------------------------------------------------------------------------------

    def row_bytes(self, running: RunningSlot, num_tokens: int) -> int:
        return self.costs.row_bytes(num_tokens, running.start_len)

    def grow(self, running: RunningSlot, num_tokens: int) -> bool:
        """Claim for a reply of `num_tokens` and some more, or failing that just for it."""
        ahead = min(running.request.max_total, num_tokens + GROWTH_TOKENS)
        return self._resize(running, ahead) or self._resize(running, num_tokens)

    def shortage(self, starved: Iterable[RunningSlot], others: Iterable[RunningSlot]) -> int:
        """The bytes that `starved` rows lack for a token each, once checkpoints have been given up.

        Checkpoints of replies only save time later on: they are dropped before a request waits.
        """
        need = sum(self.row_bytes(row, row.row_len + 1) - row.nbytes for row in starved)
        for running in others:
            while running.checkpoints and self.budget.available < need:
                self._thin(running)
        return need - self.budget.available

    def _resize(self, running: RunningSlot, num_tokens: int) -> bool:
        """A reply gives up checkpoints of its own before prefixes are evicted for it."""
        extra = max(0, self.row_bytes(running, num_tokens) - running.nbytes)
        while running.checkpoints and self.budget.free < extra:
            self._thin(running)
        if not self.budget.claim(extra):
            return False
        running.nbytes += extra
        running.row_tokens = num_tokens
        return True

    def _shrink(self, running: RunningSlot) -> None:
        held = max(running.row_len, running.drafted_len)
        surplus = running.nbytes - self.row_bytes(running, held)
        if surplus > 0:
            running.nbytes -= surplus
            self.budget.release(surplus)

    # ---- rows of a plan --------------------------------------------------------------------

    def fit_retire(self, step: int, running: RunningSlot, *, captures: bool) -> Retire:
        """Capture the row for the tree, if that is wanted and there is room for a copy."""
        bare = Retire(running.slot)
        if not captures or self.cache is None:
            return bare
        # Nothing kept the path in the tree while the reply grew: what is gone is captured again.
        request = running.request
        held = self.cache.num_cached(request.tokens(running.in_tree), request.salt)
        start = min(running.in_tree, held)
        if start == running.kept_len:
            return bare
        self._shrink(running)
        whole = Retire(running.slot, start, running.kept_len, captures=True)
        return whole if self._fits(StepPlan(step, retire=(whole,))) else bare

    def fit_chunk(self, step: int, running: RunningSlot, row: PrefillRow) -> PrefillRow:
        """The row as it is, with its last state alone, without states, or without captures.

        Without its KV in the tree the chunks behind it would not connect: they capture nothing. A
        model of states alone has no KV: where its last chunk leaves no state, the tree gets nothing
        of it.
        """
        if not row.captures:
            return row
        choices = [row.checkpoints, row.checkpoints[-1:], ()]
        if not self._has_kv and row.end == running.capture_len:
            choices = choices[:2]
        for checkpoints in choices:
            kept = replace(row, checkpoints=checkpoints)
            if self._fits(StepPlan(step, prefill=(kept,))):
                return kept
        running.lost_tree(running.in_tree)
        return replace(row, checkpoints=(), captures=False)

    def fit_checkpoint(self, step: int, running: RunningSlot, position: int) -> bool:
        """Whether the state after `position` tokens of a reply can be kept in what is free.

        It evicts no cached prefix: few requests branch off inside a reply, and many begin with a
        prefix. Earlier checkpoints of the same reply make room: the last ones matter most.
        """
        plan = StepPlan(step, decode=(DecodeRow(running.slot, position - 1, checkpoint=True),))
        nbytes = self.costs.transient_bytes(plan)
        if self.budget.free < nbytes:
            self._thin(running)
        return self._take(nbytes, self.budget.claim_free(nbytes))

    def _fits(self, plan: StepPlan) -> bool:
        nbytes = self.costs.transient_bytes(plan)
        return self._take(nbytes, self.budget.claim(nbytes))

    def _take(self, nbytes: int, claimed: bool) -> bool:
        self._transient_bytes += nbytes if claimed else 0
        return claimed

    def _thin(self, running: RunningSlot) -> None:
        """Keep half of a reply's checkpoints."""
        assert self.cache is not None
        kept = self.cache.policy.thinned(list(running.checkpoints), len(running.checkpoints) // 2)
        running.drop_checkpoints(set(running.checkpoints).difference(kept), self.budget)

    # ---- what a step captured --------------------------------------------------------------

    def take_captures(
        self,
        captures: Sequence[Capture],
        owners: Mapping[int, RunningSlot],
        retired: Mapping[int, RunningSlot],
        cache: PrefixCache,
        note: Callable[[Request, int, bool], None],
    ) -> None:
        """Insert a committed step's captures under the tokens of those that had the slots then.

        States of a growing reply have no path in the tree yet: their `RunningSlot` keeps them until
        it retires, when one or more captures bring the KV they belong to. They come first, so that
        the bytes which the step had claimed are theirs before the tree grows into them. `note` is
        called with how much of a request the tree holds now, and whether that is all of its prompt,
        or of its reply.
        """
        to_insert: list[tuple[Capture, RunningSlot]] = []
        for capture in captures:
            running = (retired if capture.retired else owners)[capture.slot]
            if running.tainted:
                capture.release()
            elif not capture.retired and capture.start >= running.prefill_len:
                running.keep_checkpoints(capture.states, self.budget)
            else:
                to_insert.append((capture, running))
        inserted = [each for each in to_insert if self._insert(*each, cache)]
        for capture, running in inserted:
            whole = capture.retired or capture.end == running.capture_len
            note(running.request, capture.end, whole)

    def _insert(self, capture: Capture, running: RunningSlot, cache: PrefixCache) -> bool:
        """Whether it connects to what the tree holds."""
        request, states = running.request, dict(capture.states)
        if capture.retired:  # a state that it has itself stays behind
            kept = running.checkpoints
            usable = [at for at in kept if at <= capture.end and at not in capture.states]
            states |= running.take_checkpoints(usable, self.budget)
        placements = cache.policy.placements(
            capture.start,
            capture.end,
            prompt_len=running.prefill_len,
            boundaries=request.boundaries,
            branch=running.branch,
        )
        found = cache.insert(
            request.tokens(capture.end),
            capture.start,
            capture.kv,
            states,
            capture.hidden,
            salt=request.salt,
            placements=placements,
        )
        if not found.inserted:
            running.lost_tree(capture.start - found.gap)
            return False
        running.in_tree = max(running.in_tree, capture.end)
        if not capture.retired and capture.end < running.capture_len:
            tip = cache.lock(found)  # the next chunk connects to it
            running.unlock_tip(cache)
            running.tip = tip
        return True
