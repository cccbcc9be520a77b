"""Runs a job and has a dialect write its reply: events, or one object."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from pippin.api.http.answers import error_body
from pippin.api.http.sending import EVENTS, HEARTBEAT
from pippin.api.job import TIERS, FoldedChoice, Job, run_sequences
from pippin.api.served_models import ModelLease
from pippin.engine.engine_client import RequestEngine
from pippin.errors import PippinError
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextPiece
from pippin.text.tokenizer import Tokenizer

# Encoded where a value will be. No client can know it: nothing that it sends is mistaken for it.
_MARK = secrets.token_hex(16).encode()
HOLE: Any = msgspec.Raw(_MARK)


class EventTemplate:
    def __init__(self, event: bytes) -> None:
        """`event`: written with HOLE in place of each value that changes."""
        self._head, *self._tails = event.split(_MARK)

    def fill(self, *values: Any) -> bytes:
        event = self._head
        for value, tail in zip(values, self._tails, strict=True):
            event += msgspec.json.encode(value) + tail
        return event


LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes
DONE = b"data: [DONE]\n\n"


class Dialect:
    """One job's reply, as bytes of server-sent events or as one object."""

    prefix = "cmpl-"  # of its id
    media_type = EVENTS  # of a stream

    def __init__(self, job: Job, lease: ModelLease) -> None:
        self._job = job
        self._tokenizer = lease.served.text.tokenizer

    def open(self) -> bytes:
        """Before the first piece."""
        return b""

    def events(self, piece: SequencePiece) -> bytes:
        """Empty, if there is nothing to send yet."""
        raise NotImplementedError

    def ping(self) -> bytes:
        """While there is nothing else to send."""
        return HEARTBEAT

    def close(self) -> bytes:
        """The reply is complete: its usage is known."""
        return b""

    def whole(self, choices: Sequence[FoldedChoice]) -> Any:
        """A JSON value."""
        raise NotImplementedError

    def error(self, error: PippinError) -> bytes:
        """The end of a stream that failed."""
        return data_event(error_body(error))


def data_event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\n".encode() + data_event(data)


def cached_details(job: Job) -> dict[str, int]:
    """Prompt tokens that were not computed, and of these those from lower tiers."""
    below = {f"{tier}_cached_tokens": job.num_cached(tier) for tier in TIERS}
    return {"cached_tokens": job.num_cached(), **{name: n for name, n in below.items() if n}}


def num_reasoning_tokens(job: Job) -> int:
    return sum(sequence.num_reasoning_tokens for sequence in job.sequences)


def logprobs_entry(token: ShownToken, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token of a chat's reply with its log probability and the likeliest others."""
    assert token.logprobs is not None, "every token of a reply was predicted"
    top = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
    return {
        **_token_entry(token.id, token.logprobs.logprob, tokenizer),
        "top_logprobs": [_token_entry(id, logprob, tokenizer) for id, logprob in top],
    }


def _token_entry(id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(id),
        "bytes": list(tokenizer.token_bytes(id)),
        "logprob": max(logprob, LEAST_LOGPROB),
    }


async def whole_reply(job: Job, dialect: Dialect, engine: RequestEngine) -> Any:
    folded = [FoldedChoice(sequence.index) for sequence in job.sequences]
    async with aclosing(run_sequences(engine, job)) as pieces:
        async for piece in pieces:
            folded[piece.index].add(piece)
    return dialect.whole(folded)


async def reply_events(
    job: Job, dialect: Dialect, engine: RequestEngine
) -> AsyncGenerator[bytes, None]:
    opened = False
    async with aclosing(run_sequences(engine, job)) as pieces:
        async for piece in pieces:
            # Not earlier: an error before the first piece is a status.
            events = dialect.events(piece) if opened else dialect.open() + dialect.events(piece)
            opened = True
            if events:
                yield events
    yield dialect.close()


class BlockStream(Dialect):
    """A dialect names its kinds of blocks, and writes their events: begin, delta, end."""

    TEXT, REASONING = "", ""
    _finish: str | None = None
    _open_kind: str | None = None  # of the open block

    def _begin(self, kind: str) -> bytes:
        raise NotImplementedError

    def _begin_call(self, id: str, name: str) -> bytes:
        raise NotImplementedError

    def _delta(self, text: str) -> bytes:
        raise NotImplementedError

    def _end(self, *, complete: bool = True) -> bytes:
        raise NotImplementedError

    def _end_call(self) -> bytes:
        return self._end()

    def events(self, piece: SequencePiece) -> bytes:
        self._finish = piece.finish
        return b"".join(map(self._part, piece.pieces))

    def _part(self, part: TextPiece) -> bytes:
        match part:
            case Content(text):
                return self._write(self.TEXT, text)
            case Reasoning(text):
                return self._write(self.REASONING, text)
            case CallBegin(_, id, name):
                return self._end() + self._begin_call(id, name)
            case CallArguments(_, text):
                return self._delta(text)
            case CallEnd(_, unparsed):
                if unparsed is None:
                    return self._end_call()
                ended = self._end(complete=False)
                if self._finish == "length":  # markup of a call that was cut is no text
                    return ended
                return ended + self._write(self.TEXT, unparsed)

    def _write(self, kind: str, text: str) -> bytes:
        started = b"" if self._open_kind == kind else self._end() + self._begin(kind)
        return started + self._delta(text)
