"""Compiles grammars beside the engine's thread, and remembers them. Knows no requests.

Whoever asks gets a future. The same grammar asked for again, also while it is being compiled, is
compiled once; each reply follows a copy of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from pippin.decode.compile import CompiledGrammar, compile_grammar, prove_grammar
from pippin.decode.vocabulary import Vocabulary
from pippin.types import GrammarSpec

REMEMBERED_GRAMMARS = 64
NUM_THREADS = 2  # a large grammar does not hold up a small one


class GrammarCompiler:
    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        """`load_vocabulary` is called once, when the first grammar is compiled or by `load`."""
        self._load_vocabulary = load_vocabulary
        self._vocabulary: Future[Vocabulary] | None = None
        self._compiled: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    def load(self) -> None:
        """Have the vocabulary now: later no other thread would run while it is built.

        Whoever asks for a grammar is told if there can be none.
        """
        wait([self._loading()])

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The grammar before a reply's first token, to be copied; or the error that it is."""
        known = self._compiled.get(spec)
        if known is None:
            loading = self._loading()
            known = self._threads.submit(lambda: self._proven(spec, loading.result()))
            self._compiled[spec] = known
            if len(self._compiled) > REMEMBERED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(spec)
        return known

    def _proven(self, spec: GrammarSpec, vocabulary: Vocabulary) -> CompiledGrammar:
        prove_grammar(spec, vocabulary)
        return compile_grammar(spec, vocabulary)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _loading(self) -> Future[Vocabulary]:
        if self._vocabulary is None:
            self._vocabulary = self._threads.submit(self._load_vocabulary)
        return self._vocabulary
