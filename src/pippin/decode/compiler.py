"""Compiles grammars beside the engine's thread, and remembers them. Knows no requests.

`compile` returns a future. A grammar is compiled once, also if it is asked for again meanwhile;
each reply follows a copy of its own. A child process has compiled every grammar before, on a
smaller stack.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from pippin.decode.compile import CompiledGrammar, compile_grammar
from pippin.decode.proving.prover import Proves
from pippin.decode.proving.verdicts import STACK_BYTES, Verdict
from pippin.decode.vocabulary import Vocabulary
from pippin.types import GrammarSpec

T = TypeVar("T")
REMEMBERED_GRAMMARS = 64
REMEMBERED_GROWTH = 0.5  # CPU seconds that built lexer states of grammars: some 100 MB
REMEMBERED_REFUSALS = 1024
NUM_THREADS = 2  # a large grammar does not hold up a small one


class GrammarCompiler:
    def __init__(self, load_vocabulary: Callable[[], Vocabulary], prover: Proves) -> None:
        """`load_vocabulary` is called once, when the first grammar is compiled or by `load`."""
        self._load_vocabulary = load_vocabulary
        self._prover = prover
        self._vocabulary: Future[Vocabulary] | None = None
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._compiling: dict[GrammarSpec, Future[CompiledGrammar]] = {}
        self._refused: OrderedDict[bytes, Verdict] = OrderedDict()  # by digest of the grammar
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

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
