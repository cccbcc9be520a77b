"""Expressions that users write, checked before they become part of a grammar. Knows no tokens.

A text that is a grammar by itself cannot end the one around it early, or add rules to it.
"""

from __future__ import annotations

from llguidance import LLMatcher, regex_to_lark

from pippin.errors import RequestError

ASCII_CLASSES = "dw"  # digits and word characters are those of ASCII, as in a schema's patterns
MAX_MESSAGE_CHARS = 500


def regex_terminal(regex: str) -> str:
    """A regular expression as Lark writes it."""
    return f"/(?:{regex_to_lark(regex, ASCII_CLASSES)})/"


def check_regex(regex: str, param: str) -> None:
    _check(f"start: {regex_terminal(regex)}", param)


def check_lark(text: str, param: str) -> None:
    _check(text, param)


def _check(lark: str, param: str) -> None:
    _, complaints = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(lark))
    if complaints:
        raise RequestError(f"{param}: {in_one_line(complaints[0])}", param=param)


def in_one_line(message: str) -> str:
    """What llguidance says, fit for an error."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").splitlines())
    return " ".join(line for line in lines if line)[:MAX_MESSAGE_CHARS]
