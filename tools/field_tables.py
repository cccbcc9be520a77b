"""Writes the tables of request fields in docs/ from the tables that requests are checked with.

A table is the one behind a line `<!-- fields: NAME -->` (honoured), `<!-- ignored: NAME -->` or
`<!-- refused: NAME -->`. Of honoured fields the last column is written by hand: it is kept, and is empty for a new field.

    python tools/field_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from pippin.api.dialects import chat_completions, infill, messages, ollama, responses
from pippin.api.batches import routes
from pippin.api.endpoints import embeddings, generation
from pippin.api.requests import fields as shared
from pippin.api.requests.fields import ValueKind
from pippin.api.requests.fields import FieldTable, Unused
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.config import LimitsConfig
from pippin.text.bundle import SamplingDefaults

DOCS = Path(__file__).parents[1] / "docs"
VOCABULARY = 1_234_567_890
RULES = RequestRules(ModelInfo("", 0, VOCABULARY, 0), SamplingDefaults(), LimitsConfig())
TABLES = {
    "shared": FieldTable(shared.GENERATION),
    "chat": chat_completions.CHAT,
    "completions": chat_completions.COMPLETION,
    "infill": infill.INFILL,
    "responses": responses.RESPONSES,
    "messages": messages.MESSAGES,
    "embeddings": embeddings.EMBEDDINGS,
    "batch": routes.BATCH,
    "rerank": embeddings.RERANK,
    "score": embeddings.SCORE,
    "ollama_chat": ollama.CHAT,
    "ollama_generate": ollama.GENERATE,
    "ollama_options": ollama.OPTIONS.table,
    "ollama_embed": ollama.EMBED,
    "ollama_pull": ollama.PULL,
    "tokenize": generation.TOKENIZE,
    "detokenize": generation.DETOKENIZE,
}
MARKED = re.compile(r"<!-- (fields|ignored|refused): (\w+) -->\n((?:\|.*\n)*)")
SHARED_LINK = "overview.md#fields-of-both-endpoints"


def rewritten(text: str) -> str:
    """A document with its tables as they should be."""
    return MARKED.sub(lambda found: _table(found[1], found[2], found[3]), text)


def _table(answer: str, name: str, old: str) -> str:
    rows = _honoured(name, old) if answer == "fields" else _unused(name, answer)
    return "\n".join([f"<!-- {answer}: {name} -->", *rows]) + "\n"


def _honoured(name: str, old: str) -> list[str]:
    table = TABLES[name]
    cells = [[cell.strip() for cell in row.split(" | ")] for row in old.splitlines()]
    known = {row[0].strip("| ").split("`")[1]: row for row in cells if "`" in row[0]}
    fields = {n: kind for n, kind in table.fields.items() if kind.answer == "honoured"}
    may_be_same = [n for n in fields if name != "shared" and n not in table.required]
    same = [n for n in may_be_same if _is_shared(n, fields[n])]
    rows = ["| field | value | notes |", "|---|---|---|"]
    for field in [n for n in fields if n not in same]:
        first = known[field][0].strip("| ") if field in known else f"`{field}`"
        notes = known[field][-1].strip("| ") if field in known else ""
        value = fields[field].words(RULES).replace(f" from 0 to {VOCABULARY - 1:,}", "")
        value += "; required" if field in table.required else ""
        rows.append(f"| {first} | {value} | {notes} |".replace("|  |", "| |"))
    if same:
        names = ", ".join(f"`{field}`" for field in same)
        rows.append(f"| {names} | as in [the shared fields]({SHARED_LINK}) | |")
    return rows


def _is_shared(name: str, kind: ValueKind) -> bool:
    known = shared.GENERATION.get(name)
    return type(known) is type(kind) and known.type is kind.type


def _unused(name: str, answer: str) -> list[str]:
    column = "accepted" if answer == "refused" else "not reported"
    rows = [f"| field | why | {column} |", "|---|---|---|"]
    alike: dict[tuple[str, str], list[str]] = {}
    for field, kind in TABLES[name].fields.items():
        if isinstance(kind, Unused) and kind.answer == answer:
            accepted = ", ".join(f"`{msgspec.json.encode(v).decode()}`" for v in kind.neutral)
            alike.setdefault((kind.text, accepted), []).append(f"`{field}`")
    for (why, accepted), names in alike.items():
        rows.append(f"| {', '.join(names)} | {why} | {accepted} |".replace("|  |", "| |"))
    return rows


def main() -> int:
    for document in sorted(DOCS.glob("**/*.md")):
        document.write_text(rewritten(document.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
