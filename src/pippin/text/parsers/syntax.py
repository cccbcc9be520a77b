"""How a format's calls are written, as data: what a grammar of calls is made of. Knows no parser.

reply  =  ... opening  call  (separator call)*  closing
call   =  before_name  NAME  before_arguments  ARGUMENTS  after_arguments
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class JsonArguments:
    """A JSON object."""


@dataclass(frozen=True)
class TaggedArguments:
    """`before_key KEY before_value VALUE after_value` for each. Strings stand as they are, bare;
    other values are JSON. A format may write another `before_value` for values of some types."""

    before_key: str
    before_value: str
    after_value: str
    before_type: Mapping[str, str] = field(default_factory=dict)

    def before(self, type: str) -> str:
        """What stands before a value of this JSON type."""
        return self.before_type.get("number" if type == "integer" else type, self.before_value)


@dataclass(frozen=True)
class KeywordArguments:
    """`a="x", b=2`, as in a call in Python, with values that are JSON."""


@dataclass(frozen=True)
class BareKeyArguments:
    """JSON with bare keys, whose strings stand as they are between two `quote`s."""

    quote: str


@dataclass(frozen=True)
class CallSyntax:
    """Where `{number}` stands in a string, it is the call's number in the reply, from 0."""

    before_name: str
    before_arguments: str
    after_arguments: str
    arguments: JsonArguments | TaggedArguments | BareKeyArguments | KeywordArguments
    opening: str = ""
    separator: str = ""
    closing: str = ""

    @property
    def trigger(self) -> str:
        """The text with which a reply's first call begins."""
        return self.opening or self.before_name
