"""How many drafts a row may have: none where rounding may not depend on it, few where each takes
memory. Knows no arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable

MOST_SHARE = 0.03  # of the bytes of a row that has
ROW_TOKENS = 2048
FEW_BYTES = 512 << 10  # of a row: small models verify as many drafts as others
NOT_DETERMINISTIC = "with --deterministic a row's sums do not depend on how many tokens a step runs"

logger = logging.getLogger(__name__)


def affordable_depth(
    max_depth: int, draft_bytes: Callable[[int], int], row_bytes: Callable[[int], int]
) -> int:
    """The most drafts of a row, `max_depth` at most, whose memory is a small share of the row's, or
    a few kilobytes.

    `draft_bytes`: of a row that may have so many; `row_bytes`: of so many tokens without drafts.
    """
    most = max(MOST_SHARE * row_bytes(ROW_TOKENS), FEW_BYTES)
    depths = [depth for depth in range(1, max_depth + 1) if draft_bytes(depth) <= most]
    depth = max(depths, default=min(max_depth, 1))
    if depth:
        share = draft_bytes(depth) / row_bytes(ROW_TOKENS)
        logger.info(
            "at most %d drafts of a request are verified in a step: their memory is %.1f%% of a "
            "request of %s tokens",
            depth,
            100 * share,
            f"{ROW_TOKENS:,}",
        )
    return depth
