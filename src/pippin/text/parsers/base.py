"""What every parser of replies offers; how a format of calls is written; what call parsers share.

A call that turns out to be malformed becomes content, exactly as it was written, from where it
began to the error. Reading continues there, so that the next call is found.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pippin.text.lexer import Lexer, Malformed, Marks, Steps
from pippin.text.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
    TextPiece,
    joined,
)

Tool = Mapping[str, Any]  # as clients declare them: {"type": "function", "function": {...}}


class ReplyParser:
    """One reply's text in, its pieces out. Here all of it is content."""

    marks: frozenset[str] = frozenset()  # special tokens in them must reach it as text
    in_reasoning: bool = False  # whether the next text is reasoning, as far as is known

    def feed(self, text: str) -> list[TextPiece]:
        return [Content(text)] if text else []

    def close(self) -> list[TextPiece]:
        """The reply is finished: return what was held back."""
        return []

    def cut(self) -> list[TextPiece]:
        """`max_tokens` cut the reply short. What was held back may be markup, and is dropped."""
        return []

    @property
    def num_held(self) -> int:
        """Characters that have been fed and not been decided upon."""
        return 0


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
        if visible := self._before_space(text):
            is_after_call_only = self.num_complete and not self._has_content
            self._pieces.append(Content(visible.lstrip() if is_after_call_only else visible))
            self._has_content = True

    def reasoning(self, text: str) -> None:
        self._pieces.append(Reasoning(text))

    def framed_reasoning(self, text: str) -> None:
        """White space at the end of reasoning belongs to its marks, which drop it."""
        if visible := self._before_space(text):
            self._pieces.append(Reasoning(visible))

    def _before_space(self, text: str) -> str:
        text = self._space + text
        visible = text.rstrip()
        self._space = text[len(visible) :]
        return visible

    def drop_space(self) -> None:
        self._space = ""

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
        else:
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


@dataclass(frozen=True)
class ReasoningMarks:
    """What stands around reasoning. A chat template may open it, or open and close it, in the
    prompt: then the reply begins inside of it, or behind it."""

    begin: str
    end: str
    # What an answer begins with: a mark, and where the rest of it differs, the mark that ends it.
    headers: tuple[tuple[str, str], ...] = ()
    trailers: tuple[str, ...] = ()  # what it ends with
    # A chat template with one of these writes them; without any here, one with all the marks.
    template_marks: tuple[str, ...] = ()

    def is_open_after(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.begin)

    def last_in(self, begun: str) -> str:
        """The mark that counts at the end of a partial reply; without any, it does not reason."""
        return self.begin if begun.rfind(self.begin) > begun.rfind(self.end) else self.end

    @property
    def marks(self) -> frozenset[str]:
        headers = (mark for header in self.headers for mark in header)
        return frozenset({self.begin, self.end, *headers, *self.trailers} - {""})

    def are_in(self, template: str) -> bool:
        """Whether a chat template writes them."""
        if self.template_marks:
            return any(mark in template for mark in self.template_marks)
        return all(mark in template for mark in (self.end, *(header for header, _ in self.headers)))


NO_REASONING = ReasoningMarks("", "")


# How arguments are written: as JSON; bare between tags; as `a=1, b="x"` with values in JSON; with
# bare keys and with quotes of the format's own.
Style = Literal["json", "tags", "keywords", "bare_keys"]
MARK = re.compile(r"(?:<[^<>{}\s]+>)+|\[[A-Z_]+\]")


@dataclass(eq=False)
class CallFormat:
    """How a family's models write calls, by example: a grammar enforces these texts, and a parser
    reads what lies between the marks in them.

    `calls` shows two calls, and what stands before, between and after them; `call` has `{name}` and
    `{arguments}`; `argument` has `{key}`, `{value}` and, if values say what they are, `{type}`:
    what `types` has for a JSON type. `{number}` is a call's number in the reply, from 0.
    """

    parser_kind: type[CallParser]
    template_marks: tuple[str, ...]  # a chat template with all of them speaks it
    call: str
    calls: str = "{call}{call}"
    argument: str = ""
    types: Mapping[str, str] = field(default_factory=dict)
    quote: str = ""  # around strings, where JSON's quotes are not
    # What is read besides, though no model was taught to write it:
    other_begins: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    other_marks: tuple[str, ...] = ()
    ends_reasoning: bool = False  # whether its first mark, a special token, ends open reasoning
    other_template_marks: tuple[str, ...] = ()  # a template with all of these speaks it too
    tokens: tuple[str, ...] = ()  # and, if its template has no format's marks, a model with these

    def __post_init__(self) -> None:
        # The texts around what differs:
        self.opening, self.separator, self.closing = self.calls.split("{call}")
        self.before_name, _, rest = self.call.partition("{name}")
        self.before_arguments, _, self.after_arguments = rest.partition("{arguments}")
        self.before_key, _, rest = self.argument.partition("{key}")
        self._before_value, _, self.after_value = rest.partition("{value}")
        self.trigger = self.opening or self.before_name  # a reply's first call begins with it
        # The marks in them. Where a section is around all calls, they are read inside of it only.
        self.section: tuple[str, ...] = ()
        if self.parser_kind.has_section and self.opening:
            self.section = (self.opening.strip(), self.closing.strip())
        begins = MARK.findall(self.before_name if self.section else self.trigger)[:1]
        if self.before_name.endswith('="'):  # the name is an attribute: the tag, up to the first
            begins = [self.before_name[: self.before_name.rindex(" ") + 1]]
        in_closing = self.closing and not self.section
        ends = MARK.findall(self.closing if in_closing else self.after_arguments)[-1:]
        self.begins = (*begins, *self.other_begins)  # a call begins with one of them
        self.ends = (*ends, *self.other_ends)  # and ends with one of these, if there are any
        self.first_marks = self.section[:1] or self.begins  # a reply's first call begins with one
        self.next_marks = (*self.begins, *self.section[1:])  # what may follow a call's end
        quotes = (self.quote,) if self.quote else ()
        others = (*self.begins, *self.ends, *self.section, *quotes, *self.other_marks)
        texts = (self.calls, self.call, self.argument)
        self.marks = frozenset({*others, *(m for text in texts for m in MARK.findall(text))})

    def parser(
        self,
        tools: Sequence[Tool] = (),
        new_id: Callable[[], str] | None = None,
        reasoning: ReasoningMarks = NO_REASONING,
        *,
        is_open: bool = False,
    ) -> CallParser:
        return self.parser_kind(self, tools, new_id, reasoning, is_open=is_open)

    def speaks(self, template: str) -> bool:
        return any(
            marks and all(mark in template for mark in marks)
            for marks in (self.template_marks, self.other_template_marks)
        )

    @property
    def style(self) -> Style:
        return self.parser_kind.style

    def before_value(self, type: str = "string") -> str:
        """What stands between a key and a value of this JSON type."""
        written = self.types.get("number" if type == "integer" else type, "")
        return self._before_value.replace("{type}", written)


class CallParser(ReplyParser):
    """Reasoning, if a reply begins with some; then content, with calls in it that begin at a mark.

    White space around the reasoning belongs to its marks. A reply that never closes it has nothing
    else. Some families also put marks around the answer: these are dropped.
    """

    style: ClassVar[Style] = "json"
    has_section: ClassVar[bool] = False

    def __init__(
        self,
        format: CallFormat,
        tools: Sequence[Tool] = (),
        new_id: Callable[[], str] | None = None,
        reasoning: ReasoningMarks = NO_REASONING,
        *,
        is_open: bool = False,
    ) -> None:
        self.format = format
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.marks = format.marks | reasoning.marks
        self.lexer = Lexer()
        self.sink = PieceSink(new_id or self.random_id)
        self.in_reasoning = is_open
        self._reasoning = reasoning
        self._at_start = False  # of the content
        self._is_plain = False  # nothing more is looked for
        self._steps = self.read_reply() if reasoning is NO_REASONING else self._read_all()
        self.read_format()

    def read_format(self) -> None:
        """Find in it what this kind of parser looks for."""

    @staticmethod
    def random_id() -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    def feed(self, text: str) -> list[TextPiece]:
        if self._is_plain:
            return super().feed(text)
        self.lexer.feed(text)
        next(self._steps, None)
        return self.sink.take()

    def close(self) -> list[TextPiece]:
        self.lexer.close()
        next(self._steps, None)
        self.sink.close()
        return self.sink.take()

    def cut(self) -> list[TextPiece]:
        undecided = self.lexer.take_undecided()
        self._steps.close()
        may_be_markup = not self._at_start or self.may_be_call(undecided)
        self.sink.cut(undecided, is_markup=self.in_reasoning or (bool(undecided) and may_be_markup))
        return self.sink.take()

    def may_be_call(self, undecided: str) -> bool:
        """Whether text that a reply begins with, and that was being read as a call, can be one."""
        return True

    @property
    def num_held(self) -> int:
        return self.lexer.num_left + self.sink.num_held

    def attempt(self, call: Callable[[], Steps[None]]) -> Steps[None]:
        """Read a call, or else let all that was taken of it be content."""
        self.lexer.record()
        try:
            yield from call()
        except Malformed:
            self.sink.reject(self.lexer.recorded())
        else:
            self.lexer.recorded()

    def end_call(self) -> None:
        """The call is complete. An error after this does not reject it."""
        self.sink.end_call()
        self.lexer.record()

    def read_start(self) -> Steps[None]:
        """What a reply may begin with, for formats without a first mark."""
        yield from ()

    def read_call(self) -> Steps[None]:
        """One call, from its first mark on."""
        raise NotImplementedError

    def read_reply(self) -> Steps[None]:
        """All behind the reasoning."""
        self._at_start = True
        yield from self.read_start()
        self._at_start = False
        marks = (*self.format.first_marks, *self._reasoning.trailers)
        if not marks:
            self.sink.content(self.lexer.take_undecided())
            self.sink.close()
            self._is_plain = True
            return
        first = Marks.of(*marks)
        while not (yield from self.lexer.ended()):
            if text := (yield from self.lexer.text_before(first)):
                self.sink.content(text)
            elif (yield from self._read_trailer()):
                continue
            elif self.format.section:
                yield from self._read_section()
            else:
                yield from self.attempt(self.read_call)

    def _read_section(self) -> Steps[None]:
        """A section is one only if there is a call in it. Otherwise it is text, like any other."""
        opening, closing = self.format.section

        def read_first() -> Steps[None]:
            yield from self.lexer.expect(opening)
            yield from self.lexer.space()
            yield from self.read_call()

        num_before = self.sink.num_complete
        if not (yield from self.lexer.is_followed(opening, self.format.begins)):
            yield from self.lexer.expect(opening)
            self.sink.content(opening)
            return
        yield from self.attempt(read_first)
        marks = Marks.of(*self.format.begins, closing)
        while not (yield from self.lexer.ended()):
            if text := (yield from self.lexer.text_before(marks)):
                self.sink.content(text)
            elif (yield from self.lexer.accept(closing)):
                if self.sink.num_complete == num_before:
                    self.sink.content(closing)
                return
            else:
                yield from self.attempt(self.read_call)

    # ---- reasoning, and the marks around an answer -------------------------------------------

    def _read_all(self) -> Steps[None]:
        yield from self._read_reasoning()
        yield from self.read_reply()

    def _read_reasoning(self) -> Steps[None]:
        marks = self._reasoning
        space = yield from self.lexer.space()
        if (yield from self.lexer.accept(marks.begin)) or self.in_reasoning:
            yield from self.lexer.space()
            self.in_reasoning = True
            other_ends = self.format.first_marks if self.format.ends_reasoning else ()
            ends = Marks.of(marks.end, *other_ends)
            while text := (yield from self.lexer.text_before(ends)):
                self.sink.framed_reasoning(text)
            self.sink.drop_space()
            self.in_reasoning = False
            if (yield from self.lexer.accept(marks.end)):
                yield from self.lexer.space()
        else:
            self.sink.content(space)
        yield from self._read_answer_header()

    def _read_answer_header(self) -> Steps[None]:
        """Drop what opens an answer. A header that never ends is text."""
        for begin, end in self._reasoning.headers:
            if not (yield from self.lexer.is_next(begin)):
                continue
            self.lexer.record()
            try:
                yield from self.lexer.expect(begin)
                if end:
                    yield from self.lexer.name_before(Marks.of(end, "\n"))
                    yield from self.lexer.expect(end)
            except Malformed:
                self.lexer.rewind()
            else:
                self.lexer.recorded()
                self.sink.drop_space()
                yield from self.lexer.space()
            return

    def _read_trailer(self) -> Steps[bool]:
        """Drop what ends an answer, if one of these or the end follows: it may be text."""
        marks = self._reasoning
        for trailer in marks.trailers:
            if not (yield from self.lexer.is_next(trailer)):
                continue
            headers = (header for header, _ in marks.headers)
            nexts = (*headers, *marks.trailers, *self.format.first_marks)
            if (yield from self.lexer.is_followed(trailer, nexts)):
                yield from self.lexer.expect(trailer)
                self.sink.drop_space()
                yield from self.lexer.space()
                yield from self._read_answer_header()
            else:
                self.sink.content((yield from self.lexer.char()))
            return True
        return False


NO_CALLS = CallFormat(CallParser, (), "")
