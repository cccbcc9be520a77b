"""How long an engine may take to stop, added up from what it does then. Knows no process.

    server closes stdin ─▶ the step in flight ─▶ write behind ─▶ close the stores ─▶ exit
                           LAST_STEP_SECONDS     FLUSH_SECONDS    CLOSE_SECONDS
    EXIT_GRACE_SECONDS:  all of these; an engine that takes longer exits by force
    STOP_GRACE_SECONDS:  a little more; the server kills an engine that does not even do that

So nothing that was written is cut off on a disk that writes SLOWEST_DISK bytes a second or more. An
engine that has nothing to write exits at once.
"""

from __future__ import annotations

from pippin.cache.disk.segments.segment_log import MAX_SEGMENT_BYTES
from pippin.scheduler.scheduler_limits import FLUSH_SECONDS

LAST_STEP_SECONDS = 2.0
SLOWEST_DISK = 128e6  # bytes a second
# What is not synced yet: a segment that the last batch fills, and the one that follows it.
CLOSE_SECONDS = 2 * MAX_SEGMENT_BYTES / SLOWEST_DISK
EXIT_GRACE_SECONDS = LAST_STEP_SECONDS + FLUSH_SECONDS + CLOSE_SECONDS
STOP_GRACE_SECONDS = EXIT_GRACE_SECONDS + 1.0
