"""Tools that Anthropic defines and clients run, as functions with schemas. Knows no dialect.

A client names such a tool by a dated type and sends no schema: Anthropic's models know it. Other
models are shown it. Dates that are not known yet have the newest schema that is.
"""

from __future__ import annotations

import re
from typing import Any

Schema = dict[str, Any]
_DATED = re.compile(r"([a-z_]{1,40})_(20[0-9]{6})")
_STRING: Schema = {"type": "string"}
_LINE: Schema = {"type": "integer", "minimum": 0}


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _said(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def _one_of(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


_VIEWED = _said(
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "For view: the first and the last line, from 1; -1 is the end of the file",
)
_FILE: Schema = {
    "path": _said(_STRING, "Path of the file or directory"),
    "view_range": _VIEWED,
    "file_text": _said(_STRING, "For create: the text of the file"),
    "old_str": _said(_STRING, "For str_replace: the text to replace, which occurs once"),
    "new_str": _said(_STRING, "For str_replace: the text in its place"),
    "insert_line": _said(_LINE, "For insert: the line after which to insert; 0 is the start"),
    "insert_text": _said(_STRING, "For insert: the text to insert"),
}
_COMMANDS = ("view", "create", "str_replace", "insert")
_OLD_FILE = {name: schema for name, schema in _FILE.items() if name != "insert_text"}
_OLD_FILE["new_str"] = _said(
    _STRING, "For str_replace: the text in its place; for insert: the text"
)

_BASH = (
    "Run a command in a bash shell that stays open between calls",
    _object(
        (),
        command=_said(_STRING, "The command to run; required unless restart is true"),
        restart=_said({"type": "boolean"}, "Start the shell again"),
    ),
)
_EDITOR = (
    "View, create and edit text files",
    _object(("command", "path"), command=_one_of(*_COMMANDS), **_FILE),
)
_OLD_EDITOR = (
    _EDITOR[0],
    _object(("command", "path"), command=_one_of(*_COMMANDS, "undo_edit"), **_OLD_FILE),
)
_MEMORY = (
    "Store and read text files that outlast this conversation, below the directory /memories",
    _object(
        ("command",),
        command=_one_of(*_COMMANDS, "delete", "rename"),
        **_FILE,
        old_path=_said(_STRING, "For rename: the path of the file or directory"),
        new_path=_said(_STRING, "For rename: its new path"),
    ),
)
# By kind: the first date of each form, oldest first.
_FORMS: dict[str, list[tuple[str, tuple[str, Schema]]]] = {
    "bash": [("20241022", _BASH)],
    "text_editor": [("20241022", _OLD_EDITOR), ("20250429", _EDITOR)],
    "memory": [("20250818", _MEMORY)],
}


def client_tool(type: str) -> Schema | None:
    """The description and the parameters of a tool of this type; None: clients do not run it."""
    found = _DATED.fullmatch(type)
    forms = _FORMS.get(found[1], []) if found else []
    for first_date, (description, parameters) in reversed(forms):
        if found is not None and found[2] >= first_date:
            return {"description": description, "parameters": parameters}
    return None
