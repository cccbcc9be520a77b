"""The tool that runs agents: what its proxy forces is what each dialect means by it."""

from __future__ import annotations

import http.client
import json
import runpy
import sys
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

FOLDER = Path(__file__).parents[2] / "tools" / "agents"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="tools/ is not beside the tests")

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
    forcing = runpy.run_path(str(FOLDER / "forcing.py"))
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


@pytest.mark.parametrize("dialect", PARSERS)
@pytest.mark.parametrize("has_result", [False, True])
def test_how_much_to_reason_is_as_the_client_sent_it(dialect: str, has_result: bool) -> None:
    more = RESULTS[dialect] if has_result else []
    forced = force(dialect, *more, fields=EFFORTS[dialect])
    assert PARSERS[dialect](forced, RULES).reasoning_effort == "high"
    for field, value in EFFORTS[dialect].items():
        assert forced[field] == value or forced[field].items() > value.items()


def test_lines_that_the_last_request_had_and_the_models_own_are_not_new() -> None:
    sys.path.insert(0, str(FOLDER.parent))
    try:
        from agents.forcing_proxy import Exchange
        from agents.token_table import token_table
    finally:
        sys.path.remove(str(FOLDER.parent))
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    reply = {"role": "assistant", "content": "It is done."}
    first = {"system": "You help.\nStatus: clean\n", "messages": [USER]}
    second = {"system": "You help.\nStatus: dirty\n", "messages": [USER, reasoning, reply, USER]}
    exchanges = [Exchange("a", "/v1/messages", first), Exchange("b", "/v1/messages", second)]
    facts = [
        {"id": "a", "prompt_tokens": 100, "cached_tokens": 0},
        {"id": "b", "prompt_tokens": 150, "cached_tokens": 64},
    ]
    log = "\n".join(["started", *map(json.dumps, facts)])
    _, one, other, most = token_table(exchanges, log, len)
    assert one.split() == ["1", "100", "0", "100", "100", "0"]
    new = len("Status: dirty\n") + len(USER["content"])
    assert other.split() == ["2", "150", "64", "86", str(new), str(86 - new)]
    assert most.split()[2] == str(86 - new)


class Echo(BaseHTTPRequestHandler):
    """Replies with what it was sent, and with the id."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(418)
        self.send_header("x-seen-id", self.headers.get("x-request-id", ""))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_proxy_sends_changed_bodies_and_records_what_the_client_sent() -> None:
    proxy_type = runpy.run_path(str(FOLDER / "forcing_proxy.py"))["ForcingProxy"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with proxy_type(url, lambda path, body: body | {"path": path}) as proxy:
            client = http.client.HTTPConnection(proxy.url.removeprefix("http://"))
            client.request("POST", "/v1/messages?beta=true", json.dumps({"a": 1}))
            reply = client.getresponse()
            assert json.load(reply) == {"a": 1, "path": "/v1/messages"}
            client.close()
        server.shutdown()
        thread.join()
    (exchange,) = proxy.exchanges
    assert exchange.sent == {"a": 1}
    assert exchange.status == reply.status == 418
    assert exchange.id == reply.getheader("x-seen-id")
