"""What crosses the channel between the server process and the engine process (msgspec, ZMQ)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from pippin.types import FinishReason, SamplingParams, TokenLogprobs

TOKEN_BYTES = 4


def pack_tokens(tokens: npt.ArrayLike) -> bytes:
    """As prompts cross: int32, little-endian. An engine's loop has no time to decode a list."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(packed, dtype="<i4").astype(np.int32)


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """One sequence to generate. `boundaries` are token positions where messages end."""

    id: str
    tokens: bytes  # of `pack_tokens`
    params: SamplingParams
    stop_ids: list[int] = []  # eos ids (unless ignored) and the user's stop_token_ids
    boundaries: list[int] = []
    priority: int = 0  # higher starts first, and is preempted last
    salt: bytes = b""  # requests share cached prefixes only with those of the same salt
    prediction: bytes = b""  # what the client expects as the reply: drafts are taken from it
    # The result is the hidden vector after the prompt, not a reply; `params.max_tokens` is 1.
    embeds: bool = False
    # A decode engine asked for the prompt: it is sent there, and no client reads the reply.
    handover: str = ""

    @property
    def prompt_len(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def token_ids(self) -> list[int]:
        """The prompt, to be read by people and tests."""
        return [int(token) for token in unpack_tokens(self.tokens)]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    id: str


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """The server saw a stop string: end the request as finished, not aborted."""

    id: str


class FlushCache(msgspec.Struct, tag="flush_cache", frozen=True):
    id: str


class GetStatus(msgspec.Struct, tag="get_status", frozen=True):
    id: str


class GetCounters(msgspec.Struct, tag="get_counters", frozen=True):
    """The numbers of a status: cheap to answer, however much is cached."""

    id: str


class Watch(msgspec.Struct, tag="watch", frozen=True):
    """A client opened the feed: send a snapshot of the engine, then every change."""


class Unwatch(msgspec.Struct, tag="unwatch", frozen=True):
    """No client reads the feed any more."""


class GetNode(msgspec.Struct, tag="get_node", frozen=True):
    """The tokens of a tree node that the feed has named."""

    id: str
    node: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    pass


class Started(msgspec.Struct, tag="started", frozen=True):
    """The engine is about to compute something of these requests for the first time."""

    ids: list[str]


class Compiled(msgspec.Struct, tag="compiled", frozen=True):
    """The grammars of these requests have been compiled: they wait in the queue now."""

    ids: list[str]


class TokenDelta(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """New tokens of one request; `finish` set makes it the request's one terminal message."""

    id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # with the first delta; [0] is position 1
    cached_tokens: int | None = None  # with the first delta: prompt tokens not computed
    host_tokens: int = 0  # of these, loaded from the host's memory
    disk_tokens: int = 0  # and from disk
    peer_tokens: int = 0  # and from a prefill engine
    accepted_drafts: int = 0  # of the reply, so far
    rejected_drafts: int = 0
    queued_s: float | None = None  # with the first delta: how long it waited to be started
    embedding: bytes | None = None  # float32 [hidden], as the head read it; with the terminal one
    finish: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    error_status: int = 500
    error_param: str | None = None


class TokenBatch(msgspec.Struct, tag="tokens", frozen=True):
    deltas: list[TokenDelta]


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine has loaded its model and listens."""

    vocab_size: int
    max_len: int
    takes_predictions: bool = False  # drafts are taken from a reply that a client expects
    num_slots: int = 1  # requests that can run at the same time


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """A sign of life, from a thread of its own."""

    turn_seconds: float  # since the loop began its present turn: a step, or nothing to do


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress while the model loads, for the terminal."""

    stage: str


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start, or had to stop; the message is for the user."""

    message: str


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """The answer to a Question."""

    id: str
    data: dict[str, Any]
    error: str | None = None


class RestorablePrefixes(msgspec.Struct, tag="prefixes", frozen=True):
    """What changed of the prefixes that the engine can restore, by the hash of their last block."""

    stored: list[int] = []
    removed: list[int] = []
    cleared: bool = False  # there is none now


class FeedMessage(msgspec.Struct, tag="feed", frozen=True):
    """A message of the feed, as clients receive it (`engine/events/schema.py`).

    "lost": the last one of this engine, because its recorder failed.
    """

    kind: Literal["snapshot", "frame", "lost"]
    json: bytes


Question = FlushCache | GetStatus | GetCounters | GetNode
ToEngine = Submit | Abort | Finish | Question | Watch | Unwatch | Shutdown
Delivered = TokenBatch | Started | Compiled | Answer | FeedMessage | RestorablePrefixes
FromEngine = Delivered | Alive | Ready | Loading | Failed
