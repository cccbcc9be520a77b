"""Lets the host submit a decode step without waiting until most of it was computed. Knows no plans.

mlx blocks a thread that is some fifty nodes ahead of its own. A decode step has more, so its launch
took as long as the step, and in the time that the host then needed for the next one mlx ran dry.
All arrays of such a step are there at once, so work that takes much memory is not to run ahead: mlx
waits for memory only where it may block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pippin.backends.mlx.cpu.operations import operations

TASKS = 50  # of ten dispatches each; a node takes two, and a step with drafts has 200
MOST_TOKENS = 16  # of all rows: more of them keep mlx busy, and their arrays are large


@contextmanager
def running_ahead(num_tokens: int) -> Iterator[None]:
    """Inside, where mlx lets it, with a step of so many tokens."""
    ours = operations()
    if ours is None or num_tokens > MOST_TOKENS:
        yield
        return
    ours.run_ahead(TASKS)
    try:
        yield
    finally:
        ours.run_ahead(-TASKS)
