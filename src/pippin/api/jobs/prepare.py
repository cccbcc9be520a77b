"""Typed requests to sequences ready to submit. Knows no JSON and no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pippin.api.grammars.constrain import can_forbid_calls, constrain
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import MAX_BYTES_PER_TOKEN, Leniency, reasoning_variables, under_owner
from pippin.api.requests.neutral_request import (
    ChatRequest,
    CompletionRequest,
    Gap,
    Options,
    ToolUse,
)
from pippin.errors import UnsupportedField
from pippin.sequences import GeneratedSequence, context_overflow, open_sequences, room_for_reply
from pippin.text.bundle import FillInMiddle, TextBundle
from pippin.text.parsers.base import ReplyParser, Tool
from pippin.text.prompt import Prompt, chat_prompt, check_nbytes, completion_prompt, nbytes_of
from pippin.text.tokenizer import Tokenizer
from pippin.types import SamplingParams


@dataclass(frozen=True)
class GapPrompt:
    prompt: Prompt
    num_left_out: int = 0  # files


def fill_of(text: TextBundle, gap: Gap) -> FillInMiddle:
    if text.fill_in_middle is None:
        raise UnsupportedField(
            f"{gap.suffix_field} is not supported: this model's tokenizer has no tokens for "
            "filling in the middle",
            param=gap.suffix_field,
        )
    return text.fill_in_middle


def gap_prompt(
    given: str | list[int],
    gap: Gap,
    fill: FillInMiddle,
    text: TextBundle,
    model: ModelInfo,
    *,
    reply_len: int | None,
) -> GapPrompt:
    """The texts whole, and of the other files the last ones that leave room for the reply."""
    if isinstance(given, str):
        check_nbytes(nbytes_of(given), model.max_prompt_bytes, param=gap.prefix_field)
    check_nbytes(nbytes_of(gap.suffix), model.max_prompt_bytes, param=gap.suffix_field)
    start = text.tokenizer.encode("")  # a start token, where the model has one
    tokens = fill.gap(given, gap.suffix, text.tokenizer)
    room = room_for_reply(Prompt([*start, *tokens]), model.max_len, param=gap.prefix_field)
    if gap.files is None:
        return GapPrompt(Prompt([*start, *tokens]))
    before, after = fill.before_files(text.tokenizer), fill.before_gap(text.tokenizer)
    room -= len(before) + len(after) + (room // 2 if reply_len is None else max(1, reply_len))
    files = _last_files(gap.files, fill, text.tokenizer, room)
    context, boundaries = [*start, *before], []
    for file in files:
        context += file
        boundaries.append(len(context))
    prompt = Prompt([*context, *after, *tokens], boundaries)
    room_for_reply(prompt, model.max_len, param=gap.prefix_field)
    return GapPrompt(prompt, len(gap.files) - len(files))


def within_gap(params: SamplingParams, fill: FillInMiddle) -> SamplingParams:
    """Marks between texts end the reply too."""
    if params.ignore_eos:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, *fill.stop_ids))


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


@dataclass
class JobTimes:
    """Times of a job's reply, in `time.perf_counter()` seconds."""

    submitted: float | None = None
    first: float | None = None  # piece of any sequence
    last: float | None = None

    def note(self, now: float) -> None:
        self.first = now if self.first is None else self.first
        self.last = now


@dataclass(frozen=True)
class Job:
    id: str
    model: str
    created_s: int
    prompts: list[Prompt]
    sequences: list[GeneratedSequence]  # those of one prompt side by side, as many for each
    stream: bool
    include_usage: bool
    timeout_s: float | None  # from being ready to the end of the reply
    tool_use: ToolUse
    leniency: Leniency
    timing: JobTimes = field(default_factory=JobTimes)

    @property
    def omitted(self) -> dict[str, list[str]]:
        """A field of the reply, where the model was not shown a picture or file of the prompt."""
        return {"omitted": self.leniency.omitted} if self.leniency.omitted else {}

    def keep_apart(self, owner_salt: bytes) -> None:
        for sequence in self.sequences:
            sequence.submit = under_owner(sequence.submit, owner_salt)

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """For one line of the log; with a tokenizer, the prompts in full."""
        times = self.timing
        facts: dict[str, Any] = {
            "reply": self.id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "host_tokens": self.host_tokens,
            "disk_tokens": self.disk_tokens,
            "peer_tokens": self.peer_tokens,
            "completion_tokens": self.completion_tokens,
            "accepted_drafts": self.accepted_drafts,
            "rejected_drafts": self.rejected_drafts,
            "queue_s": None if self.queued_s is None else round(self.queued_s, 4),
            "finish": ",".join(dict.fromkeys(s.finish or "cut" for s in self.sequences)),
        }
        if times.submitted is not None and times.first is not None and times.last is not None:
            facts["ttft_s"] = round(times.first - times.submitted, 4)
            if times.last > times.first:
                num_later = self.completion_tokens - len(self.sequences)
                facts["tokens_per_s"] = round(num_later / (times.last - times.first), 1)
        if tokenizer is not None:
            texts = (map(tokenizer.token_bytes, prompt.tokens) for prompt in self.prompts)
            facts["prompts"] = [b"".join(text).decode(errors="replace") for text in texts]
        return facts

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no sequence had to compute."""
        return self._least_of_each([sequence.cached_tokens for sequence in self.sequences])

    @property
    def host_tokens(self) -> int:
        return self._least_of_each([sequence.host_tokens for sequence in self.sequences])

    @property
    def disk_tokens(self) -> int:
        return self._least_of_each([sequence.disk_tokens for sequence in self.sequences])

    @property
    def peer_tokens(self) -> int:
        return self._least_of_each([sequence.peer_tokens for sequence in self.sequences])

    def _least_of_each(self, numbers: list[int]) -> int:
        """The least of each prompt's sequences, of all prompts together."""
        num_each = len(numbers) // len(self.prompts)
        return sum(min(numbers[i : i + num_each]) for i in range(0, len(numbers), num_each))

    @property
    def reasoning_tokens(self) -> int:
        return sum(sequence.num_reasoning_tokens for sequence in self.sequences)

    @property
    def accepted_drafts(self) -> int:
        return sum(sequence.accepted_drafts for sequence in self.sequences)

    @property
    def rejected_drafts(self) -> int:
        return sum(sequence.rejected_drafts for sequence in self.sequences)

    @property
    def with_logprobs(self) -> bool:
        return self.sequences[0].submit.params.logprobs is not None

    @property
    def queued_s(self) -> float | None:
        """The longest wait of its sequences."""
        waits = [s.queued_s for s in self.sequences if s.queued_s is not None]
        return max(waits, default=None)


def prepare_chat(
    request: ChatRequest, text: TextBundle, model: ModelInfo, *, prefix: str = "chatcmpl-"
) -> Job:
    prompt = render_prompt(request, text, model.max_prompt_bytes)
    prompt = _shortened(prompt, request.options, model)
    options = replace(request.options, params=constrain(request, prompt, text))
    return _job(
        prefix,
        [prompt],
        options,
        text,
        model,
        param=request.messages_field,
        leniency=request.leniency,
        tool_use=request.tool_use,
        new_parser=lambda: text.formats.parser(prompt.ending, request.tool_use.allowed),
        prediction=_prediction(request.prediction, text, model),
    )


def _prediction(given: str, text: TextBundle, model: ModelInfo) -> list[int]:
    """The tokens of a reply that a client expects: no more than a reply can have."""
    check_nbytes(nbytes_of(given), model.max_prompt_bytes, param="prediction")
    return text.tokenizer.encode_inside(given)[: model.max_len] if given else []


def render_prompt(request: ChatRequest, text: TextBundle, max_bytes: int) -> Prompt:
    """A conversation, its tools and how much to reason, in the words of the model's template."""
    tool_use = request.tool_use
    tools: tuple[Tool, ...] | None = tool_use.listed
    if tool_use.allowed and text.formats.tools is None:
        raise UnsupportedField(
            "tools are not supported: this model's chat template has no tool calls in a format "
            "that this server parses (name one with --tool-parser)",
            param="tools",
        )
    if not tool_use.allowed and not can_forbid_calls(text):
        tools = None  # not shown to the model
    effort = reasoning_variables(
        request.reasoning_effort,
        "" if text.chat is None else text.chat.source,
        reasons=text.formats.reasoning is not None,
        param=request.effort_field,
        leniency=request.leniency,
    )
    prompt = chat_prompt(
        request.messages,
        text,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables={**effort, **request.template_variables},
        max_bytes=max_bytes,
        param=request.messages_field,
    )
    if request.options.add_special_tokens:
        prompt = prompt.behind(text.tokenizer.special_prefix())
    return prompt.behind(request.previous_tokens)


def _shortened(prompt: Prompt, options: Options, model: ModelInfo) -> Prompt:
    match options.kept_tokens:
        case None:
            return prompt
        case -1:
            return prompt.last(max(1, model.max_len - max(1, options.max_tokens or 1)))
        case num_tokens:
            return prompt.last(num_tokens)


def prepare_completion(request: CompletionRequest, text: TextBundle, model: ModelInfo) -> Job:
    options, leniency = request.options, request.leniency
    if (gap := request.gap) is not None:
        fill = fill_of(text, gap)
        reply_len = options.max_tokens
        prompts = [
            gap_prompt(given, gap, fill, text, model, reply_len=reply_len)
            for given in request.prompts
        ]
        options = replace(options, params=within_gap(options.params, fill))
        if any(prompt.num_left_out for prompt in prompts):
            leniency.ignore(gap.files_field, "not all of them fit before the text to complete")
        found = [prompt.prompt for prompt in prompts]
    else:
        found = [_fitting_prompt(one, request, text, model) for one in request.prompts]
    return _job("cmpl-", found, options, text, model, param="prompt", leniency=leniency)


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


def _job(
    prefix: str,
    prompts: list[Prompt],
    options: Options,
    text: TextBundle,
    model: ModelInfo,
    *,
    param: str,
    leniency: Leniency,
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
        prompts=prompts,
        sequences=sequences,
        stream=options.stream,
        include_usage=options.include_usage,
        timeout_s=options.timeout_s,
        tool_use=tool_use or ToolUse(),
        leniency=leniency,
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
