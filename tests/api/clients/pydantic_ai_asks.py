"""Asks by agents of pydantic-ai: run by test_pydantic_ai.py."""

from __future__ import annotations

import asyncio
from typing import Any

from asks import answer_asks
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider

QUESTION = "How is the weather?"
LOOP = asyncio.Runner()  # one: the library keeps connections from one request to the next
OUTPUTS = {"tool": ToolOutput, "native": NativeOutput, "prompted": PromptedOutput}


class City(BaseModel):
    """A city."""

    name: str
    inhabitants: int


def make_model(kind: str, url: str) -> Any:
    match kind:
        case "chat":
            return OpenAIChatModel("qwen", provider=openai(url))
        case "responses":
            settings = OpenAIResponsesModelSettings(openai_reasoning_summary="auto")
            return OpenAIResponsesModel("qwen", provider=openai(url), settings=settings)
        case "messages":
            return AnthropicModel("qwen", provider=AnthropicProvider(base_url=url, api_key="none"))
        case "ollama":  # which it asks by the OpenAI API
            return OpenAIChatModel("qwen", provider=OllamaProvider(base_url=f"{url}/v1"))
        case "vllm":
            return OpenAIChatModel("qwen", provider=VLLMProvider(base_url=f"{url}/v1"))
    raise AssertionError(kind)


def openai(url: str) -> OpenAIProvider:
    return OpenAIProvider(base_url=f"{url}/v1", api_key="none")


def whole(kind: str, url: str) -> Any:
    async def ask() -> Any:
        run = await Agent(make_model(kind, url)).run(QUESTION)
        usage = run.usage
        return {
            "text": run.output,
            "thinking": thinking_in(run.all_messages()),
            "usage": [usage.input_tokens, usage.output_tokens],
        }

    return LOOP.run(ask())


def thinking_in(messages: Any) -> list[str]:
    parts = [part for message in messages for part in message.parts]
    return [part.content for part in parts if part.part_kind == "thinking"]


def streamed(kind: str, url: str) -> Any:
    async def ask() -> Any:
        async with Agent(make_model(kind, url)).run_stream(QUESTION) as stream:
            texts = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
            usage = stream.usage
            return {
                "texts": texts,
                "thinking": thinking_in(stream.all_messages()),
                "usage": [usage.input_tokens, usage.output_tokens],
            }

    return LOOP.run(ask())


def with_tool(kind: str, url: str, stream: bool) -> Any:
    """What a tool was called with, and what was answered to its result."""
    calls = []
    agent = Agent(make_model(kind, url))

    @agent.tool_plain
    def get_weather(city: str, days: int = 1) -> str:
        """The weather of some days."""
        calls.append({"city": city, "days": days})
        return "rain, 12 degrees"

    async def ask() -> str:
        if not stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as streamed:
            return await streamed.get_output()

    return [LOOP.run(ask()), calls]


def form(kind: str, url: str, output: str, stream: bool) -> Any:
    async def ask() -> City:
        agent = Agent(make_model(kind, url), output_type=OUTPUTS[output](City), retries=0)
        if not stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as streamed:
            return await streamed.get_output()

    return LOOP.run(ask()).model_dump()


def embedded(url: str) -> Any:
    embedder = Embedder(OpenAIEmbeddingModel("stories", provider=openai(url)))
    return [list(vector) for vector in LOOP.run(embedder.embed_documents(["a", "b"])).embeddings]


if __name__ == "__main__":
    answer_asks(whole, streamed, with_tool, form, embedded)
