"""A batch: what was asked for, and how far it is."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, get_args

import msgspec


class BatchUsage(msgspec.Struct):
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, usage: dict[str, Any]) -> None:
        """`usage` of one reply of any endpoint."""
        for name in ("prompt_tokens", "input_tokens"):
            self.input_tokens += usage.get(name, 0)
            self.cached_tokens += usage.get(f"{name}_details", {}).get("cached_tokens", 0)
        for name in ("completion_tokens", "output_tokens"):
            self.output_tokens += usage.get(name, 0)
            self.reasoning_tokens += usage.get(f"{name}_details", {}).get("reasoning_tokens", 0)

    def wire(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FINISHED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
WINDOWS_S = {"24h": 24 * 3600}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_TIMED = [status for status in get_args(Status) if status != "validating"]


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    model: str  # empty: its lines name several
    created_at: int
    metadata: dict[str, str | None] | None = None
    output_expires_s: int | None = None
    status: Status = "validating"
    times: dict[str, int] = msgspec.field(default_factory=dict)  # when each status began
    errors: list[LineError] = msgspec.field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage | None = None  # before the first line is run
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOWS_S[self.completion_window]

    def results_id(self, kind: str) -> str:
        """Of the file of its results: the same after a restart."""
        return f"file-{hashlib.sha256(f'{self.id} {kind}'.encode()).hexdigest()[:32]}"

    def enter(self, status: Status, now: float) -> None:
        self.status = status
        self.times[status] = int(now)

    def wire(self) -> dict[str, Any]:
        errors = [msgspec.structs.asdict(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMED},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": self.usage and self.usage.wire(),
            "metadata": self.metadata,
        }
