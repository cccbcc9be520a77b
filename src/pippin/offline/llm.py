"""The offline API: the same engine as the server's, in this process and this thread.

from pippin import LLM, SamplingParams
llm = LLM()
print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np

from pippin.config import Config, EngineConfig, Speculate
from pippin.embedding import embedding_of
from pippin.engine.build_loop import build_loop
from pippin.metrics import EngineMetrics
from pippin.offline.offline_requests import (
    Completion,
    Conversations,
    Message,
    OfflineRequests,
    Params,
    PromptInput,
    Prompts,
    ReplyOptions,
    RequestOptions,
    offline_config,
    only_one,
    progress_bar,
)
from pippin.offline.router import Router
from pippin.sequences import GeneratedSequence, SequencePiece
from pippin.startup.resolve import resolve
from pippin.text.bundle import TextBundle
from pippin.types import SamplingParams


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
        self.text = TextBundle.load(Path(self.config.model.model))
        self.loop = build_loop(self.config, lambda _: None, for_streams=False)
        self._router = Router(self.loop)
        self._requests = OfflineRequests(self.text, self.loop.backend.spec)

    def beside(
        self,
        *,
        prefix_cache: bool = True,
        overlap: bool = True,
        forced_chunks: bool = True,
        speculate: Speculate | None = None,
    ) -> LLM:
        """Another engine over the same loaded model, with its own requests, cache and metrics.

        Only one of the two may have requests at a time. It can speculate if this one was loaded to.
        """
        other = copy.copy(self)
        engine = replace(
            self.config.engine,
            prefix_cache=prefix_cache,
            overlap=overlap,
            forced_chunks=forced_chunks,
            speculate=speculate or self.config.engine.speculate,
            host_cache=None,  # which one engine has to itself
            cache_dir=None,  # likewise
            disk=None,
        )
        other.config = replace(self.config, engine=engine)
        other.loop = build_loop(
            other.config, lambda _: None, for_streams=False, backend=self.loop.backend
        )
        other._router = Router(other.loop)
        return other

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
