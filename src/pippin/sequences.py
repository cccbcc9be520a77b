"""One request's sequences, from parameters to pieces: shared by the server and `LLM`.

prompt, parameters  ──▶  Submit, one for each sequence  ──▶  an engine
pieces of replies   ◀──  TokenDelta                     ◀──

The caller has checked the parameters. Knows no HTTP, no JSON and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from pippin.errors import ContextOverflow, PippinError, error_of
from pippin.messages import Submit, TokenDelta, pack_tokens
from pippin.text.detokenizer import Detokenizer, TokenSpan
from pippin.text.parsers.base import ReplyParser
from pippin.text.pieces import Content, TextPiece, content_of, joined
from pippin.text.prompt import Prompt
from pippin.text.tokenizer import Tokenizer
from pippin.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class ShownToken:
    """A token of the reply (or of the echoed prompt), for logprobs."""

    id: int
    offset: int  # characters before it in the sequence's text
    logprobs: TokenLogprobs | None  # None: nothing predicted it, it is the very first


class SequencePiece(msgspec.Struct, frozen=True, gc=False):
    """The next part of one sequence. The last one has `finish`."""

    index: int
    pieces: list[TextPiece]  # that may now be shown
    shown: list[ShownToken]  # those whose text is now complete; empty unless logprobs are wanted
    tokens: list[int]  # as they were generated: a stop token, which is not shown, is among them
    logprobs: list[TokenLogprobs]  # of `tokens`, if they were asked for
    finish: Literal["stop", "length"] | None = None
    is_first: bool = False

    @property
    def text(self) -> str:
        """The content in it."""
        return content_of(self.pieces)


def room_for_reply(prompt: Prompt, max_len: int, *, param: str) -> int:
    """Tokens that a model of `max_len` positions can add to the prompt: one at least."""
    prompt_len = len(prompt.tokens)
    if prompt_len < max_len:
        return max_len - prompt_len
    raise context_overflow(max_len, prompt_len=prompt_len, reply_len=1, param=param)


def context_overflow(
    max_len: int, *, prompt_len: int, reply_len: int, param: str
) -> ContextOverflow:
    """In OpenAI's own words: agents and proxies recognise them and shorten the chat."""
    return ContextOverflow(
        f"This model's maximum context length is {max_len} tokens. However, you requested "
        f"{prompt_len + reply_len} tokens ({prompt_len} in the prompt, {reply_len} in the "
        "completion). Please reduce the length of the prompt or of the completion.",
        param=param,
    )


def open_sequences(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    *,
    first_index: int = 0,
    priority: int = 0,
    salt: bytes = b"",
    new_parser: Callable[[], ReplyParser] = ReplyParser,
    prediction: Sequence[int] = (),
) -> list[GeneratedSequence]:
    """`params.n` sequences of one prompt, numbered from `first_index`; their replies must fit.

    `new_parser` makes a parser for each: `ReplyFormats.parser`, to find reasoning and tool calls.
    `prediction`: the reply that is expected, as drafts.
    With `max_tokens` 0 the prompt alone is wanted: a token is generated, but it is not shown.
    """
    eos_ids = () if params.ignore_eos else tokenizer.eos_ids
    stop_ids = list(dict.fromkeys((*eos_ids, *params.stop_token_ids)))
    tokens, expected = pack_tokens(prompt.tokens), pack_tokens(prediction)
    sequences = []
    for number in range(params.n):
        index = first_index + number
        submit = Submit(
            id=f"{request_id}-{index}",
            tokens=tokens,
            params=_params_of(number, params),
            stop_ids=stop_ids,
            boundaries=prompt.boundaries,
            priority=priority,
            salt=salt,
            prediction=expected,
        )
        hides_reply = params.max_tokens == 0
        sequences.append(
            GeneratedSequence(
                index, prompt, submit, tokenizer, parser=new_parser(), hides_reply=hides_reply
            )
        )
    return sequences


def _params_of(number: int, params: SamplingParams) -> SamplingParams:
    """Sequences of one prompt must differ, and repeat when the request is repeated."""
    seed = None if params.seed is None else params.seed + number
    return replace(params, n=1, seed=seed, max_tokens=max(1, params.max_tokens))


class GeneratedSequence:
    """One sequence as it grows: deltas in, pieces out."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        submit: Submit,
        tokenizer: Tokenizer,
        *,
        parser: ReplyParser,
        hides_reply: bool = False,
    ) -> None:
        params = submit.params
        self.index = index
        self.prompt = prompt
        self.submit = submit
        self.cached_tokens = 0
        self.host_tokens = 0  # of these, loaded from the host's memory
        self.disk_tokens = 0  # and from disk
        self.peer_tokens = 0  # and from a prefill engine
        self.rejected_drafts = 0
        self._accepted_drafts = 0
        self.queued_s: float | None = None
        self.finish: Literal["stop", "length"] | None = None  # None: not finished, or aborted
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self._hides_reply = hides_reply
        self._wants_logprobs = params.logprobs is not None
        self._stop_ids = frozenset(submit.stop_ids)
        self._detokenizer = Detokenizer(
            tokenizer,
            params.stop,
            parser=parser,
            min_tokens=params.min_tokens,
            with_spans=self._wants_logprobs,
        )
        self._logprobs: dict[int, TokenLogprobs] = {}  # by token index, until shown
        self._num_arrived = 0
        self._num_unseen = 0  # stop tokens: generated, not shown
        self._began = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the reply that were asked for and generated."""
        return 0 if self._hides_reply else self._detokenizer.num_tokens + self._num_unseen

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that are reasoning, and its marks."""
        return self._detokenizer.num_reasoning_tokens

    @property
    def accepted_drafts(self) -> int:
        """Tokens of the reply that were accepted as drafts."""
        return min(self._accepted_drafts, self.num_tokens)  # some may be behind a stop string

    @property
    def stop_string(self) -> str | None:
        """The one that ended the reply, if one did."""
        return self._detokenizer.stop_string

    def take(self, delta: TokenDelta) -> SequencePiece:
        """The delta's part of the reply; raises if the request failed or was aborted."""
        if delta.finish == "error" or delta.finish == "abort":
            raise error_of_delta(delta)
        self._accepted_drafts = delta.accepted_drafts
        self.rejected_drafts = delta.rejected_drafts
        pieces: list[TextPiece] = []
        shown: list[ShownToken] = []
        is_first, self._began = not self._began, True
        if is_first:
            self.cached_tokens = delta.cached_tokens or 0
            self.host_tokens = delta.host_tokens
            self.disk_tokens = delta.disk_tokens
            self.peer_tokens = delta.peer_tokens
            self.queued_s = delta.queued_s
            self.prompt_logprobs = delta.prompt_logprobs
            pieces, shown = self._echo()
        if self._hides_reply:
            finish: Literal["length"] | None = "length" if delta.finish else None
            self.finish = finish
            return SequencePiece(self.index, pieces, shown, [], [], finish, is_first)
        num_before = self.num_tokens
        reply, spans = self._decode(delta)
        num_new = self.num_tokens - num_before  # less than arrived, if a stop string cut them off
        self.finish = "stop" if self._detokenizer.stopped else delta.finish
        if spans:
            shown += [self._shown(span) for span in spans]
        return SequencePiece(
            self.index,
            joined([*pieces, *reply]) if pieces else reply,
            shown,
            delta.tokens[:num_new],
            delta.logprobs[:num_new] if delta.logprobs else [],
            self.finish,
            is_first,
        )

    def _decode(self, delta: TokenDelta) -> tuple[list[TextPiece], list[TokenSpan]]:
        tokens = delta.tokens
        if delta.logprobs:
            known = enumerate(delta.logprobs, self._num_arrived)
            self._logprobs.update(known)
        self._num_arrived += len(tokens)
        hides_last = delta.finish == "stop" and bool(tokens) and tokens[-1] in self._stop_ids
        decoded = self._detokenizer.feed(tokens[:-1] if hides_last else tokens)
        if delta.finish is None or self._detokenizer.stopped:
            return decoded.pieces, decoded.spans
        self._num_unseen = int(hides_last)
        rest = self._detokenizer.close(is_cut=delta.finish == "length")
        return joined(decoded.pieces + rest.pieces), decoded.spans + rest.spans

    def _shown(self, span: TokenSpan) -> ShownToken:
        base = len(self.prompt.echo.text) if self.prompt.echo else 0
        return ShownToken(span.id, base + span.start, self._logprobs.pop(span.index, None))

    def _echo(self) -> tuple[list[TextPiece], list[ShownToken]]:
        echo = self.prompt.echo
        if echo is None:
            return [], []
        text: list[TextPiece] = [Content(echo.text)]
        if not self._wants_logprobs:
            return text, []
        logprobs = [None, *(self.prompt_logprobs or ())]
        rows = zip(self.prompt.tokens, echo.offsets, logprobs, strict=True)
        return text, [ShownToken(id, offset, known) for id, offset, known in rows]


def error_of_delta(delta: TokenDelta) -> PippinError:
    """Why a request failed or was aborted."""
    if delta.finish == "abort":
        return error_of(delta.error or "the engine aborted the request", "aborted", 503)
    error = error_of(delta.error or "the request failed", delta.error_code, delta.error_status)
    error.param = delta.error_param
    return error
