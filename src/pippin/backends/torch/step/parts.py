"""What the rows of a step work with, whatever they run. Made anew with the pools."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.captures import Captures
from pippin.backends.torch.step.pending import Draws
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.streams import Streams


@dataclass(frozen=True)
class StepParts:
    pools: Pools
    rows: Rows
    captures: Captures
    slots: Slots
    future: FutureMap[torch.Tensor]
    draws: Draws
    streams: Streams
