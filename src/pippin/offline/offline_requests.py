"""What a Python caller gives, as sequences ready to submit: for `LLM` and `AsyncLLM`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict, TypeVar, Unpack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pippin.api.requests.body import are_token_ids, check_salt, token_ids_in_words
from pippin.api.requests.sampling_fields import check_priority, check_sampling
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.embedding import embedding_submit
from pippin.errors import RequestError
from pippin.messages import Submit
from pippin.sequences import GeneratedSequence, SequencePiece, open_sequences, room_for_reply
from pippin.text.bundle import TextBundle
from pippin.text.prompt import Prompt, chat_prompt, completion_prompt
from pippin.types import FinishReason, ModelSpec, SamplingParams, TokenLogprobs

Advance = Callable[[int, bool], None]  # of new tokens, and whether they end a sequence


@contextmanager
def progress_bar(total: int, *, shown: bool, console: Console | None = None) -> Iterator[Advance]:
    """On standard error; where that is no terminal, one line at the end."""
    if not shown:
        yield lambda num_tokens, ended: None
        return
    num_generated = 0
    with Progress(
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
    ) as bar:
        task = bar.add_task("prompts", total=total, tokens=0)

        def advance(num_tokens: int, ended: bool) -> None:
            nonlocal num_generated
            num_generated += num_tokens
            bar.update(task, advance=int(ended), tokens=num_generated)

        yield advance


T = TypeVar("T")
PromptInput = str | Sequence[int]
Prompts = PromptInput | Sequence[PromptInput]
Message = dict[str, Any]
Conversations = Sequence[Message] | Sequence[Sequence[Message]]
Params = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int]


class RequestOptions(TypedDict, total=False):
    priority: Priority  # higher starts first; one for all prompts, or one each. Default: 0
    cache_salt: str | None  # requests with different salts share no cached prefix


class ReplyOptions(RequestOptions, total=False):
    # The reply that is expected to each prompt, from which drafts are taken with `speculate`.
    predictions: Sequence[PromptInput] | None


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
    host_tokens: int = 0  # of these, loaded from the host's memory
    disk_tokens: int = 0  # and from disk
    peer_tokens: int = 0  # and from a prefill engine
    accepted_drafts: int = 0  # of `tokens`: guessed, and verified in one step with others
    rejected_drafts: int = 0  # guesses that were wrong: not among `tokens`

    def add(self, piece: SequencePiece) -> None:
        self.tokens += piece.tokens
        self.text += piece.text
        self.finish_reason = piece.finish
        if piece.logprobs:
            self.logprobs = self.logprobs or []
            self.logprobs += piece.logprobs

    def close(self, sequence: GeneratedSequence) -> None:
        """What the sequence knows once it has started."""
        self.cached_tokens = sequence.cached_tokens
        self.host_tokens = sequence.host_tokens
        self.disk_tokens = sequence.disk_tokens
        self.peer_tokens = sequence.peer_tokens
        self.accepted_drafts = sequence.accepted_drafts
        self.rejected_drafts = sequence.rejected_drafts
        self.prompt_logprobs = sequence.prompt_logprobs


class OfflineRequests:
    """Checks what callers give for one model, and numbers their requests."""

    def __init__(self, text: TextBundle, spec: ModelSpec) -> None:
        self._text = text
        self._vocab_size = spec.vocab_size
        self._max_len = spec.max_len
        self._ids = itertools.count()

    def completions(
        self, prompts: Prompts, params: Params, **options: Unpack[ReplyOptions]
    ) -> list[GeneratedSequence]:
        encoded = [self._completion_prompt(prompt) for prompt in _as_prompts(prompts)]
        return self._open(encoded, params, **options)

    def chats(
        self, messages: Conversations, params: Params, **options: Unpack[ReplyOptions]
    ) -> list[GeneratedSequence]:
        prompts = [chat_prompt(chat, self._text) for chat in _as_conversations(messages)]
        return self._open(prompts, params, **options)

    def embeddings(
        self, prompts: Prompts, priority: Priority = 0, cache_salt: str | None = None
    ) -> list[Submit]:
        encoded = [self._completion_prompt(prompt) for prompt in _as_prompts(prompts)]
        if not encoded:
            raise RequestError("prompts is empty: there is nothing to embed", param="prompts")
        priorities: Sequence[int] = _for_each(priority, len(encoded), "priority")
        salt = check_salt(cache_salt)
        request_id = next(self._ids)
        submits = []
        for number, (prompt, level) in enumerate(zip(encoded, priorities, strict=True)):
            room_for_reply(prompt, self._max_len, param="prompt")
            id = f"{request_id}-{number}"
            level = check_priority(level)
            submits.append(embedding_submit(id, prompt.tokens, priority=level, salt=salt))
        return submits

    def _open(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        priority: Priority = 0,
        cache_salt: str | None = None,
        predictions: Sequence[PromptInput] | None = None,
    ) -> list[GeneratedSequence]:
        count, salt = len(prompts), check_salt(cache_salt)
        all_params: Sequence[SamplingParams] = _for_each(self._checked(params), count, "params")
        priorities: Sequence[int] = _for_each(priority, count, "priority")
        nothing: PromptInput = ""
        expected: Sequence[PromptInput] = _for_each(
            [nothing] * count if predictions is None else predictions, count, "predictions"
        )
        request_id = str(next(self._ids))
        sequences: list[GeneratedSequence] = []
        each = zip(prompts, all_params, priorities, expected, strict=True)
        for prompt, chosen, level, prediction in each:
            room = room_for_reply(prompt, self._max_len, param="prompt")
            sequences += open_sequences(
                request_id,
                prompt,
                replace(chosen, max_tokens=min(chosen.max_tokens, room)),
                self._text.tokenizer,
                first_index=len(sequences),
                priority=check_priority(level),
                salt=salt,
                prediction=self._prediction(prediction),
            )
        return sequences

    def _prediction(self, given: PromptInput) -> Sequence[int]:
        if not given:
            return ()
        if isinstance(given, str):
            return self._text.tokenizer.encode_inside(given)[: self._max_len]
        return self._tokens(given, "predictions")[: self._max_len]

    def _completion_prompt(self, given: PromptInput) -> Prompt:
        if isinstance(given, str):
            return completion_prompt(given, self._text)
        return completion_prompt(self._tokens(given, "prompt"), self._text)

    def _tokens(self, given: Sequence[int], name: str) -> list[int]:
        tokens = [operator.index(token) for token in given]  # numpy's integers too
        if not are_token_ids(tokens, self._vocab_size):
            raise RequestError(
                f"{name} is a list of {len(tokens):,} integers; "
                f"it must be {token_ids_in_words(self._vocab_size)}",
                param=name,
            )
        return tokens

    def _checked(self, params: Params) -> SamplingParams | list[SamplingParams]:
        if params is None:
            return SamplingParams(**asdict(self._text.defaults))
        if isinstance(params, SamplingParams):
            return check_sampling(params, self._vocab_size)
        return [check_sampling(each, self._vocab_size) for each in params]


def offline_config(
    model: str | None, dtype: str, engine: EngineConfig | None, config: Config | None
) -> Config:
    """What a caller says of the model, in one of two ways."""
    if config is None:
        section = ModelConfig(model=model or ModelConfig.model, dtype=dtype)  # type: ignore[arg-type]
        return Config(model=section, engine=engine or EngineConfig())
    if model is not None or dtype != "auto" or engine is not None:
        raise ValueError("config says which model, dtype and engine: give these or it, not both")
    return config


def only_one(sequences: Sequence[GeneratedSequence]) -> GeneratedSequence:
    """The sequence of a stream."""
    if len(sequences) != 1:
        raise RequestError(f"n is {len(sequences)}; a stream is one reply", param="n")
    return sequences[0]


def _for_each(values: T | Sequence[T], count: int, name: str) -> Sequence[T]:
    """One value for every prompt, or as many as there are prompts."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} values for {count} prompts", param=name)
    return values


def _as_prompts(prompts: Prompts) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(messages: Conversations) -> list[Sequence[Message]]:
    if messages and isinstance(messages[0], dict):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]
