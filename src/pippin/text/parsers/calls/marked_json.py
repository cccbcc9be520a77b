"""JSON calls between two marks, one class of data for each family. Knows no other syntax.

BEGIN {"name": "f", "arguments": {...}} END, or BEGIN [{...}, {...}] END. Every family is read in
all of these ways; `syntax` says in which one its models were taught to write.
"""

from __future__ import annotations

from pippin.text.lexer import Malformed, Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments


def _objects(
    opening: str,
    closing: str,
    *,
    separator: str = ", ",
    before_name: str = '{"name": "',
    before_arguments: str = '", "arguments": ',
) -> CallSyntax:
    """All calls of a reply between one pair of marks."""
    return CallSyntax(
        opening=opening,
        before_name=before_name,
        before_arguments=before_arguments,
        after_arguments="}",
        separator=separator,
        closing=closing,
        arguments=JsonArguments(),
    )


class MarkedJsonParser(JsonCallParser):
    """A family has `begins`, `ends` and `syntax`, and the keys of its objects where they differ."""

    @property
    def next_marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.begins

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept_any(self.begins)
        yield from self.lexer.space()
        yield from self.lexer.accept("[")
        while True:
            yield from self.lexer.space()
            yield from self.read_object()
            yield from self.lexer.space()
            while (yield from self.lexer.accept("}")):  # one too many is a common slip
                yield from self.lexer.space()
            if not (yield from self.lexer.accept(",")) and (yield from self.lexer.peek()) != "{":
                break
        yield from self.lexer.accept("]")
        yield from self.lexer.space()
        yield from self.lexer.accept_any(self.ends)

    def read_object(self) -> Steps[None]:
        yield from self.object_call()


class HermesParser(MarkedJsonParser):
    begins, ends = ("<tool_call>",), ("</tool_call>",)
    syntax = CallSyntax(
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}\n</tool_call>",
        separator="\n",
        arguments=JsonArguments(),
    )


class MiniMaxM1Parser(MarkedJsonParser):
    begins, ends = ("<tool_calls>",), ("</tool_calls>",)
    syntax = _objects("<tool_calls>\n", "\n</tool_calls>", separator="\n")


class JambaParser(MarkedJsonParser):
    begins, ends = ("<tool_calls>",), ("</tool_calls>",)
    syntax = _objects("<tool_calls>[", "]</tool_calls>")


class NemotronHParser(MarkedJsonParser):
    begins, ends = ("<TOOLCALL>",), ("</TOOLCALL>",)
    syntax = _objects("<TOOLCALL>[", "]</TOOLCALL>")


class Granite3Parser(MarkedJsonParser):
    begins = ("<|tool_call|>", "<tool_call>")
    syntax = _objects("<|tool_call|>[", "]")


class Phi4MiniParser(MarkedJsonParser):
    begins, ends = ("functools", "<|tool_call|>"), ("<|/tool_call|>",)
    syntax = _objects("functools[", "]")


class CohereParser(MarkedJsonParser):
    begins, ends = ("<|START_ACTION|>",), ("<|END_ACTION|>",)
    name_keys = ("tool_name",)
    arguments_keys = ("parameters",)
    ends_reasoning = True
    syntax = _objects(
        "<|START_ACTION|>[\n    ",
        "\n]<|END_ACTION|>",
        separator=",\n    ",
        before_name='{"tool_call_id": "{number}", "tool_name": "',
        before_arguments='", "parameters": ',
    )


class ApertusParser(MarkedJsonParser):
    """The name is the key: `{"f": {...}}`."""

    begins, ends = ("<|tools_prefix|>",), ("<|tools_suffix|>",)
    ends_reasoning = True
    syntax = _objects(
        "<|tools_prefix|>[", "]<|tools_suffix|>", before_name='{"', before_arguments='": '
    )

    def read_object(self) -> Steps[None]:
        yield from self.lexer.expect("{")
        yield from self.lexer.space()
        name = yield from self.json.string()
        if not name:
            raise Malformed
        yield from self.lexer.space()
        yield from self.lexer.expect(":")
        yield from self.lexer.space()
        yield from self.json.call_arguments(name)
        yield from self.lexer.space()
        yield from self.lexer.accept("}")
        self.end_call()
