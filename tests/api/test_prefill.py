"""A final message of the assistant is continued, in chat completions, Messages and /tokenize."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest
from qwen35_server import TEXT, prompt_text, says, serving_qwen
from transformers import PreTrainedTokenizerFast

from bundled import BUNDLED_PATH
from pippin.errors import RequestError
from pippin.text.bundle import TextBundle
from pippin.text.chat_template import ChatTemplate
from pippin.text.prompt import chat_prompt

USER = {"role": "user", "content": "Which animal?"}
CONTENTS = ["The fox", "The fox is ", "<|im_end|>", "  a\n\n b", "assistant", "狐"]
CONTINUED = {"continue_final_message": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def begun(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def chat(url: str, *messages: Any, **fields: Any) -> httpx.Response:
    body = {"model": "qwen", "messages": list(messages), **CONTINUED, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body)


@pytest.mark.parametrize("content", CONTENTS)
def test_the_prompt_is_what_transformers_continues(content: str) -> None:
    ours = TextBundle.load(BUNDLED_PATH)
    theirs = PreTrainedTokenizerFast.from_pretrained(BUNDLED_PATH)
    chat = [USER, begun(content)]
    expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **CONTINUED)
    assert chat_prompt(chat, ours, **CONTINUED).tokens == expected


@pytest.mark.parametrize("content", CONTENTS)
def test_the_prompt_ends_with_the_text_and_the_reply_is_what_follows(content: str) -> None:
    with serving_qwen(says(" jumps.")) as (url, engine):
        reply = chat(url, USER, begun(content)).json()
    assert prompt_text(engine).endswith(f"</think>\n\n{content.lstrip()}")
    assert reply["choices"][0]["message"]["content"] == " jumps."


def test_a_template_that_trims_leaves_the_space_before_the_continuation() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    rendered = template.encode(TEXT.tokenizer, [USER, begun("The fox ")], **CONTINUED)
    assert rendered.text == "[Which animal?][The fox "


def test_a_template_that_hides_the_text_is_an_error() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(RequestError, match="does not show"):
        template.encode(TEXT.tokenizer, [USER, begun("The fox")], **CONTINUED)


def test_reasoning_that_the_text_leaves_open_is_continued_as_reasoning() -> None:
    with serving_qwen(says("look.\n</think>\n\nA fox.")) as (url, _):
        message = chat(url, USER, begun("<think>\nI")).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("look.", "A fox.")


def test_a_schema_describes_the_continuation_without_reasoning() -> None:
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    with serving_qwen(says("{}")) as (url, engine):
        assert chat(url, USER, begun("Here:"), response_format=format).status_code == 200
        assert chat(url, USER, begun("<think>Hm"), response_format=format).status_code == 200
    closed, opened = (submit.params for submit in engine.submits)
    assert closed.ebnf is None  # no rule of reasoning
    assert closed.json_schema is not None
    assert opened.ebnf is not None


def test_messages_continue_a_final_message_of_the_assistant() -> None:
    with (
        serving_qwen(says(" jumps.")) as (url, engine),
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        asked: Any = {"model": "qwen", "messages": [USER, begun("The fox")]}
        message = client.messages.create(**asked, max_tokens=9)
        with client.messages.stream(**asked, max_tokens=9) as stream:
            assert stream.get_final_text() == " jumps."
        counted = client.messages.count_tokens(**asked)
    assert message.content[0].text == " jumps."
    assert prompt_text(engine).endswith("</think>\n\nThe fox")
    assert counted.input_tokens == engine.submits[0].prompt_len


def test_tokenize_counts_the_same_prompt() -> None:
    messages = [USER, begun("The fox")]
    with serving_qwen(says("")) as (url, engine):
        chat(url, *messages)
        found = httpx.post(f"{url}/tokenize", json={"messages": messages, **CONTINUED}).json()
    assert found["tokens"] == engine.submits[0].token_ids


@pytest.mark.parametrize(
    ("messages", "fields", "words"),
    [
        ([USER, begun("The")], {"add_generation_prompt": True}, "are both true"),
        ([USER], {}, "is of the role user"),
        (
            [USER, begun("", tool_calls=[{"id": "c", "function": {"name": "f"}}])],
            {},
            "has tool calls",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    messages: list[Any], fields: dict[str, Any], words: str
) -> None:
    with serving_qwen(says("")) as (url, engine):
        reply = chat(url, *messages, **fields)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert engine.submits == []
