"""How long a request may take. Knows no endpoint."""

from __future__ import annotations

from pippin.api.requests.body import Body
from pippin.config import LimitsConfig


def read_timeout(body: Body, limits: LimitsConfig) -> float | None:
    """The shorter of what the request and the server say."""
    asked = body.number("timeout", 0, None, None, above_low=True)
    given = [seconds for seconds in (asked, limits.request_timeout) if seconds is not None]
    return min(given, default=None)
