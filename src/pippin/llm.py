"""The offline API: the same engine as the server's, in this process and this thread.

from pippin import LLM, SamplingParams
llm = LLM()
print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from pippin.api.parameters import (
    are_token_ids,
    check_priority,
    check_sampling,
    token_ids_in_words,
)
from pippin.build import build_loop
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.embedding import embedding_of, embedding_submit
from pippin.errors import RequestError
from pippin.messages import Submit
from pippin.metrics import EngineMetrics
from pippin.resolve import resolve
from pippin.router import Inbox, Router
from pippin.sequences import GeneratedSequence, SequencePiece, open_sequences, room_for_reply
from pippin.text.bundle import TextBundle
from pippin.text.prompt import Prompt, chat_prompt, completion_prompt
from pippin.types import FinishReason, SamplingParams, TokenLogprobs

T = TypeVar("T")
PromptInput = str | Sequence[int]
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

    def add(self, piece: SequencePiece) -> None:
        self.tokens += piece.tokens
        self.text += piece.text
        self.finish_reason = piece.finish
        if piece.logprobs:
            self.logprobs = self.logprobs or []
            self.logprobs += piece.logprobs


class LLM:
    """A loaded model. Use it from the thread that made it; close it, or use it in a `with`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        engine: EngineConfig | None = None,
        config: Config | None = None,
    ) -> None:
        if config is None:
            section = ModelConfig(model=model or ModelConfig.model, dtype=dtype)  # type: ignore[arg-type]
            config = Config(model=section, engine=engine or EngineConfig())
        elif model is not None or dtype != "auto" or engine is not None:
            raise ValueError(
                "config says which model, dtype and engine: give these or it, not both"
            )
        self.config = resolve(config)
        self.text = TextBundle.load(Path(self.config.model.model))
        self.loop = build_loop(self.config, progress=lambda _: None)
        self._router = Router(self.loop)
        self._request_ids = itertools.count()

    def beside(
        self, *, prefix_cache: bool = True, overlap: bool = True, forced_chunks: bool = True
    ) -> LLM:
        """Another engine over the same loaded model, with its own requests, cache and metrics.

        Only one of the two may have requests at a time.
        """
        other = copy.copy(self)
        engine = replace(
            self.config.engine,
            prefix_cache=prefix_cache,
            overlap=overlap,
            forced_chunks=forced_chunks,
        )
        other.config = replace(self.config, engine=engine)
        other.loop = build_loop(other.config, lambda _: None, backend=self.loop.backend)
        other._router = Router(other.loop)
        return other

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Complete every prompt, any number at once; `n` completions each, next to each other.

        Prompts of a higher priority start first. If one fails, its error is raised after the
        others have been stopped.
        """
        encoded = [self._completion_prompt(prompt) for prompt in _as_prompts(prompts)]
        return self._complete(self._open(encoded, params, priority))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Completion]:
        """Answer one conversation, or several at once."""
        prompts = [chat_prompt(chat, self.text) for chat in _as_conversations(messages)]
        return self._complete(self._open(prompts, params, priority))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[str]:
        """The answer's text as it comes. Closing the iterator stops the reply.

        Several may be open at once, and other calls may be made meanwhile.
        """
        sequences = self._open([chat_prompt(messages, self.text)], params, priority)
        if len(sequences) > 1:
            raise RequestError(f"n is {len(sequences)}; a stream is one reply", param="n")
        with closing(self._run(sequences)) as pieces:
            yield from (piece.text for piece in pieces if piece.text)

    def embed(
        self, prompts: PromptInput | Sequence[PromptInput], *, priority: int | Sequence[int] = 0
    ) -> np.ndarray:
        """A vector of length 1 for every prompt: float32 [prompts, hidden].

        It is what the model's head reads after the prompt's last token.
        """
        encoded = [self._completion_prompt(prompt) for prompt in _as_prompts(prompts)]
        if not encoded:
            raise RequestError("prompts is empty: there is nothing to embed", param="prompts")
        priorities: Sequence[int] = _for_each(priority, len(encoded), "priority")
        request_id = str(next(self._request_ids))
        submits = []
        for number, (prompt, level) in enumerate(zip(encoded, priorities, strict=True)):
            room_for_reply(prompt, self.max_len, param="prompt")
            id = f"{request_id}-{number}"
            submits.append(embedding_submit(id, prompt.tokens, priority=check_priority(level)))
        return self._embed(submits)

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
        self._router.close()
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

    @property
    def _vocab_size(self) -> int:
        return self.loop.backend.spec.vocab_size

    # ---- inside ----------------------------------------------------------------------------

    def _complete(self, sequences: Sequence[GeneratedSequence]) -> list[Completion]:
        completions = [Completion(list(sequence.prompt.tokens)) for sequence in sequences]
        with closing(self._run(sequences)) as pieces:
            for piece in pieces:
                completions[piece.index].add(piece)
        for completion, sequence in zip(completions, sequences, strict=True):
            completion.cached_tokens = sequence.cached_tokens
            completion.prompt_logprobs = sequence.prompt_logprobs
        return completions

    def _open(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[GeneratedSequence]:
        count = len(prompts)
        all_params: Sequence[SamplingParams] = _for_each(self._checked(params), count, "params")
        priorities: Sequence[int] = _for_each(priority, count, "priority")
        request_id = str(next(self._request_ids))
        sequences: list[GeneratedSequence] = []
        for prompt, chosen, level in zip(prompts, all_params, priorities, strict=True):
            room = room_for_reply(prompt, self.max_len, param="prompt")
            sequences += open_sequences(
                request_id,
                prompt,
                replace(chosen, max_tokens=min(chosen.max_tokens, room)),
                self.text.tokenizer,
                first_index=len(sequences),
                priority=check_priority(level),
            )
        return sequences

    def _run(self, sequences: Sequence[GeneratedSequence]) -> Generator[SequencePiece, None, None]:
        """Pieces of all sequences as they come. Closing it aborts whatever still runs."""
        running = {sequence.submit.id: sequence for sequence in sequences}
        inbox = Inbox()
        try:
            for sequence in sequences:
                self._router.submit(sequence.submit, inbox)
            while running:
                for delta in self._router.wait(inbox):
                    if delta.id not in running:  # said before the engine heard of the stop string
                        continue
                    piece = running[delta.id].take(delta)
                    if piece.finish is not None:
                        del running[delta.id]
                        self._router.finish(delta.id)
                    yield piece
        finally:
            for id in running:
                self._router.abort(id)
            self._router.settle()

    def _embed(self, submits: Sequence[Submit]) -> np.ndarray:
        found: dict[str, np.ndarray] = {}
        inbox = Inbox()
        try:
            for submit in submits:
                self._router.submit(submit, inbox)
            while len(found) < len(submits):
                for delta in self._router.wait(inbox):
                    found[delta.id] = embedding_of(delta)
        finally:
            for submit in submits:
                self._router.abort(submit.id)
            self._router.settle()
        return np.stack([found[submit.id] for submit in submits])

    def _completion_prompt(self, given: PromptInput) -> Prompt:
        if isinstance(given, str):
            return completion_prompt(given, self.text)
        tokens = [operator.index(token) for token in given]  # numpy's integers too
        if not are_token_ids(tokens, self._vocab_size):
            raise RequestError(
                f"prompt is a list of {len(tokens):,} integers; "
                f"it must be {token_ids_in_words(self._vocab_size)}",
                param="prompt",
            )
        return completion_prompt(tokens, self.text)

    def _checked(
        self, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | list[SamplingParams]:
        if params is None:
            return SamplingParams(**asdict(self.text.defaults))
        if isinstance(params, SamplingParams):
            return check_sampling(params, self._vocab_size)
        return [check_sampling(each, self._vocab_size) for each in params]


def _for_each(values: T | Sequence[T], count: int, name: str) -> Sequence[T]:
    """One value for every prompt, or as many as there are prompts."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} values for {count} prompts", param=name)
    return values


def _as_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if messages and isinstance(messages[0], dict):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]
