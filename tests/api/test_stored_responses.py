"""Stored responses with the official client; and their store, against one that keeps everything."""

from __future__ import annotations

import random
from typing import Any

import httpx
import msgspec
import openai
import pytest
from qwen35_server import CALL, THOUGHT, WEATHER, openai_client, prompt_text, says
from scripted_engine import fail

from cases import cases
from pippin.api.response_store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    ResponseStores,
    StoredTurn,
)
from pippin.config import ServerConfig

QUESTION = "What is the weather?"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}
REPLY = f"{THOUGHT}I look.\n\n{CALL}"
KEYS = ServerConfig(api_key=("mine", "yours"))


def ask(client: Any, input: Any = QUESTION, **fields: Any) -> Any:
    return client.responses.create(model="qwen", input=input, tools=[TOOL], **fields)


def streamed(client: Any, input: Any = QUESTION, **fields: Any) -> Any:
    return list(ask(client, input, stream=True, **fields))[-1].response


def result_of(response: Any) -> list[dict[str, Any]]:
    call_id = response.output[-1].call_id
    return [{"type": "function_call_output", "call_id": call_id, "output": "rain"}]


@pytest.mark.parametrize("reply", [ask, streamed])
def test_a_conversation_goes_on_from_a_stored_response(reply: Any) -> None:
    with openai_client(says(REPLY), says("Rain.")) as (client, engine):
        first = reply(client)
        second = reply(client, result_of(first), previous_response_id=first.id)
    assert first.store
    assert second.previous_response_id == first.id
    prompt = prompt_text(engine)
    assert prompt.startswith(prompt_text(engine, 0)), "the prefix cache holds the first turn"
    assert f"Let me think.\n</think>\n\nI look.\n\n{CALL}" in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


def test_instructions_are_not_carried_over() -> None:
    with openai_client(says("Yes.")) as (client, engine):
        first = ask(client, instructions="Be rude.")
        ask(client, "Again.", previous_response_id=first.id, instructions="Be kind.")
    assert "Be kind." in prompt_text(engine)
    assert "Be rude." not in prompt_text(engine)


@pytest.mark.parametrize("reply", [ask, streamed])
def test_a_response_is_read_again_as_it_was_told(reply: Any) -> None:
    with openai_client(says(REPLY)) as (client, _):
        told = reply(client, metadata={"a": "b"})
        again = client.responses.retrieve(told.id, include=["reasoning.encrypted_content"])
    assert again.to_dict() == told.to_dict()


def test_items_that_went_in_are_listed_in_pages() -> None:
    with openai_client(says(REPLY), says("Rain.")) as (client, _):
        first = ask(client)
        second = ask(client, result_of(first), previous_response_id=first.id)
        listed = client.responses.input_items.list(second.id, order="asc", limit=2)
        assert [item.type for item in listed.data] == ["message", "reasoning"]
        kinds = [item.type for item in listed]  # fetches the other pages
        latest = client.responses.input_items.list(second.id).data[0]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert latest.output == "rain"
    assert listed.data[0].content[0].text == QUESTION


def test_a_stored_item_can_be_referred_to() -> None:
    with openai_client(says(REPLY), says("Rain.")) as (client, engine):
        first = ask(client)
        referred = [{"type": "item_reference", "id": item.id} for item in first.output]
        ask(client, [{"role": "user", "content": QUESTION}, *referred, *result_of(first)])
    assert f"Let me think.\n</think>\n\nI look.\n\n{CALL}" in prompt_text(engine)


def test_a_deleted_response_is_gone() -> None:
    with openai_client(says("Yes.")) as (client, _):
        first = ask(client)
        assert client.responses.delete(first.id) is None
        for gone in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}'"):
                gone(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("reply", [ask, streamed])
def test_nothing_is_kept_that_was_not_to_be_stored(reply: Any) -> None:
    with openai_client(says("Yes.")) as (client, _):
        told = reply(client, store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(told.id)
    assert told.store is False


def test_the_oldest_are_dropped_and_a_large_one_says_that_it_was_not_stored() -> None:
    config = ServerConfig(stored_responses=2, stored_bytes=20_000)
    with openai_client(says("Yes."), config=config) as (client, _):
        first, *later = [ask(client) for _ in range(3)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        assert all(client.responses.retrieve(each.id).id == each.id for each in later)
        assert ask(client, "x" * 20_000).store is False


def test_a_server_that_stores_nothing_says_so() -> None:
    config = ServerConfig(stored_responses=0)
    with openai_client(says("Yes."), config=config) as (client, _):
        assert ask(client).store is False
        assert ask(client, store=True).store is False


def test_responses_belong_to_the_key_that_made_them() -> None:
    with openai_client(says("Yes."), config=KEYS, key="mine") as (client, _):
        told = ask(client)
        other = client.with_options(api_key="yours")
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(told.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(told.id)
        with pytest.raises(openai.BadRequestError):
            ask(other, previous_response_id=told.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            ask(other, [{"type": "item_reference", "id": told.output[0].id}])
        assert client.responses.retrieve(told.id).id == told.id


def test_a_reply_that_failed_is_not_stored() -> None:
    with openai_client(fail("the device failed", after="x")) as (client, _):
        events = list(ask(client, stream=True))
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(events[0].response.id)


@cases(
    ("query", "param"),
    [
        ("input_items?limit=0", "limit"),
        ("input_items?limit=101", "limit"),
        ("input_items?limit=many", "limit"),
        ("input_items?order=up", "order"),
        ("input_items?after=nobody", "after"),
        ("input_items?nonsense=1", "nonsense"),
        ("?stream=true", "stream"),
        ("?include[]=message.output_text.logprobs", "include"),
    ],
)
def test_a_wrong_query_is_named(query: str, param: str) -> None:
    with openai_client(says("Yes.")) as (client, _):
        told = ask(client)
        path = f"{client.base_url}responses/{told.id}"
        refused = httpx.get(path + (query if query[0] == "?" else f"/{query}"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


ME, YOU = b"me", b"you"  # owners


def item(id: str, text: str = "") -> dict[str, str]:
    return {"id": id, "text": text}


def put(
    store: ResponseStore,
    id: str,
    previous: StoredTurn | None = None,
    *,
    text: str = "",
) -> bool:
    turn = StoredTurn.of([item(f"in-{id}", text)], [item(f"out-{id}")], previous)
    return store.put({"id": id, "output": msgspec.json.decode(turn.output)}, turn)


def test_a_response_is_found_with_all_that_was_said_before_it() -> None:
    store = ResponseStore(10, 10_000)
    put(store, "a")
    put(store, "b", store.previous("a"))
    stored = store.get("b")
    assert stored.response() == {"id": "b", "output": [item("out-b")]}
    assert [each["id"] for each in stored.turn.items()] == ["in-a", "out-a", "in-b", "out-b"]
    assert [each["id"] for each in stored.turn.input_items()] == ["in-a", "out-a", "in-b"]


def test_what_was_not_asked_for_longest_goes_first_and_what_was_built_on_it_stays_whole() -> None:
    store = ResponseStore(2, 10_000)
    put(store, "a")
    put(store, "b", store.previous("a"))
    store.get("a")
    put(store, "c", store.previous("a"))
    with pytest.raises(ResponseNotFound):
        store.get("b")
    store.delete("a")
    assert [each["id"] for each in store.get("c").turn.items()][:2] == ["in-a", "out-a"]
    assert store.items(["out-a", "out-b"]) == {"out-a": item("out-a")}


def test_another_key_finds_nothing() -> None:
    stores = ResponseStores(10, 10_000, num_owners=2)
    mine, yours = stores.of(ME), stores.of(YOU)
    put(mine, "a")
    for ask in (yours.get, yours.delete):
        with pytest.raises(ResponseNotFound, match="Response with id 'a' not found"):
            ask("a")
    with pytest.raises(PreviousResponseNotFound, match="Previous response with id 'a' not found"):
        yours.previous("a")
    assert yours.items(["in-a"]) == {}
    assert stores.of(ME).get("a")


def test_another_key_cannot_take_an_items_place_nor_its_room() -> None:
    stores = ResponseStores(6, 2_000, num_owners=2)
    mine, yours = stores.of(ME), stores.of(YOU)
    put(mine, "a", text="mine")
    put(yours, "a", text="yours")
    for number in range(20):
        put(yours, str(number), text="x" * 100)
    assert mine.items(["in-a"]) == {"in-a": item("in-a", "mine")}
    assert len(yours) == 3
    assert len(mine) == 1
    assert not put(yours, "large", text="x" * 1_000)
    assert put(mine, "b", text="x" * 500)


@pytest.mark.parametrize(("total", "each"), [(0, 0), (1, 1), (2, 1), (7, 2), (1024, 341)])
def test_each_owner_has_an_equal_part_and_room_for_one_response_at_least(
    total: int, each: int
) -> None:
    store = ResponseStores(total, 9_000, num_owners=3).of(ME)
    assert (store.max_responses, store.max_bytes) == (each, 3_000)
    assert store.enabled == (total > 0)


def test_what_is_too_large_alone_is_not_kept_and_drops_nobody() -> None:
    store = ResponseStore(10, 500)
    assert put(store, "a")
    assert not put(store, "b", store.previous("a"), text="x" * 480)
    assert len(store) == 1
    assert store.get("a")


def test_a_chain_counts_whole_also_if_its_beginning_was_dropped_meanwhile() -> None:
    store = ResponseStore(1, 10_000)
    put(store, "a", text="x" * 100)
    turn = store.previous("a")
    put(store, "b")  # while a request that goes on from "a" is running
    before = store.nbytes
    put(store, "c", turn)
    assert store.nbytes > before + 100
    assert len(store.get("c").turn.items()) == 4


@cases("seed", range(20))
def test_bounds_hold_and_bytes_add_up_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    store = ResponseStore(rng.randint(1, 8), rng.randint(200, 2000))
    for number in range(300):
        known = list(store._responses)
        match rng.choice(["put", "put", "get", "delete"]):
            case "put":
                goes_on = known and rng.random() < 0.7
                previous = store.previous(rng.choice(known)) if goes_on else None
                put(store, str(number), previous, text="x" * rng.randint(0, 300))
            case "get" if known:
                store.get(rng.choice(known))
            case "delete" if known:
                store.delete(rng.choice(known))
        kept = {turn for stored in store._responses.values() for turn in stored.turn.chain()}
        told = sum(len(stored.rest) for stored in store._responses.values())
        assert store.nbytes == told + sum(turn.nbytes for turn in kept) <= store.max_bytes
        assert len(store) <= store.max_responses
        assert set(store._turns.values()) == kept
