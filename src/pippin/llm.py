"""The offline API: the same engine as the server's, in this process and this thread.

from pippin import LLM, SamplingParams
llm = LLM()
print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from pippin.build import build_loop
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ContextOverflow, EngineDead, PippinError, RequestError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics
from pippin.resolve import resolve
from pippin.text.bundle import TextBundle
from pippin.text.detokenizer import Detokenizer
from pippin.types import FinishReason, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass
class Completion:
    """One generated sequence."""

    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0


class LLM:
    """A loaded model. Use it from the thread that made it; close it, or use it in a `with`."""

    def __init__(
        self,
        model: str = ModelConfig.model,
        *,
        dtype: str = "auto",
        engine: EngineConfig | None = None,
        config: Config | None = None,
    ) -> None:
        if config is None:
            section = ModelConfig(model=model, dtype=dtype)  # type: ignore[arg-type]
            config = Config(model=section, engine=engine or EngineConfig())
        self.config = resolve(config)
        self.text = TextBundle.load(Path(self.config.model.model))
        self.loop = build_loop(self.config, progress=lambda _: None)
        self._ids = itertools.count()

    def beside(self, *, prefix_cache: bool = True, overlap: bool = True) -> LLM:
        """Another engine over the same loaded model, with its own requests, cache and metrics.

        Only one of the two may have requests at a time.
        """
        other = copy.copy(self)
        engine = replace(self.config.engine, prefix_cache=prefix_cache, overlap=overlap)
        other.config = replace(self.config, engine=engine)
        other.loop = build_loop(other.config, lambda _: None, backend=self.loop.backend)
        other._ids = itertools.count()
        return other

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete every prompt, all at once; `n` completions for each, next to each other."""
        many = _as_prompts(prompts)
        tokens = [self._encode(prompt) for prompt in many]
        return self._run([(ids, ()) for ids in tokens], self._spread(params, len(many)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or several at once."""
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self._render(conversation) for conversation in conversations]
        return self._run(prompts, self._spread(params, len(prompts)))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[str]:
        """The answer's text as it comes. Closing the iterator stops the reply."""
        tokens, boundaries = self._render(messages)
        chosen = self._spread(params, 1)[0]
        submit = self._submit(tokens, boundaries, chosen)
        detokenizer = self._detokenizer(chosen)
        self.loop.submit(submit)
        finished = False
        try:
            while not finished:
                for delta in self._own(self.loop.step(), submit.id):
                    text = detokenizer.feed(delta.tokens).text
                    finished = delta.finish is not None or detokenizer.stopped
                    if finished:
                        text += detokenizer.close().text
                    if text:
                        yield text
        finally:
            if not finished or detokenizer.stopped:
                self.loop.abort(submit.id)
            self._drain()

    @property
    def max_len(self) -> int:
        return self.loop.backend.spec.max_len

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of a step when nothing else is running."""
        return self.loop.scheduler.limits.prefill_tokens

    @property
    def metrics(self) -> EngineMetrics:
        """Counters since the start, and the times of the last steps."""
        return self.loop.scheduler.metrics

    def close(self) -> None:
        self.loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- inside ----------------------------------------------------------------------------

    def _run(
        self, prompts: Sequence[tuple[list[int], Sequence[int]]], params: list[SamplingParams]
    ) -> list[Completion]:
        completions: dict[str, Completion] = {}
        detokenizers: dict[str, Detokenizer] = {}
        for (tokens, boundaries), chosen in zip(prompts, params, strict=True):
            for number in range(chosen.n):
                seed = None if chosen.seed is None else chosen.seed + number
                one = replace(chosen, n=1, seed=seed)
                submit = self._submit(tokens, boundaries, one)
                completions[submit.id] = Completion(prompt_tokens=list(tokens))
                detokenizers[submit.id] = self._detokenizer(one)
                self.loop.submit(submit)
        while not self.loop.idle:
            for delta in self.loop.step():
                self._take(delta, completions[delta.id], detokenizers[delta.id])
        return list(completions.values())

    def _take(self, delta: TokenDelta, completion: Completion, detokenizer: Detokenizer) -> None:
        if delta.error is not None:
            self._drain()
            raise _as_error(delta)
        if completion.finish_reason is not None:
            return  # tokens behind a stop string
        if delta.cached_tokens is not None:
            completion.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs is not None:
            completion.prompt_logprobs = delta.prompt_logprobs
        completion.tokens += delta.tokens
        if delta.logprobs is not None:
            completion.logprobs = (completion.logprobs or []) + delta.logprobs
        completion.text += detokenizer.feed(delta.tokens).text
        if detokenizer.stopped:
            completion.finish_reason = "stop"
            self.loop.finish(delta.id)
        elif delta.finish is not None:
            completion.text += detokenizer.close().text
            completion.finish_reason = delta.finish

    def _drain(self) -> None:
        for request in list(self.loop.scheduler.requests.values()):
            self.loop.abort(request.id)
        while not self.loop.idle:
            self.loop.step()

    def _own(self, deltas: list[TokenDelta], id: str) -> Iterator[TokenDelta]:
        for delta in deltas:
            if delta.id != id:
                continue
            if delta.error is not None:
                raise _as_error(delta)
            yield delta

    def _submit(
        self, tokens: list[int], boundaries: Sequence[int], params: SamplingParams
    ) -> Submit:
        room = self.max_len - len(tokens)
        if room < 1:
            raise ContextOverflow(
                f"prompt is {len(tokens):,} tokens, the model holds {self.max_len:,}"
            )
        eos = () if params.ignore_eos else self.text.tokenizer.eos_ids
        return Submit(
            id=str(next(self._ids)),
            tokens=tokens,
            params=replace(params, max_tokens=min(params.max_tokens, room)),
            stop_ids=sorted({*eos, *params.stop_token_ids}),
            boundaries=list(boundaries),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        tokens = self.text.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise RequestError("the prompt has no tokens", param="prompt")
        return tokens

    def _render(self, messages: Any) -> tuple[list[int], list[int]]:
        if self.text.chat is None:
            raise RequestError("this model has no chat template", param="messages")
        rendered = self.text.chat.encode(self.text.tokenizer, messages)
        return rendered.tokens, rendered.boundaries

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(self.text.tokenizer, params.stop, min_tokens=params.min_tokens)

    def _spread(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            defaults = self.text.defaults
            params = SamplingParams(
                temperature=defaults.temperature,
                top_p=defaults.top_p,
                top_k=defaults.top_k,
                min_p=defaults.min_p,
                repetition_penalty=defaults.repetition_penalty,
            )
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(
                f"{len(params)} sampling parameters for {count} prompts", param="params"
            )
        return list(params)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_error(delta: TokenDelta) -> PippinError:
    if delta.error_status == 503:
        return EngineDead(delta.error or "the engine failed")
    return RequestError(delta.error or "the request failed")
