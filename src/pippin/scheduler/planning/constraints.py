"""Replies that obey a grammar: what their rows may draw, and what is known before it is drawn.

Knows no slots and no bytes. A grammar that raises ends its own request.

    reply:  [ drawn | drawn | forced, forced, forced ]
                        └ the last one that its grammar needed to see

A token that a grammar forces is part of the reply as soon as the one before it is known: clients
have it, and a step may run several such tokens at once. A row that draws at a place whose token is
known draws that token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np

from pippin.backends.base import StepPlan
from pippin.backends.masks import allow_only, full_masks
from pippin.decode.compile import CompiledGrammar
from pippin.decode.compiler import GrammarCompiler, large_stacks
from pippin.decode.grammar import Grammar
from pippin.errors import PippinError
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.types import FinishReason, GrammarSpec

Fail = Callable[[Request, Exception], None]  # ends a request with an error
NUM_THREADS = 2  # that follow slow grammars: all of them busy, the next slow one waits for them


@dataclass
class Compiling:
    """Requests whose grammars are being compiled: they are not in the queue yet."""

    compiler: GrammarCompiler | None  # None: requests have no grammars
    on_compiled: Callable[[list[str]], None] = lambda ids: None
    num_tokens: int = 0  # of these requests
    _pending: dict[Request, Future[CompiledGrammar]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: Request, spec: GrammarSpec) -> None:
        assert self.compiler is not None, "this scheduler was made without a compiler"
        request.phase = "compiling"
        self._pending[request] = self.compiler.compile(spec)
        self.num_tokens += request.num_queued

    def remove(self, request: Request) -> None:
        if self._pending.pop(request, None) is not None:
            self.num_tokens -= request.num_queued

    def trim(self) -> None:
        """A reply ended: a grammar that has grown with it is forgotten."""
        if self.compiler is not None:
            self.compiler.trim()

    def take_done(self, fail: Fail) -> list[Request]:
        """Those that may start now, in order of arrival; what is no grammar ends its request."""
        done = [request for request, future in self._pending.items() if future.done()]
        ready = []
        for request in done:
            future = self._pending[request]
            if (error := future.exception()) is not None:
                fail(request, client_error(error))
                continue
            self.remove(request)
            request.follow(future.result().copy())
            ready.append(request)
        if ready:
            self.on_compiled([request.id for request in ready])
        return ready

    def wait(self, seconds: float) -> None:
        """Until one is compiled, where nothing else is to be done."""
        if self._pending:
            wait(self._pending.values(), seconds, return_when=FIRST_COMPLETED)


@dataclass(frozen=True)
class Followed:
    """What a grammar says of the place behind the last known token."""

    forced: list[int]  # known now: the place is behind them
    finished: bool
    mask: np.ndarray  # int32 [words], packed


@dataclass
class Following:
    """Replies whose grammars are slow. Threads follow these: no step has a row of such a reply
    before its mask is there, so none waits for it."""

    vocab_size: int
    _pending: dict[Request, Future[Followed]] = field(default_factory=dict)
    _threads: ThreadPoolExecutor | None = None

    @property
    def num_coming(self) -> int:
        """Those that are not in the queue yet."""
        return sum(request.phase == "compiling" for request in self._pending)

    @property
    def num_coming_tokens(self) -> int:
        pending = self._pending
        return sum(request.num_queued for request in pending if request.phase == "compiling")

    def start(self, request: Request, tokens: Sequence[int] = ()) -> None:
        """Append `tokens` to what its grammar has followed, and make the mask behind them."""
        assert request.grammar is not None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="follow")
        request.mask, request.followed = None, True
        with large_stacks():  # of a thread that this may start
            self._pending[request] = self._threads.submit(
                _follow, request.grammar, list(tokens), self.vocab_size, request.runs_ahead
            )

    def remove(self, request: Request) -> None:
        if (future := self._pending.pop(request, None)) is not None:
            future.cancel()

    def take_done(self) -> list[tuple[Request, Future[Followed]]]:
        done = [(request, future) for request, future in self._pending.items() if future.done()]
        for request, _ in done:
            del self._pending[request]
            request.followed = False
        return done

    def wait(self, seconds: float) -> None:
        """Until one is done, where nothing else is to be done."""
        if self._pending:
            wait(self._pending.values(), seconds, return_when=FIRST_COMPLETED)

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
