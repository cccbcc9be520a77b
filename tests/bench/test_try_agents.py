"""The tool that runs agents: what its proxy forces is what each dialect means by it."""

from __future__ import annotations

import http.client
import json
import runpy
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pippin.api.dialects.chat_completions import parse_chat
from pippin.api.dialects.messages import parse_message_request
from pippin.api.dialects.responses import parse_responses_request
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.neutral_request import ChatRequest
from pippin.config import LimitsConfig
from pippin.text.bundle import SamplingDefaults

FORCING = Path(__file__).parents[2] / "tools" / "forcing.py"
pytestmark = pytest.mark.skipif(not FORCING.exists(), reason="tools/ is not beside the tests")

RULES = RequestRules(ModelInfo("m", 4096, 300, 0), SamplingDefaults(), LimitsConfig())
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
}
USER = {"role": "user", "content": "Please call-the-shell."}
FUNCTION = {"name": "Bash", "description": "Runs a command.", "parameters": SCHEMA}
OTHER = {"name": "Read", "parameters": {"type": "object", "properties": {}}}


def tools_of(dialect: str) -> list[dict[str, Any]]:
    if dialect == "chat/completions":
        return [{"type": "function", "function": tool} for tool in (OTHER, FUNCTION)]
    if dialect == "responses":
        return [{"type": "function", **tool} for tool in (OTHER, FUNCTION)]
    return [
        {"name": tool["name"], "input_schema": tool["parameters"]} for tool in (OTHER, FUNCTION)
    ]


def force(
    dialect: str, *more: dict[str, Any], fields: dict[str, Any] | None = None
) -> dict[str, Any]:
    forcing = runpy.run_path(str(FORCING))
    items = "input" if dialect == "responses" else "messages"
    body = {"model": "m", items: [USER, *more], "tools": tools_of(dialect), "max_tokens": 99}
    body |= fields or {}
    if dialect == "responses":
        del body["max_tokens"]
    forced = forcing["force"](f"/v1/{dialect}", body)
    assert isinstance(forced, dict)
    return forced


RESULTS: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "Bash", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ],
    "messages": [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "Bash", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
    ],
    "responses": [
        {"type": "function_call", "call_id": "c", "name": "Bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ],
}
PARSERS: dict[str, Callable[[Any, RequestRules], ChatRequest]] = {
    "chat/completions": parse_chat,
    "messages": parse_message_request,
    "responses": parse_responses_request,
}


@pytest.mark.parametrize("dialect", PARSERS)
def test_the_first_reply_is_one_call_of_the_shell_with_a_fixed_command(dialect: str) -> None:
    forced = force(dialect)
    assert "timeout" not in json.dumps(forced["tools"])  # optional: not a word of it is free
    use = PARSERS[dialect](forced, RULES).tool_use
    assert use.required
    assert not use.parallel
    (tool,) = use.allowed
    assert tool["function"]["name"] == "Bash"
    assert tool["function"]["strict"]
    assert "enum" in tool["function"]["parameters"]["properties"]["command"]


@pytest.mark.parametrize("dialect", PARSERS)
def test_behind_a_result_comes_one_fixed_text_and_the_tools_are_as_before(dialect: str) -> None:
    forced = force(dialect, *RESULTS[dialect])
    request = PARSERS[dialect](forced, RULES)
    assert request.tool_use.tools
    assert not request.tool_use.allowed
    assert request.options.params.grammar is not None
    assert "It is done." in request.options.params.grammar.text
    assert forced["tools"] == force(dialect)["tools"]


EFFORTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"reasoning_effort": "high"},
    "messages": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    "responses": {"reasoning": {"effort": "high", "summary": "auto"}},
}


class Echo(BaseHTTPRequestHandler):
    """Replies with what it was sent."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(418)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_proxy_sends_changed_bodies_and_records_what_the_client_sent() -> None:
    forcing = runpy.run_path(str(FORCING))
    sent, exchanges = {"messages": [USER]}, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with forcing["forcing_proxy"](url, exchanges) as proxy:
            client = http.client.HTTPConnection(proxy.removeprefix("http://"))
            client.request("POST", "/v1/messages?beta=true", json.dumps(sent))
            reply = client.getresponse()
            assert json.load(reply) == forcing["force"]("/v1/messages", sent) != sent
            client.close()
        server.shutdown()
        thread.join()
    (exchange,) = exchanges
    assert exchange.sent == sent
    assert exchange.status == reply.status == 418
