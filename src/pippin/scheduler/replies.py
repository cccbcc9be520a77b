"""Replies that obey a grammar: what their rows may draw, and what is known before it is drawn.

Knows no slots and no bytes. A grammar that raises ends its own request.

    reply:  [ drawn | drawn | forced, forced, forced ]
                        └ the last one that its grammar needed to see

A token that a grammar forces is part of the reply as soon as the one before it is known: clients
have it, and a step may run several such tokens at once. A row that draws at a place whose token is
known draws that token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pippin.backends.base import DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.masks import allow_only, full_masks
from pippin.cache.policy import CheckpointPolicy
from pippin.decode.compile import Grammar, GrammarCompiler, large_stacks
from pippin.errors import PippinError
from pippin.scheduler.memory import Claims
from pippin.scheduler.request import Request, RunningSlot, Stage
from pippin.scheduler.speculation import NO_DRAFT, Draft, Speculation
from pippin.types import GRID, FinishReason, GrammarSpec

Fail = Callable[[Request, Exception], None]  # ends a request with an error
NUM_THREADS = 2  # that follow slow grammars: all of them busy, the next slow one waits for them


@dataclass(frozen=True)
class Followed:
    """What a grammar says of the place behind the last known token."""

    forced: list[int]  # known now: the place is behind them
    finished: bool
    mask: np.ndarray  # int32 [words], packed


@dataclass
class GrammarWork:
    """What requests wait for, one thing at a time.

    A grammar is compiled before its request gets into the queue. A slow one is followed by a
    thread: no step has a row of its reply before its mask is there, so none waits for it.
    """

    compiler: GrammarCompiler | None  # None: requests have no grammars
    vocab_size: int
    on_compiled: Callable[[list[str]], None] = lambda ids: None
    # Of a CompiledGrammar or a Followed.
    pending: dict[Request, Future[Any]] = field(default_factory=dict)
    _threads: ThreadPoolExecutor | None = None

    @property
    def coming(self) -> list[Request]:
        """Those that are not in the queue yet."""
        return [request for request in self.pending if request.phase == "compiling"]

    def compile(self, request: Request, spec: GrammarSpec) -> None:
        assert self.compiler is not None, "this scheduler was made without a compiler"
        request.phase = "compiling"
        self.pending[request] = self.compiler.compile(spec)

    def follow(self, request: Request, tokens: Sequence[int] = ()) -> None:
        """Append `tokens` to what its grammar has followed, and make the mask behind them."""
        assert request.grammar is not None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="follow")
        request.mask, request.followed = None, True
        with large_stacks():  # of a thread that this may start
            self.pending[request] = self._threads.submit(
                _follow, request.grammar, list(tokens), self.vocab_size, request.runs_ahead
            )

    def remove(self, request: Request) -> None:
        future = self.pending.pop(request, None)
        if future is not None and request.followed:  # a grammar may be compiled for others, too
            future.cancel()

    def take_done(self) -> list[tuple[Request, Future[Any]]]:
        """In order of arrival."""
        done = [(request, future) for request, future in self.pending.items() if future.done()]
        for request, _ in done:
            del self.pending[request]
            request.followed = False
        return done

    def wait(self, seconds: float) -> None:
        """Until one is done, where nothing else is to be done."""
        if self.pending:
            wait(self.pending.values(), seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _follow(grammar: Grammar, tokens: Sequence[int], vocab_size: int, runs_ahead: bool) -> Followed:
    """In a thread. The mask is first: it is made without Python's lock, and what is forced is
    cheap to say then."""
    if tokens:
        grammar.advance(tokens)
    mask = full_masks(1, vocab_size)[0]
    if grammar.finished:
        return Followed([], True, mask)
    grammar.fill_mask(mask)
    forced = grammar.forced()
    if forced and not (tokens and runs_ahead):
        allow_only(mask, forced[0])
        return Followed([], False, mask)
    if forced:
        grammar.advance(forced)
        if not grammar.finished:
            grammar.fill_mask(mask)
    return Followed(forced, grammar.finished, mask)


def make_masks(
    plan: StepPlan, owners: Mapping[int, RunningSlot], vocab_size: int, fail: Fail
) -> np.ndarray:
    """What the plan's grammar rows may draw, once every earlier step is committed."""
    masks = full_masks(len(plan.masked_rows), vocab_size)
    for mask, row in zip(masks, plan.masked_rows, strict=True):
        request = owners[row.slot].request
        if row.end < request.num_tokens:
            allow_only(mask, request.token(row.end))
        elif request.mask is not None:
            mask[:] = request.mask
        elif request.running and request.grammar is not None:
            try:
                _fill(mask, request.grammar, request)
            except Exception as error:  # whatever a grammar's library raises
                mask[:] = -1
                fail(request, client_error(error))
    return masks


def _fill(mask: np.ndarray, grammar: Grammar, request: Request) -> None:
    appended = request.runs_ahead and bool(request.output)  # what was forced is in the reply by now
    forced = [] if appended else grammar.forced()
    if forced:
        allow_only(mask, forced[0])
    else:
        grammar.fill_mask(mask)


def append_tokens(
    request: Request, sampled: Sequence[int], *, in_thread: bool = False
) -> tuple[list[int], FinishReason | None]:
    """Append what was sampled, and what the request's grammar forces after it.

    `in_thread`: the grammar is left to a thread.

    Returns these tokens, and why the last of them ends the reply.
    """
    tokens = list(sampled)
    reasons = [request.append(token) for token in tokens]
    assert not any(reasons[:-1]), "no draft is accepted behind the end of a reply"
    reason = reasons[-1]
    grammar = request.grammar
    if grammar is None or in_thread:
        return tokens, reason
    grammar.advance(tokens)
    forced = grammar.forced() if request.runs_ahead and reason is None else []
    known, reason = append_forced(request, forced) if forced else ([], reason)
    tokens += known
    if len(tokens) > len(sampled):
        grammar.advance(tokens[len(sampled) :])
    return tokens, "stop" if reason is None and grammar.finished else reason


def append_forced(request: Request, forced: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Append these up to the reply's end; which, and why it ends."""
    tokens: list[int] = []
    for token in forced:
        tokens.append(token)
        if (reason := request.append(token)) is not None:
            return tokens, reason
    return tokens, None


def client_error(error: BaseException) -> Exception:
    """As a client gets it: our own errors as they are, a library's after what failed."""
    if isinstance(error, PippinError):
        return error
    return PippinError(f"the grammar failed: {str(error) or repr(error)}")


# Whether chunks of these lengths are to be run beside so many streams, their own among them.
PaysOff = Callable[[Sequence[int], int], bool]


@dataclass
class ReplyRows:
    decode: list[DecodeRow] = field(default_factory=list)
    chunks: list[PrefillRow] = field(default_factory=list)
    starved: list[RunningSlot] = field(default_factory=list)  # they have no bytes to grow into


@dataclass(frozen=True)
class ReplyPlanner:
    claims: Claims
    policy: CheckpointPolicy | None  # None: replies are not cached
    has_states: bool  # the model is recurrent: a growing reply leaves checkpoints
    runs_chunks: bool = True  # False: also tokens that are known run one by one
    speculation: Speculation | None = None  # None: no drafts

    def plan(
        self,
        step: int,
        running_slots: Iterable[RunningSlot],
        pays_off: PaysOff,
        *,
        beside_prompts: bool = False,
    ) -> ReplyRows:
        """A row for each reply that goes on. `beside_prompts`: some are in the step, or may be."""
        sampling: dict[RunningSlot, bool] = {}  # of replies that go on: whether they sample
        known: list[RunningSlot] = []
        for running in running_slots:
            if self._samples(running):
                sampling[running] = True
                if running.request.grammar is not None and running.num_known > 1:
                    known.append(running)
            elif self.policy is not None and self.runs_last_token(running):
                sampling[running] = False
        ends = self._chunk_ends(known, len(sampling), pays_off) if known else {}
        drafts: dict[RunningSlot, Draft] = {}
        if self.speculation is not None:
            replying = [running for running, samples in sampling.items() if samples]
            drafts = self.speculation.draft(
                step, replying, len(sampling), beside_prompts=beside_prompts
            )
        rows = ReplyRows()
        for running, samples in sampling.items():
            if running in ends and self._fits(running, ends[running]):
                rows.chunks.append(self._chunk(step, running, ends[running]))
                continue
            draft, end = drafts.get(running, NO_DRAFT), running.row_len + 1
            if draft.depth and not self._fits(running, end + draft.depth):
                draft = NO_DRAFT
            if end <= running.row_tokens or self._fits(running, end):
                rows.decode.append(self._token(step, running, draft, samples))
            elif samples:
                rows.starved.append(running)
            else:
                running.enter(Stage.CLOSED)
        return rows

    def _fits(self, running: RunningSlot, end: int) -> bool:
        return end <= running.row_tokens or self.claims.grow(running, end)

    def _samples(self, running: RunningSlot) -> bool:
        request = running.request
        if request.phase != "decode" or running.stage is not Stage.RUNNING:
            return False
        if request.num_sampled >= request.params.max_tokens:
            return False
        return request.grammar is None or not request.waits_for_mask

    def _token(self, step: int, running: RunningSlot, draft: Draft, samples: bool) -> DecodeRow:
        request, position = running.request, running.row_len
        end = position + 1 + draft.depth
        # Of a reply that has ended the next token to run is drawn once more, if it is not the last.
        samples = samples or (not request.running and end < request.num_tokens)
        running.plan_row(step, end, samples=samples, depth=draft.depth)
        running.num_drafts = draft.num_drafts
        wanted = end - end % GRID
        return DecodeRow(
            running.slot,
            position,
            samples,
            wanted > position and self._keeps_checkpoint(step, running, wanted),
            request.grammar is not None,
            draft.depth,
            draft.proposal,
            draft.num_drafts,
        )

    def _keeps_checkpoint(self, step: int, running: RunningSlot, wanted: int) -> bool:
        """Whether a state is to be kept of a row that grows past `wanted` tokens, and fits.

        It is captured behind the row's input token: at `wanted` if the row has no drafts, or else
        about there.
        """
        if wanted <= running.checkpoint_len or self.policy is None or not self.has_states:
            return False
        if not self.policy.captures_decode(wanted):
            return False
        running.checkpoint_len = wanted
        return self.claims.fit_checkpoint(step, running, wanted)

    # ---- tokens that are known beforehand --------------------------------------------------

    def _chunk_ends(
        self, known: Sequence[RunningSlot], num_streams: int, pays_off: PaysOff
    ) -> dict[RunningSlot, int]:
        ends = {running: self._end_of_known(running) for running in known if self.runs_chunks}
        ends = {running: end for running, end in ends.items() if end > running.row_len + 1}
        lengths = [end - running.row_len for running, end in ends.items()]
        return ends if lengths and pays_off(lengths, num_streams) else {}

    def _end_of_known(self, running: RunningSlot) -> int:
        """A checkpoint is captured by the row of one token that reaches it: stop short of it."""
        end = running.request.num_tokens
        if self.policy is None or not self.has_states:
            return end
        grid = range((running.row_len // GRID + 1) * GRID, end + 1, GRID)
        return next((at - 1 for at in grid if self.policy.captures_decode(at)), end)

    def _chunk(self, step: int, running: RunningSlot, end: int) -> PrefillRow:
        start = running.row_len
        running.plan_row(step, end, samples=True)
        tokens = running.request.tokens(end)[start:]
        return PrefillRow(running.slot, start, tokens, samples=True, masked=True)

    # ---- ends ------------------------------------------------------------------------------

    def runs_last_token(self, running: RunningSlot) -> bool:
        """Whether the end of a reply is still to be run, so that the tree gets all of it.

        Once every sample is planned, the next step can do so before that token is known.
        """
        request = running.request
        if self.policy is None or request.embeds or running.num_left > 0 or running.num_unsure:
            return False
        if running.stage is not Stage.RUNNING:
            return False
        if request.phase == "decode":
            return (
                request.num_sampled >= request.params.max_tokens
                and running.row_len < request.max_total
            )
        return request.completed and not running.tainted and running.row_len < request.num_tokens

    def retire(self, step: int, running: RunningSlot) -> Retire:
        """The row's end; the tree gets what it holds of a reply that ended or is to be resumed."""
        kept = running.request.completed or running.runs
        captures = self.policy is not None and kept and running.is_exact
        row = self.claims.fit_retire(step, running, captures=captures)
        running.retire(row.end)
        return row
