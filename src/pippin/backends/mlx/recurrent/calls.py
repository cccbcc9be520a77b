"""How a model calls its recurrences, recorded in one forward at load; knows no timing, no model.

What a call costs depends on its *kind*: the function, whether it takes one token or many, and the
shapes and types of what a token brings. Rows and tokens are counts, not part of the kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models import gated_delta, ssm

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

# Arguments of shape [rows, tokens, ...]; the others are the layer's own parameters.
TOKEN_ARGUMENTS = {
    "gated_delta_update": ("q", "k", "v", "a", "b"),
    "ssm_update": ("hidden_states", "B", "C", "dt"),
}
PADDING = ("mask", "lengths")
_SIGNATURES = {
    "gated_delta_update": inspect.signature(gated_delta.gated_delta_update),
    "ssm_update": inspect.signature(ssm.ssm_update),
}


@dataclass(frozen=True)
class Kind:
    function: str
    phase: Phase
    shapes: str  # of one token: "q 2x64, k 2x64, v 4x64, a 4, b 4, float32"

    def __str__(self) -> str:
        return f"{self.function} {self.phase}: {self.shapes}"


@dataclass(frozen=True)
class Call:
    """The arguments of one call, by name."""

    function: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return cls(function, _SIGNATURES[function].bind(*args, **kwargs).arguments)

    @property
    def tokens(self) -> dict[str, mx.array]:
        return {name: self.arguments[name] for name in TOKEN_ARGUMENTS[self.function]}

    @property
    def num_tokens(self) -> int:
        return int(next(iter(self.tokens.values())).shape[1])

    @property
    def shapes(self) -> str:
        first = next(iter(self.tokens.values())).dtype
        parts = []
        for name, array in self.tokens.items():
            extents = "x".join(map(str, array.shape[2:]))
            parts.append(f"{name} {extents}" + ("" if array.dtype == first else f" {array.dtype}"))
        return ", ".join([*parts, str(first)]).replace("mlx.core.", "")

    def kind(self, phase: Phase | None = None) -> Kind:
        """The kind of this call, or that of one like it in another phase."""
        if phase is None:
            phase = "decode" if self.num_tokens == 1 else "prefill"
        return Kind(self.function, phase, self.shapes)

    @property
    def ragged(self) -> bool:
        """Whether some tokens may be padding."""
        return any(self.arguments.get(name) is not None for name in PADDING)

    def between(self, start: int, stop: int) -> Call:
        """The call for these tokens alone. Counts of tokens, `lengths`, are not cut."""
        assert self.arguments.get("lengths") is None
        cut = {name: array[:, start:stop] for name, array in self.tokens.items()}
        mask = self.arguments.get("mask")
        if mask is not None:
            cut["mask"] = mask[:, start:stop]
        return replace(self, arguments={**self.arguments, **cut})

    def resized(self, num_rows: int, num_tokens: int, seed: int = 0) -> Call:
        """A call of the same kind on other numbers: no state yet, no padding."""
        keys = mx.random.split(mx.random.key(seed), len(self.tokens))
        drawn = {
            name: (
                mx.random.normal((num_rows, num_tokens, *array.shape[2:]), key=key)
                * array.shape[-1] ** -0.5
            ).astype(array.dtype)
            for key, (name, array) in zip(keys, self.tokens.items(), strict=True)
        }
        absent = {"state", *PADDING}
        kept = {name: value for name, value in self.arguments.items() if name not in absent}
        return replace(self, arguments=kept | drawn)


def is_among(kinds: frozenset[Kind], call: Call) -> bool:
    """Whether a call is for mlx-lm's function, given the kinds that it was chosen for. Its Mamba-2
    kernels do not always pass over padding: ragged rows of these are ours whatever was chosen.
    """
    return call.kind() in kinds and not (call.function == "ssm_update" and call.ragged)


_recorded: ContextVar[dict[str, Call] | None] = ContextVar("pippin_recurrent_calls", default=None)


@contextmanager
def record_calls() -> Iterator[dict[str, Call]]:
    """Collect one call of each function and shape that runs inside the `with`."""
    calls: dict[str, Call] = {}
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def calls_are_recorded() -> bool:
    return _recorded.get() is not None


def record_call(function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Called by the substituted recurrences; outside `record_calls` it does nothing."""
    calls = _recorded.get()
    if calls is not None:
        call = Call.of(function, args, kwargs)
        calls.setdefault(f"{function} {call.shapes}", call)
