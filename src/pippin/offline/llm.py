"""The offline API: the same engine as the server's, in this process and this thread.

from pippin import LLM, SamplingParams
llm = LLM()
print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pippin.api.requests.body import are_token_ids, check_salt, token_ids_in_words
from pippin.api.requests.sampling_fields import check_priority, check_sampling
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.embedding import embedding_of, embedding_submit
from pippin.engine.build_loop import build_loop
from pippin.errors import EngineDead, RequestError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics
from pippin.scheduler.loop import Loop
from pippin.sequences import GeneratedSequence, SequencePiece, open_sequences, room_for_reply
from pippin.startup.resolve import resolve
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


KNOWN_AT_THE_END = (
    *("cached_tokens", "host_tokens", "disk_tokens", "peer_tokens"),
    *("accepted_drafts", "rejected_drafts", "prompt_logprobs"),
)


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
        for name in KNOWN_AT_THE_END:
            setattr(self, name, getattr(sequence, name))


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


def load_offline(
    config: Config, progress: Callable[[str], None], *, for_streams: bool = True
) -> tuple[Loop, TextBundle]:
    text = TextBundle.load(Path(config.model.model))
    return build_loop(config, progress, for_streams=for_streams), text


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
        self.config = resolve(offline_config(model, dtype, engine, config))
        self.loop, self.text = load_offline(self.config, lambda _: None, for_streams=False)
        self._router = Router(self.loop)
        self._requests = OfflineRequests(self.text, self.loop.backend.spec)

    def generate(
        self,
        prompts: Prompts,
        params: Params = None,
        *,
        progress: bool = False,
        **options: Unpack[ReplyOptions],
    ) -> list[Completion]:
        """Complete every prompt, any number at once; `n` completions each, next to each other.

        Prompts of a higher priority start first. Calls with different `cache_salt`s share no cached
        prefix. If one fails, its error is raised after the others have been stopped. `progress`:
        show a bar in the terminal.
        """
        sequences = self._requests.completions(prompts, params, **options)
        return self._complete(sequences, progress=progress)

    def chat(
        self,
        messages: Conversations,
        params: Params = None,
        *,
        progress: bool = False,
        **options: Unpack[ReplyOptions],
    ) -> list[Completion]:
        """Answer one conversation, or several at once."""
        sequences = self._requests.chats(messages, params, **options)
        return self._complete(sequences, progress=progress)

    def stream_generate(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        **options: Unpack[ReplyOptions],
    ) -> Iterator[str]:
        """The continuation's text as it arrives. Closing the iterator stops it."""
        return self._stream(self._requests.completions([prompt], params, **options))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ReplyOptions],
    ) -> Iterator[str]:
        """The answer's text as it arrives. Closing the iterator stops the reply.

        Several may be open at once, and other calls may be made meanwhile.
        """
        return self._stream(self._requests.chats(messages, params, **options))

    def embed(
        self, prompts: Prompts, *, progress: bool = False, **options: Unpack[RequestOptions]
    ) -> np.ndarray:
        """A vector of length 1 for every prompt: float32 [prompts, hidden].

        It is what the model's head reads after the prompt's last token.
        """
        submits = self._requests.embeddings(prompts, **options)
        found: dict[str, np.ndarray] = {}
        bar = progress_bar(len(submits), shown=progress)
        with bar as advance, closing(self._router.run(submits)) as deltas:
            for delta in deltas:
                found[delta.id] = embedding_of(delta)
                advance(0, True)
        return np.stack([found[submit.id] for submit in submits])

    @property
    def max_len(self) -> int:
        return self.loop.backend.spec.max_len

    @property
    def metrics(self) -> EngineMetrics:
        """Counters since the start, and the times of the last steps."""
        return self.loop.scheduler.metrics

    def close(self) -> None:
        self._router.close()
        self.loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----------------------------------------------------------------------------

    def _complete(
        self, sequences: Sequence[GeneratedSequence], *, progress: bool
    ) -> list[Completion]:
        completions = [Completion(list(sequence.prompt.tokens)) for sequence in sequences]
        bar = progress_bar(len(sequences), shown=progress)
        with bar as advance, closing(self._run(sequences)) as pieces:
            for piece in pieces:
                completions[piece.index].add(piece)
                advance(len(piece.tokens), piece.finish is not None)
        for completion, sequence in zip(completions, sequences, strict=True):
            completion.close(sequence)
        return completions

    def _stream(self, sequences: Sequence[GeneratedSequence]) -> Iterator[str]:
        with closing(self._run([only_one(sequences)])) as pieces:
            yield from (piece.text for piece in pieces if piece.text)

    def _run(self, sequences: Sequence[GeneratedSequence]) -> Generator[SequencePiece, None, None]:
        """Pieces of all sequences as they arrive. Closing it aborts those that still run."""
        by_id = {sequence.submit.id: sequence for sequence in sequences}
        with closing(self._router.run([sequence.submit for sequence in sequences])) as deltas:
            for delta in deltas:
                piece = by_id[delta.id].take(delta)
                if piece.finish is not None and delta.finish is None:
                    self._router.finish(delta.id)  # a stop string
                yield piece


Reader = Callable[[TokenDelta], None]


class Router:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._backlog: list[tuple[int, int, Submit]] = []  # a heap: by priority, then arrival
        self._arrivals = itertools.count()
        self._readers: dict[str, Reader] = {}  # by request id, until its last delta was read
        self._leaving: list[tuple[Callable[[str], None], str]] = []  # before the next step
        # Still set after a step that raised: nothing is known of the state it left.
        self._in_step = False
        self._closed = False
        if loop.backend.warm_up_seconds == math.inf:  # no step is captured while requests run
            loop.warm_up.run_at_load(lambda _: None)

    @property
    def idle(self) -> bool:
        return self._loop.idle and not (self._backlog or self._leaving)

    def run(self, submits: Sequence[Submit]) -> Generator[TokenDelta, None, None]:
        """Deltas of these requests as they arrive. Closing it aborts those that still run."""
        inbox: deque[TokenDelta] = deque()
        try:
            for submit in submits:
                self.open(submit, inbox.append)
            num_open = len(submits)
            while num_open:
                while not inbox:
                    assert self._backlog or not self._loop.idle, "nothing will ever come"
                    self.step()
                delta = inbox.popleft()
                if delta.id in self._readers:  # else it was sent before the loop knew of `finish`
                    yield delta
                    if delta.finish is not None:
                        self.forget(delta.id)
                    num_open -= delta.id not in self._readers
        finally:
            for submit in submits:
                self.abort(submit.id)
            self._drain()

    def open(self, submit: Submit, reader: Reader) -> None:
        """`reader` is called with each delta until the request is forgotten, or left."""
        self._readers[submit.id] = reader
        heapq.heappush(self._backlog, (-submit.priority, next(self._arrivals), submit))

    def forget(self, request_id: str) -> None:
        """Its last delta was read."""
        self._readers.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Its caller has left. Ended requests are ignored."""
        self._leave(request_id, self._loop.abort)

    def finish(self, request_id: str) -> None:
        """The reply is complete (a stop string). Ended requests are ignored."""
        self._leave(request_id, self._loop.finish)

    def _drain(self) -> None:
        """If no request is open any more, step until the loop has released everything."""
        if self._readers or self._in_step or self._closed or self._loop.failure is not None:
            return
        while not self.idle:
            self.step()

    def close(self) -> None:
        """The loop is about to be closed: requests that are still open raise EngineDead."""
        self._closed = True

    def _leave(self, request_id: str, leave: Callable[[str], None]) -> None:
        # Called before the next step: an iterator may be closed by the garbage collector amid one.
        if self._readers.pop(request_id, None) is not None:
            self._leaving.append((leave, request_id))

    def step(self) -> None:
        if self._closed:
            raise EngineDead("the model has been closed")
        if self._in_step:
            raise EngineDead("the engine stopped in the middle of a step; load the model again")
        if self._loop.failure is not None:
            raise self._loop.failure
        with interrupts_held_back():
            self._in_step = True
            while self._leaving:
                leave, request_id = self._leaving.pop()
                leave(request_id)
            self._feed()
            for delta in self._loop.step():
                if (reader := self._readers.get(delta.id)) is not None:  # else its caller has left
                    reader(delta)
            self._in_step = False

    def _feed(self) -> None:
        while self._backlog:
            submit = self._backlog[0][-1]
            if submit.id in self._readers:  # else its caller has left
                if not self._loop.has_room(submit):
                    return
                self._loop.submit(submit)
            heapq.heappop(self._backlog)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C takes effect at the end: half a step would leave an engine that cannot go on.

    The second one takes effect at once, for a step that never ends.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        held.append((number, frame))
        if len(held) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
