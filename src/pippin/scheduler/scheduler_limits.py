"""The part of the configuration that a scheduler needs. Knows no option's name."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLUSH_SECONDS = 2.5  # to write what waits to be written, when the engine stops


@dataclass(frozen=True)
class Limits:
    max_running: int = 64
    max_running_reason: str = ""  # why so many, for /status
    max_queue: int = 1024
    max_queue_tokens: int = 1 << 40
    prefill_tokens: int = 512
    max_gap: float = math.inf  # seconds that a step with running streams may be planned to take
    for_streams: bool = True  # replies are read while they grow: prompts leave them time
    deterministic: bool = False  # only whole grid blocks of prompts are computed alike and shared
    forced_chunks: bool = True  # several tokens that a grammar forces may run at once
    capacity_bytes: int = 1 << 40
