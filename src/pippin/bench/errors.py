"""What ends a benchmark with a word to its user."""

from __future__ import annotations

from pippin.errors import PippinError


class BenchError(PippinError):
    """A server that is out of reach, or what cannot be measured."""
