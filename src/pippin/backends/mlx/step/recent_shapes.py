"""Which shapes of forwards were run lately: a device may take long over a new one. Knows no arrays.

Kernels, library heuristics and captured graphs are kept by shape, and only so many of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_SHAPES = 4096


class RecentShapes:
    def __init__(self, max_shapes: int = MAX_SHAPES) -> None:
        self._max_shapes = max_shapes
        self._shapes: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, shape: Hashable) -> bool:
        """A forward of this shape is run; returns whether it is new."""
        is_new = shape not in self._shapes
        self._shapes[shape] = None
        self._shapes.move_to_end(shape)
        if len(self._shapes) > self._max_shapes:
            self._shapes.popitem(last=False)
        return is_new
