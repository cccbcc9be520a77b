"""Expressions that users write, checked before they become part of a grammar. Knows no tokens.

A text that is a grammar by itself cannot end the one around it early, or add rules to it.
"""

from __future__ import annotations

from llguidance import LLMatcher, regex_to_lark

from pippin.errors import RequestError
from pippin.types import GrammarPart

ASCII_CLASSES = "dw"  # digits and word characters are those of ASCII, as in a schema's patterns
MAX_MESSAGE_CHARS = 500


def regex_terminal(regex: str) -> str:
    """A regular expression as Lark writes it."""
    return f"/(?:{regex_to_lark(regex, ASCII_CLASSES)})/"


def _bare_terminal(regex: str) -> str:
    """Without the group around it, which `a)|(b` would close."""
    return f"/{regex_to_lark(regex, ASCII_CLASSES)}/" if regex else regex_terminal(regex)


def check_part(part: GrammarPart) -> None:
    """Raises if it is no grammar by itself. Compiles it: call it in a child process only."""
    lark = part.text if part.syntax == "lark" else f"start: {_bare_terminal(part.text)}"
    _, complaints = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(lark))
    if complaints:
        raise RequestError(f"{part.field}: {in_one_line(complaints[0])}", param=part.field)


def in_one_line(message: str) -> str:
    """A message of llguidance's, for an error."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").splitlines())
    text = " ".join(line for line in lines if line)[:MAX_MESSAGE_CHARS]
    return "no reply can match it" if text == "NoExtensionBias" else text  # all that it reports
