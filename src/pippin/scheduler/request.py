"""One request's life on the host: which tokens are known, and where it is in its life.

Knows no arrays, no queue and no bytes: what it holds while it runs is its `RunningSlot`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pippin.decode.grammar import Grammar
from pippin.messages import Submit, unpack_tokens
from pippin.types import FinishReason, SamplingParams, TierName

NO_TOKENS = np.zeros(0, dtype=np.int32)
KEY_TOKENS = 16  # prompts that share less than this are strangers

Phase = Literal[
    "compiling",  # not in the queue yet: what it is to obey is being compiled
    "waiting",  # in the queue, no slot
    "loading",  # not in the queue: a part of its prompt is being loaded from a tier below
    "prefill",  # chunks of what is known are being planned
    "decode",  # one token a step
    "ended",  # it has its terminal message
]


#   tokens:  [ prompt | reply: sampled or forced, known | sampled, in flight ]
#            0   prompt_len                        num_tokens
@dataclass(eq=False, slots=True)
class Request:
    id: str
    prompt: np.ndarray  # int32 [prompt_len]
    params: SamplingParams
    stop_ids: frozenset[int]
    boundaries: tuple[int, ...]
    seed: int
    arrival: int  # counts requests: in order of arrival
    arrived_at: int = 0  # counts prompt tokens that had been planned by then
    # Of its salt and first tokens: prompts that begin alike have the same; b"": too short.
    key: bytes = b""
    salt: bytes = b""  # a digest: requests of another salt share nothing with it
    priority: int = 0  # higher starts first, and is preempted last
    grammar: Grammar | None = None
    # int32 [n]: what its client expects as the reply
    prediction: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    embeds: bool = False  # it wants the hidden vector after its prompt, and no reply
    handover: str = ""  # a decode engine's, which its prompt is computed for

    phase: Phase = "waiting"
    output: list[int] = field(default_factory=list)
    num_sampled: int = 0  # tokens of the reply that are known or in flight
    finish: FinishReason | None = None
    slot: int = 0  # while it runs; what comes with it is a `RunningSlot`
    cached_len: int = 0  # prompt tokens that were not computed, when it first started
    host_len: int = 0  # of these, loaded for it from the host's memory
    disk_len: int = 0  # and from disk
    peer_len: int = 0  # and from a prefill engine
    mask: np.ndarray | None = None  # int32 [words]: of its next token, where its grammar is slow
    followed: bool = False  # a thread makes that mask
    was_wanted: bool = False  # a prefill engine was asked for its prompt: once
    tiers_tried: int = 0  # in so many tiers below memory, since it was queued
    # Tokens [start, end) that were loaded for it, from each tier.
    loaded: dict[TierName, tuple[int, int]] = field(default_factory=dict)
    accepted_drafts: int = 0  # that were verified for it,
    rejected_drafts: int = 0  # and were wrong
    num_preemptions: int = 0
    starts_again: bool = False  # what it was restored from the first time was damaged
    submitted_s: float | None = None  # on the loop's clock
    queued_s: float | None = None  # how long it waited, when it first started
    passed_over: int = 0  # times a later request was started first

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        *,
        seed: int,
        arrival: int,
        arrived_at: int = 0,
        grammar: Grammar | None = None,
    ) -> Request:
        prompt = unpack_tokens(submit.tokens)
        return cls(
            id=submit.id,
            prompt=prompt,
            params=submit.params,
            stop_ids=frozenset(submit.stop_ids),
            boundaries=tuple(submit.boundaries),
            seed=seed,
            arrival=arrival,
            arrived_at=arrived_at,
            key=submit.salt + prompt[:KEY_TOKENS].tobytes() if len(prompt) > KEY_TOKENS else b"",
            salt=submit.salt,
            priority=submit.priority,
            grammar=grammar,
            prediction=unpack_tokens(submit.prediction),
            embeds=submit.embeds,
            handover=submit.handover,
        )

    # ---- what is known ---------------------------------------------------------------------

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the committed reply."""
        return len(self.prompt) + len(self.output)

    @property
    def num_queued(self) -> int:
        """Tokens that it holds in the host's memory while it waits."""
        return self.num_tokens + len(self.prediction)

    @property
    def max_total(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def running(self) -> bool:
        return self.phase in ("prefill", "decode")

    @property
    def completed(self) -> bool:
        """Ended in earnest: all of its reply is worth keeping."""
        return self.finish in ("stop", "length")

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every position of the prompt is to be scored: none may come from the cache."""
        return self.params.prompt_logprobs is not None and not self.output

    @property
    def runs_ahead(self) -> bool:
        """Tokens that its grammar forces are known before they are drawn: no scores are wanted."""
        return self.params.logprobs is None and self.params.prompt_logprobs is None

    @property
    def waits_for_mask(self) -> bool:
        """Its grammar is slow, and what its next token may be is not known yet: no row of it."""
        if self.grammar is None:
            return False
        return self.followed or (self.grammar.slow and self.num_sampled > len(self.output))

    @property
    def in_flight(self) -> bool:
        """Beside the sample that is being committed another one is planned."""
        return self.num_sampled > len(self.output) + 1

    @property
    def samples_left(self) -> bool:
        return self.num_sampled < self.params.max_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts by seniority: the highest priority first, then the earliest arrival."""
        return -self.priority, self.arrival

    def tokens(self, length: int) -> np.ndarray:
        """The first `length` known tokens, int32."""
        if length <= len(self.prompt):
            return self.prompt[:length]
        reply = np.asarray(self.output[: length - len(self.prompt)], dtype=np.int32)
        return np.concatenate([self.prompt, reply])

    # ---- transitions -----------------------------------------------------------------------

    def token(self, position: int) -> int:
        """The known token at a position of the reply."""
        return self.output[position - len(self.prompt)]

    def follow(self, grammar: Grammar) -> None:
        """What it is to obey has been compiled: it may start."""
        assert self.phase == "compiling"
        self.grammar = grammar
        self.phase = "waiting"

    def note_load(self, tier: TierName, start: int, end: int) -> None:
        """Tokens [start, end) are in memory now because it waited; perhaps none."""
        self.loaded[tier] = (start, max(start, end))

    def start(self, slot: int, cached_len: int) -> None:
        assert self.phase == "waiting"
        self.phase = "prefill"
        self.slot = slot
        if not self.num_preemptions:
            self.cached_len = cached_len
            self.peer_len = self._num_loaded("peer", cached_len)
            cached_len -= self.peer_len
            self.disk_len = self._num_loaded("disk", cached_len)
            self.host_len = self._num_loaded("host", cached_len - self.disk_len)

    def _num_loaded(self, tier: TierName, length: int) -> int:
        """Of the first `length` tokens: what a tier brought lies before what a slower one did."""
        start, end = self.loaded.get(tier, (0, 0))
        return max(0, min(length, end) - start)

    def note_start(self, now_s: float) -> None:
        """Its first chunk, or its first one again, is in a step that is launched now."""
        if self.submitted_s is not None and self.queued_s is None:
            self.queued_s = now_s - self.submitted_s

    def plan_sample(self, end: int) -> None:
        """What comes before `end` has been planned, and with it the token there: known or not."""
        self.phase = "decode"
        self.num_sampled = max(self.num_sampled, end - len(self.prompt) + 1)

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled or forced token; why it ends the reply, None if it does not."""
        self.output.append(token)
        num_generated = len(self.output)
        self.num_sampled = max(self.num_sampled, num_generated)
        if token in self.stop_ids and num_generated > self.params.min_tokens:
            return "stop"
        return "length" if num_generated >= self.params.max_tokens else None

    def requeue(self, *, damaged: bool) -> None:
        """No sample is in flight, and what is known stays known. `damaged`: what it was restored
        from. A reply without tokens then starts again, as if it had never started."""
        assert self.running
        self.phase = "waiting"
        self.slot = self.tiers_tried = 0
        if damaged and not self.output:
            self.starts_again = True
            self.num_sampled = self.cached_len = 0
            self.host_len = self.disk_len = self.peer_len = 0
            self.loaded = {}
        else:
            assert self.num_sampled == len(self.output), "a sample is in flight"
            self.num_preemptions += 1

    def drop_samples(self) -> None:
        """What was drawn for it, or is being drawn, is not to be used."""
        self.num_sampled = len(self.output)

    def end(self, reason: FinishReason) -> None:
        assert self.finish is None, f"{self.id} has ended"
        self.phase = "ended"
        self.finish = reason
