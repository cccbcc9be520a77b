"""One request's life on the host: which tokens are known, planned and held. Knows no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from pippin.decode.grammar import Grammar
from pippin.messages import Submit
from pippin.types import FinishReason, Payload, SamplingParams

if TYPE_CHECKING:
    from pippin.cache.prefix_cache import Lock


Phase = Literal[
    "waiting",  # in the queue, no slot
    "prefill",  # prompt chunks are being planned
    "decode",  # one token a step
    "done",  # finished or aborted; its slot waits behind the fence
    "retired",  # slot given back
]


#   tokens:  [ matched in the tree | prompt computed here | sampled, known | sampled, in flight ]
#            0               cached_len             prompt_len   prompt_len + len(output)
#   `held` counts positions whose forward has been planned; the row holds exactly these.
@dataclass(eq=False, slots=True)
class Request:
    id: str
    prompt: np.ndarray  # int32 [prompt_len]
    params: SamplingParams
    stop_ids: frozenset[int]
    boundaries: tuple[int, ...]
    seed: int
    arrived: float

    phase: Phase = "waiting"
    slot: int = 0
    output: list[int] = field(default_factory=list)
    held: int = 0
    num_sampled: int = 0  # planned samples, known or in flight
    last_step: int = -1  # the last plan with a row of this request: its fence
    finish: FinishReason | None = None
    grammar: Grammar | None = None

    cached_len: int = 0
    branch: int = 0  # where this prompt leaves a path that is already in the tree
    lock: Lock | None = None
    in_tree: int = 0  # tokens [0, in_tree) were handed to the tree
    states: dict[int, Payload] = field(default_factory=dict)  # reply checkpoints, until retired
    reserved_bytes: int = 0
    reserved_tokens: int = 0
    passed_over: int = 0  # times a later request was admitted first
    absorbs: bool = True  # False: no room was left to run the reply's last token
    spoiled: bool = False  # what its row holds is not known to be the prompt and the reply

    @classmethod
    def from_submit(cls, submit: Submit, *, seed: int, arrived: float) -> Request:
        return cls(
            id=submit.id,
            prompt=np.asarray(submit.tokens, dtype=np.int32),
            params=submit.params,
            stop_ids=frozenset(submit.stop_ids),
            boundaries=tuple(submit.boundaries),
            seed=seed,
            arrived=arrived,
        )

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the committed reply."""
        return self.prompt_len + len(self.output)

    @property
    def max_total(self) -> int:
        return self.prompt_len + self.params.max_tokens

    @property
    def running(self) -> bool:
        return self.phase in ("prefill", "decode")

    @property
    def will_be_cached(self) -> bool:
        """Finished in earnest: its reply reaches the tree with the step that retires it."""
        return self.finish in ("stop", "length") and not self.spoiled

    @property
    def num_coming(self) -> int:
        """Tokens [0, n) that the tree will hold once what is planned has been committed."""
        if self.will_be_cached:
            return self.num_tokens
        return self.prompt_len if self.running and not self.wants_prompt_logprobs else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    def tokens(self, length: int) -> np.ndarray:
        """The first `length` known tokens, int32."""
        if length <= self.prompt_len:
            return self.prompt[:length]
        reply = np.asarray(self.output[: length - self.prompt_len], dtype=np.int32)
        return np.concatenate([self.prompt, reply])

    def append(self, token: int) -> FinishReason | None:
        """Take in a sampled token; returns why it ends the reply, None if it does not."""
        self.output.append(token)
        if self.grammar is not None:
            self.grammar.advance(token)
        num_generated = len(self.output)
        if token in self.stop_ids and num_generated > self.params.min_tokens:
            return "stop"
        return "length" if num_generated >= self.params.max_tokens else None
