"""Gathers pieces, numbers calls and drops the white space around them. Knows no format."""

from __future__ import annotations

from collections.abc import Callable

from pippin.text.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
    TextPiece,
    joined,
)


class PieceSink:
    """Pieces of one reply. White space at the end of content is held until the next piece.

    Before a call, and between a call and the end, it belongs to the markup. A reply without calls
    keeps all of it.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._pieces: list[TextPiece] = []
        self._space = ""
        self._space_before_call = ""
        self._has_content = False
        self._in_call = False
        self._held_arguments: list[str] | None = None
        self._num_calls = 0
        self.num_complete = 0  # calls that could be parsed

    @property
    def num_held(self) -> int:
        return len(self._space)

    def take(self) -> list[TextPiece]:
        pieces, self._pieces = joined(self._pieces), []
        return pieces

    def content(self, text: str) -> None:
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        if visible:
            is_after_call_only = self.num_complete and not self._has_content
            self._pieces.append(Content(visible.lstrip() if is_after_call_only else visible))
            self._has_content = True

    def reasoning(self, text: str) -> None:
        self._pieces.append(Reasoning(text))

    def begin_call(self, name: str, id: str | None = None) -> None:
        assert not self._in_call
        self._space_before_call, self._space = self._space, ""
        self._in_call = True
        self._pieces.append(CallBegin(self._num_calls, id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        assert self._in_call
        if self._held_arguments is not None:
            self._held_arguments.append(text)
        elif text:
            self._pieces.append(CallArguments(self._num_calls, text))

    def hold_arguments(self) -> None:
        """Keep those that follow, until they are taken."""
        self._held_arguments = []

    def take_held_arguments(self) -> str:
        held, self._held_arguments = self._held_arguments or [], None
        return "".join(held)

    def end_call(self) -> None:
        self.num_complete += 1
        self._end_call(None)

    def reject(self, text: str) -> None:
        """This text is no call, or not all of one."""
        self._held_arguments = None
        if self._in_call:
            self._end_call(self._space_before_call + text)
        else:
            self.content(text)

    def cut(self, undecided: str, *, is_markup: bool) -> None:
        """The reply was cut short; of a call that has begun, `undecided` is the rest."""
        if self._in_call or not is_markup:
            self.reject(undecided)
        elif self._space:
            self._space = ""  # it stood before the markup
        self.close()

    def close(self) -> None:
        if self._space and not self.num_complete:
            self._pieces.append(Content(self._space))
        self._space = ""

    def _end_call(self, unparsed: str | None) -> None:
        self._pieces.append(CallEnd(self._num_calls, unparsed))
        self._num_calls += 1
        self._in_call = False
