"""Holds replies of a model of random weights to something an agent can use: a proxy before its server.

Bodies of chats, messages and responses are changed on their way to the server, as a client could
have sent them: the reply is either one call of the shell tool with a fixed command, or the one text
`DONE`. The shell tool's schema is narrowed in every request, so that prompts stay alike. All else,
how much to reason above all, is as the client sent it.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

MARK = "call-the-shell"  # in a user's text: the reply to it is a call
COMMAND = "mktemp note-XXXX; echo pippin-$((40 + 2))"
RESULT = "pippin-42"  # what a shell makes of it
DONE = "It is done."
SHELL_TOOLS = ("Bash", "bash", "exec_command", "shell", "run_shell_command", "run_terminal_command")
SHELL_TOOLS += ("shell_command", "llm_version")
_DONE_SCHEMA = {"enum": [DONE]}
_HOP_BY_HOP = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}

Body = dict[str, Any]


@dataclass
class Exchange:
    """A request that generates, as the client sent it, and its reply: the status, and the body's first piece."""

    path: str
    sent: Body
    status: int = 0
    first: bytes = b""


@contextmanager
def forcing_proxy(server_url: str, exchanges: list[Exchange]) -> Iterator[str]:
    """Its address; it adds to `exchanges`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(None, Exchange(self.path, {}))

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            path = urlsplit(self.path).path
            exchange = Exchange(path, json.loads(body or b"{}"))
            forced = force(path, exchange.sent)
            if forced is not exchange.sent:
                exchanges.append(exchange)
                body = json.dumps(forced).encode()
            self.pass_on(body, exchange)

        def pass_on(self, body: bytes | None, exchange: Exchange) -> None:
            kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
            server = http.client.HTTPConnection(urlsplit(server_url).netloc)
            server.request(self.command, self.path, body, kept)
            reply = server.getresponse()
            exchange.status = reply.status
            self.close_connection = True
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            try:
                self.end_headers()
                while piece := reply.read1(65536):
                    exchange.first = exchange.first or piece
                    self.wfile.write(piece)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the agent has exited, or needs no more
            server.close()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: the table does."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()
        thread.join()


def force(path: str, body: Body) -> Body:
    """The body that is sent to the server for the one that a client sent to `path`."""
    dialect = path.rpartition("/v1/")[2]
    if dialect not in ("chat/completions", "messages", "responses"):
        return body
    forced = body | {"tools": [_narrow(tool) for tool in body.get("tools") or ()]}
    names = [_function(tool).get("name") for tool in forced["tools"]]
    name = next((name for name in SHELL_TOOLS if name in names), None)
    items = body["input"] if dialect == "responses" else body["messages"]
    calls = name is not None and _wants_call(items if isinstance(items, list) else [{"content": items}])
    if dialect == "messages":
        call = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
        format = {"type": "json_schema", "schema": _DONE_SCHEMA}
        done = {"output_config": {**body.get("output_config", {}), "format": format}}
        no_call: Any = {"type": "none"}
    elif dialect == "responses":
        call = {"type": "function", "name": name}
        done = {"text": {"format": {"type": "json_schema", "name": "done", "schema": _DONE_SCHEMA}}}
        no_call = "none"
    else:
        call = {"type": "function", "function": {"name": name}}
        schema = {"name": "done", "schema": _DONE_SCHEMA}
        done = {"response_format": {"type": "json_schema", "json_schema": schema}}
        no_call = "none"
    if not forced["tools"]:
        del forced["tools"]
        return forced | done
    if dialect != "messages":
        forced["parallel_tool_calls"] = False
    return forced | ({"tool_choice": call} if calls else {**done, "tool_choice": no_call})


def _wants_call(messages: list[Body]) -> bool:
    """Whether the user's last words ask for a call that has no result yet."""
    for message in reversed(messages):
        text = json.dumps(message)
        if message.get("role") == "tool" or "tool_result" in text or "call_output" in text:
            return False
        if message.get("role") == "assistant":
            return False
        if MARK in text:
            return True
    return False


def _function(tool: Body) -> Body:
    """The part of a tool with its name and its schema."""
    function = tool.get("function", tool)
    assert isinstance(function, dict)
    return function


def _narrow(tool: Body) -> Body:
    """A shell tool gets a strict schema of fixed words; others are as they were."""
    function = _function(tool)
    if function.get("name") not in SHELL_TOOLS:
        return tool
    key = "input_schema" if "input_schema" in function else "parameters"
    narrow = function | {key: _narrow_schema(function[key]), "strict": True}
    return tool | {"function": narrow} if "function" in tool else narrow


def _narrow_schema(schema: Body) -> Body:
    properties = schema.get("properties", {})
    required = [field for field in properties if field in schema.get("required", ())]
    fixed = {field: _fixed(properties[field]) for field in required}
    return {
        "type": "object",
        "properties": fixed,
        "required": required,
        "additionalProperties": False,
    }


def _fixed(schema: Body) -> Body:
    match schema.get("type"):
        case "boolean":
            return {"type": "boolean", "enum": [False]}
        case "array":  # a command in words
            return {"enum": [["bash", "-c", COMMAND]]}
        case "string" if "enum" not in schema:
            return {"type": "string", "enum": [COMMAND]}
    return schema
