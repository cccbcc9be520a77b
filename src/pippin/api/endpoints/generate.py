"""SGLang's `/generate`: its fields to a job. Knows no reply and no HTTP.

What would change the answer is honoured, or refused by name.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from pippin.api.endpoints.timeouts import read_timeout
from pippin.api.jobs.prepare import Job, fitting_prompt
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body
from pippin.api.requests.bounds import MAX_LABEL_CHARS
from pippin.api.requests.fields import Refusal, check_fields
from pippin.api.requests.parameters import (
    MAX_LOGPROBS,
    are_token_ids,
    read_priority,
    read_sampling,
    token_ids_in_words,
)
from pippin.api.requests.salts import read_salt
from pippin.config import LimitsConfig
from pippin.errors import RequestError
from pippin.sequences import GeneratedSequence, context_overflow, open_sequences, room_for_reply
from pippin.text.bundle import TextBundle
from pippin.text.prompt import Prompt
from pippin.types import SamplingParams

DEFAULT_NEW_TOKENS = 128

_LOGPROBS = ("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
GENERATE_HONOURED = frozenset(
    {
        *("text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", *_LOGPROBS),
        *("priority", "model", "timeout", "cache_salt"),
    }
)
_TEXT_ONLY = "only text is read"
GENERATE_REFUSED = {
    "input_embeds": Refusal("send text or input_ids"),
    "image_data": Refusal(_TEXT_ONLY),
    "video_data": Refusal(_TEXT_ONLY),
    "audio_data": Refusal(_TEXT_ONLY),
    "token_ids_logprob": Refusal("top_logprobs_num tells the likeliest tokens"),
    "lora_path": Refusal("adapters are not loaded on request"),
    "custom_logit_processor": Refusal("code in requests is not run"),
    "return_hidden_states": Refusal("hidden states are not returned", (False,)),
    "session_params": Refusal("the prefix cache needs no sessions"),
}

# SGLang's names of what other endpoints call otherwise.
_SPELLED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
PARAMS_HONOURED = frozenset(
    {
        *("max_new_tokens", "min_new_tokens", "sampling_seed", "temperature", "top_p", "top_k"),
        *("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
        *("stop", "stop_token_ids", "ignore_eos", "n", "json_schema", "regex", "ebnf"),
    }
)
PARAMS_REFUSED = {
    "skip_special_tokens": Refusal("special tokens are not shown", (True,)),
    "spaces_between_special_tokens": Refusal("special tokens are not shown", (True, False)),
    "no_stop_trim": Refusal("what ends a reply is not shown", (False,)),
    "stop_regex": Refusal("stop takes strings"),
    "structural_tag": Refusal("use json_schema, regex or ebnf"),
    "custom_params": Refusal("there are no custom logit processors"),
}


@dataclass(frozen=True)
class GenerateOptions:
    """How the reply is told."""

    many: bool  # a list of replies: several prompts, or several of one
    rids: list[str]  # one for each reply
    with_logprobs: bool
    logprob_start: int  # the first token of the prompt whose log probability is told; -1: none
    num_top: int
    with_text: bool  # beside token ids in log probabilities


class _Params(Body):
    """SGLang's `sampling_params`, read by the names of other endpoints and told by its own."""

    def get(self, field: str) -> Any:
        return super().get(_SPELLED.get(field, field))

    def has(self, field: str) -> bool:
        return super().has(_SPELLED.get(field, field))

    def name(self, field: str) -> str:
        return super().name(_SPELLED.get(field, field))


def parse_generate(
    fields: Any, text: TextBundle, model: ModelInfo, limits: LimitsConfig
) -> tuple[Job, GenerateOptions]:
    body = Body(fields)
    check_fields(body, GENERATE_HONOURED, GENERATE_REFUSED)
    model.check_name(body.string("model", model.name))
    given = body.get("sampling_params") if body.has("sampling_params") else {}
    check_fields(Body(given, "sampling_params"), PARAMS_HONOURED, PARAMS_REFUSED)
    params_body = _Params(given, "sampling_params")
    prompts, many = _read_prompts(body, text, model)
    options, params = _read_options(body, params_body, text, model, limits)
    num_replies = len(prompts) * params.n
    if num_replies > limits.max_choices:
        raise RequestError(
            f"{len(prompts):,} prompts times n = {params.n:,} are {num_replies:,} replies; "
            f"this server gives at most {limits.max_choices:,} (--max-choices)",
            param="sampling_params.n",
        )
    param = "text" if body.has("text") else "input_ids"
    id = f"gen-{uuid.uuid4().hex}"
    sequences: list[GeneratedSequence] = []
    for prompt in prompts:
        sequences += open_sequences(
            id,
            prompt,
            replace(params, max_tokens=_max_tokens(prompt, params_body, model, limits, param)),
            text.tokenizer,
            first_index=len(sequences),
            priority=read_priority(body),
            salt=read_salt(body),
        )
    job = Job(
        id=id,
        model=model.name,
        created_s=int(time.time()),
        prompts=prompts,
        sequences=sequences,
        stream=body.boolean("stream", False),
        include_usage=False,
        timeout_s=read_timeout(body, limits),
    )
    many = many or params.n > 1
    return job, replace(options, many=many, rids=_read_rids(body, id, num_replies, many=many))


def _read_prompts(body: Body, text: TextBundle, model: ModelInfo) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list."""
    if body.has("text") == body.has("input_ids"):
        raise RequestError("one of text and input_ids is required", param="text")
    if body.has("text"):
        given = body.get("text")
        many = isinstance(given, list)
        rows = given if many else [given]
        if not rows or not all(isinstance(row, str) for row in rows):
            raise body.wrong("text", "a string or a list of strings")
    else:
        given = body.get("input_ids")
        many = isinstance(given, list) and bool(given) and isinstance(given[0], list)
        rows = given if many else [given]
        if not all(are_token_ids(row, model.vocab_size) for row in rows):
            allowed = token_ids_in_words(model.vocab_size)
            raise body.wrong("input_ids", f"a list of {allowed}, or a list of such lists")
    param = "text" if body.has("text") else "input_ids"
    return [fitting_prompt(row, text, model, param=param) for row in rows], many


def _read_options(
    body: Body, params_body: Body, text: TextBundle, model: ModelInfo, limits: LimitsConfig
) -> tuple[GenerateOptions, SamplingParams]:
    wanted = body.boolean("return_logprob", False)
    start = body.integer("logprob_start_len", -1, None, -1)
    num_top = body.integer("top_logprobs_num", 0, MAX_LOGPROBS, 0)
    with_text = body.boolean("return_text_in_logprobs", False)
    max_tokens = params_body.integer("max_tokens", 0, None, DEFAULT_NEW_TOKENS)
    params = replace(
        read_sampling(params_body, model.vocab_size, text.defaults, limits, max_tokens=max_tokens),
        logprobs=num_top if wanted else None,
        prompt_logprobs=num_top if wanted and start >= 0 else None,
    )
    return GenerateOptions(False, [], wanted, start, num_top, with_text), params


def _max_tokens(
    prompt: Prompt, params: Body, model: ModelInfo, limits: LimitsConfig, param: str
) -> int:
    room = room_for_reply(prompt, model.max_len, param=param)
    most = room if limits.max_tokens is None else min(room, limits.max_tokens)
    if not params.has("max_tokens"):
        return min(DEFAULT_NEW_TOKENS, most)
    asked = params.integer("max_tokens", 0, limits.max_tokens, 0)
    if asked > room:
        raise context_overflow(
            model.max_len,
            prompt_len=len(prompt.tokens),
            reply_len=asked,
            param=params.name("max_tokens"),
        )
    return asked


def _read_rids(body: Body, id: str, count: int, *, many: bool) -> list[str]:
    """Labels for the replies: the client's own, or ours."""
    rid = body.get("rid")
    if rid is None:
        return [f"{id}-{index}" for index in range(count)] if many else [id]
    rids = rid if isinstance(rid, list) else [rid]
    if len(rids) != count or not all(isinstance(each, str) for each in rids):
        raise body.wrong("rid", "a string" if count == 1 else f"a list of {count} strings")
    if (longest := max(map(len, rids))) > MAX_LABEL_CHARS:
        raise RequestError(
            f"rid has {longest:,} characters; at most {MAX_LABEL_CHARS:,} are allowed", param="rid"
        )
    return list(rids)
