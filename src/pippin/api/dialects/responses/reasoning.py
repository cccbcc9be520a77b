"""Reasoning in the items of a conversation: how it is sent, and read when it is sent back.

Knows no template.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from pippin.api.dialects.responses.item_forms import REASONING, SUMMARY, ItemForm
from pippin.api.requests.body import Body

ENCRYPTED = "reasoning.encrypted_content"
_MARK = "pippin-reasoning-"  # what other servers encrypted begins otherwise, and cannot be read


@dataclass(frozen=True)
class ReasoningForm:
    """Where a client looks for reasoning."""

    summarised: bool = False  # the summary is all of it: no other model writes a shorter one
    encrypted: bool = False  # encoded, also: some clients send nothing else back

    @classmethod
    def asked(cls, body: Body) -> ReasoningForm:
        reasoning = body.object("reasoning") or Body({})
        return cls(
            summarised=reasoning.has("summary") or reasoning.has("generate_summary"),
            encrypted=ENCRYPTED in body.get("include", ()),
        )

    @property
    def item(self) -> ItemForm:
        return SUMMARY if self.summarised else REASONING

    def extra(self, text: str) -> dict[str, str]:
        """What a complete item has besides. Not secret: the client is shown the text too."""
        return {"encrypted_content": _MARK + _encoded(text)} if self.encrypted else {}


def reasoning_of(item: Body) -> str:
    """The text of a past item: its content, or else what stands for it."""
    for field in ("content", "encrypted_content", "summary"):
        if field == "encrypted_content":
            text = _decoded(item.string(field, ""))
        else:
            parts = item.objects(field) if item.get(field) else []
            text = "".join(part.string("text", "") for part in parts)
        if text:
            return text
    return ""


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _decoded(given: str) -> str:
    if not given.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
