"""Tools that a client's own search finds, such as Claude Code's. Knows no template.

With Anthropic's `defer_loading` a tool is described in the result that refers to it, and not in the
list that the prompt begins with: the list, and what is cached behind it, stays when one is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pippin.api.requests.body import Body
from pippin.api.requests.tools import DeclaredTool

REFERENCE = "tool_reference"


class DeferredTools:
    def __init__(self, tools: Iterable[DeclaredTool]) -> None:
        self._functions = {tool.name: tool.tool["function"] for tool in tools if tool.deferred}
        self._found: set[str] = set()

    def described(self, references: Sequence[Body]) -> str:
        """A result of a search, as Anthropic shows it to its models and Claude Code's tool says."""
        lines = [f"<function>{self._described(block)}</function>" for block in references]
        return "\n".join(["<functions>", *lines, "</functions>"])

    def _described(self, reference: Body) -> str:
        """Once in a conversation: many references must not make much text of a long schema."""
        reference.ignore_unknown({"type", "tool_name", "cache_control"})
        name = reference.required_string("tool_name")
        described = {"name": name} if name in self._found else self._functions.get(name)
        self._found.add(name)
        return json.dumps(described or {"name": name}, ensure_ascii=False)  # the list has others

    def callable(self, tools: Iterable[DeclaredTool]) -> list[DeclaredTool]:
        """Those in the list, and those that the conversation refers to."""
        return [tool for tool in tools if not tool.deferred or tool.name in self._found]
