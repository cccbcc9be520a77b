"""Every field of a request is honoured, ignored and reported, or refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from openai.types import completion_create_params as completion_types
from openai.types.chat import completion_create_params as chat_types
from scripted_engine import MODEL, TEXT

from cases import cases
from pippin.api.dialects.chat_completions import CHAT, COMPLETION, parse_chat, parse_completion
from pippin.api.job import Job, prepare_chat, prepare_completion
from pippin.api.model_info import RequestRules
from pippin.api.requests.fields import FieldTable
from pippin.config import LimitsConfig
from pippin.errors import (
    ContextOverflow,
    ModelNotFound,
    PippinError,
    RequestError,
    UnsupportedField,
)
from pippin.text.bundle import TextBundle

USER = {"role": "user", "content": "Hi."}


RULES = RequestRules(MODEL, TEXT.defaults, LimitsConfig())
CHAT_BODY = {"model": "stories", "messages": [USER]}


def chat(**fields: Any) -> Job:
    return prepare_chat(parse_chat(CHAT_BODY | fields, RULES), TEXT, MODEL)


def strict(**fields: Any) -> Job:
    rules = replace(RULES, strict_fields=True)
    return prepare_chat(parse_chat(CHAT_BODY | fields, rules), TEXT, MODEL)


def complete(**fields: Any) -> Job:
    body = {"model": "stories", "prompt": "Hi."} | fields
    return prepare_completion(parse_completion(body, RULES), TEXT, MODEL)


def prompt_of(*messages: dict[str, Any], **fields: Any) -> str:
    [sequence] = chat(messages=list(messages), **fields).sequences
    return "".join(TEXT.tokenizer.token_text(token) for token in sequence.submit.token_ids)


def refuse(job: Any, error: type[PippinError], param: str, match: str, **fields: Any) -> None:
    with pytest.raises(error, match=match) as info:
        job(**fields)
    assert info.value.param == param


@pytest.mark.parametrize(("kinds", "table"), [(chat_types, CHAT), (completion_types, COMPLETION)])
def test_every_documented_field_is_honoured_or_refused(kinds: Any, table: FieldTable) -> None:
    for kind in (kinds.CompletionCreateParamsBase, kinds.CompletionCreateParamsStreaming):
        assert kind.__annotations__.keys() <= table.fields.keys()


def named(table: FieldTable, answer: str) -> set[str]:
    return {name for name, kind in table.fields.items() if kind.answer == answer}


@cases("field", sorted(named(CHAT, "refused")))
def test_refused_chat_fields_are_named_but_null_and_neutral_values_pass(field: str) -> None:
    refuse(chat, UnsupportedField, field, field, **{field: {"some": "thing"}})
    for value in (None, *CHAT.fields[field].neutral):
        chat(**{field: value})


NEUTRAL_NULLS = sorted(named(CHAT, "honoured") - {"model", "messages"})


def test_null_counts_as_left_out() -> None:
    assert chat(**dict.fromkeys(NEUTRAL_NULLS)).sequences[0].submit.params == (
        chat().sequences[0].submit.params
    )


def test_an_unknown_field_that_is_null_asks_for_nothing() -> None:
    chat(extra=None, messages=[USER | {"extra": None}])


def test_where_to_cache_may_be_said_but_changes_nothing() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "Hi."}
    plain = prompt_of({"role": "user", "content": [part]})
    assert prompt_of({"role": "user", "content": [part | hint]}) == plain
    assert prompt_of({"role": "user", "content": [part]} | hint) == plain
    name = "messages[0].content[0].cache_control"
    wrong = [{"role": "user", "content": [part | {"cache_control": "always"}]}]
    refuse(chat, RequestError, name, "must be a JSON object", messages=wrong)


def test_an_overflow_is_worded_so_that_agents_and_proxies_know_it() -> None:
    """What LiteLLM looks for in lower case, and others with the number."""
    with pytest.raises(ContextOverflow) as info:
        complete(prompt=[5] * 9000)
    assert "this model's maximum context length is 8192 tokens" in info.value.message.lower()


@pytest.mark.parametrize(
    ("field", "nearest"), [("max_token", "max_tokens"), ("Temperature", "temperature")]
)
def test_an_unknown_field_is_refused_with_the_nearest_known_one(field: str, nearest: str) -> None:
    refuse(chat, RequestError, field, f"did you mean {nearest}", **{field: 1})


@cases(
    ("field", "value", "allowed"),
    [
        ("temperature", 2.1, "from 0 to 2"),
        ("temperature", "hot", "a number"),
        ("temperature", True, "a number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_k", -2, "at least -1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", 10**400, "above 0"),
        ("presence_penalty", -3, "from -2 to 2"),
        ("frequency_penalty", 3, "from -2 to 2"),
        ("n", 0, "from 1 to 128"),
        ("n", 1.5, "an integer"),
        ("max_tokens", 0, "at least 1"),
        ("seed", 2**64, "an integer"),
        ("stop", [""], "each of 1 to 1,024"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop", 3, "a string or a list"),
        ("stop_token_ids", [8192], "0 to 8,191"),
        ("ignore_eos", "yes", "true or false"),
        ("stream", 1, "true or false"),
        ("user", 7, "a string"),
        ("logprobs", 3.5, "it must be"),
        ("priority", 1001, "an integer from -1,000 to 1,000"),
        ("priority", -1001, "an integer from -1,000 to 1,000"),
        ("priority", "high", "an integer"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value_and_the_range(
    field: str, value: Any, allowed: str
) -> None:
    for job in (chat, complete):
        refuse(job, RequestError, field, rf"{field} is .*{allowed}", **{field: value})


def test_every_sequence_has_the_priority_of_its_request() -> None:
    for job in (chat, complete):
        assert [s.submit.priority for s in job(n=2, priority=-7).sequences] == [-7, -7]
        assert [s.submit.priority for s in job().sequences] == [0]


def test_fields_that_belong_together_are_checked_together() -> None:
    refuse(chat, RequestError, "top_logprobs", "needs logprobs", top_logprobs=3)
    refuse(chat, RequestError, "top_logprobs", "to 20", logprobs=True, top_logprobs=21)
    refuse(chat, RequestError, "stream_options", "needs stream", stream_options={})
    refuse(chat, RequestError, "max_tokens", "same", max_tokens=1, max_completion_tokens=1)
    refuse(chat, RequestError, "min_tokens", "from 0 to 3", max_tokens=3, min_tokens=4)
    refuse(complete, UnsupportedField, "best_of", "best_of is 3; n is 2", best_of=3, n=2)
    assert len(complete(best_of=2, n=2).sequences) == 2
    obfuscation = {"include_obfuscation": True}
    name = "stream_options.include_obfuscation"
    refuse(strict, UnsupportedField, name, name, stream=True, stream_options=obfuscation)
    name = "stream_options.include_use"
    refuse(chat, RequestError, name, "usage", stream=True, stream_options={"include_use": True})


def test_logit_bias_keys_are_tokens_of_the_model() -> None:
    refuse(chat, RequestError, "logit_bias", '"dog"', logit_bias={"dog": 1})
    refuse(chat, RequestError, "logit_bias", "8,191", logit_bias={"8192": 1})
    refuse(chat, RequestError, "logit_bias", "8,191", logit_bias={"1" * 5000: 1})
    refuse(chat, RequestError, "logit_bias.5", "from -100 to 100", logit_bias={"5": 101})


def test_only_the_served_model_is_found() -> None:
    refuse(chat, ModelNotFound, "model", "gpt-4.*stories", model="gpt-4")
    assert chat(model=None).model == "stories"


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    long = [5] * 9102
    match = r"maximum context length is 8192 tokens.*9102 in the prompt"
    refuse(complete, ContextOverflow, "prompt", match, prompt=long)
    refuse(complete, ContextOverflow, "prompt", "8193 tokens", prompt=long[:8192])
    match = r"context length is 8192 tokens.* 8500 tokens .8000 in the prompt, 500 in the"
    refuse(complete, ContextOverflow, "max_tokens", match, prompt=long[:8000], max_tokens=500)
    assert complete(prompt=long[:8000]).sequences[0].submit.params.max_tokens == 192


@cases("prompt", [[], [[]], "", {}, 5, ["a", 5], [9000], [[9000]], [[1], "a"]])
def test_prompts_that_are_none_are_refused(prompt: Any) -> None:
    refuse(complete, RequestError, "prompt", "prompt is", prompt=prompt)


def test_messages_render_with_text_parts_and_tool_history() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é":1}'}}
    text = prompt_of(
        {"role": "developer", "content": [{"type": "text", "text": "Be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    )
    assert text.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>")
    assert '{"name": "f", "arguments": {"é":1}}' in text  # as it came
    assert text.endswith("\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_arguments_that_are_no_json_stay_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100}}
    assert "[" * 100 in prompt_of(USER, {"role": "assistant", "tool_calls": [call]})


def test_the_generation_prompt_can_be_left_out() -> None:
    assert prompt_of(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


@cases(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([USER | {"tool_calls": []}], "messages[0].tool_calls"),
        ([USER | {"function_call": {"name": "f"}}], "messages[0].function_call"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: Any, param: str) -> None:
    refuse(chat, RequestError, param, re.escape(param), messages=messages)


def test_template_variables_reach_the_template_but_cannot_replace_its_inputs() -> None:
    name = "chat_template_kwargs.messages"
    refuse(chat, RequestError, name, "the server sets it", chat_template_kwargs={"messages": []})
    chat(chat_template_kwargs={"enable_thinking": False})


def test_a_model_without_a_template_does_not_chat() -> None:
    text = TextBundle(TEXT.tokenizer, None, TEXT.defaults)
    request = parse_chat(CHAT_BODY, RULES)
    with pytest.raises(RequestError, match="/v1/completions"):
        prepare_chat(request, text, MODEL)
