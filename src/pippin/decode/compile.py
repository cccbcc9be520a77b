"""Turns what a request asks for into a grammar over a model's tokens. Knows no threads, no cache.

Everything that was asked for is enforced: what llguidance cannot enforce, or would only warn of, is
an error that names it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pippin.decode.closed_objects import closed
from pippin.decode.expressions import check_part, in_one_line, regex_terminal
from pippin.decode.json_schema import ONE_LINE, check_schema
from pippin.decode.size.check_size import check_size
from pippin.decode.vocabulary import Vocabulary
from pippin.errors import RequestError
from pippin.types import GrammarPart, GrammarSpec

if TYPE_CHECKING:
    import numpy as np  # processes that are forked do without its threads

SILENT = 0
NO_GRAMMAR = "("  # a matcher of it has failed, and follows nothing
NUM_EXECUTORS = 2
DISOBEYED = "doesn't satisfy the grammar"  # llguidance's words for a token that is not allowed
# CPU time that following a grammar may take in one reply. An ambiguous grammar takes longer the
# longer the reply is.
FREE_SECONDS = 1.0
TOKEN_SECONDS = 0.002
SLOW_SECONDS = 0.001  # a step that takes longer builds states, which all copies keep
# Of steps that take longer, beyond that: then a thread follows the grammar. Copies of it wait for
# each other (they have one lexer), so all of them are slow, and stay so.
MAX_SLOW_SECONDS = 0.03


@dataclass
class Growth:
    """CPU time of steps that are slow. If a grammar's lexer builds states: some 200 MB a second."""

    seconds: float = 0.0

    @property
    def is_slow(self) -> bool:
        return self.seconds > MAX_SLOW_SECONDS


class CompiledGrammar:
    """A grammar of llguidance's, at one point of one reply."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, growth: Growth | None = None
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._spent = 0.0  # CPU seconds
        self._mask_seconds = 0.0  # of the last mask
        self._num_tokens = 0
        self.growth = Growth() if growth is None else growth  # of all copies

    def copy(self) -> CompiledGrammar:
        """The same grammar for another reply; what was computed for one serves both."""
        return CompiledGrammar(self._matcher.deep_copy(), self._tokenizer, self.growth)

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def slow(self) -> bool:
        return self.growth.is_slow

    def fill_mask(self, mask: np.ndarray) -> None:
        assert mask.dtype.name == "int32"
        assert mask.flags.c_contiguous
        began = thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._mask_seconds = thread_time() - began
        self._check(self._mask_seconds)

    def forced(self) -> list[int]:
        began = thread_time()
        tokens = self._matcher.compute_ff_tokens()
        self._check(thread_time() - began)
        # A tokenizer may spell the forced text with a token that is longer than what is forced.
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else []

    def advance(self, tokens: Sequence[int]) -> None:
        """The mask before has tried these tokens, so this takes no longer than it did."""
        self._num_tokens += len(tokens)
        if not self.slow:
            self._matcher.consume_tokens(list(tokens))
            self._check(0.0)
            return
        began = perf_counter()
        self._consume_unlocked(tokens)
        self._check(min(perf_counter() - began, self._mask_seconds))

    def _consume_unlocked(self, tokens: Sequence[int]) -> None:
        """Without Python's lock, which llguidance releases where it follows several matchers. A
        thread of its own does it, whose CPU time is not known."""
        idle = LLMatcher(self._tokenizer, NO_GRAMMAR, log_level=SILENT)
        for token in tokens:
            _executor().consume_token_par([(self._matcher, token), (idle, token)])

    def _check(self, seconds: float) -> None:
        """Raise if the last call failed, or if the reply has no CPU time left for what it took."""
        self._spent += seconds
        self.growth.seconds += max(0.0, seconds - SLOW_SECONDS)
        if not self._matcher.is_error():
            if self._spent > FREE_SECONDS + TOKEN_SECONDS * self._num_tokens:
                raise RequestError(
                    f"the grammar is too complex: to follow it for {self._num_tokens:,} tokens "
                    f"took {self._spent:.1f} s of CPU time; the limit is {FREE_SECONDS:g} s and "
                    f"{TOKEN_SECONDS * 1000:g} ms a token. Make it less ambiguous"
                )
            return
        message = in_one_line(self._matcher.get_error())
        if DISOBEYED in message:
            raise RuntimeError(message)
        # Some grammars turn out to be more than llguidance can follow only within a reply.
        raise RequestError(f"the grammar is too complex: {message}")


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
    """The grammar before a reply's first token. Raises an error for the client."""
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary.tokenizer, _source(spec), log_level=SILENT, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # fails if no reply is possible; otherwise llguidance keeps it
    complaints = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if complaints:
        raise RequestError(f"{spec.kind}: {in_one_line(complaints[0])}", param=spec.kind)
    return CompiledGrammar(matcher, vocabulary.tokenizer)


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads=NUM_EXECUTORS)


def prove_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> None:
    """Raises if a client's grammar is wrong, or exceeds a limit.

    It may also exhaust the stack or the memory, or never return: run it in a process of its own.
    """
    check_size(spec)
    for part in spec.parts:
        check_part(part)
    if spec.kind == "regex":
        check_part(GrammarPart("regex", spec.text, "regex"))
    compile_grammar(spec, vocabulary)


def _source(spec: GrammarSpec) -> str:
    match spec.kind:
        case "json_schema":
            schema = json.dumps(closed(check_schema(spec.text)))
            return LLMatcher.grammar_from_json_schema(schema, overrides=ONE_LINE)
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: {regex_terminal(spec.text)}")
        case "ebnf":
            return LLMatcher.grammar_from_lark(_as_lark(spec.text))


def _as_lark(text: str) -> str:
    """llama.cpp's GBNF, which SGLang's `ebnf` is too, or Lark as it is."""
    try:
        return any_to_lark(text)
    except Exception as error:  # it raises bare ones for what a user wrote
        raise RequestError(f"ebnf: {error}", param="ebnf") from error
