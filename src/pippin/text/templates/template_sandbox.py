"""Runs untrusted jinja templates: no Python, limited time, limited text. Knows no chat.

jinja2's immutable sandbox denies a template Python and changes to its variables. It limits neither
time nor text. So loops and calls check the time. Whatever makes text or lists (an operator, a
filter, a method, a macro) has its result's size bounded before it is made, as far as that can be
larger than what it is made of, and counted in sum afterwards.
"""

from __future__ import annotations

import contextvars
import functools
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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

# On the wall's clock, which is read faster and never behind the other; and of CPU time.
_deadline: contextvars.ContextVar[tuple[float, float]] = contextvars.ContextVar("_deadline")
# Characters, in one item.
_made: contextvars.ContextVar[list[int]] = contextvars.ContextVar("_made")
# Lists and objects by identity, with their sizes: a chat is rendered several times.
_sizes: contextvars.ContextVar[dict[int, tuple[Any, int]]] = contextvars.ContextVar("_sizes")

# Filters that take items as they are. All others make text of their value.
_OF_ITEMS = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items"),
        *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"),
        *("reverse", "select", "selectattr", "slice", "sort", "sum", "unique"),
    }
)
_MAKE_LISTS = frozenset(
    {"batch", "dictsort", "groupby", "list", "reverse", "slice", "sort", "sum", "unique"}
)
_FILL = frozenset(
    {
        *("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson"),
        *("wordwrap", "zfill"),
    }
)
_SPLIT = frozenset({"split", "rsplit", "splitlines"})
# What can make more of a text than a few times as much.
_GROW = _FILL | {"format", "format_map", "join", "replace", "translate", "xmlattr"}


class TemplateLimit(jinja2.TemplateError):
    """A template exceeded a limit of time or of size."""


@contextmanager
def time_limit() -> Iterator[None]:
    """All that is rendered inside shares one allowance, in CPU time of this thread."""
    if _deadline.get(None) is not None:
        yield
        return
    wall, cpu = time.perf_counter(), time.thread_time()
    token = _deadline.set((wall + MAX_CPU_SECONDS, cpu + MAX_CPU_SECONDS))
    _sizes.set({})
    try:
        yield
    finally:
        _deadline.reset(token)
        _sizes.set({})


class BoundedTemplate:
    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    def render(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        _made.set([0])
        with time_limit():
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise TemplateLimit(f"it makes more than {MAX_CHARS:,} characters")
                pieces.append(piece)
        return "".join(pieces)


def compile_bounded(
    source: str,
    *,
    filters: Mapping[str, Callable[..., Any]],
    functions: Mapping[str, Callable[..., Any]],
) -> BoundedTemplate:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters.update(filters)
    for name, work in environment.filters.items():
        environment.filters[name] = _bounded(name, work)
    environment.filters[_Environment.TURNS] = _turns
    environment.filters[_Environment.JOINED] = _joined
    environment.globals.update(functions)
    del environment.globals["lipsum"]
    tree = environment.parse(source)
    _replace_concatenations(tree)
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(
            loop.iter, _Environment.TURNS, [], [], None, None, lineno=loop.lineno
        )
    code = environment.compile(tree)
    return BoundedTemplate(
        environment.template_class.from_code(environment, code, environment.make_globals(None))
    )


class _Environment(ImmutableSandboxedEnvironment):
    # Filters whose names no template can write:
    TURNS = "turns of a loop"
    JOINED = "texts, joined"
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """What a macro, a block or a `set` block renders."""
        pieces = list(pieces)
        _make(sum([len(piece) for piece in pieces]))
        return "".join(pieces)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        called = args[1]
        if type(called) is jinja2.runtime.Macro:
            return _call(self, *args, **kwargs)
        if type(called) is not BuiltinMethodType:
            called = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        owner = getattr(called, "__self__", None)
        if not isinstance(owner, _TEXTS):
            return _call(self, *args, **kwargs)
        name = called.__name__
        if name in _GROW or name in _SPLIT:
            _check_growth(name, [owner, *args[2:]], kwargs)
        return _counted(_call(self, *args, **kwargs))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "+":
            if type(left) is str and type(right) is str:
                _make(len(left) + len(right))
                return left + right
            if isinstance(left, list | tuple) and isinstance(right, list | tuple):
                _check_items(len(left) + len(right))
        elif operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_growth("format", [left, right], {})
        return _counted(super().call_binop(context, operator, left, right))


_call = ImmutableSandboxedEnvironment.call


def _replace_concatenations(tree: jinja2.nodes.Node) -> None:
    """`a ~ b` becomes a filter, which can be bounded."""
    for node in tree.find_all(jinja2.nodes.Node):
        for name, value in node.iter_fields():
            if isinstance(value, jinja2.nodes.Concat):
                setattr(node, name, _as_filter(value))
            elif isinstance(value, list):
                value[:] = [
                    _as_filter(item) if isinstance(item, jinja2.nodes.Concat) else item
                    for item in value
                ]


def _as_filter(concat: jinja2.nodes.Concat) -> jinja2.nodes.Filter:
    first, *others = concat.nodes
    name = _Environment.JOINED
    return jinja2.nodes.Filter(first, name, others, [], None, None, lineno=concat.lineno)


def _joined(*values: Any) -> str:
    _make(sum(map(_num_chars, values)))
    return "".join(map(str, values))


def _shown(value: Any) -> Any:
    """A value that is rendered as it is."""
    if type(value) is not str:
        _make(_num_chars(value))
    return value


def _bounded(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is bounded before it is made."""
    if name in _OF_ITEMS - _MAKE_LISTS:
        return work
    grows = name in _GROW or name in _MAKE_LISTS
    at = 1 if hasattr(work, "jinja_pass_arg") else 0  # its value; before that a context

    @functools.wraps(work)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if not grows and type(args[at]) is str:
            return _counted(work(*args, **kwargs))
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
            items = list(islice(_turns(items), MAX_ITEMS + 1))
        except TypeError:
            return items  # not iterable: the filter says so
    _check_items(len(items))
    return items


def _check_growth(name: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a filter or a method would make too much of its arguments."""
    value, *others = args
    others += kwargs.values()
    if name in _FILL and any(isinstance(n, int) and abs(n) > MAX_WIDTH for n in others):
        raise TemplateLimit(f"{name} is given a width of more than {MAX_WIDTH:,}")
    if name in _OF_ITEMS:
        if name == "sum" and any(isinstance(start, list | tuple) for start in others):
            raise TemplateLimit("it adds up lists")
        return
    if name in _SPLIT:
        separator = others[0] if others and isinstance(others[0], type(value)) else None
        if len(value) > MAX_ITEMS and (separator is None or value.count(separator) > MAX_ITEMS):
            raise TemplateLimit(f"{name} makes more than {MAX_ITEMS:,} items")
        return
    size = _num_chars(value)
    if name == "join":
        texts = value if hasattr(value, "__len__") else ()
        joined, glue = (texts, others) if not isinstance(value, str | bytes) else (others, [value])
        num = max([len(joined), *(len(items) for items in others if isinstance(items, list))])
        size += sum(map(_num_chars, others)) + num * max(map(_num_chars, glue), default=0)
    elif name == "replace" and len(others) > 1:
        old, new = str(others[0]), str(others[1])
        size += str(value).count(old) * max(0, len(new) - len(old))
    elif name == "indent":
        (width,) = [each for each in others if isinstance(each, str)] or [" " * MAX_WIDTH]
        size += (str(value).count("\n") + 1) * len(width)
    elif name in ("format", "format_map"):
        text = str(value)
        if _WIDE.search(text):
            raise TemplateLimit("it formats something to thousands of characters")
        size += (text.count("%") + text.count("{")) * sum(map(_num_chars, others))
    elif name in ("translate", "wordwrap", "xmlattr"):
        size *= 1 + sum(map(_num_chars, others))
    _check_chars(size)


def _counted(made: Any) -> Any:
    if isinstance(made, _TEXTS):
        _make(len(made))
    elif isinstance(made, list | tuple):
        _check_items(len(made))
        _make(ITEM_CHARS * len(made))
    return made


def _make(num_chars: int) -> None:
    """Count what is made of one value; raise if that is too much, or in all."""
    made = _made.get()
    made[0] += num_chars
    if num_chars > MAX_CHARS or made[0] > MAX_MADE * MAX_CHARS:
        _check_chars(num_chars)
        raise TemplateLimit(
            f"it makes values of more than {MAX_MADE * MAX_CHARS:,} characters in all"
        )


def _num_chars(value: Any) -> int:
    """About as many as `str` or `tojson` makes of it. Lists can hold each other many times, so
    this stops where it is too many."""
    if isinstance(value, str | bytes):
        return len(value)
    if value is None or isinstance(value, int | float):
        return len(str(value))
    sizes = _sizes.get()
    if (known := sizes.get(id(value))) is not None:
        return known[1]
    total, waiting = 0, [value]
    for seen, each in enumerate(waiting):  # which grows
        kind = type(each)
        if kind is str:
            total += len(each)
        elif kind is dict:
            total += sum([len(key) if type(key) is str else 1 for key in each])
            waiting += each.values()
        elif kind is list or kind is tuple:
            waiting += each
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
    wall, cpu = _deadline.get()
    if time.perf_counter() > wall and time.thread_time() > cpu:
        raise TemplateLimit(f"it ran for more than {MAX_CPU_SECONDS:g} s")


def _turns(iterable: Iterable[Any]) -> Iterator[Any]:
    for number, item in enumerate(iterable):
        if number % _TURNS_A_LOOK == 0:
            _check_time()
        yield item


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


def _check_repetition(repeated: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(repeated, str | bytes):
        _check_chars(len(repeated) * times)
    elif isinstance(times, int) and isinstance(repeated, list | tuple):
        _check_items(len(repeated) * times)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what to train on; for serving it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  (so declared by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
