"""What guesses how replies go on. A wrong guess costs time, and never a token."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pippin.scheduler.request import Request


class Drafter(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def on_device(self) -> bool:
        """The backend makes drafts in its steps, for the next ones: nothing is proposed here."""
        ...

    def propose(self, request: Request, num_tokens: int) -> np.ndarray:
        """At most `num_tokens` tokens that could follow the request's known ones, int32."""
        ...


class DeviceDrafter:
    """Stands for what the backend drafts with."""

    on_device = True

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, request: Request, num_tokens: int) -> np.ndarray:
        raise NotImplementedError(f"{self.name} drafts on the device")
