"""Token ids to pieces of a reply, one step at a time, cut at stop strings.

decoded:   [ visible to the client | may begin a stop string | may be markup | a broken character ]
owner:       caller                  StopMatcher               ReplyParser     decoder

Stop strings are looked for in content alone: not in reasoning, not in a call.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

import msgspec

from pippin.text.parsers.base import ReplyParser
from pippin.text.pieces import Content, TextPiece, content_of, joined
from pippin.text.tokenizer import Tokenizer


class TokenSpan(msgspec.Struct, frozen=True, gc=False):
    """Where one token's text lies in the reply, in characters, markup and all.

    The tokens that share one character all span it.
    """

    index: int  # 0 is the reply's first token
    id: int
    start: int
    end: int


class TokenSpans:
    """Tokens in as they are decoded, their spans out once their text has been shown in full."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_decoded = 0  # characters
        self._num_shown = 0
        self._unfinished: list[tuple[int, int, int]] = []  # (index, id, start): no end yet
        self._waiting: deque[TokenSpan] = deque()  # decoded, not shown in full

    def add(self, token: int, text: str, *, unfinished: bool) -> None:
        """A token and the text that it adds. `unfinished`: a character goes on in the next one."""
        index, start = self._num_tokens, self._num_decoded
        self._num_tokens += 1
        self.finish_character(text)
        if unfinished:
            self._unfinished.append((index, token, start))
        else:
            self._waiting.append(TokenSpan(index, token, start, self._num_decoded))

    def finish_character(self, text: str) -> None:
        """New text ends the character that earlier tokens began: now their spans are known."""
        if text:
            self._end_all(self._num_decoded + 1)
        self._num_decoded += len(text)

    def close(self) -> None:
        """No more tokens are added."""
        self._end_all(self._num_decoded)

    def show_all_but(self, num_chars: int) -> None:
        """So many characters of what was decoded are held back, or were cut off."""
        self._num_shown = self._num_decoded - num_chars

    def take_shown(self) -> list[TokenSpan]:
        spans = []
        while self._waiting and self._waiting[0].end <= self._num_shown:
            spans.append(self._waiting.popleft())
        return spans

    def take_before_cut(self) -> list[TokenSpan]:
        """A token cut in two was still needed for the text before the cut."""
        spans = [span for span in self._waiting if span.start < self._num_shown]
        self._waiting.clear()
        return spans

    def _end_all(self, end: int) -> None:
        if self._unfinished:
            self._waiting.extend(TokenSpan(i, id, start, end) for i, id, start in self._unfinished)
            self._unfinished.clear()


class StopMatcher:
    """Shows text up to a stop string, holding back whatever might be the beginning of one.

    The stop string that is complete first wins, and of those the longest, so the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop before the first character"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._held = ""
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str:
        """The text that may now be shown."""
        if self.matched is not None:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """No more text will come: what was held back is not a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Characters at the end of `text` with which some stop string begins."""
        for num in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-num:]) for stop in self._stops):
                return num
        return 0


REPLACEMENT = "\ufffd"
MAX_UNFINISHED_TOKENS = 8  # a character is at most four bytes; past this it will never finish


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """What may now be shown, and the tokens whose text has been shown in full."""

    pieces: list[TextPiece]
    spans: list[TokenSpan] = []  # unless they are wanted, none

    @property
    def text(self) -> str:
        """The content in it."""
        return content_of(self.pieces)


class _ByteDecoder:
    """For tokens that are runs of bytes: exact, and as cheap as one dictionary lookup."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tail = b""

    @property
    def unfinished(self) -> bool:
        return bool(self._tail)

    def push(self, token: int) -> str:
        data = self._tail + self._tokenizer.token_bytes(token)
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[num_used:]
        return text

    def flush(self) -> str:
        text, self._tail = self._tail.decode(errors="replace"), b""
        return text


class _WindowDecoder:
    """For any other tokenizer: decode a short window twice and take what the new tokens add."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens of the last text shown: they decide on spaces
        self._new: list[int] = []

    @property
    def unfinished(self) -> bool:
        return bool(self._new)

    def push(self, token: int) -> str:
        self._new.append(token)
        text = self._added_text()
        broken = text.endswith(REPLACEMENT) and len(self._new) < MAX_UNFINISHED_TOKENS
        return "" if broken or not text else self._show(text)

    def flush(self) -> str:
        return self._show(self._added_text())

    def _added_text(self) -> str:
        shown = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._new)[len(shown) :]

    def _show(self, text: str) -> str:
        self._context, self._new = self._new, []
        return text


class Detokenizer:
    """One reply's text. Feed tokens until `stopped`, or until there are none and `close` it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        parser: ReplyParser | None = None,
        min_tokens: int = 0,
        show_special: bool = False,
        with_spans: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser or ReplyParser()
        self._shows_special = show_special
        decoder = _ByteDecoder if tokenizer.spells_bytes else _WindowDecoder
        self._decoder = decoder(tokenizer)
        self._matcher = StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self.num_tokens = 0  # decoded; fewer than were fed if a stop string cut them off
        self.num_reasoning_tokens = 0  # of these
        self._spans = TokenSpans() if with_spans else None
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        """The one that ended the reply, if one did."""
        return None if self._matcher is None else self._matcher.matched

    def feed(self, ids: Sequence[int]) -> Decoded:
        """Decode new tokens; those after a stop string are dropped."""
        shown: list[TextPiece] = []
        parser, spans = self._parser, self._spans
        passes = spans is None and self._matcher is None
        for token in ids:
            if self.stopped:
                break
            self.num_tokens += 1
            is_hidden = token in self._tokenizer.special_ids and not self._shows_special
            text = self._mark(token) if is_hidden else self._decoder.push(token)
            if spans is not None:
                spans.add(token, text, unfinished=self._decoder.unfinished)
            was_reasoning = parser.in_reasoning
            pieces = parser.feed(text)
            self.num_reasoning_tokens += was_reasoning or parser.in_reasoning
            shown += pieces if passes else self._show(pieces)
        return self._decoded(shown)

    def close(self, *, is_cut: bool = False) -> Decoded:
        """The reply is finished, or `max_tokens` cut it short: return what was held back."""
        if self.stopped:
            return Decoded([])
        text = self._decoder.flush()
        if self._spans is not None:
            self._spans.finish_character(text)
            self._spans.close()
        end = self._parser.cut if is_cut else self._parser.close
        shown = self._show([*self._parser.feed(text), *end()])
        if not self.stopped:
            shown += self._release()
            if self._spans is not None:
                self._spans.show_all_but(0)
        return self._decoded(shown)

    def _decoded(self, shown: list[TextPiece]) -> Decoded:
        if self._spans is None:
            return Decoded(joined(shown))
        spans = self._spans.take_before_cut() if self.stopped else self._spans.take_shown()
        return Decoded(joined(shown), spans)

    def _mark(self, token: int) -> str:
        """A special token is text only if it is a mark of the parser's."""
        mark = self._tokenizer.token_text(token)
        if not any(mark in known for known in self._parser.marks):
            return ""
        return self._decoder.flush() + mark

    def _show(self, pieces: list[TextPiece]) -> list[TextPiece]:
        """Those of the parser's pieces, or parts of them, that no stop string can cut."""
        shown, num_held = (pieces, 0) if self._matcher is None else self._match(pieces)
        if self._spans is not None:
            self._spans.show_all_but(self._parser.num_held + num_held)
        return shown

    def _match(self, pieces: list[TextPiece]) -> tuple[list[TextPiece], int]:
        """What may be shown, and the number of characters held back or cut off."""
        assert self._matcher is not None
        shown: list[TextPiece] = []
        for piece in pieces:
            if self.num_tokens <= self._min_tokens:
                shown.append(piece)
            elif isinstance(piece, Content):
                num_fed = self._matcher.num_held + len(piece.text)
                text = self._matcher.feed(piece.text)
                shown += [Content(text)] if text else []
                if self._matcher.matched is not None:
                    self.stopped = True
                    return shown, num_fed - len(text)
            else:  # a stop string does not reach across a call
                shown += [*self._release(), piece]
        return shown, self._matcher.num_held

    def _release(self) -> list[TextPiece]:
        """What was held back is not a stop string after all."""
        held = "" if self._matcher is None else self._matcher.flush()
        return [Content(held)] if held else []
