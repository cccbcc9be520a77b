"""Costs in lines of Python that run: the same on every machine, fast or busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pippin

PACKAGE = str(Path(pippin.__file__).parent)


def num_lines(operation: Callable[[], object]) -> int:
    """How many lines of Pippin run in `operation`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None  # a garbage collector's callback, or a test's
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return count
