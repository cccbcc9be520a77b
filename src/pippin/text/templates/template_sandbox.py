"""Runs untrusted jinja templates: no Python, limited time, limited text. Knows no chat.

jinja2's immutable sandbox denies a template Python and changes to its variables. It limits neither
time nor text. So loops and calls check the time, operators that make large values (`"a" * n`) are
limited, and the characters are counted as they are rendered.
"""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 64_000_000
MAX_CPU_SECONDS = 10.0
MAX_POWER = 64
_WIDE = re.compile(r"\d{4}|\*")  # a width or a precision
_TURNS_A_LOOK = 256

_deadline: contextvars.ContextVar[float] = contextvars.ContextVar("_deadline")


class TemplateLimit(jinja2.TemplateError):
    """A template exceeded a limit of time or of size."""


@contextmanager
def time_limit() -> Iterator[None]:
    """All that is rendered inside shares one allowance, in CPU time of this thread."""
    if _deadline.get(None) is not None:
        yield
        return
    token = _deadline.set(time.thread_time() + MAX_CPU_SECONDS)
    try:
        yield
    finally:
        _deadline.reset(token)


class BoundedTemplate:
    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    def render(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
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
    environment.globals.update(functions)
    tree = environment.parse(source)
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(
            loop.iter, _Environment.TURNS, [], [], None, None, lineno=loop.lineno
        )
    code = environment.compile(tree)
    return BoundedTemplate(
        environment.template_class.from_code(environment, code, environment.make_globals(None))
    )


class _Environment(ImmutableSandboxedEnvironment):
    TURNS = "turns of a loop"  # a filter whose name no template can write
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[self.TURNS] = _turns

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return super().call(*args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        elif operator == "**" and not -MAX_POWER <= right <= MAX_POWER:
            raise TemplateLimit(f"it raises a number to the power {right}")
        elif operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TemplateLimit("it formats something to thousands of characters")
        return super().call_binop(context, operator, left, right)


def _check_time() -> None:
    if time.thread_time() > _deadline.get():
        raise TemplateLimit(f"it ran for more than {MAX_CPU_SECONDS:g} s")


def _turns(iterable: Iterable[Any]) -> Iterator[Any]:
    for number, item in enumerate(iterable):
        if number % _TURNS_A_LOOK == 0:
            _check_time()
        yield item


def _check_repetition(repeated: Any, times: Any) -> None:
    is_repetition = isinstance(repeated, str | list | tuple) and isinstance(times, int)
    if is_repetition and len(repeated) * times > MAX_CHARS:
        raise TemplateLimit(f"it repeats something to a length of more than {MAX_CHARS:,}")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what to train on; for serving it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  (so declared by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
