"""OpenAI's text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pippin.api.dialects.dialect import HOLE, LEAST_LOGPROB, CompletionStream, EventTemplate
from pippin.api.jobs.run_job import FoldedChoice, Job
from pippin.api.model_info import RequestRules
from pippin.api.requests.fields import rows_of
from pippin.api.requests.neutral_request import CompletionRequest, Gap
from pippin.api.requests.openai_fields import COMPLETION
from pippin.api.requests.sampling_fields import check_choices, read_options
from pippin.api.served_models import ModelLease
from pippin.sequences import SequencePiece, ShownToken
from pippin.types import TokenLogprobs


def parse_completion(fields: Any, rules: RequestRules) -> CompletionRequest:
    body = COMPLETION.read(fields, rules)
    prompts, echo = rows_of(body.get("prompt")), body.get("echo", False)
    if body.get("max_tokens") == 0 and not echo:
        raise body.wrong("max_tokens", "an integer of at least 1, or 0 with echo")
    num_logprobs = body.get("logprobs")
    prompt_logprobs = num_logprobs if echo else None
    options = read_options(body, rules, num_logprobs, prompt_logprobs=prompt_logprobs)
    check_choices(len(prompts), options, rules.limits)
    n = options.params.n
    if body.get("best_of", n) != n:
        raise body.unsupported("best_of", f"n is {n}, and only as many replies are computed")
    suffix = body.get("suffix", "")
    if suffix and echo:
        raise body.error("suffix", "and echo cannot be sent together")
    if (suffix or echo) and options.kept_tokens is not None:
        other = "suffix" if suffix else "echo"
        raise body.error(other, "and truncate_prompt_tokens cannot be sent together")
    gap = Gap(suffix) if suffix else None
    return CompletionRequest(options, prompts, echo, body.leniency, gap)


class CompletionsDialect(CompletionStream):
    object = chunk_object = "text_completion"

    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        self._with_logprobs = job.with_logprobs

    def events(self, piece: SequencePiece) -> bytes:
        text = piece.text
        if not (text or piece.shown or piece.finish):
            return b""
        if self._with_logprobs or piece.finish:
            return self._event(self._choice(piece.index, text, piece.shown, piece.finish))
        template = self._templates.get(piece.index)
        if template is None:
            event = self._event(self._choice(piece.index, HOLE, [], None))
            template = self._templates[piece.index] = EventTemplate(event)
        return template.fill(text)

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        return self._whole(
            [self._choice(c.index, c.text.content, c.shown, c.finish) for c in choices]
        )

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
