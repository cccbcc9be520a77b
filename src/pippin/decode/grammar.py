"""What a grammar must offer to constrain sampling. Knows no scheduler and no model."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Grammar(Protocol):
    """Tracks one reply. The host must know the last token before the next mask can be made."""

    def allowed(self) -> np.ndarray:
        """bool [vocab_size]: which tokens may come next."""
        ...

    def advance(self, token: int) -> None: ...
