"""Each request's tokens as a table: what is new in it, and what was computed again. Knows no HTTP.

New are the lines that the conversation's last request did not have, without the assistant's: those
are the server's own words. All else that was computed, the template's marks too, counts as again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agents.forcing_proxy import Exchange

_SHOWN = ("content", "text", "output")  # fields whose strings are in a prompt


def token_table(
    exchanges: Sequence[Exchange], log: str, count: Callable[[str], int]
) -> Iterator[str]:
    """By the server's log; `count`: tokens of a text."""
    entries = (json.loads(line) for line in log.splitlines() if line.startswith("{"))
    facts = {entry["id"]: entry for entry in entries if "prompt_tokens" in entry}
    yield f"  {'request':>8} {'prompt':>7} {'cached':>7} {'computed':>8} {'new':>6} {'again':>6}"
    before: dict[str, Counter[str]] = {}  # lines of each conversation: agents have several
    most = 0
    for number, exchange in enumerate(exchanges, 1):
        if exchange.id not in facts:
            continue
        prompt, cached = (facts[exchange.id][f"{kind}_tokens"] for kind in ("prompt", "cached"))
        lines = Counter(_lines(exchange.sent))
        kind = json.dumps(exchange.sent.get("tools"))
        new = prompt
        if kind in before:
            new = sum(map(count, (lines - before[kind]).elements()))
        before[kind] = lines
        computed = prompt - cached
        again = max(0, computed - new)
        most = max(most, again)
        yield f"  {number:8} {prompt:7,} {cached:7,} {computed:8,} {new:6,} {again:6,}"
    yield f"  at most {most:,} tokens computed again"


def _lines(sent: Mapping[str, Any]) -> Iterator[str]:
    items = sent.get("messages") or sent.get("input")
    for part in (sent.get("system"), sent.get("instructions"), items):
        for text in _texts(part):
            yield from text.splitlines(keepends=True)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict) and not _is_the_models(value):
        for field in _SHOWN:
            yield from _texts(value.get(field))


def _is_the_models(item: Mapping[str, Any]) -> bool:
    return item.get("role") == "assistant" or item.get("type") == "reasoning"
