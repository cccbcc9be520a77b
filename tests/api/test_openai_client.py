"""The official client against the real server, with an engine that plays a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from scripted_engine import (
    EOS,
    TOKENIZER,
    ScriptedEngine,
    fail,
    hang,
    say,
    say_tokens,
    serving,
    wait_until,
)

STORY = "Once upon a time, a 😀 met a 漢字 dog. The end."
USER = [{"role": "user", "content": "Tell me a story."}]


@contextmanager
def client_of(engine: ScriptedEngine) -> Iterator[Any]:
    with (
        serving(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def chat(engine: ScriptedEngine, **options: Any) -> Any:
    with client_of(engine) as client:
        reply = client.chat.completions.create(model="stories", messages=USER, **options)
        return list(reply) if options.get("stream") else reply


def chat_chunks(engine: ScriptedEngine, **options: Any) -> list[Any]:
    return chat(engine, stream=True, **options)


def complete(engine: ScriptedEngine, prompt: Any, **options: Any) -> Any:
    with client_of(engine) as client:
        reply = client.completions.create(model="stories", prompt=prompt, **options)
        return list(reply) if options.get("stream") else reply


def complete_chunks(engine: ScriptedEngine, prompt: Any, **options: Any) -> list[Any]:
    return complete(engine, prompt, stream=True, **options)


def test_a_chat_reply_is_the_text_and_says_what_it_cost() -> None:
    engine = ScriptedEngine(say(STORY))
    reply = chat(engine)
    [choice] = reply.choices
    assert (choice.message.content, choice.finish_reason) == (STORY, "stop")
    assert choice.message.role == "assistant"
    assert choice.logprobs is None
    assert reply.usage.prompt_tokens == engine.submits[0].prompt_len
    assert reply.usage.completion_tokens == len(TOKENIZER.encode(STORY)) + 1
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert not engine.aborted


def test_a_streamed_chat_says_the_same_in_pieces_none_of_them_broken() -> None:
    engine = ScriptedEngine(say(STORY))
    *chunks, usage = chat_chunks(engine, stream_options={"include_usage": True})
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == STORY
    assert all("\ufffd" not in text for text in texts)
    assert len(texts) > 10
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(TOKENIZER.encode(STORY)) + 1


def test_without_include_usage_no_chunk_speaks_of_it() -> None:
    chunks = chat_chunks(ScriptedEngine(say("Hi.")))
    assert all("usage" not in chunk.model_dump(exclude_unset=True) for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


@pytest.mark.parametrize("stop", ["dog. The", [" dog. T", "never"]])
def test_a_stop_string_over_several_tokens_leaks_nothing_and_ends_the_request(stop: Any) -> None:
    engine = ScriptedEngine(say(STORY))
    before = STORY[: STORY.index(stop if isinstance(stop, str) else stop[0])]
    [choice] = chat(engine, stop=stop).choices
    assert (choice.message.content, choice.finish_reason) == (before, "stop")
    assert engine.finished == [engine.submits[0].id]
    chunks = chat_chunks(ScriptedEngine(say(STORY)), stop=stop)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_text_held_for_a_stop_string_that_never_comes_is_sent_at_the_end() -> None:
    [choice] = chat(ScriptedEngine(say("The end")), stop=["end of"]).choices
    assert choice.message.content == "The end"


def test_a_stop_token_is_not_shown_but_counted() -> None:
    [token] = TOKENIZER.encode("dog")
    engine = ScriptedEngine(say_tokens([*TOKENIZER.encode("A "), token]))
    reply = chat(engine, extra_body={"stop_token_ids": [token]})
    assert reply.choices[0].message.content == "A "
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens == len(TOKENIZER.encode("A ")) + 1
    assert engine.submits[0].stop_ids == [*TOKENIZER.eos_ids, token]


def test_a_reply_that_runs_out_of_tokens_says_length() -> None:
    reply = chat(ScriptedEngine(say(STORY)), max_completion_tokens=4)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content == TOKENIZER.decode(TOKENIZER.encode(STORY)[:4])


def test_chat_logprobs_spell_the_reply_with_bytes_and_alternatives() -> None:
    whole = chat(ScriptedEngine(say(STORY)), logprobs=True, top_logprobs=2).choices[0]
    chunks = chat_chunks(ScriptedEngine(say(STORY)), logprobs=True, top_logprobs=2)
    entries = whole.logprobs.content
    ids = TOKENIZER.encode(STORY)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == STORY
    assert [entry.logprob for entry in entries] == [-id / 1000 for id in ids]
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(ids)
    assert entries[0].top_logprobs[1].token == TOKENIZER.token_text(ids[0] + 1)
    streamed = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [entry for part in streamed for entry in part] == entries


def test_logprobs_without_alternatives_list_none() -> None:
    [choice] = chat(ScriptedEngine(say("Hi.")), logprobs=True).choices
    assert all(entry.top_logprobs == [] for entry in choice.logprobs.content)


def test_logprobs_stop_where_the_text_stops() -> None:
    [choice] = chat(ScriptedEngine(say(STORY)), logprobs=True, stop=" a 😀").choices
    assert "".join(entry.token for entry in choice.logprobs.content) == "Once upon a time,"


def test_n_choices_are_separate_sequences_with_seeds_of_their_own() -> None:
    engine = ScriptedEngine(say("One."), say("Two."), say("Three."))
    reply = chat(engine, n=3, seed=7)
    assert [(c.index, c.message.content) for c in reply.choices] == [
        (0, "One."),
        (1, "Two."),
        (2, "Three."),
    ]
    assert [submit.params.seed for submit in engine.submits] == [7, 8, 9]
    assert len({submit.id for submit in engine.submits}) == 3
    assert reply.usage.prompt_tokens == engine.submits[0].prompt_len
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_streamed_choices_can_be_told_apart() -> None:
    chunks = chat_chunks(ScriptedEngine(say("One."), say("Two, and more.")), n=2)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "One.", 1: "Two, and more."}
    assert sum(chunk.choices[0].finish_reason == "stop" for chunk in chunks) == 2


def test_one_choice_stopped_by_a_string_does_not_stop_the_other() -> None:
    engine = ScriptedEngine(say("One stop here."), say("Two goes on."))
    reply = chat(engine, n=2, stop="stop")
    assert [choice.message.content for choice in reply.choices] == ["One ", "Two goes on."]
    assert engine.finished == [engine.submits[0].id]
    assert not engine.aborted


def test_a_completion_continues_its_prompt() -> None:
    engine = ScriptedEngine(say(" a time"))
    reply = complete(engine, "Once upon")
    assert reply.choices[0].text == " a time"
    assert reply.choices[0].finish_reason == "stop"
    assert engine.submits[0].token_ids == TOKENIZER.encode("Once upon")
    assert "".join(c.choices[0].text for c in complete_chunks(engine, "Once upon")) == " a time"


def test_prompts_may_be_several_and_may_be_tokens() -> None:
    engine = ScriptedEngine(say("a"), say("b"), say("c"), say("d"))
    reply = complete(engine, ["One", "Two"], n=2)
    assert [(c.index, c.text) for c in reply.choices] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    one, two = TOKENIZER.encode("One"), TOKENIZER.encode("Two")
    assert [submit.token_ids for submit in engine.submits] == [
        one,
        one,
        two,
        two,
    ]
    assert reply.usage.prompt_tokens == len(one) + len(two)
    assert reply.usage.prompt_tokens_details.cached_tokens == 6
    engine = ScriptedEngine(say("a"))
    complete(engine, [5, 6, 7])
    complete(engine, [[5, 6], [8]])
    assert [submit.token_ids for submit in engine.submits] == [
        [5, 6, 7],
        [5, 6],
        [8],
    ]


def test_echo_repeats_the_prompt_before_the_reply() -> None:
    assert complete(ScriptedEngine(say(" dog")), "A 😀", echo=True).choices[0].text == "A 😀 dog"
    chunks = complete_chunks(ScriptedEngine(say(" dog")), "A 😀", echo=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "A 😀 dog"


def test_completion_logprobs_have_offsets_into_the_text() -> None:
    engine = ScriptedEngine(say(" big dog"))
    [choice] = complete(engine, "A small cat", echo=True, logprobs=1).choices
    assert engine.submits[0].params.prompt_logprobs == 1
    logprobs, ids = choice.logprobs, TOKENIZER.encode("A small cat") + TOKENIZER.encode(" big dog")
    assert "".join(logprobs.tokens) == choice.text == "A small cat big dog"
    assert logprobs.token_logprobs == [None, *(-id / 1000 for id in ids[1:])]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[1] == {logprobs.tokens[1]: -ids[1] / 1000}
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    parts = [
        chunk.choices[0].logprobs.text_offset
        for chunk in complete_chunks(engine, "A small cat", echo=True, logprobs=1)
    ]
    assert [offset for part in parts for offset in part] == logprobs.text_offset


def test_a_prompt_can_be_scored_without_a_reply() -> None:
    reply = complete(ScriptedEngine(say(" dog")), "A cat", echo=True, logprobs=0, max_tokens=0)
    [choice] = reply.choices
    assert (choice.text, choice.finish_reason) == ("A cat", "length")
    assert len(choice.logprobs.token_logprobs) == len(TOKENIZER.encode("A cat"))
    assert reply.usage.completion_tokens == 0


def test_an_engine_error_before_the_first_token_is_a_status() -> None:
    for options in ({}, {"stream": True}, {"n": 2}):
        with pytest.raises(openai.InternalServerError) as info:
            chat(ScriptedEngine(fail("the queue is full")), **options)
        assert info.value.status_code == 503
        assert "the queue is full" in str(info.value)
        assert info.value.code == "overloaded"


def test_an_engine_error_later_ends_the_stream_with_an_error() -> None:
    engine = ScriptedEngine(fail("the engine died", after="Once upon"))
    with client_of(engine) as client:
        stream = client.chat.completions.create(model="stories", messages=USER, stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="the engine died"):
            texts.extend(chunk.choices[0].delta.content for chunk in stream)
    with pytest.raises(openai.InternalServerError, match="the engine died"):
        chat(ScriptedEngine(fail("the engine died", after="Once upon")))


def test_one_failing_choice_fails_the_reply_and_aborts_the_others() -> None:
    engine = ScriptedEngine(hang(after="Once"), fail("no memory"))
    with pytest.raises(openai.InternalServerError, match="no memory"):
        chat(engine, n=2)
    wait_until(lambda: engine.aborted == [engine.submits[0].id])


def test_the_engine_is_told_what_the_request_asked_for() -> None:
    engine = ScriptedEngine(say("Hi."))
    documented = {"temperature": 0.5, "top_p": 0.9, "seed": -3, "max_tokens": 9}
    documented |= {"presence_penalty": 1.0, "frequency_penalty": -1.0}
    ours = {"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    ours |= {"min_tokens": 2}
    unused = {"user": "someone", "metadata": {"a": "b"}, "store": False}
    chat(engine, **documented, **unused, logit_bias={"17": -100}, extra_body=ours)
    [submit] = engine.submits
    asked = {**documented, **ours, "logit_bias": {17: -100.0}}
    assert {name: getattr(submit.params, name) for name in asked} == asked
    assert submit.stop_ids == []
    assert submit.boundaries


def test_what_a_request_leaves_out_comes_from_the_checkpoint() -> None:
    engine = ScriptedEngine(say("Hi."))
    chat(engine)
    [submit] = engine.submits
    assert (submit.params.temperature, submit.params.top_p) == (0.7, 0.95)
    assert submit.params.max_tokens == 8192 - submit.prompt_len
    assert submit.stop_ids == [EOS, 0]


def test_models_are_listed_and_found() -> None:
    with client_of(ScriptedEngine(say("Hi."))) as client:
        assert [model.id for model in client.models.list()] == ["stories", "gpt-4o"]
        assert client.models.retrieve("stories").owned_by == "pippin"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-4")
