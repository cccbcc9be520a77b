"""Asks a running server with every client that is installed, and prints the results.

    pippin serve &
    pip install openai anthropic litellm langchain-openai instructor "pydantic-ai-slim[openai]"
    python tools/try_clients.py --url http://127.0.0.1:8000

Installs nothing. What is asked is held by grammars (calls that are required, forms of bounded
size), so that a model which only writes stories answers too. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

QUESTION = "How is the weather in Rome?"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    key: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


Ask = Callable[[Server], None]
ASKED: list[tuple[str, str, Ask]] = []  # distribution, what was asked, how


def asks(distribution: str, what: str) -> Callable[[Ask], Ask]:
    def register(ask: Ask) -> Ask:
        ASKED.append((distribution, what, ask))
        return ask

    return register


def check_arguments(arguments: Any) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert given["city"] in ("Rome", "Oslo"), given
    assert 1 <= given["days"] <= 9, given


def form() -> Any:
    from pydantic import BaseModel, Field

    class Weather(BaseModel):
        city: Literal["Rome", "Oslo"]
        degrees: int = Field(ge=0, le=40)

    return Weather


# ---- openai ------------------------------------------------------------------------------------


def openai_client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)


@asks("openai", "chat, whole and streamed")
def openai_chat(server: Server) -> None:
    with openai_client(server) as client:
        asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 8, "seed": 1}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        chunks = client.chat.completions.create(**asked, stream=True)
        assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@asks("openai", "a required strict call, whole, streamed and with its result")
def openai_tools(server: Server) -> None:
    with openai_client(server) as client:
        asked = {"model": server.model, "tools": [TOOL], "tool_choice": "required"}
        one_call = {**asked, "parallel_tool_calls": False}
        message = client.chat.completions.create(messages=MESSAGES, **one_call).choices[0].message
        check_arguments(message.tool_calls[0].function.arguments)
        stream = client.chat.completions.create(messages=MESSAGES, stream=True, **one_call)
        calls = [call for c in stream for call in c.choices[0].delta.tool_calls or ()]
        check_arguments("".join(call.function.arguments or "" for call in calls))
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        later = [*MESSAGES, message.model_dump(exclude_none=True), result]
        client.chat.completions.create(
            model=server.model, messages=later, tools=[TOOL], max_tokens=8
        )


@asks("openai", "parsed structured output, in chats and responses")
def openai_parsed(server: Server) -> None:
    with openai_client(server) as client:
        asked = {"model": server.model, "response_format": form()}
        parsed = client.chat.completions.parse(messages=MESSAGES, **asked)
        assert parsed.choices[0].message.parsed.city
        response = client.responses.parse(model=server.model, input=QUESTION, text_format=form())
        assert response.output_parsed.city


@asks("openai", "responses: stored, continued, listed, deleted")
def openai_stored(server: Server) -> None:
    with openai_client(server) as client:
        asked = {"model": server.model, "max_output_tokens": 8}
        first = client.responses.create(input=QUESTION, **asked)
        second = client.responses.create(input="And?", previous_response_id=first.id, **asked)
        assert client.responses.retrieve(second.id).output_text == second.output_text
        items = list(client.responses.input_items.list(second.id, order="asc"))
        assert items[0].content[0].text == QUESTION
        client.responses.delete(first.id)


@asks("openai", "responses: a custom tool with a regex, streamed")
def openai_custom(server: Server) -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
    tool = {"type": "custom", "name": "dial", "format": grammar}
    with openai_client(server) as client:
        events = client.responses.create(
            model=server.model,
            input=QUESTION,
            tools=[tool],
            tool_choice={"type": "custom", "name": "dial"},
            parallel_tool_calls=False,
            stream=True,
        )
        kind = "response.custom_tool_call_input.delta"
        dialled = "".join(event.delta for event in events if event.type == kind)
        assert len(dialled) == 3, dialled
        assert dialled.isdecimal(), dialled


# ---- anthropic ---------------------------------------------------------------------------------


@asks("anthropic", "messages, streamed with the helper; a required call; counting")
def anthropic_messages(server: Server) -> None:
    import anthropic

    tool = {"name": "get_weather", "input_schema": PARAMETERS, "strict": True}
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        asked: Any = {"model": server.model, "messages": MESSAGES}
        with client.messages.stream(max_tokens=8, **asked) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_text() == text
        choice = {"type": "any", "disable_parallel_tool_use": True}
        asked |= {"tools": [tool]}
        message = client.messages.create(max_tokens=500, tool_choice=choice, **asked)
        (call,) = [block for block in message.content if block.type == "tool_use"]
        check_arguments(call.input)
        assert client.messages.count_tokens(**asked).input_tokens > 0


# ---- what is built on them ---------------------------------------------------------------------


@asks("litellm", "a required call, whole and streamed; messages as anthropic/MODEL")
def litellm_completion(server: Server) -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask GitHub
    import litellm

    asked: Any = {
        "model": f"openai/{server.model}",
        "api_base": server.v1,
        "api_key": server.key,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    message = litellm.completion(**asked).choices[0].message
    check_arguments(message.tool_calls[0].function.arguments)
    chunks = litellm.completion(**asked, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    check_arguments("".join(call.function.arguments or "" for call in calls))
    other: Any = {"model": f"anthropic/{server.model}", "api_base": server.url}
    reply = litellm.completion(**other, api_key=server.key, messages=MESSAGES, max_tokens=8)
    assert reply.usage.completion_tokens == 8


@asks("langchain-openai", "a required call; with_structured_output; the Responses API")
def langchain(server: Server) -> None:
    from langchain_openai import ChatOpenAI

    asked: Any = {"model": server.model, "base_url": server.v1, "api_key": server.key}
    chat = ChatOpenAI(**asked)
    bound = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    check_arguments(bound.invoke(QUESTION).tool_calls[0]["args"])
    assert chat.with_structured_output(form(), method="json_schema").invoke(QUESTION).city
    assert ChatOpenAI(**asked, use_responses_api=True, max_tokens=8).invoke(QUESTION).content


@asks("instructor", "a form, by a schema")
def instructor_form(server: Server) -> None:
    """Not by a call: it sends no `strict`, and a model of stories fills any JSON with stories."""
    import instructor

    with openai_client(server) as raw:
        client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
        asked: Any = {"model": server.model, "messages": MESSAGES, "max_retries": 0}
        assert client.chat.completions.create(response_model=form(), **asked).city


@asks("pydantic-ai-slim", "an agent with an output type, by chats and by responses")
def pydantic_ai(server: Server) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask(kind: Any) -> Any:
        provider = OpenAIProvider(base_url=server.v1, api_key=server.key)
        agent = Agent(kind(server.model, provider=provider), output_type=NativeOutput(form()))
        return (await agent.run(QUESTION)).output

    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        assert asyncio.run(ask(kind)).city


# ---- the table ---------------------------------------------------------------------------------


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--model", help="default: the first of /v1/models")
    options.add_argument("--key", default="none")
    given = options.parse_args()
    url = given.url.rstrip("/").removesuffix("/v1")
    server = Server(url, given.model or first_model(url, given.key), given.key)
    failed = False
    for distribution, version, what, result in rows(server):
        print(f"{distribution:17} {version:8} {what:68} {result}", flush=True)
        failed |= result not in ("ok", "-")
    return int(failed)


def rows(server: Server) -> Iterator[tuple[str, str, str, str]]:
    for distribution, what, ask in ASKED:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            yield distribution, "absent", what, "-"
            continue
        try:
            ask(server)
        except Exception as error:  # whatever a client raises is a line of the table
            yield distribution, version, what, f"{type(error).__name__}: {error}"[:300]
        else:
            yield distribution, version, what, "ok"


def first_model(url: str, key: str) -> str:
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["data"][0]["id"])


if __name__ == "__main__":
    sys.exit(main())
