"""What payloads occupy on a device, where each is a copy of its own. Knows shapes, no arrays."""

from __future__ import annotations

from pippin.backends.base.plan import StepPlan
from pippin.types import Component, ModelSpec


def captured_bytes(spec: ModelSpec, plan: StepPlan) -> int:
    """The captures that a plan asks for, where each is a copy of its own: `transient_bytes`."""
    per_token = spec.kv_bytes_per_token + spec.window_bytes_per_token
    total = 0
    for retire in plan.retire:
        if retire.captures:
            total += (retire.end - retire.start) * per_token + spec.state_bytes
    for chunk in plan.prefill:
        if chunk.captures:
            total += len(chunk.tokens) * per_token + len(chunk.checkpoints) * spec.state_bytes
            total += spec.hidden_bytes * chunk.samples
    for row in plan.decode:
        if row.checkpoint:
            total += spec.state_bytes
    return total + sum(loaded_bytes(spec, load.component, load.num_tokens) for load in plan.load)


def loaded_bytes(spec: ModelSpec, component: Component, num_tokens: int) -> int:
    """What a payload occupies on the device."""
    match component:
        case Component.ATTENTION:
            return num_tokens * spec.kv_bytes_per_token
        case Component.WINDOW:
            return num_tokens * spec.window_bytes_per_token
        case Component.STATE:
            return spec.state_bytes
    return spec.hidden_bytes
