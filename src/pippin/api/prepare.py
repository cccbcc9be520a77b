"""Typed requests to sequences ready to submit. Knows no JSON and no engine."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace

from pippin.api.openai import ChatRequest, CompletionRequest, ModelInfo, Options
from pippin.errors import ContextOverflow
from pippin.sequences import GeneratedSequence, open_sequences, room_for_reply
from pippin.text.bundle import TextBundle
from pippin.text.prompt import Prompt, chat_prompt, completion_prompt


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready to run."""

    id: str
    model: str
    created_s: int
    prompts: list[Prompt]
    sequences: list[GeneratedSequence]  # those of one prompt side by side, as many for each
    stream: bool
    include_usage: bool


def prepare_chat(request: ChatRequest, text: TextBundle, model: ModelInfo) -> Job:
    prompt = chat_prompt(
        request.messages,
        text,
        add_generation_prompt=request.add_generation_prompt,
        variables=request.template_variables,
    )
    return _job("chatcmpl", [prompt], request.options, text, model, param="messages")


def prepare_completion(request: CompletionRequest, text: TextBundle, model: ModelInfo) -> Job:
    prompts = [completion_prompt(given, text, echo=request.echo) for given in request.prompts]
    return _job("cmpl", prompts, request.options, text, model, param="prompt")


def _job(
    prefix: str,
    prompts: list[Prompt],
    options: Options,
    text: TextBundle,
    model: ModelInfo,
    *,
    param: str,
) -> Job:
    id = f"{prefix}-{uuid.uuid4().hex}"
    sequences: list[GeneratedSequence] = []
    for prompt in prompts:
        params = replace(options.params, max_tokens=_max_tokens(prompt, options, model, param))
        sequences += open_sequences(
            id,
            prompt,
            params,
            text.tokenizer,
            first_index=len(sequences),
            priority=options.priority,
        )
    return Job(
        id=id,
        model=model.name,
        created_s=int(time.time()),
        prompts=prompts,
        sequences=sequences,
        stream=options.stream,
        include_usage=options.include_usage,
    )


def _max_tokens(prompt: Prompt, options: Options, model: ModelInfo, param: str) -> int:
    room = room_for_reply(prompt, model.max_len, param=param)
    if options.max_tokens is None:
        return room
    if options.max_tokens > room:
        prompt_len = len(prompt.tokens)
        raise ContextOverflow(
            f"prompt is {prompt_len:,} tokens and {options.max_tokens_field} "
            f"{options.max_tokens:,}: together {prompt_len + options.max_tokens:,}, "
            f"the model holds {model.max_len:,}",
            param=options.max_tokens_field,
        )
    return options.max_tokens
