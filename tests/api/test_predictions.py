"""Predicted outputs and what is counted of drafts, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from scripted_engine import MODEL, TOKENIZER, ScriptedEngine, say, serving

from cases import cases
from pippin.messages import Submit, TokenDelta, unpack_tokens

USER = [{"role": "user", "content": "Rewrite this."}]
PREDICTED = "The fox ran home."
DRAFTING = replace(MODEL, takes_predictions=True)


def say_with_drafts(submit: Submit) -> list[TokenDelta]:
    """Three tokens a step, two of them accepted of four drafts."""
    deltas = say(PREDICTED + " It slept well that night.")(submit)
    tokens = [token for delta in deltas for token in delta.tokens]
    steps = [tokens[start : start + 3] for start in range(0, len(tokens), 3)]
    return [
        TokenDelta(
            submit.id,
            tokens=step,
            accepted_drafts=2 * number,
            rejected_drafts=2 * number,
            finish="stop" if number == len(steps) - 1 else None,
        )
        for number, step in enumerate(steps)
    ]


@contextmanager
def client_of(engine: ScriptedEngine, model: Any = DRAFTING) -> Iterator[Any]:
    with (
        serving(engine, model=model) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def details(usage: Any) -> tuple[int, int]:
    found = usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


def test_usage_counts_accepted_and_rejected_drafts() -> None:
    engine = ScriptedEngine(say_with_drafts)
    ask = {"model": "stories", "stream_options": {"include_usage": True}, "stream": True}
    with client_of(engine) as client:
        whole = client.chat.completions.create(model="stories", messages=USER)
        *_, last = client.chat.completions.create(messages=USER, **ask)
        text = client.completions.create(model="stories", prompt="Once", n=2)
        *_, last_text = client.completions.create(prompt="Once", **ask)
    accepted, rejected = details(whole.usage)
    assert accepted == rejected > 4
    assert whole.usage.completion_tokens > accepted, "rejected ones are not part of the reply"
    assert details(last.usage) == details(last_text.usage) == (accepted, rejected)
    assert details(text.usage) == (2 * accepted, 2 * rejected)


def test_drafts_behind_a_stop_string_are_not_counted_as_part_of_the_reply() -> None:
    with client_of(ScriptedEngine(say_with_drafts)) as client:
        reply = client.chat.completions.create(model="stories", messages=USER, stop=[" ran"])
    assert reply.choices[0].message.content == "The fox"
    assert details(reply.usage)[0] <= reply.usage.completion_tokens


@pytest.mark.parametrize(
    "content",
    [PREDICTED, [{"type": "text", "text": PREDICTED[:9]}, {"type": "text", "text": PREDICTED[9:]}]],
    ids=["text", "parts"],
)
def test_a_prediction_is_tokenized_for_the_engine(content: Any) -> None:
    engine = ScriptedEngine(say(PREDICTED))
    with client_of(engine) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="stories",
            messages=USER,
            prediction={"type": "content", "content": content},
            n=2,
        )
    assert "prediction" not in str(raw.headers)
    assert [unpack_tokens(submit.prediction).tolist() for submit in engine.submits] == [
        TOKENIZER.encode(PREDICTED)
    ] * 2


def test_a_prediction_is_reported_as_ignored_where_nothing_drafts_from_texts() -> None:
    engine = ScriptedEngine(say(PREDICTED))
    with client_of(engine, MODEL) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="stories",
            messages=USER,
            prediction={"type": "content", "content": PREDICTED},
        )
    assert raw.parse().choices[0].message.content == PREDICTED
    assert "prediction" in str(raw.headers)
    assert engine.submits[0].prediction == b""


@cases(
    "prediction",
    [
        "text",
        {"type": "other", "content": "x"},
        {"type": "content"},
        {"type": "content", "content": 7},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": "x " * 200_000},
        {"type": "content", "content": [{"type": "text", "text": "x " * 2_000}] * 100},
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_prediction_is_refused_by_name(prediction: Any) -> None:
    engine = ScriptedEngine(say(PREDICTED))
    with client_of(engine) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="stories", messages=USER, extra_body={"prediction": prediction}
        )
    assert str(refused.value.param).startswith("prediction")
    assert not engine.submits


def test_a_prediction_is_no_longer_than_a_reply_can_be() -> None:
    engine = ScriptedEngine(say(PREDICTED))
    with client_of(engine, replace(DRAFTING, max_len=256)) as client:
        client.chat.completions.create(
            model="stories",
            messages=USER,
            prediction={"type": "content", "content": PREDICTED * 60},
        )
    assert len(unpack_tokens(engine.submits[0].prediction)) == 256
