"""Turns what a request asks for into a grammar over a model's tokens, and remembers it.

Everything that was asked for is enforced: what llguidance cannot enforce, or would only warn of, is
an error that names it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Protocol, TypeVar

import llguidance
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pippin.decode.json_schema import (
    ONE_LINE,
    check_part,
    check_schema,
    closed,
    in_one_line,
    regex_terminal,
)
from pippin.decode.prover import NUM_SERVERS, STACK_BYTES, Prover, Verdict
from pippin.decode.size import check_size
from pippin.errors import RequestError
from pippin.types import GrammarPart, GrammarSpec

if TYPE_CHECKING:
    import numpy as np  # processes that are forked do without its threads


class Grammar(Protocol):
    """Follows one reply. The host must know the last token before the next mask can be made.

    Any of these may raise: then the reply ends with that error, and no other does.
    """

    @property
    def finished(self) -> bool:
        """The reply is whole: nothing can follow but its end."""
        ...

    @property
    def slow(self) -> bool:
        """The next call may take long: a thread makes it, and no step waits. It stays so."""
        ...

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write which tokens are allowed next into `mask`, packed int32 [words]: 1 if allowed.

        An end token is allowed where the reply may end.
        """
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as they are known already; often none."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the reply."""
        ...


SEPARATOR = "\n"  # that tokenizers neither change nor join with a word behind it


class Vocabulary:
    def __init__(
        self,
        tokens: Sequence[bytes],  # by id; empty where nothing is spelled
        *,
        eos_ids: Sequence[int],
        marks: Collection[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """Takes two seconds for 248k tokens, and in half of that no other thread runs."""
        assert eos_ids, "without an end token no reply could end"
        # The attributes that llguidance reads from a tokenizer of another library:
        self.tokens = list(tokens)
        self.special_token_ids = sorted({*marks, *eos_ids})
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self._encode = encode
        self._marks = frozenset(self.special_token_ids)
        self.tokenizer = llguidance.LLTokenizer(self, eos_token=list(eos_ids))  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar forces, as the model would choose them, no marks."""
        spelled = self._encode(text)
        if self._spells(spelled, text):
            return spelled
        # SentencePiece adds a space before the first word of a text; this text continues another.
        spelled = self._encode(SEPARATOR + text)
        for number, token in enumerate(spelled):
            if token < len(self.tokens) and self.tokens[token].endswith(SEPARATOR.encode()):
                if self._spells(rest := spelled[number + 1 :], text):
                    return rest
                break
        return self.tokenizer.greedy_tokenize(text)

    def _spells(self, tokens: Sequence[int], text: str) -> bool:
        if not self._marks.isdisjoint(tokens) or max(tokens, default=0) >= len(self.tokens):
            return False
        return b"".join(self.tokens[token] for token in tokens) == text.encode()


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


# A small grammar is followed between steps until it has become slow. One step of it takes 0.1 s of
# CPU time at most: what a row of the parser takes grows with the square of its items, and it has
# hardly more of them than the grammar has symbols. 20 tools of 8 parameters are small.
SMALL = LLParserLimits(verbose_errors=False, max_grammar_size=1_000, step_max_items=10_000)
LARGE = LLParserLimits(verbose_errors=False)
MAX_SMALL_WORDS = 1_000  # of Lark: the error of a chain of rules that is too large takes seconds
_WORD = re.compile(r"\w+")


@dataclass
class Growth:
    """CPU time of steps that are slow. If a grammar's lexer builds states: some 200 MB a second."""

    seconds: float = 0.0
    is_large: bool = False

    @property
    def is_slow(self) -> bool:
        return self.is_large or self.seconds > MAX_SLOW_SECONDS


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
    source = _source(spec)
    is_large = spec.kind == "ebnf" and len(_WORD.findall(source)) > MAX_SMALL_WORDS
    matcher = None if is_large else _matcher(source, vocabulary, SMALL)
    if matcher is None or matcher.is_error():
        matcher, is_large = _matcher(source, vocabulary, LARGE), True
    complaints = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
    if complaints:
        raise RequestError(f"{spec.kind}: {in_one_line(complaints[0])}", param=spec.kind)
    return CompiledGrammar(matcher, vocabulary.tokenizer, Growth(is_large=is_large))


def _matcher(source: str, vocabulary: Vocabulary, limits: LLParserLimits) -> LLMatcher:
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=SILENT, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # fails if no reply is possible; otherwise llguidance keeps it
    return matcher


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


T = TypeVar("T")
REMEMBERED_GRAMMARS = 64
REMEMBERED_GROWTH = 0.5  # CPU seconds that built lexer states of grammars: some 100 MB
REMEMBERED_REFUSALS = 1024


class GrammarCompiler:
    def __init__(self, load_vocabulary: Callable[[], Vocabulary], prover: Prover) -> None:
        """`load_vocabulary` is called once, when the first grammar is compiled or by `load`."""
        self._load_vocabulary = load_vocabulary
        self._prover = prover
        self._vocabulary: Future[Vocabulary] | None = None
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._compiling: dict[GrammarSpec, Future[CompiledGrammar]] = {}
        self._refused: OrderedDict[bytes, Verdict] = OrderedDict()  # by digest of the grammar
        self._threads = ThreadPoolExecutor(NUM_SERVERS, thread_name_prefix="grammar")

    def start_loading(self) -> None:
        """Build the vocabulary, in a thread. `compile` reports a failure."""
        self._loading()

    def load(self) -> None:
        """Return when the vocabulary is built."""
        wait([self._loading()])

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar before a reply's first token, to be copied; or the error."""
        self.trim()
        if (known := self._compiled.get(spec)) is not None:
            self._compiled.move_to_end(spec)
            return known
        if (known := self._compiling.get(spec)) is None:
            loading = self._loading()
            known = self._compiling[spec] = self._submit(lambda: self._compile(spec, loading))
        return known

    def trim(self) -> None:
        """Move what has been compiled since to `_compiled`; errors evict no grammar. Evict the
        least recently used, by number, and by what their lexers have grown to in replies."""
        for spec, future in list(self._compiling.items()):
            if future.done():
                del self._compiling[spec]
                if future.exception() is None:
                    self._compiled[spec] = future
        growth = sum(future.result().growth.seconds for future in self._compiled.values())
        while len(self._compiled) > REMEMBERED_GRAMMARS or growth > REMEMBERED_GROWTH:
            _, evicted = self._compiled.popitem(last=False)
            growth -= evicted.result().growth.seconds

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._prover.close()

    def _compile(self, spec: GrammarSpec, loading: Future[Vocabulary]) -> CompiledGrammar:
        vocabulary, digest = loading.result(), _digest(spec)
        verdict = self._refused.get(digest) or self._prover.prove(spec)
        if verdict.error is not None and verdict.is_final:
            self._refused[digest] = verdict
            if len(self._refused) > REMEMBERED_REFUSALS:
                self._refused.popitem(last=False)
        verdict.raise_error()
        return compile_grammar(spec, vocabulary)

    def _loading(self) -> Future[Vocabulary]:
        if self._vocabulary is None:
            self._prover.load()  # builds one of its own at the same time
            self._vocabulary = self._submit(self._load_vocabulary)
        return self._vocabulary

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        with large_stacks():  # of a thread that this may start
            return self._threads.submit(work)


@contextmanager
def large_stacks() -> Iterator[None]:
    """What a child compiled on its stack cannot overflow one of twice the size."""
    before = threading.stack_size(2 * STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def _digest(spec: GrammarSpec) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for text in (spec.kind, spec.text, *(t for p in spec.parts for t in (p.syntax, p.text))):
        digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
    return digest.digest()
