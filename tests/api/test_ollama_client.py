"""Ollama's own client against the real server, with an engine that plays a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ollama
import pytest
from qwen35_server import ARGUMENTS, CALL, THOUGHT, TWO_CALLS, WEATHER, prompt_text, says
from qwen35_server import MODEL as QWEN
from qwen35_server import TEXT as QWEN_TEXT
from scripted_engine import (
    TOKENIZER,
    ScriptedEngine,
    answer_anything,
    fail,
    hang,
    say,
    serving,
    wait_until,
)

from pippin.api.dialects import ollama as fields
from pippin.config import ServerConfig

STORY = "Once upon a time, a 😀 met a 漢字 dog. The end."
USER = [{"role": "user", "content": "Tell me a story."}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER},
}


@contextmanager
def client_of(
    engine: ScriptedEngine, config: ServerConfig | None = None, **headers: str
) -> Iterator[Any]:
    with serving(engine, config) as url, ollama.Client(url, headers=headers) as client:
        yield client


@contextmanager
def qwen_client(*replies: str) -> Iterator[tuple[Any, ScriptedEngine]]:
    engine = ScriptedEngine(*(says(reply) for reply in replies))
    with (
        serving(engine, text=QWEN_TEXT, model=QWEN) as url,
        ollama.Client(url) as client,
    ):
        yield client, engine


def test_a_chat_has_its_text_counts_and_times() -> None:
    with client_of(ScriptedEngine(say(STORY))) as client:
        reply = client.chat("stories", USER)
    assert (reply.message.role, reply.message.content) == ("assistant", STORY)
    assert (reply.done, reply.done_reason, reply.model) == (True, "stop", "stories")
    assert reply.eval_count == len(TOKENIZER.encode(STORY)) + 1
    assert reply.prompt_eval_count > 0
    durations = (reply.total_duration, reply.prompt_eval_duration, reply.eval_duration)
    assert all(isinstance(each, int) and each > 0 for each in durations)
    assert reply.total_duration >= reply.prompt_eval_duration
    assert reply.created_at.endswith("Z")


def test_a_chat_is_streamed_as_lines_and_the_last_one_has_the_counts() -> None:
    with client_of(ScriptedEngine(say(STORY))) as client:
        parts = list(client.chat("stories", USER, stream=True))
    assert "".join(part.message.content for part in parts) == STORY
    assert len(parts) > 5
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == "stop"
    assert parts[-1].eval_count == len(TOKENIZER.encode(STORY)) + 1


def test_generate_continues_in_the_models_template_and_raw_as_it_is() -> None:
    engine = ScriptedEngine(say(STORY))
    with client_of(engine) as client:
        assert client.generate("stories", "Hi.", system="Be brief.").response == STORY
        parts = list(client.generate("stories", "Hi.", stream=True))
        assert client.generate("stories", "Hi.", raw=True).response == STORY
    assert "".join(part.response for part in parts) == STORY
    assert engine.submits[2].token_ids == TOKENIZER.encode("Hi.")
    rendered = [TOKENIZER.decode_with_special(submit.token_ids) for submit in engine.submits]
    assert "Be brief." in rendered[0]
    assert "Hi." in rendered[1].removeprefix("Hi.")


def test_the_context_of_a_reply_precedes_the_next_prompt() -> None:
    engine = ScriptedEngine(say("A dog."))
    with client_of(engine) as client:
        whole = client.generate("stories", "One.").context
        *_, streamed = client.generate("stories", "One.", stream=True)
        client.generate("stories", "Two.", context=whole)
        client.generate("stories", "Two.")
    first, _, third, alone = engine.submits
    assert whole == [*first.token_ids, *TOKENIZER.encode("A dog."), *first.stop_ids[:1]]
    assert streamed.context == whole
    assert third.token_ids == [*whole, *alone.token_ids]
    assert len(whole) in third.boundaries


def test_options_are_passed_to_the_engine() -> None:
    engine = ScriptedEngine(say(STORY))
    same = {"temperature": 0.5, "top_k": 11, "top_p": 0.9, "min_p": 0.1, "seed": 3}
    same |= {"presence_penalty": 0.3, "frequency_penalty": -0.2}
    others = {"num_predict": 7, "stop": ["zzz"], "repeat_penalty": 1.1}
    with client_of(engine) as client:
        reply = client.chat("stories", USER, options=same | others)
    asked = {**same, "max_tokens": 7, "stop": ("zzz",), "repetition_penalty": 1.1}
    assert {name: getattr(engine.submits[0].params, name) for name in asked} == asked
    assert (reply.done_reason, reply.eval_count) == ("length", 7)


@pytest.mark.parametrize("num_predict", [-2, -1, 0, 1_000_000])
def test_as_many_tokens_as_fit_are_generated_where_no_less_is_asked(num_predict: int) -> None:
    engine = ScriptedEngine(say("Hi."))
    options = {"num_predict": num_predict, "seed": -1}
    with client_of(engine) as client:
        assert client.chat("stories", USER, options=options).message.content == "Hi."
    assert engine.submits[0].params.max_tokens == 8192 - engine.submits[0].prompt_len
    assert engine.submits[0].params.seed is None


def test_every_field_of_the_clients_types_is_in_the_tables() -> None:
    tables = {
        ollama._types.ChatRequest: fields.CHAT,
        ollama._types.GenerateRequest: fields.GENERATE,
        ollama._types.EmbedRequest: fields.EMBED,
        ollama._types.EmbeddingsRequest: fields.EMBEDDINGS,
        ollama._types.ShowRequest: fields.SHOW,
        ollama.Options: fields.OPTIONS.table,
    }
    for request, table in tables.items():
        assert set(request.model_fields) <= set(table.fields), request


def test_options_of_loading_and_keep_alive_change_nothing() -> None:
    engine = ScriptedEngine(say("Hi."))
    options = {"num_ctx": 2048, "num_gpu": 99, "use_mmap": True, "mirostat": 0, "repeat_last_n": 64}
    with client_of(engine) as client:
        for keep_alive in ("5m", -1, 30.5):
            client.chat("stories", USER, options=options, keep_alive=keep_alive)
        client.chat("stories", USER)
    *others, plain = engine.submits
    assert [submit.params for submit in others] == [plain.params] * 3


def test_a_request_without_a_prompt_says_that_the_model_is_loaded() -> None:
    engine = ScriptedEngine(say("Hi."))
    with client_of(engine) as client:
        assert client.chat("stories").done_reason == "load"
        assert client.generate("stories", keep_alive="10m").done_reason == "load"
        unloaded = client.generate("stories", keep_alive=0)
        assert (unloaded.done, unloaded.done_reason, unloaded.response) == (True, "unload", "")
        (part,) = client.chat("stories", [], stream=True)
        assert part.done_reason == "load"
    assert engine.submits == []


def test_a_final_message_of_the_assistant_is_continued() -> None:
    with qwen_client("Four.") as (client, engine):
        client.chat("qwen", [*USER, {"role": "assistant", "content": "Two and two is"}])
    assert prompt_text(engine).endswith("Two and two is")


def test_format_is_json_or_a_schema(obeys: Any) -> None:
    with qwen_client("{}") as (client, engine):
        client.chat("qwen", USER, format="json", think=False)
        assert obeys(engine, '{"a": 1}')
        assert not obeys(engine, "no")
        client.generate("qwen", "Hi.", format=WEATHER, think=False)
        assert obeys(engine, json.dumps(ARGUMENTS))
        assert not obeys(engine, '{"a": 1}')


def test_thinking_is_apart_from_the_content_and_can_be_switched() -> None:
    with qwen_client(THOUGHT + "Four.") as (client, engine):
        reply = client.chat("qwen", USER, think=True)
        assert (reply.message.thinking.strip(), reply.message.content) == ("Let me think.", "Four.")
        parts = list(client.generate("qwen", "Hi.", think="high", stream=True))
        assert "".join(part.thinking or "" for part in parts).strip() == "Let me think."
        assert "".join(part.response for part in parts) == "Four."
        assert prompt_text(engine).endswith("<think>\n")
        client.chat("qwen", USER, think=False)
        assert prompt_text(engine).endswith("</think>\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_whole_and_their_results_go_back(stream: bool) -> None:
    with qwen_client(THOUGHT + TWO_CALLS, "It rains.") as (client, engine):
        reply = client.chat("qwen", USER, tools=[TOOL], stream=stream)
        parts = list(reply) if stream else [reply]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        arguments = [call.function.arguments for call in calls]
        assert arguments == [ARGUMENTS, {"city": "Rome"}]
        calling = ollama.Message(role="assistant", content="", tool_calls=calls)
        assert parts[-1].done_reason == "stop"
        results = [
            {"role": "tool", "tool_name": "get_weather", "content": text} for text in ("1", "2")
        ]
        client.chat("qwen", [*USER, calling, *results], tools=[TOOL])
    text = prompt_text(engine)
    assert "<function=get_weather>" in text
    assert "<tool_response>\n1\n</tool_response>" in text
    assert "Rome" in text


def test_python_functions_are_tools() -> None:
    def get_weather(city: str) -> str:
        """Get the weather.

        Args:
            city: Where.
        """
        return city

    with qwen_client(THOUGHT + CALL) as (client, engine):
        reply = client.chat("qwen", USER, tools=[get_weather])
    assert reply.message.tool_calls[0].function.arguments == ARGUMENTS
    assert "Get the weather." in prompt_text(engine)


def test_a_call_that_was_cut_has_the_arguments_that_can_be_read() -> None:
    with qwen_client(THOUGHT + CALL) as (client, _):
        length = len(QWEN_TEXT.tokenizer.encode(THOUGHT + CALL)) - 4
        for stream in (False, True):
            options = {"num_predict": length}
            reply = client.chat("qwen", USER, tools=[TOOL], options=options, stream=stream)
            parts = list(reply) if stream else [reply]
            assert parts[-1].done_reason == "length"
            assert "".join(part.message.content for part in parts) == ""
            (call,) = [call for part in parts for call in part.message.tool_calls or ()]
            assert call.function.name == "get_weather"
            assert call.function.arguments["city"] == "Tokyo"


def test_logprobs_are_of_each_token_with_others() -> None:
    with client_of(ScriptedEngine(say("A dog."))) as client:
        whole = client.chat("stories", USER, logprobs=True, top_logprobs=2)
        parts = list(client.generate("stories", "Hi.", logprobs=True, stream=True))
    assert "".join(entry.token for entry in whole.logprobs) == "A dog."
    assert [len(entry.top_logprobs) for entry in whole.logprobs] == [2] * len(whole.logprobs)
    streamed = [entry for part in parts for entry in part.logprobs or ()]
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in whole.logprobs]


def test_texts_are_embedded_and_cut_to_what_fits() -> None:
    engine = ScriptedEngine(answer_anything)
    with client_of(engine) as client:
        one, two = client.embed("stories", ["Hi.", "A dog."]).embeddings
        assert one == two == [0.5] * 4
        assert client.embeddings("stories", "Hi.").embedding == [0.5] * 4
        assert len(client.embed("stories", "Hi.", dimensions=1).embeddings[0]) == 1
        reply = client.embed("stories", "word " * 100_000)
        assert engine.submits[-1].prompt_len == reply.prompt_eval_count == 8191
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            client.embed("stories", "word " * 100_000, truncate=False)


def test_models_are_listed_shown_and_loaded() -> None:
    with client_of(ScriptedEngine()) as client:
        listed = client.list().models
        assert [model.model for model in listed] == ["stories:latest", "gpt-4o:latest"]
        assert all(len(model.digest) == 64 for model in listed)
        (running, _) = client.ps().models
        assert (running.name, running.context_length) == ("stories:latest", 8192)
        assert running.expires_at.year > 2100
        for name in (listed[0].model, "gpt-4o"):
            shown = client.show(name)
            assert shown.capabilities == ["completion", "tools"]
            family = shown.modelinfo["general.architecture"]
            assert shown.modelinfo[f"{family}.context_length"] == 8192
    with qwen_client() as (client, _):
        assert client.show("qwen").capabilities == ["completion", "tools", "insert", "thinking"]


def test_another_model_is_a_404_in_ollamas_words() -> None:
    with client_of(ScriptedEngine(say("Hi."))) as client:
        for ask in (
            lambda: client.chat("llama3", USER),
            lambda: list(client.generate("llama3", "Hi.", stream=True)),
            lambda: client.embed("llama3", "Hi."),
            lambda: client.show("llama3"),
        ):
            with pytest.raises(ollama.ResponseError, match="model 'llama3' not found") as info:
                ask()
            assert info.value.status_code == 404


def test_an_error_in_a_stream_is_a_line_and_before_it_a_status() -> None:
    late = ScriptedEngine(fail("no memory", after="Once upon"))
    with client_of(late) as client, pytest.raises(ollama.ResponseError, match="no memory"):
        list(client.chat("stories", USER, stream=True))
    with client_of(ScriptedEngine(fail("no memory"))) as client:
        with pytest.raises(ollama.ResponseError, match="no memory") as info:
            client.generate("stories", "Hi.")
        assert info.value.status_code == 503


def test_a_key_is_required_of_ollamas_clients_too() -> None:
    config = ServerConfig(api_key=("secret",))
    with client_of(ScriptedEngine(say("Hi.")), config) as client:
        with pytest.raises(ollama.ResponseError, match="API key is missing") as info:
            client.list()
        assert info.value.status_code == 401
    with client_of(ScriptedEngine(say("Hi.")), config, authorization="Bearer secret") as client:
        assert client.chat("stories", USER).message.content == "Hi."


def test_a_client_that_disconnects_aborts_its_request() -> None:
    engine = ScriptedEngine(hang(after="Once upon a time"))
    with client_of(engine) as client:
        stream = client.chat("stories", USER, stream=True)
        next(stream)
        stream.close()
        wait_until(lambda: engine.aborted == [engine.submits[0].id])
