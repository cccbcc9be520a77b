"""Chooses between mlx-lm's recurrences and ours, by timing both on a model's own shapes.

Only where mlx-lm has a kernel there is something to time: on Metal. Elsewhere, and with
--deterministic or --safe, it is ours at once, in plain operations. The times are remembered in a
file (timing.py).

Both yield the states that are wanted inside of a prefill forward: mlx-lm's kernel in slices
(slices.py), and it is timed with a state at every 64 tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx_lm.models import gated_delta as mlx_lm_gated_delta
from mlx_lm.models import ssm as mlx_lm_ssm

from pippin.backends.mlx.device import device_info, on_metal
from pippin.backends.mlx.recurrent import blocks, gated_delta, ssm, triangular
from pippin.backends.mlx.recurrent.calls import PHASES, Call, Kind, Phase
from pippin.backends.mlx.recurrent.slices import run_in_slices
from pippin.backends.mlx.recurrent.taps import tap_block_states
from pippin.backends.mlx.timing import (
    RememberedTimes,
    Timer,
    machine,
    shortest_seconds,
    times_file,
)

WORTHWHILE = 0.95  # of our time
DECODE_ROWS = (1, 8)
PREFILL_TOKENS = 512  # and as many as a step takes
# Calls that are launched together: fetching a result from a GPU takes longer than one token.
CHAIN: dict[Phase, int] = {"prefill": 2, "decode": 16}
SIMD_WIDTH = 32  # mlx-lm's kernels give each lane a whole share of a row
SUBJECT = "recurrences"
DETERMINISTIC = "deterministic mode does not go by times"
SAFE = "--safe: in plain operations"

logger = logging.getLogger(__name__)

Function = Callable[..., tuple[mx.array, mx.array]]

OURS: dict[str, Function] = {
    "gated_delta_update": gated_delta.gated_delta_update,
    "ssm_update": ssm.ssm_update,
}


def _in_slices(function: Function) -> Function:
    name = function.__name__
    return lambda **arguments: run_in_slices(function, Call(name, arguments))


MLX_LM: dict[str, Function] = {
    "gated_delta_update": _in_slices(mlx_lm_gated_delta.gated_delta_update),
    "ssm_update": _in_slices(mlx_lm_ssm.ssm_update),
}


class Times(msgspec.Struct, frozen=True):
    """Milliseconds of one call, added up over the sizes that were timed."""

    ours_ms: float
    mlx_lm_ms: float


@dataclass(frozen=True)
class Choice:
    """For one kind of call: the times of both, or why there was nothing to time."""

    kind: Kind
    times: Times | None = None
    obstacle: str | None = None

    @property
    def mlx_lm(self) -> bool:
        if self.times is None:
            return False
        return self.times.mlx_lm_ms <= WORTHWHILE * self.times.ours_ms

    def __str__(self) -> str:
        name = "mlx-lm's" if self.mlx_lm else "ours"
        if self.times is None:
            return f"{name}: {self.obstacle}"
        return f"{name}: {self.times.ours_ms:.2f} ms ours, {self.times.mlx_lm_ms:.2f} ms mlx-lm's"


def obstacle_to_mlx_lm(call: Call, phase: Phase) -> str | None:
    """Why mlx-lm's function is out of the question for calls of this kind, if it is."""
    metal = on_metal()
    if call.function == "gated_delta_update":
        key_dim = call.tokens["k"].shape[-1]
        if metal and key_dim % SIMD_WIDTH == 0 and call.arguments.get("use_kernel", True):
            return None
        return "mlx-lm has only a Python loop " + (f"for keys of {key_dim}" if metal else "here")
    state_dim = call.tokens["B"].shape[-1]
    if not metal or phase == "prefill":
        return "mlx-lm has no kernel " + ("for many tokens" if metal else "here")
    if state_dim % SIMD_WIDTH:
        return f"mlx-lm's kernel drops part of states of {state_dim}, no multiple of {SIMD_WIDTH}"
    return None


def choose_recurrences(
    calls: Iterable[Call],
    *,
    deterministic: bool,
    safe: bool = False,
    path: Path | None = None,
    obstacle: Callable[[Call, Phase], str | None] = obstacle_to_mlx_lm,
    seconds_of: Timer | None = None,
) -> tuple[Choice, ...]:
    """One choice for each kind of call, from the times in the file at `path` or new ones."""
    ours = machine((gated_delta, ssm, blocks, triangular))
    remembered = RememberedTimes(path or times_file(SUBJECT), ours, Times)
    timer = seconds_of or shortest_seconds
    choices = []
    for call, phase in ((call, phase) for call in calls for phase in PHASES):
        kind = call.kind(phase)
        fixed = SAFE if safe else DETERMINISTIC if deterministic else None
        reason = fixed or obstacle(call, phase)
        if reason is not None:
            choices.append(Choice(kind, obstacle=reason))
            continue
        times = remembered.get(str(kind))
        if times is None:
            try:
                times = time_both(call, phase, timer)
            except TheirsFailed as failure:
                logger.warning("%s: ours, for %s", kind, failure, exc_info=failure.__cause__)
                choices.append(Choice(kind, obstacle=str(failure)))
                continue
            remembered.add(str(kind), times)
        choices.append(Choice(kind, times))
    remembered.save()
    return tuple(choices)


class TheirsFailed(Exception):
    """mlx-lm's function raised; ours runs everywhere."""


def time_both(call: Call, phase: Phase, seconds_of: Timer) -> Times:
    """Both functions on each size that matters, added up."""

    def milliseconds(functions: Mapping[str, Function]) -> float:
        works = (work(functions[call.function], call, phase, *size) for size in sizes(phase))
        return 1e3 * sum(seconds_of(one) for one in works) / CHAIN[phase]

    ours_ms = milliseconds(OURS)
    try:
        return Times(ours_ms, milliseconds(MLX_LM))
    except Exception as error:  # whatever a kernel can do on a machine that we have never seen
        raise TheirsFailed(f"mlx-lm's failed here: {error}") from error


def sizes(phase: Phase) -> list[tuple[int, int]]:
    """Rows and tokens of the calls that are timed."""
    if phase == "decode":
        return [(num_rows, 1) for num_rows in DECODE_ROWS]
    return [(1, n) for n in sorted({PREFILL_TOKENS, device_info().prefill_tokens})]


def work(
    function: Function, call: Call, phase: Phase, num_rows: int, num_tokens: int
) -> Callable[[], None]:
    """A few calls that hand the state on, each on its own tokens, as a step would run them."""
    resized = [call.resized(num_rows, num_tokens, seed) for seed in range(CHAIN[phase])]
    arguments = resized[0].arguments
    _, state = function(**arguments)
    tokens = [one.tokens for one in resized]
    mx.eval(state, tokens)
    tapped = tap_block_states if phase == "prefill" else nullcontext

    def chain(state: mx.array, tokens: list[dict[str, mx.array]]) -> list[mx.array]:
        outputs = []
        for one in tokens:
            with tapped():
                y, state = function(**{**arguments, **one, "state": state})
            outputs.append(y)
        return [*outputs, state]

    # Decode steps are compiled, prefill is not.
    run: Callable[..., Any] = mx.compile(chain) if phase == "decode" else chain
    return lambda: mx.eval(run(state, tokens))
