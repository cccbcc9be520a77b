"""Asks by LangChain's OpenAI, Anthropic and Ollama models: run by test_langchain.py."""

from __future__ import annotations

import asyncio
from typing import Any

from asks import answer_asks
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = "How is the weather?"
LOOP = asyncio.Runner()  # one: the libraries keep connections from one request to the next


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int


def make_chat(kind: str, url: str, **options: Any) -> Any:
    given: Any = {"model": "qwen", "api_key": "none", "max_retries": 0, **options}
    match kind:
        case "openai_chat":
            return ChatOpenAI(base_url=f"{url}/v1", **given)
        case "openai_responses":
            return ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, **given)
        case "anthropic_messages":
            return ChatAnthropic(base_url=url, **{"max_tokens": 500, **given})
        case "ollama_chat":
            return ChatOllama(model="qwen", base_url=url, validate_model_on_init=True, **options)
    raise AssertionError(kind)


def whole(kind: str, url: str) -> Any:
    reply = make_chat(kind, url).invoke(QUESTION)
    return {"text": reply.text, "usage": reply.usage_metadata}


def streamed(kind: str, url: str) -> Any:
    options = {"stream_usage": True} if kind == "openai_chat" else {}
    parts = list(make_chat(kind, url, **options).stream(QUESTION))
    return {"texts": [part.text for part in parts], "usage": add(parts).usage_metadata}


def asynchronous(kind: str, url: str) -> Any:
    async def ask() -> list[str]:
        chat = make_chat(kind, url)
        parts = [part.text async for part in chat.astream(QUESTION)]
        return [(await chat.ainvoke(QUESTION)).text, "".join(parts)]

    return LOOP.run(ask())


def called(kind: str, url: str, tool: Any, choice: str | None) -> Any:
    options = {"tool_choice": choice} if choice else {}
    message = make_chat(kind, url).bind_tools([tool], **options).invoke(QUESTION)
    return message.model_dump(), message.tool_calls


def answered(kind: str, url: str, tool: Any) -> Any:
    """A call, and what is answered to its result."""
    chat = make_chat(kind, url).bind_tools([tool])
    asked = HumanMessage(QUESTION)
    message = chat.invoke([asked])
    results = [ToolMessage("rain, 12 degrees", tool_call_id=c["id"]) for c in message.tool_calls]
    return chat.invoke([asked, message, *results]).text


def streamed_call(kind: str, url: str, tool: Any) -> Any:
    return add(make_chat(kind, url).bind_tools([tool]).stream(QUESTION)).tool_calls


def form(kind: str, url: str, method: str) -> Any:
    chat = make_chat(kind, url).with_structured_output(City, method=method)
    return chat.invoke(f"{QUESTION} Answer in JSON.").model_dump()


def form_parts(kind: str, url: str, method: str) -> Any:
    schema = City.model_json_schema()
    return list(make_chat(kind, url).with_structured_output(schema, method=method).stream(QUESTION))


def blocks(kind: str, url: str, options: dict[str, Any]) -> Any:
    """Types of a reply's parts, and the reasoning among them."""
    found = make_chat(kind, url, **options).invoke(QUESTION).content_blocks
    return [[block["type"], block.get("reasoning")] for block in found]


def embedded(url: str) -> Any:
    openai = OpenAIEmbeddings(
        model="stories", base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    ollama = OllamaEmbeddings(model="stories", base_url=url)

    async def ask(embeddings: Any) -> Any:
        return await embeddings.aembed_documents(["a", "b"])

    return [
        [each.embed_query("a"), each.embed_documents(["a", "b"]), LOOP.run(ask(each))]
        for each in (openai, ollama)
    ]


def add(parts: Any) -> Any:
    added: Any = AIMessageChunk("")
    for part in parts:
        added += part
    return added


if __name__ == "__main__":
    answer_asks(
        *(whole, streamed, asynchronous, called, answered, streamed_call),
        *(form, form_parts, blocks, embedded),
    )
