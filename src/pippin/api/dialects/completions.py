"""OpenAI's text completions. Knows no chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pippin.api.dialects.dialect import data_event, openai_usage
from pippin.api.dialects.shared_options import check_choices, check_model, read_options
from pippin.api.http.http_errors import error_body
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body
from pippin.api.requests.fields import COMPLETION_HONOURED, COMPLETION_REFUSED, check_fields
from pippin.api.requests.neutral_request import CompletionRequest
from pippin.api.requests.sampling_fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    are_token_ids,
    token_ids_in_words,
)
from pippin.config import LimitsConfig
from pippin.errors import PippinError, UnsupportedField
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.bundle import SamplingDefaults
from pippin.text.tokenizer import Tokenizer
from pippin.types import TokenLogprobs

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes


def parse_completion(
    fields: Any, model: ModelInfo, defaults: SamplingDefaults, limits: LimitsConfig
) -> CompletionRequest:
    body = Body(fields)
    check_fields(body, COMPLETION_HONOURED, COMPLETION_REFUSED)
    check_model(body, model)
    body.label("user")
    prompts = _parse_prompts(body, model)
    echo = body.boolean("echo", False)
    num_logprobs = body.integer("logprobs", 0, MAX_LOGPROBS, None)
    options = read_options(
        body,
        model,
        defaults,
        limits,
        num_logprobs,
        prompt_logprobs=num_logprobs if echo else None,
        min_reply=0 if echo else 1,  # with echo, none is a way to score a text
    )
    check_choices(len(prompts), options, limits)
    best_of = body.integer("best_of", 1, MAX_CHOICES, options.params.n)
    if best_of != options.params.n:
        raise UnsupportedField(
            f"best_of is {best_of} and n is {options.params.n}; "
            "choosing among more replies than are returned is not supported",
            param="best_of",
        )
    return CompletionRequest(options, prompts, echo)


def _parse_prompts(body: Body, model: ModelInfo) -> list[str] | list[list[int]]:
    prompt = body.require("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if are_token_ids(prompt, model.vocab_size):
            return [prompt]
        if all(are_token_ids(item, model.vocab_size) for item in prompt):
            return list(prompt)
    raise body.wrong(
        "prompt",
        f"a string, a list of strings, a list of {token_ids_in_words(model.vocab_size)}, "
        "or a list of such lists",
    )


class CompletionsDialect:
    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._with_logprobs = job.with_logprobs

    def open(self) -> bytes:
        return b""

    def events(self, piece: SequencePiece) -> bytes:
        if not (piece.text or piece.shown or piece.finish):
            return b""
        choice = self._choice(piece.index, piece.text, piece.shown, piece.finish)
        usage = {"usage": None} if self._job.include_usage else {}
        return data_event(self._envelope([choice]) | usage)

    def close(self) -> bytes:
        if not self._job.include_usage:
            return DONE
        return data_event(self._envelope([]) | {"usage": openai_usage(self._job)}) + DONE

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        whole = [self._choice(c.index, c.text.content, c.shown, c.finish) for c in choices]
        return self._envelope(whole) | {"usage": openai_usage(self._job)}

    def error(self, error: PippinError) -> bytes:
        return data_event(error_body(error)) + DONE

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": "text_completion",
            "created": self._job.created_s,
            "model": self._job.model,
            "choices": choices,
        }

    def _choice(
        self, index: int, text: str, tokens: list[ShownToken], finish: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens) if self._with_logprobs else None,
            "finish_reason": finish,
        }

    def _logprobs(self, tokens: list[ShownToken]) -> dict[str, Any]:
        return {
            "tokens": [self._tokenizer.token_text(token.id) for token in tokens],
            "token_logprobs": [
                None if t.logprobs is None else max(t.logprobs.logprob, LEAST_LOGPROB)
                for t in tokens
            ],
            "top_logprobs": [
                None if t.logprobs is None else self._top(t.id, t.logprobs) for t in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by their text, and the chosen one even if it is none of them."""
        top = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        by_text: dict[str, float] = {}
        for token, logprob in (top | {id: logprobs.logprob}).items():
            by_text.setdefault(self._tokenizer.token_text(token), max(logprob, LEAST_LOGPROB))
        return by_text
