"""A reply as blocks, one open at a time: of Messages and Responses. Knows no event of either."""

from __future__ import annotations

from pippin.sequences import SequencePiece
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextPiece


class BlockStream:
    """A dialect names its kinds of blocks, and writes their events: begin, delta, end."""

    TEXT, REASONING = "", ""
    _finish: str | None = None
    _open_kind: str | None = None  # of the open block

    def _begin(self, kind: str) -> bytes:
        raise NotImplementedError

    def _begin_call(self, id: str, name: str) -> bytes:
        raise NotImplementedError

    def _delta(self, text: str) -> bytes:
        raise NotImplementedError

    def _end(self, *, complete: bool = True) -> bytes:
        raise NotImplementedError

    def _end_call(self) -> bytes:
        return self._end()

    def events(self, piece: SequencePiece) -> bytes:
        self._finish = piece.finish
        return b"".join(map(self._part, piece.pieces))

    def _part(self, part: TextPiece) -> bytes:
        match part:
            case Content(text):
                return self._write(self.TEXT, text)
            case Reasoning(text):
                return self._write(self.REASONING, text)
            case CallBegin(_, id, name):
                return self._end() + self._begin_call(id, name)
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd(_, unparsed):
                if unparsed is None:
                    return self._end_call()
                ended = self._end(complete=False)
                if self._finish == "length":  # markup of a call that was cut is no text
                    return ended
                return ended + self._write(self.TEXT, unparsed)

    def _write(self, kind: str, text: str) -> bytes:
        started = b"" if self._open_kind == kind else self._end() + self._begin(kind)
        return started + self._delta(text)
