"""`/tokenize` and `/detokenize`, against the tokenizers library and the chat endpoint."""

from __future__ import annotations

from typing import Any

import httpx
import tokenizers
from scripted_engine import BUNDLED, EOS, MODEL, ScriptedEngine, say, serving

from cases import cases

REFERENCE = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
TEXT = "Once upon a time, a fox — señor 狐 — said: <|endoftext|>!"
MESSAGES = [{"role": "user", "content": "Hi."}]


def post(path: str, engine: ScriptedEngine | None = None, **fields: Any) -> httpx.Response:
    with serving(engine or ScriptedEngine()) as url:
        return httpx.post(url + path, json=fields)


def test_a_text_becomes_the_tokens_that_the_library_finds() -> None:
    expected = REFERENCE.encode(TEXT).ids
    assert post("/tokenize", prompt=TEXT).json() == {
        "tokens": expected,
        "count": len(expected),
        "max_model_len": MODEL.max_len,
        "token_strs": None,
    }


def test_a_list_of_texts_becomes_lists() -> None:
    found = post("/tokenize", prompt=["a fox", "", TEXT], add_special_tokens=False).json()
    assert found["tokens"] == [
        REFERENCE.encode(text, add_special_tokens=False).ids for text in ("a fox", "", TEXT)
    ]
    assert found["count"] == [len(tokens) for tokens in found["tokens"]]


def test_messages_become_what_the_chat_endpoint_computes() -> None:
    for fields in ({}, {"add_generation_prompt": False}):
        engine = ScriptedEngine(say("Hello."))
        found = post("/tokenize", messages=MESSAGES, **fields).json()
        post("/v1/chat/completions", engine, model="stories", messages=MESSAGES, **fields)
        assert found["tokens"] == engine.submits[0].token_ids
        assert found["count"] == len(found["tokens"])


def test_token_strings_spell_the_text() -> None:
    found = post("/tokenize", prompt="a small fox", return_token_strs=True).json()
    assert "".join(found["token_strs"]).strip() == "a small fox"
    assert len(found["token_strs"]) == found["count"]


def test_tokens_become_the_text_that_the_library_finds() -> None:
    tokens = [*REFERENCE.encode(TEXT).ids, EOS]
    whole = REFERENCE.decode(tokens, skip_special_tokens=False)
    assert post("/detokenize", tokens=tokens).json() == {"text": whole, "prompt": whole}
    bare = post("/detokenize", tokens=tokens, skip_special_tokens=True).json()["text"]
    assert bare == REFERENCE.decode(tokens)
    assert bare != whole
    assert post("/detokenize", tokens=[tokens, []]).json()["text"] == [whole, ""]


@cases(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-4"}, "model"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
        ),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [MODEL.vocab_size]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt-4"}, "model"),
    ],
)
def test_what_is_wrong_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    response = post(path, **fields)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
