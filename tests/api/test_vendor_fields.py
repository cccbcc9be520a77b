"""What other servers' clients send: no field is unknown, and no default of another server a 400."""

from __future__ import annotations

import json
from typing import Any

import anthropic.types.beta.message_create_params as beta_params
import anthropic.types.message_create_params as anthropic_params
import openai.types.chat.completion_create_params as chat_params
import openai.types.responses.response_create_params as responses_params
import pytest
from anthropic.types import MessageCountTokensParams
from openai.types import EmbeddingCreateParams
from qwen35_server import MODEL, TEXT
from vendor_fields import LLAMA_CPP, SGLANG, VLLM

from pippin.api.dialects import chat_completions as chats
from pippin.api.dialects import messages as anthropic
from pippin.api.dialects.chat_completions import parse_chat, parse_completion
from pippin.api.dialects.messages import parse_message_request
from pippin.api.dialects.responses import RESPONSES, parse_responses_request
from pippin.api.endpoints import embeddings
from pippin.api.job import prepare_chat, prepare_completion
from pippin.api.model_info import RequestRules
from pippin.api.requests import shared_fields as extensions
from pippin.api.requests.fields import FieldTable
from pippin.config import LimitsConfig
from pippin.errors import RequestError
from pippin.text.tokenizer import Tokenizer

RULES = RequestRules(MODEL, TEXT.defaults, LimitsConfig())
USER = {"role": "user", "content": "Count to ten, please."}
TABLES = {
    "chat": chats.CHAT,
    "completions": chats.COMPLETION,
    "responses": RESPONSES,
    "messages": anthropic.MESSAGES,
}
HEADERS = {"betas", "workspace_id"}  # arguments of Anthropic's client that no body has
OF_CHATS = {  # of other servers' chats alone
    *chats.CHANGING_CHAT,
    *extensions.REASONING,
    *("add_generation_prompt", "chat_template_kwargs", "continue_final_message"),
    *("include_reasoning", "max_completion_tokens", "parallel_tool_calls", "reasoning_effort"),
    *("tools", "top_logprobs"),
} - {"echo"}


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "qwen", "messages": [USER], **fields}, RULES)


def completion(**fields: Any) -> Any:
    return parse_completion({"model": "qwen", "prompt": "Count to ten.", **fields}, RULES)


def responses(**fields: Any) -> Any:
    body = {"model": "qwen", "input": "Count to ten, please.", **fields}
    return parse_responses_request(body, RULES)


def messages(**fields: Any) -> Any:
    body = {"model": "qwen", "messages": [USER], "max_tokens": 9, **fields}
    return parse_message_request(body, RULES)


@pytest.mark.parametrize("vendor", [VLLM, SGLANG, LLAMA_CPP])
def test_defaults_of_other_servers_are_accepted(vendor: dict[str, Any]) -> None:
    assert vendor.keys() <= chats.CHAT.fields.keys()
    of_texts = {name: value for name, value in vendor.items() if name not in OF_CHATS}
    assert of_texts.keys() <= chats.COMPLETION.fields.keys()
    of_texts["logprobs"] = None  # a number, there
    chat(**vendor)
    completion(**of_texts)
    for name, value in vendor.items():
        chat(**{name: value})


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_what_is_refused_has_a_reason_and_names_what_to_send(table: FieldTable) -> None:
    for name, kind in table.fields.items():
        if kind.answer == "refused":
            assert len(kind.text.split()) >= 3 or kind.text.startswith("use "), name


def test_every_field_of_the_official_clients_is_known() -> None:
    documented: list[tuple[FieldTable, Any]] = [
        (chats.CHAT, chat_params.CompletionCreateParamsBase),
        (RESPONSES, responses_params.ResponseCreateParamsBase),
        (anthropic.MESSAGES, anthropic_params.MessageCreateParamsBase),
        (anthropic.MESSAGES, beta_params.MessageCreateParamsBase),
        (anthropic.COUNT_TOKENS, MessageCountTokensParams),
        (embeddings.EMBEDDINGS, EmbeddingCreateParams),
    ]
    for table, kind in documented:
        assert set(kind.__annotations__) - HEADERS <= table.fields.keys(), kind


@pytest.mark.parametrize("read", [chat, completion, responses, messages])
def test_members_of_extra_body_are_fields(read: Any) -> None:
    sent = {"top_k": 7, "repetition_penalty": 1.5, "keep_alive": "5m"}
    found = read(extra_body=sent, top_k=3)
    assert found.options.params.top_k == 7, "as OpenAI's client merges them"
    assert found.options.params.repetition_penalty == 1.5
    assert found.leniency.header() == "keep_alive"
    for wrong in (3, [], {"extra_body": {}}, {"top_q": 1}):
        with pytest.raises(RequestError):
            read(extra_body=wrong)


@pytest.mark.parametrize("read", [responses, messages])
def test_other_dialects_sample_as_chats_do(read: Any) -> None:
    sent = {"min_p": 0.1, "seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    sent |= {"frequency_penalty": 0.25, "stop_token_ids": [5], "min_tokens": 2, "ignore_eos": True}
    assert read(**sent).options.params == chat(**sent).options.params
    assert read(chat_template_kwargs={"a": 1}).template_variables == {"a": 1}


def test_responses_have_other_servers_names_and_structures() -> None:
    assert responses(repeat_penalty=1.3).options.params.repetition_penalty == 1.3
    assert responses(guided_regex="a+").options.params.regex == "a+"
    assert responses(enable_thinking=False).reasoning_effort == "none"
    with pytest.raises(RequestError, match="both constrain"):
        responses(regex="a", text={"format": {"type": "json_object"}})


def test_names_of_llama_cpp_are_ours() -> None:
    params = chat(n_predict=5, n_cmpl=2, grammar='root ::= "a"')
    assert (params.options.max_tokens, params.options.params.n) == (5, 2)
    assert params.options.params.ebnf == 'root ::= "a"'
    assert chat(n_predict=-1).options.max_tokens is None
    with pytest.raises(RequestError, match="max_tokens and n_predict are the same"):
        chat(n_predict=5, max_tokens=6)


# ---- what vLLM names about prompts -------------------------------------------------------------


def test_the_last_tokens_of_a_prompt_are_kept() -> None:
    whole = prepare_chat(chat(), TEXT, MODEL).prompts[0]
    kept = prepare_chat(chat(truncate_prompt_tokens=6), TEXT, MODEL).prompts[0]
    assert kept.tokens == whole.tokens[-6:]
    assert [len(whole.tokens) - end for end in whole.boundaries if end > len(whole.tokens) - 6] == [
        6 - end for end in kept.boundaries
    ]
    assert prepare_chat(chat(truncate_prompt_tokens=999), TEXT, MODEL).prompts[0] == whole
    texts = prepare_completion(completion(truncate_prompt_tokens=2), TEXT, MODEL).prompts[0]
    assert texts.tokens == TEXT.tokenizer.encode("Count to ten.")[-2:]


def test_as_many_tokens_of_a_prompt_are_kept_as_fit() -> None:
    ids = list(range(1_000, 1_000 + MODEL.max_len + 7))
    sent = {"prompt": ids, "max_tokens": 10}
    with pytest.raises(RequestError, match="maximum context length"):
        prepare_completion(completion(**sent), TEXT, MODEL)
    job = prepare_completion(completion(**sent, truncate_prompt_tokens=-1), TEXT, MODEL)
    assert job.prompts[0].tokens == ids[-(MODEL.max_len - 10) :]


@pytest.mark.parametrize("number", [0, -2, 1.5, "3", True])
def test_other_numbers_of_kept_tokens_are_refused(number: Any) -> None:
    for read in (chat, completion):
        with pytest.raises(RequestError, match="truncate_prompt_tokens is"):
            read(truncate_prompt_tokens=number)


def test_a_shortened_prompt_is_not_echoed() -> None:
    for other in ({"echo": True}, {"suffix": "x"}):
        with pytest.raises(RequestError, match="cannot be sent together"):
            completion(truncate_prompt_tokens=3, **other)
    with pytest.raises(RequestError, match="truncation_side is not supported"):
        chat(truncation_side="right")


def test_special_tokens_are_the_tokenizers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Tokenizer.encode
    start = 7

    def encode(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = bare(self, text, add_special_tokens=False)
        return [start, *ids] if add_special_tokens else ids

    monkeypatch.setattr(Tokenizer, "encode", encode)
    whole = prepare_chat(chat(), TEXT, MODEL).prompts[0].tokens
    added = prepare_chat(chat(add_special_tokens=True), TEXT, MODEL).prompts[0].tokens
    assert added == [start, *whole]
    for sent, tokens in (({}, [start]), ({"add_special_tokens": False}, [])):
        job = prepare_completion(completion(**sent), TEXT, MODEL)
        assert job.prompts[0].tokens == [*tokens, *encode(TEXT.tokenizer, "Count to ten.")[1:]]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_may_be_beside_its_type(kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    params = chat(response_format={"type": kind, "schema": schema}).options.params
    assert json.loads(params.json_schema) == schema
    both = {"type": kind, "schema": schema, "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(RequestError, match="are the same"):
        chat(response_format=both)
    with pytest.raises(RequestError, match=r"response_format.schema is 3"):
        chat(response_format={"type": kind, "schema": 3})
