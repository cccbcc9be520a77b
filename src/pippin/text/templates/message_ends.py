"""Where messages end in a rendered chat, found by rendering parts of it. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pippin.text.templates.message_shape import Message, Render, Tools, try_render

_PROBE: Message = {"role": "user", "content": "\ue000"}  # a letter that no message begins with


class MessageEnds:
    """`find` is called with ascending numbers of messages."""

    def __init__(
        self, render: Render, text: str, messages: Sequence[Message], tools: Tools | None
    ) -> None:
        self._render = render
        self._text = text
        self._messages = messages
        self._tools = tools
        self._last_end = 0

    def find(self, num_messages: int) -> int | None:
        """Where the first `num_messages` end, in characters; None where that is not known."""
        end = self._find(self._messages[:num_messages])
        self._last_end = max(self._last_end, end or 0)
        return end

    def _find(self, head: Sequence[Message]) -> int | None:
        """Some templates refuse a chat without a user message, and some write the last message in
        another way. So the second attempt adds a user message and removes it again. If that fails
        too, the result is the longest beginning that they share with the whole chat.
        """
        alone = try_render(self._render, head, self._tools) if head else None
        if alone is not None and self._text.startswith(alone):
            return len(alone)
        with_probe = try_render(self._render, [*head, _PROBE], self._tools)
        if with_probe is not None and self._probe and with_probe.endswith(self._probe):
            before_probe = with_probe.removesuffix(self._probe)
            if self._text.startswith(before_probe):
                return len(before_probe)
        renders = [render for render in (alone, with_probe) if render is not None]
        shared = max((_shared_len(self._text, render) for render in renders), default=0)
        return shared if shared > self._last_end else None

    @cached_property
    def _probe(self) -> str | None:
        """Without tools: they belong to the messages before it."""
        return try_render(self._render, [_PROBE], None)


def _shared_len(one: str, other: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
