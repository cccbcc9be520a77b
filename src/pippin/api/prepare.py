"""Typed requests to token sequences ready to submit. Knows no JSON and no engine."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace

from pippin.api.openai import ChatRequest, CompletionRequest, ModelInfo, Options
from pippin.errors import ContextOverflow, RequestError
from pippin.messages import Submit
from pippin.text.bundle import TextBundle
from pippin.text.detokenizer import Detokenizer, TokenSpan
from pippin.types import SamplingParams


@dataclass(frozen=True)
class Echo:
    """The prompt as the reply repeats it: its text, and where each token's text begins."""

    text: str
    tokens: list[int]
    offsets: list[int]


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    boundaries: list[int]
    echo: Echo | None = None


@dataclass(frozen=True)
class ChoiceSpec:
    """One choice of the reply: its index there, and what to submit for it."""

    index: int
    prompt: Prompt
    submit: Submit
    hides_reply: bool = False  # the client wants the prompt scored, and no reply


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready to run."""

    id: str
    model: str
    created_s: int
    prompts: list[Prompt]
    choices: list[ChoiceSpec]
    stream: bool
    include_usage: bool


def prepare_chat(request: ChatRequest, text: TextBundle, model: ModelInfo) -> Job:
    if text.chat is None:
        raise RequestError(
            f"{model.name} has no chat template; use /v1/completions", param="messages"
        )
    messages = request.messages
    if "developer" not in text.chat.source:  # the newer name for the same thing
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    rendered = text.chat.encode(
        text.tokenizer,
        messages,
        add_generation_prompt=request.add_generation_prompt,
        variables=request.template_variables,
    )
    prompt = Prompt(rendered.tokens, rendered.boundaries)
    return _job("chatcmpl", [prompt], request.options, text, model, param="messages")


def prepare_completion(request: CompletionRequest, text: TextBundle, model: ModelInfo) -> Job:
    prompts = [_completion_prompt(given, request.echo, text) for given in request.prompts]
    return _job("cmpl", prompts, request.options, text, model, param="prompt")


def _completion_prompt(given: str | list[int], echo: bool, text: TextBundle) -> Prompt:
    tokens = text.tokenizer.encode(given) if isinstance(given, str) else given
    if not tokens and text.tokenizer.bos_id is not None:
        tokens = [text.tokenizer.bos_id]
    if not tokens:
        raise RequestError("prompt is empty: there is nothing to continue", param="prompt")
    return Prompt(tokens, [], _echo(given, tokens, text) if echo else None)


def _echo(given: str | list[int], tokens: list[int], text: TextBundle) -> Echo:
    spans, decoded = _spell_out(tokens, text)
    shown = given if isinstance(given, str) else decoded
    # Tokens may spell a little more than was given: a start mark, or a space before the first word.
    surplus = len(decoded) - len(shown)
    return Echo(shown, tokens, [max(0, span.start - surplus) for span in spans])


def _spell_out(tokens: list[int], text: TextBundle) -> tuple[list[TokenSpan], str]:
    detokenizer = Detokenizer(text.tokenizer, show_special=True)
    pieces = (detokenizer.feed(tokens), detokenizer.close())
    return [span for p in pieces for span in p.spans], "".join(p.text for p in pieces)


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
    params = options.params
    stop_ids = [*(() if params.ignore_eos else text.tokenizer.eos_ids), *params.stop_token_ids]
    specs: list[ChoiceSpec] = []
    for prompt in prompts:
        max_tokens = _max_tokens(prompt, options, model, param)
        for choice in range(params.n):
            index = len(specs)
            submit = Submit(
                id=f"{id}-{index}",
                tokens=prompt.tokens,
                params=_choice_params(params, choice, max(1, max_tokens)),
                stop_ids=stop_ids,
                boundaries=prompt.boundaries,
            )
            specs.append(ChoiceSpec(index, prompt, submit, hides_reply=max_tokens == 0))
    return Job(
        id=id,
        model=model.name,
        created_s=int(time.time()),
        prompts=prompts,
        choices=specs,
        stream=options.stream,
        include_usage=options.include_usage,
    )


def _choice_params(params: SamplingParams, choice: int, max_tokens: int) -> SamplingParams:
    """Choices of one prompt must differ, and repeat when the request is repeated."""
    seed = None if params.seed is None else params.seed + choice
    return replace(params, n=1, seed=seed, max_tokens=max_tokens)


def _max_tokens(prompt: Prompt, options: Options, model: ModelInfo, param: str) -> int:
    prompt_len = len(prompt.tokens)
    room = model.max_len - prompt_len
    if room < 1:
        raise ContextOverflow(
            f"prompt is {prompt_len:,} tokens, the model holds {model.max_len:,}"
            + (" with the reply" if room == 0 else ""),
            param=param,
        )
    if options.max_tokens is None:
        return room
    if options.max_tokens > room:
        raise ContextOverflow(
            f"prompt is {prompt_len:,} tokens and {options.max_tokens_field} "
            f"{options.max_tokens:,}: together {prompt_len + options.max_tokens:,}, "
            f"the model holds {model.max_len:,}",
            param=options.max_tokens_field,
        )
    return options.max_tokens
