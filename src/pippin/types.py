"""Types that every layer shares. Knows no arrays, no HTTP and no model."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

GRID = 64  # tokens between checkpoints

FinishReason = Literal["stop", "length", "abort", "error"]
# Of what lies below the device's memory; the fastest first.
TierName = Literal["host", "disk", "peer"]


class Component(enum.Enum):
    """What a model keeps of the tokens it has read, and so what a tree node can carry."""

    ATTENTION = "attention"  # KV of every token
    WINDOW = "window"  # KV of the last `window` tokens
    STATE = "state"  # recurrent state after the last token
    HIDDEN = "hidden"  # what the head reads after the last token of a prompt: enough to sample

    __hash__ = object.__hash__  # members are singletons, and keys that every step looks up often

    @property
    def divides(self) -> bool:
        """KV of a run of tokens, which can be cut; a state or a hidden vector cannot."""
        return self is Component.ATTENTION or self is Component.WINDOW


class Payload(Protocol):
    """A piece of one component's cache, opaque to its owner.

    KV payloads can be split after any of their tokens; a state or a hidden vector belongs to the
    end of its node and is never split.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def split(self, at: int) -> tuple[Payload, Payload]:
        """The first `at` tokens and the rest, which together own the memory from then on.

        A plan that already borrowed the whole may still read it until it has been launched.
        """
        ...

    def release(self) -> None:
        """Free the memory; called exactly once, by the last owner."""
        ...

    def fingerprint(self) -> int:
        """A hash of the bytes, for the canary's deep check. May block; debug only."""
        ...


@dataclass(frozen=True)
class GrammarPart:
    """A client's own grammar inside a larger one. By itself it must be a grammar too: otherwise
    it could end the one around it early, or add rules to it."""

    syntax: Literal["lark", "regex"]
    text: str
    field: str  # where it stands in the request, for errors


@dataclass(frozen=True)
class GrammarSpec:
    """What a reply must look like, as text of one of these languages."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    parts: tuple[GrammarPart, ...] = ()  # of the text


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Code that builds it from user input validates it."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    speculate: bool = True  # False: no drafts, also where the engine speculates
    n: int = 1
    logprobs: int | None = None  # number of alternatives beside each token; None: no logprobs
    prompt_logprobs: int | None = None
    # What the reply must look like: at most one of these. A schema is an object, or its JSON.
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar_parts: tuple[GrammarPart, ...] = ()  # of `ebnf`; set by the server, for custom tools

    @property
    def grammar(self) -> GrammarSpec | None:
        if self.json_schema is not None:
            schema = self.json_schema
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
            return GrammarSpec("json_schema", text)
        if self.regex is not None:
            return GrammarSpec("regex", self.regex)
        return None if self.ebnf is None else GrammarSpec("ebnf", self.ebnf, self.grammar_parts)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """The log probability of one token, and of the likeliest alternatives at its place."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepForwards:
    """How a backend ran a plan: explains a step's time."""

    prefill: int = 0  # forwards over chunks of prompts
    new_prefill: int = 0  # of these, of a shape that had not been run lately
    new_decode: int = 0  # forwards over decode rows, likewise
    compiled: bool = False  # the decode rows ran as one compiled function


@dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps, as discovered from the model's own cache object."""

    index: int
    component: Component
    nbytes: int  # per token for KV, per sequence for a state
    window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """The numbers the scheduler and the cache need to know about a loaded model."""

    name: str
    vocab_size: int
    max_len: int  # positions: prompt and reply together
    layers: tuple[LayerSpec, ...]
    state_taps: bool = False  # states can be captured every GRID tokens inside a prefill chunk
    hidden_bytes: int = 0  # of a hidden vector; 0: the head is not known, so none can be captured

    def _total(self, component: Component) -> int:
        return sum(layer.nbytes for layer in self.layers if layer.component is component)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        return self._total(Component.ATTENTION)

    @cached_property
    def window_bytes_per_token(self) -> int:
        return self._total(Component.WINDOW)

    @cached_property
    def state_bytes(self) -> int:
        return self._total(Component.STATE)

    @cached_property
    def window(self) -> int:
        """Tokens the widest sliding window looks back over; 0 without one."""
        return max((layer.window or 0 for layer in self.layers), default=0)

    @cached_property
    def components(self) -> tuple[Component, ...]:
        present = {layer.component for layer in self.layers}
        if self.hidden_bytes:
            present.add(Component.HIDDEN)
        return tuple(c for c in Component if c in present)
