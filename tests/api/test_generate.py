"""SGLang's `/generate` and `/get_model_info`."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from scripted_engine import EOS, MODEL, TOKENIZER, ScriptedEngine, fail, hang, say, serving

from pippin.api.endpoints.generate import (
    GENERATE_HONOURED,
    GENERATE_REFUSED,
    PARAMS_HONOURED,
    PARAMS_REFUSED,
)

SAID = "A fox and a hen."


def generate(engine: ScriptedEngine | None = None, **fields: Any) -> httpx.Response:
    with serving(engine or ScriptedEngine(say(SAID))) as url:
        return httpx.post(f"{url}/generate", json=fields)


def params_of(**sampling_params: Any) -> Any:
    engine = ScriptedEngine(say(SAID))
    assert generate(engine, text="Hi", sampling_params=sampling_params).status_code == 200
    return engine.submits[0].params


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_reply_has_text_ids_and_what_it_took() -> None:
    engine = ScriptedEngine(say(SAID))
    reply = generate(engine, text="Hi", rid="mine").json()
    tokens = [*TOKENIZER.encode(SAID), EOS]
    assert reply == {
        "text": SAID,
        "output_ids": tokens,
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": len(TOKENIZER.encode("Hi")),
            "completion_tokens": len(tokens),
            "cached_tokens": 3,
        },
    }
    assert engine.submits[0].params.max_tokens == 128


def test_tokens_may_come_in_place_of_text() -> None:
    engine = ScriptedEngine(say(SAID))
    assert generate(engine, input_ids=[5, 6, 7]).json()["text"] == SAID
    assert engine.submits[0].tokens == [5, 6, 7]


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ["Hi", "Ho"]},
        {"input_ids": [[5, 6], [7]]},
        {"text": "Hi", "sampling_params": {"n": 2}},
    ],
)
def test_several_replies_are_a_list(fields: dict[str, Any]) -> None:
    replies = generate(ScriptedEngine(say("one"), say("two")), **fields, rid=["a", "b"]).json()
    assert [reply["text"] for reply in replies] == ["one", "two"]
    assert [reply["meta_info"]["id"] for reply in replies] == ["a", "b"]
    assert isinstance(generate(text=["Hi"]).json(), list)


def test_sampling_params_go_by_their_names_in_sglang() -> None:
    params = params_of(
        max_new_tokens=9, min_new_tokens=2, sampling_seed=5, temperature=0.5, top_k=-1, stop=["x"]
    )
    assert (params.max_tokens, params.min_tokens, params.seed) == (9, 2, 5)
    assert (params.temperature, params.top_k, params.stop) == (0.5, 0, ("x",))
    assert params_of(regex="a+").regex == "a+"


def test_how_a_reply_ended_is_told() -> None:
    def finish(**sampling_params: Any) -> Any:
        reply = generate(text="Hi", sampling_params=sampling_params).json()
        return reply["meta_info"]["finish_reason"]

    assert finish(max_new_tokens=2) == {"type": "length", "length": 2}
    assert finish(stop=["zebra", " hen"]) == {"type": "stop", "matched": " hen"}


def test_a_stream_says_all_so_far_again_and_again() -> None:
    told = events(generate(text="Hi", stream=True, return_logprob=True))
    texts = [event["text"] for event in told]
    assert texts[-1] == SAID
    assert len(set(texts)) > 3
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    reasons = [event["meta_info"]["finish_reason"] for event in told]
    assert reasons[:-1] == [None] * (len(told) - 1)
    assert reasons[-1]["type"] == "stop"
    assert told[-1] | {"meta_info": None} == generate(text="Hi").json() | {"meta_info": None}
    assert "index" not in told[0]


def test_streams_of_several_replies_are_told_apart() -> None:
    engine = ScriptedEngine(say("one"), say("two"))
    told = events(generate(engine, text=["Hi", "Ho"], stream=True))
    assert {event["index"]: event["text"] for event in told} == {0: "one", 1: "two"}


def test_log_probabilities_of_the_reply_and_of_the_prompt() -> None:
    fields = {"input_ids": [5, 6, 7], "return_logprob": True}
    meta = generate(**fields).json()["meta_info"]
    tokens = [*TOKENIZER.encode(SAID), EOS]
    assert meta["output_token_logprobs"] == [[-t / 1000, t, None] for t in tokens]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta

    meta = generate(**fields, logprob_start_len=0, top_logprobs_num=2).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-0.006, 6, None], [-0.007, 7, None]]
    assert meta["input_top_logprobs"] == [
        None,
        [[-0.006, 6, None], [-0.007, 7, None]],
        [[-0.007, 7, None], [-0.008, 8, None]],
    ]
    assert len(meta["output_top_logprobs"]) == len(tokens)

    later = generate(**fields, logprob_start_len=2, return_text_in_logprobs=True)
    [entry] = later.json()["meta_info"]["input_token_logprobs"]
    assert entry == [-0.007, 7, TOKENIZER.token_text(7)]


def test_no_new_tokens_score_a_prompt() -> None:
    reply = generate(
        text="A fox",
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 0},
    ).json()
    assert reply["text"] == ""
    assert reply["output_ids"] == reply["meta_info"]["output_token_logprobs"] == []
    assert len(reply["meta_info"]["input_token_logprobs"]) == len(TOKENIZER.encode("A fox"))


@pytest.mark.parametrize("field", sorted(GENERATE_REFUSED))
def test_refused_fields_are_named(field: str) -> None:
    assert not GENERATE_HONOURED & GENERATE_REFUSED.keys()
    response = generate(text="Hi", **{field: {"some": "thing"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    for neutral in (None, *GENERATE_REFUSED[field].neutral):
        assert generate(text="Hi", **{field: neutral}).status_code == 200


@pytest.mark.parametrize("field", sorted(PARAMS_REFUSED))
def test_refused_sampling_params_are_named(field: str) -> None:
    assert not PARAMS_HONOURED & PARAMS_REFUSED.keys()
    response = generate(text="Hi", sampling_params={field: {"some": "thing"}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"sampling_params.{field}"
    for neutral in (None, *PARAMS_REFUSED[field].neutral):
        params_of(**{field: neutral})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [[1], "a"]}, "input_ids"),
        ({"input_ids": [MODEL.vocab_size]}, "input_ids"),
        ({"input_ids": [1] * MODEL.max_len}, "input_ids"),
        ({"text": "a", "model": "gpt-4"}, "model"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": ["a", "b"], "rid": "one"}, "rid"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": MODEL.max_len}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "sampling_params": {"min_new_tokens": 999}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": ["a"] * 513}, "sampling_params.n"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    response = generate(**fields)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


def test_an_engine_that_fails_is_told_before_and_in_a_stream() -> None:
    engine = ScriptedEngine(fail("full"))
    assert generate(engine, text="Hi").status_code == 503
    assert generate(engine, text="Hi", stream=True).status_code == 503
    assert generate(ScriptedEngine(hang()), text="Hi", timeout=0.05).status_code == 408


def test_the_model_is_described_without_paths() -> None:
    with serving(ScriptedEngine()) as url:
        info = httpx.get(f"{url}/get_model_info").json()
        assert httpx.get(f"{url}/model_info").json() == info
    assert info["model_path"] == info["served_model_name"] == "stories"
    assert info["is_generation"] is True
    assert info["max_model_len"] == MODEL.max_len
