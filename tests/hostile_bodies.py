"""Bodies of requests with hostile sizes, depths and repeats, for every POST of an OpenAPI document.

A body is what its endpoint answers, with one to three places changed: a field of the document, a
member somewhere inside, or a name that no endpoint knows. Replies are one token at most, so that
what a server spends on a body is what it spends on reading it. Knows no server.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

USER = {"role": "user", "content": "Once upon a time"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}
OLLAMA_CALL = {"function": {"name": "look", "arguments": {"at": "a"}}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "a"}
BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "Once"},
    {"type": "tool_result", "tool_use_id": "1", "content": "a"},
]
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": "Once"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "summary": []},
    {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
]
LABELS = {"a": "b"}
BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [USER], "metadata": LABELS, "stop": ["zzz"], "chat_template_kwargs": {"a": 1}},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT, USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"},
    ],
    "/v1/completions": [
        {"prompt": "Once", "stop_token_ids": [1], "logit_bias": {"1": 1}, "stop": ["zzz"]},
        {"prompt": [1, 2, 3], "n": 2},
        {"prompt": ["Once", "upon"], "echo": True, "logprobs": 1},
    ],
    "/v1/responses": [
        {"input": "Once", "metadata": LABELS, "client_metadata": LABELS, "instructions": "Hm."},
        {"input": ITEMS},
        {"input": [{"type": "item_reference", "id": "a"}], "previous_response_id": "a"},
        {"input": "Once", "tools": [{"type": "function", "name": "look", "parameters": {}}]},
    ],
    "/v1/messages": [
        {"messages": [USER], "system": [BLOCKS[0]], "metadata": {"user_id": "a"}},
        {"messages": [{"role": "user", "content": BLOCKS}], "stop_sequences": ["zzz"]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a"},
                        {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "a"}},
                    ],
                },
                USER,
            ]
        },
        {"messages": [USER], "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
    ],
    "/v1/embeddings": [{"input": "Once"}, {"input": ["Once", "upon"]}, {"input": [1, 2]}],
    "/api/chat": [
        {"messages": [USER], "options": {"num_predict": 1, "stop": ["zzz"]}, "stream": False},
        {
            "messages": [
                USER,
                {"role": "assistant", "thinking": "a", "tool_calls": [OLLAMA_CALL]},
                {"role": "tool", "tool_name": "look", "content": "a"},
            ],
            "options": {"num_predict": 1},
            "tools": [TOOL],
        },
    ],
    "/api/generate": [
        {"prompt": "Once", "system": "Hm.", "context": [1, 2], "options": {"num_predict": 1}},
        {"prompt": "Once", "raw": True, "options": {"num_predict": 1}},
    ],
    "/api/embed": [{"input": "Once"}, {"input": ["Once", "upon"], "options": {"num_ctx": 1}}],
    "/api/embeddings": [{"prompt": "Once"}],
    "/api/show": [{"verbose": True}],
    "/api/pull": [{"stream": False}],
    "/tokenize": [{"prompt": "Once"}, {"prompt": ["a", "b"]}, {"messages": [USER]}],
    "/detokenize": [{"tokens": [1, 2]}, {"tokens": [[1], [2]]}],
    "/flush_cache": [{}],
    "/restart_replicas": [{}],
}
BASES["/v1/messages/count_tokens"] = BASES["/v1/messages"]
BASES["/v1/responses/input_tokens"] = BASES["/v1/responses"]
BASES["/infill"] = [
    {"input_prefix": "Once", "input_suffix": "time", "prompt": " upon", "n_predict": 1},
    {
        "input_prefix": "Once",
        "input_suffix": "time",
        "input_extra": [{"filename": "a", "text": "b"}],
        "response_fields": ["content", "timings/prompt_n"],
        "n_predict": 1,
    },
]
BASES["/v1/rerank"] = [{"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}]
BASES["/v1/score"] = [{"text_1": "a", "text_2": ["b", "c"]}, {"text_1": ["a"], "text_2": "b"}]
BASES |= dict.fromkeys(("/v2/rerank", "/rerank"), BASES["/v1/rerank"])
BASES["/score"] = BASES["/v1/score"]
BASES["/v1/files"] = [{"purpose": "batch"}]
BASES["/v1/batches"] = [
    {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": LABELS,
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }
]
BASES["/v1/batches/{id}/cancel"] = [{}]
WITHOUT_MODEL = frozenset(path for path in BASES if path.startswith(("/v1/files", "/v1/batches")))
WITHOUT_MODEL |= {"/flush_cache", "/restart_replicas"}
# Where a grammar is compiled of what is sent.
GRAMMARS = frozenset(
    {"response_format", "json_schema", "regex", "ebnf", "text", "output_config", "strict", "format"}
)
SIZES = (10, 60, 100, 500, 1_000, 1_021, 4_000, 9_998, 10_000, 60_000, 100_000, 1_000_000)
LARGEST = 30_000_000  # bytes: of what a server reads at all
DEPTHS = (20, 100, 127, 129, 400, 990, 10_000, 1_000_000)
NUMBERS = ("NaN", "-Infinity", "1e999", "-1", "1e308", f"{2**63}", f"{10**40}", "9" * 5000, "-0.0")
STRINGS = (
    *("a", " ", "\n", "\0", "é", "e\u0301", "\U0001f600", "\ufffd", "<|endoftext|>", "<tool_call>"),
    *('"', "\\", "{", "[[", "a b ", "word ", '{"a":', "(a+)+$", "../", "%s", "{{ a }}", "𝕏\u200d"),
)
RAW_STRINGS = (rb'"\ud800"', b'"\xff\xfe"', rb'"\u0000"', b'"\x00"', rb'"\uD83D"', b'"a')


@dataclass(frozen=True)
class Hostile:
    path: str
    body: bytes
    what: str  # was changed, for reports


def post_fields(document: dict[str, Any]) -> dict[str, list[str]]:
    """The fields of every POST body, by path."""
    found = {}
    for path, methods in document["paths"].items():
        if "post" in methods:
            content = methods["post"].get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            found[path] = sorted(schema.get("properties", {}))
    return found


def hostile_bodies(
    document: dict[str, Any], model: str, number: int, *, seed: int, grammars: bool, largest: int
) -> Iterator[Hostile]:
    """`number` of them, the paths in turn. Without `grammars` nothing is sent that is compiled."""
    fields = post_fields(document)
    assert fields.keys() == BASES.keys(), "every POST has a body here, and none besides"
    chance = random.Random(seed)
    paths = sorted(fields)
    for each in range(number):
        yield _Maker(chance, model, grammars, largest).make(
            paths[each % len(paths)], fields[paths[each % len(paths)]]
        )


class _Raw:
    """A value as bytes, put into the body after all else was encoded."""

    def __init__(self, text: bytes) -> None:
        self.text = text


class _Maker:
    """One body."""

    def __init__(self, chance: random.Random, model: str, grammars: bool, largest: int) -> None:
        self._chance = chance
        self._model = model
        self._grammars = grammars
        self._left = largest if chance.random() < 0.03 else min(largest, 2_000_000)
        self._raws: list[_Raw] = []
        self._said: list[str] = []

    def make(self, path: str, fields: list[str]) -> Hostile:
        body = copy.deepcopy(self._chance.choice(BASES[path]))
        if path not in WITHOUT_MODEL:
            body["model"] = self._model
            body |= self._one_token(path)
        for _ in range(self._chance.choice((1, 1, 1, 2, 3))):
            self._change(body, fields)
        return Hostile(path, self._encoded(body), ", ".join(self._said))

    def _one_token(self, path: str) -> dict[str, Any]:
        limited = {
            "/v1/responses": "max_output_tokens",
            "/v1/chat/completions": "max_tokens",
            "/v1/completions": "max_tokens",
            "/v1/messages": "max_tokens",
        }
        return {limited[path]: 1} if path in limited else {}

    def _change(self, body: dict[str, Any], fields: list[str]) -> None:
        known = [name for name in fields if self._grammars or name not in GRAMMARS]
        match self._chance.randrange(5):
            case 0 | 1 if known:
                name = self._chance.choice(known)
                body[name] = self._value(name)
            case 2:
                name = self._string(self._size())
                body[name] = self._value("unknown")
            case _:
                self._change_inside(body)

    def _change_inside(self, body: dict[str, Any]) -> None:
        """Some list, object or string that is there already."""
        places = list(_places(body))
        if not places:
            return
        holder, key = self._chance.choice(places)
        name = f"inside {key}"
        value = holder[key]
        match value:
            case list() if value and self._chance.random() < 0.7:
                holder[key] = self._repeated(value, name)
            case str() if self._chance.random() < 0.7:
                holder[key] = self._long_string(name)
            case dict() if self._chance.random() < 0.5:
                value |= self._members(name)
            case _:
                holder[key] = self._value(name)

    def _value(self, name: str) -> Any:
        makers: list[Callable[[str], Any]] = [
            self._deep,
            self._long_string,
            self._long_list,
            self._members,
            self._number,
            self._raw_string,
        ]
        return self._chance.choice(makers)(name)

    def _repeated(self, value: list[Any], name: str) -> list[Any]:
        each = max(1, len(json.dumps(value, default=lambda raw: "x" * len(raw.text))))
        times = max(1, min(self._size(), self._left // each))
        self._left -= times * each
        self._said.append(f"{name} x {times:,}")
        return value * times

    def _deep(self, name: str) -> _Raw:
        depth = self._chance.choice(DEPTHS)
        opening, closing = self._chance.choice(
            [(b"[", b"]"), (b'{"a":', b"}"), (b'{"properties":{"a":', b"}}"), (b'[{"a":', b"}]")]
        )
        depth = min(depth, max(1, self._left // (len(opening) + len(closing))))
        self._left -= depth * (len(opening) + len(closing))
        self._said.append(f"{name} {depth:,} deep")
        return self._raw(opening * depth + b"1" + closing * depth)

    def _long_string(self, name: str) -> str:
        text = self._string(self._size())
        self._said.append(f"{name} of {len(text):,} x {text[:4]!r}")
        return text

    def _long_list(self, name: str) -> list[Any]:
        kinds = [0, 8191, 1e300, "", "a", [], {}, None, True, USER, TOOL, BLOCKS[0], ITEMS[1]]
        return self._repeated([copy.deepcopy(self._chance.choice(kinds))], name)

    def _members(self, name: str) -> dict[str, Any]:
        number = min(self._size(), max(1, self._left // 20))
        self._left -= number * 20
        self._said.append(f"{name} of {number:,} members")
        values = self._chance.choice(["", "a", 0, None, [], {"type": "string"}])
        return {f"{'x' * self._chance.choice((0, 9))}{i}": values for i in range(number)}

    def _number(self, name: str) -> _Raw:
        text = self._chance.choice(NUMBERS)
        self._said.append(f"{name} {text[:20]}")
        return self._raw(text.encode())

    def _raw_string(self, name: str) -> _Raw:
        text = self._chance.choice(RAW_STRINGS)
        self._said.append(f"{name} {text!r}")
        return self._raw(text)

    def _string(self, size: int) -> str:
        part = self._chance.choice(STRINGS)
        times = max(1, min(size, self._left // (6 * len(part))))
        self._left -= 6 * len(part) * times
        return part * times

    def _size(self) -> int:
        return self._chance.choice(SIZES) + self._chance.randrange(3)

    def _raw(self, text: bytes) -> _Raw:
        raw = _Raw(text)
        self._raws.append(raw)
        return raw

    def _encoded(self, body: dict[str, Any]) -> bytes:
        marks = {f"\ue000{i}\ue000": raw for i, raw in enumerate(self._raws)}
        by_raw = {id(raw): mark for mark, raw in marks.items()}
        ascii = self._chance.random() < 0.5
        text = json.dumps(body, default=lambda raw: by_raw[id(raw)], ensure_ascii=ascii)
        encoded = text.encode("utf-8", "surrogatepass")
        for mark, raw in marks.items():
            encoded = encoded.replace(json.dumps(mark, ensure_ascii=ascii).encode(), raw.text)
        if self._chance.random() < 0.02:
            encoded = encoded[: self._chance.randrange(len(encoded))]
            self._said.append("cut")
        return encoded


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Where something stands: its holder and its key. The length of a reply is left alone."""
    if isinstance(value, _Raw) or depth > 8:
        return
    inside = value.items() if isinstance(value, dict) else enumerate(value[:20])
    for key, each in inside:
        if key in ("max_tokens", "max_output_tokens", "num_predict", "model"):
            continue
        yield value, key
        if isinstance(each, dict | list) and len(each) < 100:
            yield from _places(each, depth + 1)
