"""Chat templates: untrusted jinja with no Python, limited time and limited text.

jinja2's immutable sandbox denies a template Python and changes to its variables. It limits neither
time nor text. So loops and calls check the time. Whatever makes text or lists (an operator, a
filter, a method, a macro) has its result's size bounded before it is made, as far as that can be
larger than what it is made of, and counted in sum afterwards.
"""

from __future__ import annotations

import bisect
import contextvars
import functools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pippin.errors import LoadError, RequestError
from pippin.text.tokenizer import Tokenizer, read_json

MAX_CHARS = 64_000_000  # of a text, and of what is rendered
MAX_CPU_SECONDS = 10.0
MAX_MADE = 4  # times as many characters, in all values that are made on the way
MAX_ITEMS = 1_000_000  # of a list
ITEM_CHARS = 16  # an item of a list counts as much: it takes 8 bytes and often more
MAX_SIZES = 256  # of values that are remembered
MAX_BITS = 1 << 16  # of a number
MAX_WIDTH = 1_000  # to fill or to indent a text to
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{4}|\*)|\{[^{}]*:[^{}]*(\d{4}|\{)")  # as a number or a variable
_TURNS_A_LOOK = 256
_TEXTS = (str, bytes)

# Filters that take items as they are. All others make text of their value.
_MAKE_LISTS = frozenset(
    {"batch", "dictsort", "groupby", "list", "reverse", "slice", "sort", "sum", "unique"}
)
_OF_ITEMS = _MAKE_LISTS | {
    *("attr", "count", "d", "default", "first", "items", "last", "length", "map", "max", "min"),
    *("random", "reject", "rejectattr", "select", "selectattr"),
}
_FILL = frozenset(
    {
        *("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson"),
        *("wordwrap", "zfill"),
    }
)
_SPLIT = frozenset({"split", "rsplit", "splitlines"})


class TemplateLimit(jinja2.TemplateError):
    """A template exceeded a limit of time or of size."""


class _Allowance:
    """What is left to the renders of one chat; characters are counted for each of them."""

    def __init__(self) -> None:
        # On the wall's clock, which is read faster and never behind the other; and of CPU time.
        self.wall = time.perf_counter() + MAX_CPU_SECONDS
        self.cpu = time.thread_time() + MAX_CPU_SECONDS
        self.made = 0  # characters
        # Lists and objects by identity, with their sizes: a chat is rendered several times.
        self.sizes: dict[int, tuple[Any, int]] = {}


_allowance: contextvars.ContextVar[_Allowance | None] = contextvars.ContextVar(
    "_allowance", default=None
)


@contextmanager
def time_limit() -> Iterator[_Allowance]:
    """All that is rendered inside shares one allowance, in CPU time of this thread."""
    if (outer := _allowance.get()) is not None:
        yield outer
        return
    token = _allowance.set(allowance := _Allowance())
    try:
        yield allowance
    finally:
        _allowance.reset(token)


def _left() -> _Allowance:
    allowance = _allowance.get()
    assert allowance is not None
    return allowance


def _render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces: list[str] = []
    num_chars = 0
    with time_limit() as allowance:
        allowance.made = 0
        for piece in template.generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise TemplateLimit(f"it makes more than {MAX_CHARS:,} characters")
            pieces.append(piece)
    return "".join(pieces)


def _compile_bounded(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        finalize=_shown,
    )
    environment.filters["tojson"] = _tojson
    for name in environment.filters.keys() - (_OF_ITEMS - _MAKE_LISTS):
        environment.filters[name] = _bounded(name, environment.filters[name])
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del environment.globals["lipsum"]
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise LoadError(f"the chat template does not compile: {error}") from error


class _Code(CodeGenerator):
    """Loops and `a ~ b` call the environment, which bounds them."""

    def visit_For(self, node: jinja2.nodes.For, frame: Frame) -> None:  # noqa: N802
        node.iter = self._called("turns", [node.iter])
        super().visit_For(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.visit(self._called("joined", node.nodes), frame)

    def _called(self, name: str, args: list[Any]) -> jinja2.nodes.Call:
        method = jinja2.nodes.EnvironmentAttribute(name)
        called = jinja2.nodes.Call(method, args, [], None, None, lineno=args[0].lineno)
        called.set_environment(self.environment)
        return called


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What a macro, a block or a `set` block renders."""
        pieces = list(pieces)
        _make(sum([len(piece) for piece in pieces]))
        return "".join(pieces)

    @staticmethod
    def joined(*values: Any) -> str:
        _make(_sum_chars(values))
        return "".join(map(str, values))

    @staticmethod
    def turns(iterable: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(iterable):
            if number % _TURNS_A_LOOK == 0:
                _check_time()
            yield item

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        called = getattr(args[1], "__wrapped__", args[1])  # the sandbox wraps `format`
        owner = getattr(called, "__self__", None)
        if not isinstance(owner, _TEXTS):
            return super().call(*args, **kwargs)
        _check_growth(called.__name__, [owner, *args[2:]], kwargs)
        return _counted(super().call(*args, **kwargs))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(repeated, _TEXTS):
                    _check_chars(len(repeated) * times)
                elif isinstance(times, int) and isinstance(repeated, list | tuple):
                    _check_items(len(repeated) * times)
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_growth("format", [left, right], {})
        return _counted(super().call_binop(context, operator, left, right))


def _shown(value: Any) -> Any:
    """A value that is rendered as it is."""
    if type(value) is not str:
        _make(_num_chars(value))
    return value


def _bounded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is bounded before it is made."""
    at = 1 if hasattr(work, "jinja_pass_arg") else 0  # its value; before that a context

    @functools.wraps(work)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if name in _MAKE_LISTS or (name == "join" and not isinstance(given[at], str)):
            given[at] = _listed(given[at])
        _check_growth(name, given[at:], kwargs)
        return _counted(work(*given, **kwargs))

    return bounded


def _listed(items: Any) -> Any:
    """Items that a filter keeps all together."""
    if isinstance(items, jinja2.Undefined):
        return items
    if not hasattr(items, "__len__"):
        try:
            items = list(islice(_Environment.turns(items), MAX_ITEMS + 1))
        except TypeError:
            return items  # not iterable: the filter says so
    _check_items(len(items))
    return items


def _added_by_join(value: Any, others: list[Any]) -> int:
    texts = value if hasattr(value, "__len__") else ()
    joined, glue = (texts, others) if not isinstance(value, _TEXTS) else (others, [value])
    num = max([len(joined), *(len(items) for items in others if isinstance(items, list))])
    return _sum_chars(others) + num * max(map(_num_chars, glue), default=0)


def _added_by_replace(value: Any, others: list[Any]) -> int:
    if len(others) < 2:
        return 0
    old, new = str(others[0]), str(others[1])
    return str(value).count(old) * max(0, len(new) - len(old))


def _added_by_indent(value: Any, others: list[Any]) -> int:
    (width,) = [each for each in others if isinstance(each, str)] or [" " * MAX_WIDTH]
    return (str(value).count("\n") + 1) * len(width)


def _added_by_format(value: Any, others: list[Any]) -> int:
    text = str(value)
    if _WIDE.search(text):
        raise TemplateLimit("it formats something to thousands of characters")
    return (text.count("%") + text.count("{")) * _sum_chars(others)


def _added_each(value: Any, others: list[Any]) -> int:
    return _num_chars(value) * _sum_chars(others)


def _sum_chars(values: Iterable[Any]) -> int:
    return sum(map(_num_chars, values))


# Filters and methods that can make more of a text than a few times as much: how many characters.
_ADDED: dict[str, Callable[[Any, list[Any]], int]] = {
    "join": _added_by_join,
    "replace": _added_by_replace,
    "indent": _added_by_indent,
    "format": _added_by_format,
    "format_map": _added_by_format,
    "translate": _added_each,
    "wordwrap": _added_each,
    "xmlattr": _added_each,
}


def _check_growth(name: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a filter or a method would make too much of its arguments."""
    value, *others = args
    others += kwargs.values()
    if name in _FILL and any(isinstance(n, int) and abs(n) > MAX_WIDTH for n in others):
        raise TemplateLimit(f"{name} is given a width of more than {MAX_WIDTH:,}")
    if name == "sum" and any(isinstance(start, list | tuple) for start in others):
        raise TemplateLimit("it adds up lists")
    if name in _SPLIT:
        separator = others[0] if others and isinstance(others[0], type(value)) else None
        if len(value) > MAX_ITEMS and (separator is None or value.count(separator) > MAX_ITEMS):
            raise TemplateLimit(f"{name} makes more than {MAX_ITEMS:,} items")
    elif name not in _OF_ITEMS:
        added = _ADDED.get(name)
        _check_chars(_num_chars(value) + (added(value, others) if added else 0))


def _counted(made: Any) -> Any:
    if isinstance(made, _TEXTS):
        _make(len(made))
    elif isinstance(made, list | tuple):
        _check_items(len(made))
        _make(ITEM_CHARS * len(made))
    return made


def _make(num_chars: int) -> None:
    """Count what is made of one value; raise if that is too much, or in all."""
    _check_chars(num_chars)
    allowance = _left()
    allowance.made += num_chars
    if allowance.made > MAX_MADE * MAX_CHARS:
        raise TemplateLimit(
            f"it makes values of more than {MAX_MADE * MAX_CHARS:,} characters in all"
        )


def _num_chars(value: Any) -> int:
    """About as many as `str` or `tojson` makes of it. Lists can hold each other many times, so
    this stops where it is too many."""
    if isinstance(value, _TEXTS):
        return len(value)
    if value is None or isinstance(value, int | float):
        return len(str(value))
    sizes = _left().sizes
    if (known := sizes.get(id(value))) is not None:
        return known[1]
    total, waiting = 0, [value]
    for seen, each in enumerate(waiting):  # which grows
        if isinstance(each, _TEXTS):
            total += len(each)
        elif isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, Collection):
            waiting += each
        elif isinstance(each, Namespace):
            waiting.append(object.__getattribute__(each, "_Namespace__attrs"))
        if seen % _TURNS_A_LOOK == 0:
            _check_time()
            if total + seen > MAX_CHARS or len(waiting) > MAX_ITEMS:
                break
    _check_items(len(waiting))
    total += len(waiting)
    if len(sizes) < MAX_SIZES:
        sizes[id(value)] = value, total  # which stays alive, and its identity its own
    return total


def _check_time() -> None:
    allowance = _left()
    if time.perf_counter() > allowance.wall and time.thread_time() > allowance.cpu:
        raise TemplateLimit(f"it ran for more than {MAX_CPU_SECONDS:g} s")


def _check_chars(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateLimit(f"it makes a value of more than {MAX_CHARS:,} characters")


def _check_items(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise TemplateLimit(f"it makes a list of more than {MAX_ITEMS:,} items")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise TemplateLimit(f"it makes a number of more than {MAX_BITS:,} bits")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what to train on; for serving it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  (so declared by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_PROBE: Message = {"role": "user", "content": "\ue000"}  # a letter that no message begins with


def _message_ends(
    render: Render,
    text: str,
    messages: Sequence[Message],
    tools: Tools | None,
    prefixes: Sequence[int],
) -> list[int]:
    """Where the first so many messages end in the text, in characters, where that is known.

    Some templates refuse a chat without a user message, and some write the last message in another
    way. So the second attempt adds a user message and removes it again. If that fails too, the
    result is the longest beginning that they share with the whole chat.
    """
    ends = [0]
    # Without tools: they belong to the messages before it.
    probe = functools.cache(lambda: try_render(render, [_PROBE], None))
    for num_messages in prefixes:
        head = messages[:num_messages]
        alone = try_render(render, head, tools) if head else None
        if alone is not None and text.startswith(alone):
            ends.append(len(alone))
            continue
        with_probe = try_render(render, [*head, _PROBE], tools)
        if with_probe is not None and (end := probe()) and with_probe.endswith(end):
            before_probe = with_probe.removesuffix(end)
            if text.startswith(before_probe):
                ends.append(len(before_probe))
                continue
        renders = [each for each in (alone, with_probe) if each is not None]
        shared = max((_shared_len(text, each) for each in renders), default=0)
        if shared > max(ends):
            ends.append(shared)
    return ends


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


Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Message], Tools | None], str]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE_ARGUMENTS = {"probe": "value"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}},
    },
}
_MARK = "probe-mark"
_PROBE_ID = "probe0000"  # nine letters and digits: some templates refuse any other id


@dataclass(frozen=True)
class MessageShape:
    # Text is better where a template writes it unchanged: the prompt then repeats the model's own
    # tokens, which the prefix cache has.
    text_arguments: bool
    one_text_beside_calls: bool  # a turn with calls may have reasoning or content, not both
    one_system: bool = False  # a system message stands at the beginning, or not at all
    one_user: bool = False  # no two user messages in a row
    user_drops_reasoning: bool = False  # a user message behind a tool's result: that before it

    @classmethod
    def of(cls, render: Render) -> MessageShape:
        """What the template makes of short chats."""

        def turn(arguments: Any, content: str, reasoning: str | None, *more: Message) -> str | None:
            messages = [_message("user"), _reply(arguments, content, reasoning), *more]
            return try_render(render, messages, [_PROBE_TOOL])

        def chat(*roles: str) -> str | None:
            """The last message is marked."""
            messages = [*map(_message, roles[:-1]), _message(roles[-1], _MARK)]
            return try_render(render, messages, None)

        as_text = json.dumps(_PROBE_ARGUMENTS)
        written, mapped = turn(as_text, "", None), turn(_PROBE_ARGUMENTS, "", None)
        is_text = written is not None and mapped in (None, written)
        arguments = as_text if is_text else _PROBE_ARGUMENTS
        result = {**_message("tool"), "tool_call_id": _PROBE_ID}
        before = turn(arguments, "", _MARK, result)
        after = turn(arguments, "", _MARK, result, _message("user"))
        return cls(
            text_arguments=is_text,
            one_text_beside_calls=turn(arguments, "probe", "probe") is None,
            one_system=_MARK not in (chat("user", "assistant", "user", "system") or ""),
            one_user=chat("user", "user") is None,
            user_drops_reasoning=_MARK in (before or "") and _MARK not in (after or _MARK),
        )

    def apply(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Agents send system messages in mid-conversation. For a template that refuses them:

        - those before the first reply join the system prompt, which conversations share;
        - those behind a tool's result join that, where a user message would be taken for the next
          question, and the reasoning before it would be dropped in the middle of a turn;
        - all others become user messages.
        """
        shaped: list[dict[str, Any]] = []
        joined: list[list[str]] = []  # the contents of those that become one message, for each
        ordered = _system_first(messages) if self.one_system else messages
        for message in map(self._message, ordered):
            last = shaped[-1] if shaped else None
            text = self._joined_text(last, message)
            if text is None and self.one_system and last and message["role"] == "system":
                message["role"] = "user"
                text = self._joined_text(last, message)
            if text is None:
                shaped.append(message)
                joined.append([])
            else:
                joined[-1].append(text)
        for message, more in zip(shaped, joined, strict=True):
            if more:
                message["content"] = "\n\n".join([message["content"], *more])
        return shaped

    def _joined_text(self, last: Message | None, message: Message) -> str | None:
        """What `message` adds to the one before it; None if it is a message of its own."""
        text = message.get("content")
        if last is None or not isinstance(last.get("content"), str) or not isinstance(text, str):
            return None
        match last["role"], message["role"]:
            case ("system", "system") if self.one_system:
                return text
            case ("user", "user") if self.one_user:
                return text
            case ("tool", "system") if self.one_system and self.user_drops_reasoning:
                return f"<system-reminder>\n{text.strip()}\n</system-reminder>"
        return None

    def _message(self, message: Message) -> dict[str, Any]:
        """With its reasoning under every name and its calls as they should be."""
        result = _with_reasoning_names(message)
        if calls := message.get("tool_calls"):
            result["tool_calls"] = [self._call(call) for call in calls]
            if self.one_text_beside_calls and result.get("thinking") and result.get("content"):
                both = f"{result['thinking']}\n\n{result['content']}"
                result |= {"content": "", **dict.fromkeys(_REASONING_NAMES, both)}
        return result

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function.get("arguments", {})
        arguments = _as_text(arguments) if self.text_arguments else _as_mapping(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


def _message(role: str, content: str = "probe") -> Message:
    return {"role": role, "content": content}


def _reply(arguments: Any, content: str, reasoning: str | None) -> Message:
    function = {"name": "probe", "arguments": arguments}
    reasons = {} if reasoning is None else dict.fromkeys(_REASONING_NAMES, reasoning)
    calls = [{"id": _PROBE_ID, "type": "function", "function": function}]
    return {**_message("assistant", content), "tool_calls": calls, **reasons}


def try_render(render: Render, messages: Sequence[Message], tools: Tools | None) -> str | None:
    """None if the template refuses the messages."""
    try:
        return render(messages, tools)
    except RequestError:
        return None


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """System messages before the first reply stand before the user's."""
    replies = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    num_first = next(replies, len(messages))
    first = sorted(messages[:num_first], key=lambda message: message["role"] != "system")
    return [*first, *messages[num_first:]]


def _with_reasoning_names(message: Message) -> dict[str, Any]:
    found = (message[name] for name in _REASONING_NAMES if message.get(name) is not None)
    reasoning = next(found, None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_mapping(arguments: Any) -> Any:
    """What is no object stays text: the template may know what to do with it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    return _without_halves(value) if "\\ud" in arguments.lower() else value


def _without_halves(value: Any) -> Any:
    """Half of a surrogate pair is valid JSON, and no character: no tokenizer reads it."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(text.decode("utf-16", "replace"))


# A chat of many turns gets boundaries for its first and its last messages: those in between were
# last messages themselves a few turns ago, and each boundary costs a render.
NUM_FIRST_BOUNDARIES = 2
NUM_LAST_BOUNDARIES = 8
MAX_RENDERED_MESSAGES = 16_000  # for the boundaries of one chat, all renders together

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# What a template raises when it meets messages that it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class RenderedChat:
    text: str
    tokens: list[int]
    boundaries: list[int]  # token positions where messages end, ascending


class ChatTemplate:
    """A checkpoint's own template, run in the sandbox that transformers would use.

    Some checkpoints have another one for chats with tools (`tool_source`).
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._variables = dict(variables or {})
        self._template = _compile_bounded(self.source)
        self._tool_template = _compile_bounded(self.tool_source)

    @classmethod
    def load(cls, model_dir: Path, variables: Mapping[str, Any]) -> ChatTemplate | None:
        sources = _find_sources(model_dir)
        if "default" not in sources:
            return None
        return cls(sources["default"], variables, tool_source=sources.get("tool_use"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        return self._render(
            self._shape.apply(messages),
            tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> RenderedChat:
        """The prompt's tokens, and those positions in it where messages end.

        `check` may refuse the rendered text before more is made of it. To continue the final
        message, the text is cut behind its content.
        """
        cut_mark = uuid4().hex if continue_final_message else None
        shown = messages if cut_mark is None else _with_cut_mark(messages, cut_mark)
        add_generation_prompt = add_generation_prompt and cut_mark is None
        render = partial(self._render, variables=variables)
        with time_limit():
            shaped = self._shape.apply(shown)
            text = render(shaped, tools, add_generation_prompt=add_generation_prompt)
            text = text if cut_mark is None else _before_mark(text, cut_mark)
            check(text)
            prefixes = _prefixes(len(shaped), has_tools=bool(tools))
            ends = _message_ends(render, text, shaped, tools, prefixes)
        tokens, token_ends = tokenizer.encode_rendered(text)
        # How many tokens cover no more than what ends there:
        boundaries = {bisect.bisect_right(token_ends, end) for end in ends if end}
        return RenderedChat(text, tokens, sorted(b for b in boundaries if b))

    @cached_property
    def _shape(self) -> MessageShape:
        return MessageShape.of(self._render)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._tool_template if tools else self._template
        try:
            return _render_bounded(
                template,
                {
                    **self._variables,
                    **(variables or {}),
                    "messages": messages,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refused the messages: {str(error) or repr(error)}",
                param="messages",
            ) from error


def _prefixes(num_messages: int, *, has_tools: bool) -> list[int]:
    """How many messages to look for the end of; the end of none is that of the tools."""
    first = range(0 if has_tools else 1, min(NUM_FIRST_BOUNDARIES, num_messages) + 1)
    num_last = max(1, min(NUM_LAST_BOUNDARIES, MAX_RENDERED_MESSAGES // max(1, num_messages)))
    last = range(max(1, num_messages - num_last + 1), num_messages + 1)
    return sorted({*first, *last})


def _with_cut_mark(messages: Sequence[Message], cut_mark: str) -> list[Message]:
    """Marked, because templates trim a content and write it in the middle of their own text."""
    *before, final = messages
    return [*before, {**final, "content": final["content"] + cut_mark}]


def _before_mark(text: str, cut_mark: str) -> str:
    before, found, _ = text.partition(cut_mark)
    if not found:
        raise RequestError(
            "the model's chat template does not show the content of the final message, which can "
            "therefore not be continued; end the conversation with a user message",
            param="messages",
        )
    return before


def _find_sources(model_dir: Path) -> dict[str, str]:
    """Templates by name; most checkpoints have one without a name."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(model_dir / name).get("chat_template")
        if isinstance(template, list):
            return {entry["name"]: entry["template"] for entry in template}
        if template is not None:
            return {"default": str(template)}
    return {}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; prompts must not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
