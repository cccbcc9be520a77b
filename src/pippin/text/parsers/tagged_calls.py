"""Calls whose arguments stand bare between tags, converted to a JSON object.

A string is passed on as it arrives, any other value when it is complete and its type is known. Bare
text may contain the tags that end it. So a tag ends a value only if what follows it continues the
format; elsewhere it is text.
"""

from __future__ import annotations

import html
import json
import re

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import CallParser
from pippin.text.parsers.json_calls import JsonReader
from pippin.text.parsers.schema_types import argument_types, as_json, escaped

STRING = frozenset({"string"})
MAX_ATTRIBUTES = 8  # of one tag


class TaggedCallParser(CallParser):
    style = "tags"
    # Where a value also ends if its tag is missing: (what stands there, what must follow that).
    implied_ends: tuple[tuple[str, tuple[str, ...]], ...] = ()
    pads_values = False  # a line break before and one after each value are not part of it
    quote: tuple[str, str] | None = None  # around some values

    def read_format(self) -> None:
        format = self.format
        ends = format.after_arguments.split()
        self.call_end = ends[-1]
        self.value_end = format.after_value.strip()
        # A tag's beginning; its key, where that is an attribute, may stand behind others.
        self.parameter = re.sub(r'\w+="$', "", format.before_key)
        self.after_value = (self.parameter, *ends)

    def begin_call(self, name: str) -> None:
        """A function's name was read. It is passed on with its first argument, or its end."""
        self._name = name
        self._num_arguments = 0

    def types_of(self, key: str) -> frozenset[str]:
        """Those that the tool's schema has for an argument."""
        return argument_types(self.tools.get(self._name), key)

    def finish_call(self) -> None:
        if not self._num_arguments:
            self.sink.begin_call(self._name)
        self.sink.arguments("}" if self._num_arguments else "{}")
        self.end_call()

    def argument(self, key: str, types: frozenset[str]) -> Steps[None]:
        """A value, up to and with its end tag."""
        if not self._num_arguments:
            self.sink.begin_call(self._name)
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self.sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        end = self.value_end
        if self.quote is not None and (yield from self.lexer.accept(self.quote[0])):
            end = self.quote[1] + end
        if types == STRING:
            self.sink.arguments('"')
        value, at_start = "", True
        while (text := (yield from self._value_text(end))) is not None:
            value += text.removeprefix("\n") if at_start and self.pads_values else text
            at_start = at_start and not text
            if types == STRING:
                held = "\n" if self.pads_values and value.endswith("\n") else ""
                shown, value = value.removesuffix(held), held
                self.sink.arguments(escaped(shown))
        value = value.removesuffix("\n") if self.pads_values else value
        self.sink.arguments('"' if types == STRING else as_json(value, types))

    def _value_text(self, end: str) -> Steps[str | None]:
        """The next part of a value; None once its end has been taken."""
        ends = Marks.of(end, self.call_end, *(mark for mark, _ in self.implied_ends))
        if text := (yield from self.lexer.text_before(ends)):
            return self.lexer.without_cut_mark(text, ends)
        if (yield from self.lexer.is_followed(end, self.after_value)):
            yield from self.lexer.expect(end)
            return None
        for mark, nexts in self.implied_ends:
            if (yield from self.lexer.is_followed(mark, nexts)):
                return None
        if (yield from self.lexer.is_followed(self.call_end, self.format.next_marks)):
            raise Malformed
        return (yield from self.lexer.char())  # only text, or Malformed at the end


class TagCallParser(TaggedCallParser):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>...</arg_value></tool_call>` (GLM), or wrapped:
    `<tool_call><function=f><parameter=a>...</parameter></function></tool_call>` (Qwen).

    Models at times leave the wrapper out, or the end of a parameter in it, or they write a JSON
    object instead (LongCat): all are read.
    """

    def read_format(self) -> None:
        super().read_format()
        format = self.format
        *wrapper, self._function = format.before_name.split()
        self._wrapper = wrapper[0] if wrapper else ""
        self._name_end = format.before_arguments.strip()
        self._function_end = format.after_arguments.split()[0]
        self._key_end, *value_begin = format.before_value().replace("><", "> <").split()
        self._value_begin = value_begin[0] if value_begin else ""
        self.pads_values = format.after_value.startswith("\n")
        self._after_name = Marks.of(self.parameter, self.call_end, self._function, *"{\n")
        self._after_key = Marks.of(self._key_end, "\n")
        if wrapper:
            self._after_name = self._after_key = Marks.of(*"<>\n")
            function_end = (f"\n{self._function_end}", (self.call_end,))
            self.implied_ends = ((f"\n{self.parameter}", ("",)), function_end)

    def read_call(self) -> Steps[None]:
        if self._wrapper:
            yield from self.lexer.accept(self._wrapper)
            yield from self.lexer.space()
        yield from self.lexer.expect(self._function)
        yield from self.lexer.space()
        is_json = not self._wrapper and (yield from self.lexer.peek()) == "{"
        if is_json:
            yield from JsonReader(self, self.format.ends, self.format.next_marks).call()
        else:
            yield from self._read_function()
        if self._wrapper or is_json:
            yield from self.lexer.space()
            yield from self.lexer.accept(self.call_end)

    def _read_function(self) -> Steps[None]:
        self.begin_call((yield from self.lexer.name_before(self._after_name)))
        yield from self.lexer.expect(self._name_end)
        while True:
            yield from self.lexer.space()
            if (yield from self.lexer.accept(self._function_end)):
                break
            if (yield from self.lexer.is_next(self.call_end)):
                break
            yield from self.lexer.expect(self.parameter)
            key = yield from self.lexer.name_before(self._after_key)
            yield from self.lexer.expect(self._key_end)
            if self._value_begin:
                yield from self.lexer.space()
                yield from self.lexer.expect(self._value_begin)
            yield from self.argument(key, self.types_of(key))
        self.finish_call()


class AttributeTagParser(TaggedCallParser):
    """`<invoke name="f"><parameter name="a">...</parameter></invoke>`.

    A tag may have further attributes. One of them may say which type a value has: then that counts,
    and not the tool's schema.
    """

    has_section = True

    def read_format(self) -> None:
        super().read_format()
        format = self.format
        self._tag_end = format.before_arguments.rpartition('"')[2].strip()
        self._name_attribute = format.before_name.removesuffix('="').split()[-1]
        self._key_attribute = format.before_key.removesuffix('="').split()[-1]
        typed = re.search(r'(\w+)="\{type\}', format.argument)
        self._type_attribute = typed[1] if typed else ""

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(self.format.begins[0])
        attributes = yield from self.attributes()
        yield from self.lexer.space()
        name = attributes.get(self._name_attribute)
        if not name:
            raise Malformed
        yield from self.read_arguments(name)

    def read_arguments(self, name: str) -> Steps[None]:
        """From behind a call's tag to its end."""
        self.begin_call(name)
        while not (yield from self.lexer.accept(self.call_end)):
            yield from self.lexer.expect(self.parameter)
            attributes = yield from self.attributes()
            if (key := attributes.get(self._key_attribute)) is None:
                raise Malformed
            types = self.types_of(key)
            written = attributes.get(self._type_attribute or "")
            said = frozenset(t for t, word in self.format.types.items() if word == written)
            yield from self.argument(
                key, said if len(said) == 1 else types & said if said else types
            )
            yield from self.lexer.space()
        self.finish_call()

    def attributes(self) -> Steps[dict[str, str]]:
        """All of a tag's, and its end."""
        found: dict[str, str] = {}
        while True:
            yield from self.lexer.space()
            if (yield from self.lexer.accept(self._tag_end)):
                return found
            name = yield from self.lexer.name_before(Marks.of(*'="<>\n'))
            yield from self.lexer.expect("=")
            yield from self.lexer.expect('"')
            found[name] = html.unescape((yield from self.lexer.name_before(Marks.of(*'"\n'))))
            yield from self.lexer.expect('"')
            if len(found) > MAX_ATTRIBUTES:
                raise Malformed


class MiniCpm5Parser(AttributeTagParser):
    """A value with `<`, `&` or a line break in it stands in a CDATA block."""

    quote = ("<![CDATA[", "]]>")


class KimiK3Parser(AttributeTagParser):
    """Arguments in tags of their own, each with its type, or all of them as one JSON object."""

    def read_arguments(self, name: str) -> Steps[None]:
        if not (yield from self.lexer.accept("<|open|>json ")):
            yield from super().read_arguments(name)
            return
        yield from self.attributes()
        yield from self.lexer.space()
        json_end = "<|close|>json<|sep|>"
        yield from JsonReader(self, (json_end,), (self.call_end,)).call_arguments(name)
        yield from self.lexer.space()
        yield from self.lexer.accept(json_end)
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(self.call_end)
