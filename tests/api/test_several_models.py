"""Several models behind one API: which engine answers, what waits, what is unloaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import say, serving
from several_models import FakeEngine, World, serving_several

from pippin.config import ServerConfig

Play = Callable[[World], Awaitable[None]]


def play(scenario: Play, **options: Any) -> None:
    async def run() -> None:
        async with serving_several(**options) as world:
            await scenario(world)

    asyncio.run(run())


def played(**options: Any) -> Callable[[Play], Callable[[], None]]:
    """A test of one world."""

    def decorate(scenario: Play) -> Callable[[], None]:
        return lambda: play(scenario, **options)

    return decorate


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


@played(room=3)
async def test_a_requests_model_answers_it_and_the_first_one_if_it_names_none(world: World) -> None:
    assert text_of(await world.chat("beta", max_tokens=50)) == "I am beta."
    assert text_of(await world.chat("gamma-alias", max_tokens=50)) == "I am gamma."
    assert text_of(await world.chat(max_tokens=50)) == "I am alpha."
    reply = await world.client.post("/v1/completions", json={"prompt": "Hi.", "max_tokens": 2})
    assert reply.json()["model"] == "alpha"
    ollama = {"model": "beta:latest", "prompt": "Hi.", "stream": False}
    assert (await world.client.post("/api/generate", json=ollama)).json()["model"] == "beta"


@played()
async def test_an_unknown_model_is_a_404_that_names_all_and_loads_none(world: World) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/api/chat", "/v1/messages"):
        messages = [{"role": "user", "content": "Hi."}]
        body = {"model": "delta", "messages": messages, "prompt": "Hi.", "max_tokens": 1}
        body.pop("prompt" if "completions" not in path or "chat" in path else "messages")
        reply = await world.client.post(path, json=body)
        assert reply.status_code == 404
        assert all(name in reply.text for name in ("alpha", "beta", "gamma"))
    assert world.started == []


@played()
async def test_a_request_that_is_wrong_loads_nothing(world: World) -> None:
    assert (await world.chat("beta", temperature="hot")).status_code == 400
    assert (await world.client.post("/tokenize", json={"model": "beta", "prompt": "a"})).json()
    assert world.started == []


@played()
async def test_models_are_listed_whether_they_are_loaded_or_not(world: World) -> None:
    listed = (await world.client.get("/v1/models")).json()["data"]
    names = [entry["id"] for entry in listed if entry["id"] == entry["root"]]
    assert names == ["alpha", "beta", "gamma"]
    assert (await world.client.get("/v1/models/gamma")).json()["id"] == "gamma"
    tags = (await world.client.get("/api/tags")).json()["models"]
    assert {"alpha:latest", "beta:latest", "gamma:latest"} <= {tag["name"] for tag in tags}
    assert (await world.client.get("/api/ps")).json() == {"models": []}
    await world.chat("beta")
    loaded = (await world.client.get("/api/ps")).json()["models"]
    assert {model["name"] for model in loaded} == {"beta:latest", "beta-alias:latest"}
    assert loaded[0]["expires_at"] < "2100", "in five minutes"
    assert loaded[0]["context_length"] == 4096, "as the engine says"
    assert (await world.client.get("/health")).status_code == 200
    states = (await world.client.get("/status")).json()["models"]
    assert [state["state"] for state in states.values()] == ["stopped", "ready", "stopped"]
    assert (await world.client.get("/status?model=beta")).json() == {"running": 0}
    assert (await world.client.get("/status?model=alpha")).status_code == 503


@played()
async def test_another_model_takes_the_place_of_one_without_a_request(world: World) -> None:
    assert (await world.chat("alpha")).headers["x-pippin-load-place"] == "1"
    assert "x-pippin-load-place" not in (await world.chat("alpha")).headers
    await world.chat("beta")
    assert world.started == ["alpha", "beta"]
    assert world.hosts[0][1].engine.is_closed
    assert (world.state("alpha"), world.state("beta")) == ("stopped", "ready")


@played()
async def test_a_stream_is_not_cut_by_a_request_for_another_model(world: World) -> None:
    await world.chat("alpha")
    engine = world.hosts[0][1].engine
    engine.gate.clear()
    stream = asyncio.create_task(world.chat("alpha", stream=True))
    while not engine.submits[1:]:
        await asyncio.sleep(0.001)
    other = asyncio.create_task(world.chat("beta"))
    await world.until_waiting("beta")
    world.wait(100.0)  # alpha has had its turn
    late = asyncio.create_task(world.chat("alpha", max_tokens=50))
    await world.until_waiting("alpha")
    assert world.started == ["alpha"]
    assert not engine.is_closed
    assert not other.done()
    assert not late.done()
    engine.gate.set()
    assert "[DONE]" in (await stream).text
    assert "error" not in (await stream).text
    assert (await other).status_code == 200
    assert text_of(await late) == "I am alpha."
    assert world.started == ["alpha", "beta", "alpha"]


@played()
async def test_keep_alive_is_honoured_and_zero_unloads(world: World) -> None:
    async def generate(**fields: object) -> httpx.Response:
        body = {"model": "alpha", "stream": False, **fields}
        return await world.client.post("/api/generate", json=body)

    await generate(prompt="Hi.", keep_alive="10m")
    assert world.engines.seconds_left("alpha") == 600.0
    await generate(prompt="Hi.", keep_alive=-1)
    assert world.engines.seconds_left("alpha") is None
    assert (await generate(prompt="Hi.", keep_alive="soon")).status_code == 400
    reply = await generate(keep_alive=0)
    assert reply.json()["done_reason"] == "unload"
    await world.settle()
    assert world.state("alpha") == "stopped"
    await generate(keep_alive=0)
    assert world.started == ["alpha"], "what is not loaded is not loaded to be unloaded"
    assert (await generate()).json()["done_reason"] == "load"
    assert world.started == ["alpha", "alpha"]


@pytest.mark.parametrize(
    ("keys", "admin"),
    [
        ({"api_key": ("alice", "bob"), "admin_key": ("root",)}, "root"),
        ({"api_key": ("alice", "bob")}, None),
        ({"api_key": ("alice",)}, "alice"),
    ],
)
def test_where_keys_are_set_an_admin_sets_how_long_a_model_stays(
    keys: dict[str, tuple[str, ...]], admin: str | None
) -> None:
    async def scenario(world: World) -> None:
        async def post(path: str, key: str, **fields: object) -> httpx.Response:
            body = {"model": "alpha", "stream": False, **fields}
            headers = {"Authorization": f"Bearer {key}"}
            return await world.client.post(path, json=body, headers=headers)

        texts: dict[str, dict[str, object]] = {
            "/api/generate": {"prompt": "Hi.", "options": {"num_predict": 2}},
            "/api/chat": {"messages": [{"role": "user", "content": "Hi."}]},
        }
        for key in {*keys["api_key"], *keys.get("admin_key", ())} - {admin}:
            for path, text in texts.items():
                for keep_alive in (0, "1s", -1):
                    reply = await post(path, key, keep_alive=keep_alive, **text)
                    assert reply.status_code == 200
                    assert reply.headers["x-pippin-ignored"] == "keep_alive"
                    assert world.engines.seconds_left("alpha") == 300.0
                refused = await post(path, key, keep_alive=0)
                assert refused.status_code == 403
                assert "--admin-key" in refused.json()["error"]
                assert world.state("alpha") == "ready"
        if admin is not None:
            reply = await post("/api/generate", admin, keep_alive="10m", **texts["/api/generate"])
            assert "x-pippin-ignored" not in reply.headers
            assert world.engines.seconds_left("alpha") == 600.0
            assert (await post("/api/chat", admin, keep_alive=0)).status_code == 200
            await world.settle()
            assert world.state("alpha") == "stopped"

    play(scenario, config=ServerConfig(**keys))  # type: ignore[arg-type]


@played(room=2)
async def test_an_idle_model_is_unloaded_after_its_keep_alive(world: World) -> None:
    await world.chat("alpha")
    world.wait(301.0)
    await world.settle()
    assert world.state("alpha") == "stopped"


@played()
async def test_the_time_that_a_request_waited_is_its_load_duration(world: World) -> None:
    world.loads.clear()
    body = {"model": "alpha", "prompt": "Hi.", "stream": False}
    waiting = asyncio.create_task(world.client.post("/api/generate", json=body))
    await world.until_waiting("alpha")
    world.now[0] += 7.0
    world.loads.set()
    assert (await waiting).json()["load_duration"] == 7_000_000_000


@played()
async def test_a_model_that_cannot_be_loaded_is_refused_and_others_are_served(world: World) -> None:
    world.failures["alpha"] = "no such weights"
    for _ in range(2):
        refused = await world.chat("alpha")
        assert refused.status_code == 503
        assert "no such weights" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) == 5
    assert world.started == ["alpha"], "the second one did not try again"
    assert (await world.chat("beta")).status_code == 200
    del world.failures["alpha"]
    world.wait(100.0)
    assert (await world.chat("alpha")).status_code == 200


@played()
async def test_a_model_whose_engine_died_too_often_is_refused_for_a_while(world: World) -> None:
    await world.chat("alpha")
    world.hosts[0][1].dies.set()
    asked = [asyncio.create_task(world.chat("alpha")) for _ in range(3)]  # at any moment of it
    for _ in range(3):
        await asyncio.sleep(0)
        asked.append(asyncio.create_task(world.chat("alpha")))
    statuses = {(await reply).status_code for reply in asked}
    assert statuses <= {200, 503}
    refused = await world.chat("alpha")
    assert refused.status_code == 503
    assert "failed 6 times in a row" in refused.json()["error"]["message"]
    assert (await world.chat("beta")).status_code == 200
    world.wait(100.0)
    assert (await world.chat("alpha")).status_code == 200
    assert world.engines.num_open == 0


@played()
async def test_no_lease_is_given_on_an_engine_that_ends(world: World) -> None:
    await world.chat("alpha")
    closing = asyncio.Event()
    host = world.hosts[0][1]
    host.engine.close = closing.set  # type: ignore[method-assign]
    host.dies.set()
    await closing.wait()
    assert world.engines.lease_now("alpha") is None


@played(max_waiting=2)
async def test_a_full_queue_refuses_with_a_time_to_retry(world: World) -> None:
    world.loads.clear()
    waiting = [asyncio.create_task(world.chat("alpha")) for _ in range(2)]
    await world.until_waiting("alpha", 2)
    refused = await world.chat("alpha")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    world.loads.set()
    places = {(await each).headers["x-pippin-load-place"] for each in waiting}
    assert places == {"1", "2"}


@played()
async def test_a_client_that_disconnects_gives_up_its_place(world: World) -> None:
    world.loads.clear()
    waiting = asyncio.create_task(world.engines.lease("alpha"))
    await world.settle()
    waiting.cancel()
    await world.settle()
    assert not world.engines.turn("alpha").waiting
    world.loads.set()
    await world.settle()
    assert world.engines.turn("alpha").num_open == 0


@played()
async def test_requests_that_wait_are_refused_when_the_server_drains(world: World) -> None:
    world.loads.clear()
    waiting = asyncio.create_task(world.chat("alpha"))
    await world.until_waiting("alpha")
    world.engines.drain()
    assert (await waiting).status_code == 503
    await world.engines.drained()


def test_metrics_have_the_models_name_where_there_are_several() -> None:
    async def scenario(world: World) -> None:
        await world.chat("beta")
        found = (await world.client.get("/metrics")).text
        assert 'pippin_engine_up{model_name="alpha"} 0.0' in found
        assert 'pippin_engine_up{model_name="beta"} 1.0' in found
        assert 'pippin_model_loads_total{model_name="beta"} 1.0' in found
        assert 'pippin_requests_total{finished_reason="stop",model_name="beta"}' in found
        assert found.count("# TYPE pippin_engine_up ") == 1

    play(scenario)
    with serving(FakeEngine(say("a"))) as url:
        alone = httpx.get(f"{url}/metrics").text
    assert "model_name" not in alone
    assert "pippin_engine_up 1.0" in alone


def test_lines_of_a_batch_may_name_different_models(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 50}
        line = {"method": "POST", "url": "/v1/chat/completions"}
        lines = [
            json.dumps({**line, "custom_id": name, "body": {**body, "model": name}})
            for name in ("beta", "gamma", "beta-alias")
        ]
        file = ("lines.jsonl", "\n".join(lines).encode())
        sent = await world.client.post("/v1/files", data={"purpose": "batch"}, files={"file": file})
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await world.client.post(
            "/v1/batches", json={**asked, "input_file_id": sent.json()["id"]}
        )
        path = f"/v1/batches/{batch.json()['id']}"
        assert batch.json()["model"] is None
        while (shown := (await world.client.get(path)).json())["status"] != "completed":
            assert shown["status"] in ("validating", "in_progress", "finalizing"), shown
            await asyncio.sleep(0.01)
        output = await world.client.get(f"/v1/files/{shown['output_file_id']}/content")
        replies = [json.loads(reply)["response"]["body"] for reply in output.text.splitlines()]
        assert sorted(reply["model"] for reply in replies) == ["beta", "beta", "gamma"]

    play(scenario, config=ServerConfig(batch_dir=str(tmp_path), batch_running=2))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_other_routes_find_their_model_too(path: str) -> None:
    async def scenario(world: World) -> None:
        await world.client.post(path, json={"model": "gamma", "input": "Hi.", "timeout": 0.01})
        assert world.started == ["gamma"]

    play(scenario)
