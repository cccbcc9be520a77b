"""Which segment makes room, and what of it is worth moving. Knows no files.

Room is made a segment at a time: the one whose bytes were, on average, used longest ago. What in
it was used later than the store's average is written again first, the latest first, but no more
than a twentieth of what callers wrote: so a disk never writes much more than it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from pippin.cache.disk.segments.segment import Segment, Slot

MOVED_SHARE = 0.05  # of the bytes that callers wrote


def pick_victim(segments: Sequence[Segment], active: Segment | None) -> Segment | None:
    """Never the one that is being written, unless there is no other."""
    sealed = [segment for segment in segments if segment is not active]
    return min(sealed, key=lambda segment: segment.mean_use, default=active)


def worth_moving(victim: Segment, segments: Sequence[Segment], max_bytes: int) -> list[Slot]:
    """The entries of a victim that are written again, within `max_bytes`."""
    total = sum(segment.live_bytes for segment in segments)
    average = sum(segment.use_bytes for segment in segments) / total if total else 0.0
    moved: list[Slot] = []
    for slot in sorted(victim.slots.values(), key=lambda slot: -slot.use):
        if slot.use <= average:
            break
        if slot.entry.nbytes <= max_bytes:
            moved.append(slot)
            max_bytes -= slot.entry.nbytes
    return moved
