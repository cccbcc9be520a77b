"""Checked requests to jobs: sequences that are ready to be submitted."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pippin.api.jobs.constrain import can_forbid_calls, constrain
from pippin.api.jobs.run_job import Job
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import MAX_BYTES_PER_TOKEN
from pippin.api.requests.neutral_request import (
    ChatRequest,
    CompletionRequest,
    Gap,
    Options,
    ToolUse,
)
from pippin.api.served_models import ServedText
from pippin.errors import UnsupportedField
from pippin.sequences import GeneratedSequence, context_overflow, open_sequences, room_for_reply
from pippin.text.bundle import FillInMiddle, TextBundle
from pippin.text.parsers.base import ReplyParser
from pippin.text.prompt import Prompt, chat_prompt, check_nbytes, completion_prompt, nbytes_of
from pippin.text.tokenizer import Tokenizer

DEFAULT_EFFORT = "medium"  # what clients send by default
# Variables that switch reasoning on and off in templates, and how their use is recognised.
_SWITCHES = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"\b(?:if|not|and|or)\s+thinking\b(?!\.)"),
}


def prepare(request: ChatRequest | CompletionRequest, served: ServedText, prefix: str) -> Job:
    """`prefix`: of the reply's id."""
    if isinstance(request, ChatRequest):
        return prepare_chat(request, served.text, served.model, prefix=prefix)
    return prepare_completion(request, served.text, served.model, prefix=prefix)


def prepare_chat(
    request: ChatRequest, text: TextBundle, model: ModelInfo, *, prefix: str = "chatcmpl-"
) -> Job:
    prompt = render_prompt(request, text, model.max_prompt_bytes)
    prompt = _shortened(prompt, request.options, model)
    expected = request.prediction
    check_nbytes(nbytes_of(expected), model.max_prompt_bytes, param="prediction")
    return _job(
        prefix,
        [prompt],
        replace(request.options, params=constrain(request, prompt, text)),
        text,
        model,
        request,
        param=request.messages_field,
        tool_use=request.tool_use,
        new_parser=lambda: text.formats.parser(prompt.ending, request.tool_use.allowed),
        # No more than a reply can have:
        prediction=text.tokenizer.encode_inside(expected)[: model.max_len] if expected else (),
    )


def render_prompt(request: ChatRequest, text: TextBundle, max_bytes: int) -> Prompt:
    """A conversation, its tools and how much to reason, in the words of the model's template."""
    tool_use = request.tool_use
    if tool_use.allowed and text.formats.tools is None:
        raise UnsupportedField(
            "tools are not supported: this model's chat template has no tool calls in a format "
            "that this server parses (name one with --tool-parser)",
            param="tools",
        )
    is_shown_tools = tool_use.allowed or can_forbid_calls(text)
    prompt = chat_prompt(
        request.messages,
        text,
        tools=tool_use.listed if is_shown_tools else None,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables={**reasoning_variables(request, text), **request.template_variables},
        max_bytes=max_bytes,
        param=request.messages_field,
    )
    if request.options.add_special_tokens:
        prompt = prompt.behind(text.tokenizer.special_prefix())
    return prompt.behind(request.previous_tokens)


def reasoning_variables(request: ChatRequest, text: TextBundle) -> dict[str, Any]:
    effort, template = request.reasoning_effort, "" if text.chat is None else text.chat.source
    if effort is None:
        return {}
    variables: dict[str, Any] = {
        name: effort != "none" for name, use in _SWITCHES.items() if use.search(template)
    }
    ignore, param = request.leniency.ignore, request.effort_field
    if re.search(r"\breasoning_effort\b", template):
        # Templates with this variable have three levels of it, and none without reasoning.
        levels = {"minimal": "low", "xhigh": "high"}
        if effort != "none":
            variables["reasoning_effort"] = levels.get(effort, effort)
        elif not variables:
            ignore(param, "this model always reasons, and the lowest is low", effort)
            variables["reasoning_effort"] = "low"
    can_be_without = effort != "none" or text.formats.reasoning is not None
    if not variables and effort != DEFAULT_EFFORT and can_be_without:
        ignore(param, "this model's template has no switch for reasoning", effort)
    return variables


def prepare_completion(
    request: CompletionRequest, text: TextBundle, model: ModelInfo, *, prefix: str = "cmpl-"
) -> Job:
    options, gap = request.options, request.gap
    if gap is None:
        prompts = [_fitting_prompt(one, request, text, model) for one in request.prompts]
    else:
        if (fill := text.fill_in_middle) is None:
            raise UnsupportedField(
                f"{gap.suffix_field} is not supported: this model's tokenizer has no tokens for "
                "filling in the middle",
                param=gap.suffix_field,
            )
        found = [gap_prompt(one, gap, fill, text, model, options) for one in request.prompts]
        prompts = [prompt for prompt, _ in found]
        if any(num_left_out for _, num_left_out in found):
            why = "not all of them fit before the text to complete"
            request.leniency.ignore(gap.files_field, why)
        if not options.params.ignore_eos:  # marks between texts end the reply too
            stop_ids = (*options.params.stop_token_ids, *fill.stop_ids)
            options = replace(options, params=replace(options.params, stop_token_ids=stop_ids))
    return _job(prefix, prompts, options, text, model, request, param="prompt")


def gap_prompt(
    given: str | list[int],
    gap: Gap,
    fill: FillInMiddle,
    text: TextBundle,
    model: ModelInfo,
    options: Options,
) -> tuple[Prompt, int]:
    """The texts whole, and of the other files the last ones that leave room for the reply; and how
    many files are left out."""
    if isinstance(given, str):
        check_nbytes(nbytes_of(given), model.max_prompt_bytes, param=gap.prefix_field)
    check_nbytes(nbytes_of(gap.suffix), model.max_prompt_bytes, param=gap.suffix_field)
    start = text.tokenizer.encode("")  # a start token, where the model has one
    tokens = fill.gap(given, gap.suffix, text.tokenizer)
    room = room_for_reply(Prompt([*start, *tokens]), model.max_len, param=gap.prefix_field)
    if gap.files is None:
        return Prompt([*start, *tokens]), 0
    before, after = fill.before_files(text.tokenizer), fill.before_gap(text.tokenizer)
    reply_len = options.max_tokens
    room -= len(before) + len(after) + (room // 2 if reply_len is None else max(1, reply_len))
    files = _last_files(gap.files, fill, text.tokenizer, room)
    context, boundaries = [*start, *before], []
    for file in files:
        context += file
        boundaries.append(len(context))
    prompt = Prompt([*context, *after, *tokens], boundaries)
    room_for_reply(prompt, model.max_len, param=gap.prefix_field)
    return prompt, len(gap.files) - len(files)


def _last_files(
    files: tuple[tuple[str, str], ...], fill: FillInMiddle, tokenizer: Tokenizer, room: int
) -> list[list[int]]:
    """Those that fit in `room` tokens. None is encoded that has more bytes than could fit."""
    found: list[list[int]] = []
    for name, text in reversed(files):
        if nbytes_of(name) + nbytes_of(text) > room * MAX_BYTES_PER_TOKEN:
            break
        tokens = fill.other_file(name, text, tokenizer)
        room -= len(tokens)
        if room < 0:
            break
        found.append(tokens)
    return found[::-1]


def _fitting_prompt(
    given: str | list[int], request: CompletionRequest, text: TextBundle, model: ModelInfo
) -> Prompt:
    """Checked by itself, so that no prompt is encoded after the first that is too long."""
    options = request.options
    if not isinstance(given, str):
        room_for_reply(_shortened(Prompt(given), options, model), model.max_len, param="prompt")
    prompt = completion_prompt(
        given,
        text,
        echo=request.echo,
        add_special_tokens=options.add_special_tokens is not False,
        max_bytes=model.max_prompt_bytes,
    )
    prompt = _shortened(prompt, options, model)
    room_for_reply(prompt, model.max_len, param="prompt")
    return prompt


def _shortened(prompt: Prompt, options: Options, model: ModelInfo) -> Prompt:
    match options.kept_tokens:
        case None:
            return prompt
        case -1:
            return prompt.last(max(1, model.max_len - max(1, options.max_tokens or 1)))
        case num_tokens:
            return prompt.last(num_tokens)


def _job(
    prefix: str,
    prompts: list[Prompt],
    options: Options,
    text: TextBundle,
    model: ModelInfo,
    request: ChatRequest | CompletionRequest,
    *,
    param: str,
    tool_use: ToolUse | None = None,
    new_parser: Callable[[], ReplyParser] = ReplyParser,
    prediction: Sequence[int] = (),
) -> Job:
    id = f"{prefix}{uuid.uuid4().hex}"
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
            salt=options.salt,
            new_parser=new_parser,
            prediction=prediction,
        )
    return Job(
        id=id,
        model=model.name,
        created_s=int(time.time()),
        request=request,
        prompts=prompts,
        sequences=sequences,
        stream=options.stream,
        include_usage=options.include_usage,
        timeout_s=options.timeout_s,
        tool_use=tool_use or ToolUse(),
        leniency=request.leniency,
    )


def _max_tokens(prompt: Prompt, options: Options, model: ModelInfo, param: str) -> int:
    room = room_for_reply(prompt, model.max_len, param=param)
    if options.max_tokens is None:
        return room if options.most_tokens is None else min(room, options.most_tokens)
    if options.max_tokens > room:
        raise context_overflow(
            model.max_len,
            prompt_len=len(prompt.tokens),
            reply_len=options.max_tokens,
            param=options.max_tokens_field,
        )
    return options.max_tokens
