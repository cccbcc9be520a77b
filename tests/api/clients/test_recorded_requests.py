"""Requests of clients that are not installed here, and what these clients read of the replies.

Each file in tests/fixtures/clients names a client, its version and where its requests are from:
recorded from the client, or written from its source. What is read is given by paths into the reply;
"*" stands for any value but null. Of a stream, texts at a path are joined, and otherwise the last
value counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from qwen35_server import MODEL, TEXT, THOUGHT, says
from scripted_engine import ScriptedEngine, answer_anything, serving

from call_texts import write_calls
from pippin.messages import Submit, TokenDelta

FILES = sorted((Path(__file__).parents[2] / "fixtures/clients").glob("*.json"))
RECORDED = [json.loads(file.read_text()) for file in FILES]
REQUESTS = [
    pytest.param(recorded, request, id=f"{recorded['client']}-{request['name']}")
    for recorded in RECORDED
    for request in recorded["requests"]
]
ANY = "*"
OTHER_REPLY = "A reply that no constraint allows."


def reply_text(reply: str | dict[str, Any]) -> str:
    if isinstance(reply, str):
        return reply
    return write_calls("qwen3_coder", [(reply["name"], reply["arguments"])])


def thought_in(submit: Submit) -> str:
    """The reasoning of a reply to this prompt, if it has any."""
    return THOUGHT if TEXT.tokenizer.decode(submit.token_ids[-4:]).endswith("<think>\n") else ""


def events_in(response: httpx.Response) -> list[Any]:
    """One, unless the reply is a stream."""
    kind = response.headers["content-type"].partition(";")[0]
    if kind == "text/event-stream":
        data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        return [json.loads(event) for event in data if event != "[DONE]"]
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in response.text.splitlines()]
    return [response.json()]


def read(event: Any, path: str) -> Any:
    for key in path.split("."):
        if isinstance(event, list):
            event = event[int(key)] if int(key) < len(event) else None
        else:
            event = event.get(key) if isinstance(event, dict) else None
    return event


def read_all(events: list[Any], path: str) -> Any:
    values = [value for event in events if (value := read(event, path)) is not None]
    if not values:
        return None
    is_repeated = len(set(map(str, values))) == 1  # as the model's name in each part
    return values[-1] if is_repeated or not isinstance(values[0], str) else "".join(values)


@pytest.mark.parametrize(("recorded", "request_"), REQUESTS)
def test_a_request_is_answered_with_what_its_client_reads(
    recorded: dict[str, Any], request_: dict[str, Any], obeys: Any
) -> None:
    reply = request_.get("reply")

    def script(submit: Submit) -> list[TokenDelta]:
        if reply is None:
            return answer_anything(submit)
        return says(thought_in(submit) + reply_text(reply))(submit)

    engine = ScriptedEngine(script)
    with serving(engine, text=TEXT, model=MODEL) as url:
        body = request_.get("body")
        response = httpx.request(
            "GET" if body is None else "POST",
            url + request_["path"],
            content=None if body is None else json.dumps(body),
            headers=recorded["headers"][request_["headers"]],
        )
    assert response.status_code == 200, response.text
    events = events_in(response)
    for path, expected in request_["reads"].items():
        found = read_all(events, path)
        assert found == expected or (expected == ANY and found is not None), (path, found)
    if request_.get("constrained"):
        thought = thought_in(engine.submits[-1])
        assert obeys(engine, thought + reply_text(request_["reply"]))
        assert not obeys(engine, thought + OTHER_REPLY)


def test_every_file_names_its_client_and_its_version() -> None:
    clients = {recorded["client"] for recorded in RECORDED}
    assert clients == {"litellm", "instructor", "Open WebUI", "Home Assistant"}
    for recorded in RECORDED:
        assert recorded["version"]
        assert recorded["source"]
        assert {request["headers"] for request in recorded["requests"]} == set(recorded["headers"])
