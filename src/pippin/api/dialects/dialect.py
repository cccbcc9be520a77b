"""What every dialect offers to whoever runs a job. Knows no dialect and no transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.errors import PippinError
from pippin.sequences import SequencePiece


class Dialect(Protocol):
    """One job's reply, as bytes of server-sent events or as one object."""

    def open(self) -> bytes:
        """Before the first piece."""
        ...

    def events(self, piece: SequencePiece) -> bytes:
        """What a piece says; nothing, if it says nothing yet."""
        ...

    def close(self) -> bytes:
        """The reply is complete: its usage is known."""
        ...

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]: ...

    def error(self, error: PippinError) -> bytes:
        """What went wrong after the stream had begun; it ends with this."""
        ...


def data_event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """An event that is called what its data says it is."""
    return f"event: {data['type']}\n".encode() + data_event(data)


def cached_details(job: Job) -> dict[str, int]:
    """Prompt tokens that were not computed, and of these what came from other tiers, if any did."""
    details = {"cached_tokens": job.cached_tokens}
    if job.host_tokens:
        details["host_cached_tokens"] = job.host_tokens
    if job.disk_tokens:
        details["disk_cached_tokens"] = job.disk_tokens
    return details


def openai_usage(job: Job) -> dict[str, Any]:
    prompt_tokens, completion_tokens = job.prompt_tokens, job.completion_tokens
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": cached_details(job),
    }
    if job.reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": job.reasoning_tokens}
    return usage
