"""Other servers' fields as those of ours with the same meaning. Knows no dialect."""

from __future__ import annotations

from typing import Any

from pippin.api.fields.extensions import RENAMED
from pippin.api.requests.body import Body
from pippin.api.requests.structured import ANY_OBJECT

_STRUCTURES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}


def with_our_names(body: Body) -> Body:
    """Of a checked request."""
    found = {name: body.get(name) for name in RENAMED if body.has(name)}
    fields = {name: body.get(name) for name in body.fields() if name not in found}
    if found.get("n_predict") == -1:
        del found["n_predict"]
    for name, value in found.items():
        _put(body, fields, RENAMED[name], name, value)
    if body.has("guided_choice"):
        _put(body, fields, "regex", "guided_choice", _any_of(body, "guided_choice"))
    if (structure := body.object("structured_outputs")) is not None:
        for name in filter(structure.has, _STRUCTURES):
            _put(body, fields, _STRUCTURES[name], structure.name(name), structure.get(name))
        if structure.has("choice"):
            choices = _any_of(structure, "choice")
            _put(body, fields, "regex", structure.name("choice"), choices)
        if structure.get("json_object"):
            name = structure.name("json_object")
            _put(body, fields, "json_schema", name, ANY_OBJECT)
    return body.renamed(fields)


def effort_of(body: Body) -> tuple[str | None, str]:
    """How much to reason, and the field that sets it: the first of those that are sent."""
    if body.has("reasoning_effort"):
        return body.get("reasoning_effort"), "reasoning_effort"
    if (reasoning := body.object("reasoning")) is not None:
        if reasoning.has("effort"):
            return reasoning.get("effort"), reasoning.name("effort")
        if reasoning.has("enabled"):
            return _switched(reasoning.get("enabled")), reasoning.name("enabled")
    if body.has("thinking"):
        return _thinking(body), "thinking"
    for field in ("enable_thinking", "think"):
        if body.has(field):
            return _switched(body.get(field)), field
    return None, "reasoning_effort"


def _switched(on: bool) -> str:
    return "medium" if on else "none"


def _thinking(body: Body) -> str | None:
    if isinstance(body.get("thinking"), bool):
        return _switched(body.get("thinking"))
    thinking = body.required_object("thinking")
    kind = thinking.one_of("type", ("enabled", "disabled", "adaptive", "auto"))
    if thinking.has("budget_tokens"):
        thinking.ignore("budget_tokens", "reasoning has no budget of its own")
    return None if kind in (None, "auto") else _switched(kind != "disabled")


def _put(body: Body, fields: dict[str, Any], ours: str, name: str, value: Any) -> None:
    if fields.get(ours) is not None:
        raise body.error(ours, f"and {name} are the same; send one of them")
    fields[ours] = value


def _any_of(body: Body, field: str) -> str:
    """A regular expression of literal choices."""
    choices = body.get(field)
    is_list = isinstance(choices, list) and bool(choices)
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise body.wrong(field, "a list of at least one string")
    return "|".join("".join(map(_literal, choice)) for choice in choices)


def _literal(character: str) -> str:
    if character.isalnum() or not character.isascii():
        return character
    return f"\\x{ord(character):02x}"
