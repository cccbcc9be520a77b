"""Turns what a request asks for into a grammar over a model's tokens. Knows no threads, no cache.

Everything that was asked for is enforced: what llguidance cannot enforce, or would only warn of, is
an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits
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
DISOBEYED = "doesn't satisfy the grammar"  # llguidance's words for a token that is not allowed


class CompiledGrammar:
    """A grammar of llguidance's, at one point of one reply."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> CompiledGrammar:
        """The same grammar for another reply; what was computed for one serves both."""
        return CompiledGrammar(self._matcher.deep_copy())

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def fill_mask(self, mask: np.ndarray) -> None:
        assert mask.dtype.name == "int32"
        assert mask.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def forced(self) -> list[int]:
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        # A tokenizer may spell the forced text with a token that is longer than what is forced.
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else []

    def advance(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if not self._matcher.is_error():
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
    return CompiledGrammar(matcher)


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
