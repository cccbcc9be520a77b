"""The contract between the scheduler and a backend.

A plan carries every device-side effect of a step, and a backend executes it in this order:

    retire   read what rows hold after the previous launch (captures), then free their slots
    admit    sampling parameters of slots that start
    decode   run one token of each row (from the FutureMap) and the drafts behind it, sample behind
             each, accept, stash the token by slot
    prefill  restore a matched prefix, then run chunks of prompts, and of replies whose next tokens
             are known; sample where one ends, or at once where all of a prompt was restored with
             its hidden vector
    spill    read payloads of the tree as bytes, on their way to another tier
    load     make payloads of bytes from there

Decode and prefill concern different slots: either may run first, but streams wait for decode.
Rows that obey a grammar are sampled when the host has made their masks: `PendingStep.sample`.

Several tokens a step: a row with drafts runs its input token and `depth` drafts, and samples behind
each what it would have sampled there without drafts: noise depends on the seed and the token's
number alone. A draft is accepted while it equals the token sampled before it, and none behind a
stop id. The host learns how many were accepted with the result. Until then plans have upper bounds,
and the device's own lengths count. What rejected drafts wrote is never read.

Only `Backend.launch` touches the device, so no schedule-versus-forward race can be written.

    plan.py      what a step computes
    result.py    what it returns, and the bytes that this takes
    backend.py   a backend, its step in flight, and what things cost before they happen
"""

from __future__ import annotations

from pippin.backends.base.backend import Backend, Costs, DeviceInfo, PendingStep, WarmUpShape
from pippin.backends.base.plan import (
    MAX_STOP_IDS,
    Admit,
    DecodeRow,
    Load,
    PrefillRow,
    Proposal,
    Restore,
    Retire,
    Spill,
    StepPlan,
)
from pippin.backends.base.result import (
    Capture,
    Damage,
    Spilled,
    StepResult,
    captured_bytes,
    loaded_bytes,
)

__all__ = [
    "MAX_STOP_IDS",
    "Admit",
    "Backend",
    "Capture",
    "Costs",
    "Damage",
    "DecodeRow",
    "DeviceInfo",
    "Load",
    "PendingStep",
    "PrefillRow",
    "Proposal",
    "Restore",
    "Retire",
    "Spill",
    "Spilled",
    "StepPlan",
    "StepResult",
    "WarmUpShape",
    "captured_bytes",
    "loaded_bytes",
]
