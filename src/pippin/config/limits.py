"""Limits of requests and connections of one client. Knows no request."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.config.checks import check_at_least
from pippin.errors import ConfigError


@dataclass(frozen=True)
class LimitsConfig:
    """Limits for one client. A request above one is refused with a 4xx error that names it."""

    max_body_bytes: int = 32_000_000
    """Maximum size of a request body, in bytes."""

    max_choices: int = 512
    """Maximum number of replies to one request: its number of prompts times `n`."""

    max_tokens: int | None = None
    """Maximum length of one reply, in tokens. Default: the model's context length minus the
    prompt."""

    max_stops: int = 16
    """Maximum number of stop strings in one request."""

    max_logit_bias: int = 1024
    """Maximum number of tokens in the `logit_bias` of one request."""

    max_schema_bytes: int = 262_144
    """Maximum size of a JSON Schema, regular expression or grammar in a request, in bytes."""

    max_connections: int = 1024
    """Maximum number of open connections. At the limit, an idle connection is closed to accept a
    new one, or the oldest without a request of an address that has more than an eighth of all; if
    there is none, the new one gets HTTP 429."""

    header_timeout: float = 10.0
    """Seconds within which the headers of a request must arrive."""

    body_timeout: float = 60.0
    """Seconds within which the body of a request must arrive."""

    idle_timeout: int = 75
    """Seconds after which a connection without requests is closed."""

    send_timeout: float = 60.0
    """Seconds after which a client that reads nothing of its response is disconnected."""

    request_timeout: float | None = None
    """Maximum duration of one request in seconds, including its time in the queue; a request can
    set a lower value with its `timeout` field. Default: no limit."""

    def __post_init__(self) -> None:
        check_at_least(self, max_body_bytes=1, max_choices=1, max_tokens=1, max_stops=0)
        check_at_least(self, max_logit_bias=0, max_schema_bytes=1, max_connections=1)
        check_at_least(self, idle_timeout=1)
        for name in ("header_timeout", "body_timeout", "send_timeout", "request_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {seconds}")
