"""A checked request to a job: sequences that run on an engine side by side, and their counts."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from pippin.api.grammar import can_forbid_calls, constrain
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import MAX_BYTES_PER_TOKEN, Leniency, under_owner
from pippin.api.requests.neutral_request import (
    ChatRequest,
    CompletionRequest,
    Gap,
    Options,
    ToolUse,
)
from pippin.api.served_models import ServedText
from pippin.engine.engine_client import RequestEngine
from pippin.errors import UnsupportedField
from pippin.messages import Submit, TokenDelta
from pippin.sequences import (
    GeneratedSequence,
    SequencePiece,
    ShownToken,
    context_overflow,
    open_sequences,
    room_for_reply,
)
from pippin.text.bundle import FillInMiddle, TextBundle
from pippin.text.parsers.base import ReplyParser
from pippin.text.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    FoldedText,
    Reasoning,
    TextPiece,
)
from pippin.text.prompt import Prompt, chat_prompt, check_nbytes, completion_prompt, nbytes_of
from pippin.text.tokenizer import Tokenizer

TIERS = ("host", "disk", "peer")  # below the device's memory: where cached tokens came from


@dataclass
class JobTimes:
    """Times of a job's reply, in `time.perf_counter()` seconds."""

    submitted: float | None = None
    first: float | None = None  # piece of any sequence
    last: float | None = None


@dataclass(frozen=True)
class Job:
    id: str
    model: str
    created_s: int
    request: ChatRequest | CompletionRequest  # or a dialect's own, which has more for its reply
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

    @property
    def with_logprobs(self) -> bool:
        return self.sequences[0].submit.params.logprobs is not None

    @property
    def keep_alive_s(self) -> float | None:
        return self.request.options.keep_alive_s

    def keep_apart(self, owner_salt: bytes) -> None:
        for sequence in self.sequences:
            sequence.submit = under_owner(sequence.submit, owner_salt)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Of the reply, so far."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    def num_cached(self, tier: str = "cached") -> int:
        """Prompt tokens that no sequence had to compute; or those of them from a lower tier."""
        num_each = len(self.sequences) // len(self.prompts)
        numbers = [getattr(sequence, f"{tier}_tokens") for sequence in self.sequences]
        return sum(min(numbers[i : i + num_each]) for i in range(0, len(numbers), num_each))

    def num_drafts(self, end: str) -> int:
        """`end`: accepted or rejected."""
        return sum(getattr(sequence, f"{end}_drafts") for sequence in self.sequences)

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """For one line of the log; with a tokenizer, the prompts in full."""
        times = self.timing
        waits = [s.queued_s for s in self.sequences if s.queued_s is not None]
        facts: dict[str, Any] = {
            "reply": self.id,
            "prompt_tokens": self.num_prompt_tokens,
            **{f"{tier}_tokens": self.num_cached(tier) for tier in ("cached", *TIERS)},
            "completion_tokens": self.num_tokens,
            **{f"{end}_drafts": self.num_drafts(end) for end in ("accepted", "rejected")},
            "queue_s": round(max(waits), 4) if waits else None,  # the longest
            "finish": ",".join(dict.fromkeys(s.finish or "cut" for s in self.sequences)),
        }
        if times.submitted is not None and times.first is not None and times.last is not None:
            facts["ttft_s"] = round(times.first - times.submitted, 4)
            if times.last > times.first:
                num_later = self.num_tokens - len(self.sequences)
                facts["tokens_per_s"] = round(num_later / (times.last - times.first), 1)
        if tokenizer is not None:
            texts = (map(tokenizer.token_bytes, prompt.tokens) for prompt in self.prompts)
            facts["prompts"] = [b"".join(text).decode(errors="replace") for text in texts]
        return facts


@dataclass
class FoldedChoice:
    index: int
    text: FoldedText = field(default_factory=FoldedText)
    shown: list[ShownToken] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # as they were generated
    finish: str | None = None

    def add(self, piece: SequencePiece) -> None:
        for part in piece.pieces:
            # A call that the end of the reply cut short stays a call, with the arguments so far.
            is_cut = isinstance(part, CallEnd) and part.unparsed is not None
            if piece.finish != "length" or not is_cut:
                self.text.add(part)
        self.shown += piece.shown
        self.tokens += piece.tokens
        self.finish = piece.finish

    @property
    def pieces(self) -> list[TextPiece]:
        """All of it in few. A call that was cut does not end."""
        pieces: list[TextPiece] = []
        if self.text.reasoning:
            pieces.append(Reasoning(self.text.reasoning))
        if self.text.content:
            pieces.append(Content(self.text.content))
        for number, call in self.text.calls.items():
            pieces += [CallBegin(number, call.id, call.name), CallArguments(number, call.arguments)]
            if self.finish != "length" or number != max(self.text.calls):
                pieces.append(CallEnd(number))
        return pieces

    def finish_or(self, called: str) -> str | None:
        """How it finished; `called`, if it did so to have functions called."""
        return called if self.finish == "stop" and self.text.calls else self.finish


async def run_sequences(engine: RequestEngine, job: Job) -> AsyncGenerator[SequencePiece, None]:
    """Pieces of all sequences as they arrive. Closing it aborts those that still run."""
    running = {sequence.submit.id: sequence for sequence in job.sequences}
    submits, times = [s.submit for s in job.sequences], job.timing
    times.submitted = perf_counter()
    deltas = engine.generate(submits[0]) if len(submits) == 1 else _merge(engine, submits)
    async with aclosing(deltas):
        async for delta in deltas:
            sequence = running.get(delta.id)
            if sequence is None:  # sent before the engine got `finish`
                continue
            piece = sequence.take(delta)
            times.last = perf_counter()
            if times.first is None:
                times.first = times.last
            if piece.finish is not None:
                del running[delta.id]
                if delta.finish is None:
                    engine.finish(delta.id)
            yield piece
            if not running:
                return


async def _merge(engine: RequestEngine, submits: list[Submit]) -> AsyncGenerator[TokenDelta, None]:
    queue: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()

    async def pump(submit: Submit) -> None:
        try:
            async with aclosing(engine.generate(submit)) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
        except Exception as error:  # raised again below, where the reply is made
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(submit)) for submit in submits]
    try:
        while True:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


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
