"""What a grammar must offer to constrain a reply. Knows no scheduler, no model and no language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Grammar(Protocol):
    """Follows one reply. The host must know the last token before the next mask can be made.

    Any of these may raise: then the reply ends with that error, and no other does.
    """

    @property
    def finished(self) -> bool:
        """The reply is whole: nothing can follow but its end."""
        ...

    @property
    def slow(self) -> bool:
        """The next call may take long: a thread makes it, and no step waits. It stays so."""
        ...

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write which tokens are allowed next into `mask`, packed int32 [words]: 1 if allowed.

        An end token is allowed where the reply may end.
        """
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as they are known already; often none."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the reply."""
        ...
