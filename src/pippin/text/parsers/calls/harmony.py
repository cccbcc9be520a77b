"""Harmony (gpt-oss): messages on channels, where other formats have text with calls in it.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

Analysis is reasoning, final and commentary are content; a message `to=functions.f` is a call. A
reply begins in a message's header: the prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, CALL, END, RETURN = "<|constrain|>", "<|call|>", "<|end|>", "<|return|>"
_ALL = (START, CHANNEL, MESSAGE, CONSTRAIN, CALL, END, RETURN)
ANALYSIS, COMMENTARY, FINAL = (
    f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final")
)
REPLY_BEGINS = f"{START}assistant"  # as the prompt ends
NEXT_MESSAGE = f"{END}{START}assistant"
_MARKS = Marks.of(*_ALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(\S+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyParser(JsonCallParser):
    begins = (START, CHANNEL)
    other_marks = _ALL
    ends = (CALL, END)
    next_marks = (START,)
    syntax = CallSyntax(
        before_name="<|channel|>commentary to=functions.",
        before_arguments=" <|constrain|>json<|message|>",
        after_arguments="<|call|>",
        separator="<|start|>assistant",
        arguments=JsonArguments(),
    )

    def read_reply(self) -> Steps[None]:
        if (yield from self.lexer.is_next(" to=")):
            yield from self.attempt(self.read_call)
        while not (yield from self.lexer.ended()):
            if text := (yield from self.lexer.text_before(_MARKS)):
                self.sink.content(text)
            elif (yield from self.lexer.is_next(START)) or (yield from self.lexer.is_next(CHANNEL)):
                yield from self.attempt(self.read_call)
            else:
                yield from self.lexer.accept_any(_ALL)  # the end of a message

    def read_call(self) -> Steps[None]:
        """One message, whatever it is."""
        header = yield from self._read_header()
        if recipient := _RECIPIENT.search(header):
            yield from self.lexer.space()
            yield from self.json.call_arguments(recipient[1])
            self.end_call()
            return
        self.lexer.record()  # the header is no text
        channel = _CHANNEL.search(header)
        self.in_reasoning = channel is not None and channel[1] == "analysis"
        while text := (yield from self.lexer.text_before(_MARKS)):
            (self.sink.reasoning if self.in_reasoning else self.sink.content)(text)
            self.lexer.record()
        self.in_reasoning = False

    def _read_header(self) -> Steps[str]:
        yield from self.lexer.accept(START)
        header = ""
        while not (yield from self.lexer.accept(MESSAGE)):
            if text := (yield from self.lexer.text_before(_MARKS)):
                header += text
            elif mark := (yield from self.lexer.accept_any((CHANNEL, CONSTRAIN))):
                header += " " + mark
            else:
                raise Malformed
        return header
