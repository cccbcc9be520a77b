"""mlx-lm's recurrences where it has a Metal kernel: which calls it takes, and states inside of one.

Its kernels give the state after the last token alone. Where states between tokens are tapped, a
call runs in slices, each from the state of the one before it, in float32: the numbers are those of
one call, to the bit, for a few launches a slice. Knows no model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import gated_delta, ssm

from pippin.backends.mlx.device import on_metal
from pippin.backends.mlx.recurrent.blocks import BLOCK_TOKENS
from pippin.backends.mlx.recurrent.taps import (
    block_states_are_tapped,
    record_block_states,
    wanted_states,
)

SIMD_WIDTH = 32  # mlx-lm's kernels give each lane a whole share of a row of the state

# Arguments of shape [rows, tokens, ...]; the others are the layer's own parameters.
TOKEN_ARGUMENTS = {
    "gated_delta_update": ("q", "k", "v", "a", "b"),
    "ssm_update": ("hidden_states", "B", "C", "dt"),
}
_SIGNATURES = {
    "gated_delta_update": inspect.signature(gated_delta.gated_delta_update),
    "ssm_update": inspect.signature(ssm.ssm_update),
}


@dataclass(frozen=True)
class Call:
    """The arguments of one call, by name."""

    function: str
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return cls(function, _SIGNATURES[function].bind(*args, **kwargs).arguments)

    @property
    def num_tokens(self) -> int:
        return int(self.arguments[TOKEN_ARGUMENTS[self.function][0]].shape[1])

    @property
    def has_kernel(self) -> bool:
        """Of Gated DeltaNet for any tokens; of Mamba-2 for one token of each row, and it does not
        always pass over padding."""
        if self.function == "gated_delta_update":
            whole = self.arguments["k"].shape[-1] % SIMD_WIDTH == 0
            return whole and bool(self.arguments.get("use_kernel", True))
        ragged = any(self.arguments.get(name) is not None for name in ("mask", "lengths"))
        whole = self.arguments["B"].shape[-1] % SIMD_WIDTH == 0
        return whole and self.num_tokens == 1 and not ragged

    def between(self, start: int, stop: int) -> dict[str, Any]:
        """The arguments for these tokens alone."""
        names = [*TOKEN_ARGUMENTS[self.function], "mask"]
        given = {name: self.arguments.get(name) for name in names}
        cut = {name: array[:, start:stop] for name, array in given.items() if array is not None}
        return {**self.arguments, **cut}


def call_of_kernel(function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """The call, if mlx-lm's kernel is to take it: in fewer operations than ours, and one launch."""
    if not on_metal():
        return None
    call = Call.of(function, args, kwargs)
    return call if call.has_kernel else None


def run_in_slices(
    function: Callable[..., tuple[mx.array, mx.array]], call: Call
) -> tuple[mx.array, mx.array]:
    """`function(**call.arguments)`; sliced only inside of `tap_block_states`."""
    if not block_states_are_tapped():
        return function(**call.arguments)
    wanted = wanted_states()
    num_tokens = call.num_tokens
    cuts = range(BLOCK_TOKENS, num_tokens, BLOCK_TOKENS) if wanted is None else wanted
    outputs: list[mx.array] = []
    states: dict[int, mx.array] = {}  # by the number of their block
    start, state = 0, cast(mx.array, call.arguments.get("state"))  # or None, before the first
    for end in (*(cut for cut in cuts if cut < num_tokens), num_tokens):
        y, state = function(**{**call.between(start, end), "state": state})
        outputs.append(y)
        states[(end - 1) // BLOCK_TOKENS] = state
        start = end
    record_block_states(states)
    return mx.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0], state
