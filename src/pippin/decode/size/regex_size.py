"""How large a regular expression is. Knows no grammar around it."""

from __future__ import annotations

import re

from pippin.decode.size.groups import Groups
from pippin.decode.size.size_limits import (
    MAX_ALTERNATIVES,
    MAX_EXPANSION,
    check_limit,
)

# Nothing here looks twice at the same characters: what is never closed reaches to the end.
_TOKENS = re.compile(
    r"(?P<plain>[^\\\[(){}*+?|]+)"
    r"|(?P<one>\\(?:[pPx]\{[^}]{0,64}\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]?)"
    r"|(?P<open>\((?:\?(?:P?<\w{1,64}>|[a-zA-Z-]{0,16}:))?)"
    r"|(?P<close>\))"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}"
    r"|(?P<bar>\|)"
    r"|[*+?{}\\]",
    re.DOTALL,
)


def check_regex_size(regex: str) -> None:
    groups, num_bars = Groups(), 0
    for token in _TOKENS.finditer(regex):
        match token.lastgroup:
            case "plain":
                length = len(token[0])
                if length > 1:
                    groups.add(size=length - 1)
                groups.add()  # what a repetition behind it repeats
            case "one":
                groups.add()
            case "open":
                groups.open()
            case "close":
                groups.close()
            case "least" | "most":
                groups.repeat(token["most"] or token["least"])
            case "bar":
                num_bars += 1
    check_limit("alternatives", num_bars + 1, MAX_ALTERNATIVES)
    expanded = sum(size for _, size in groups.written_out())
    check_limit("characters, with repetitions written out", expanded, MAX_EXPANSION)
