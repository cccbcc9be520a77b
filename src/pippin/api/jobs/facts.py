"""What the log says of a job: tokens, times and how it ended. Knows no HTTP."""

from __future__ import annotations

from typing import Any

from pippin.api.jobs.prepare import Job
from pippin.text.tokenizer import Tokenizer


def facts_of(job: Job, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """For one line of the log; with a tokenizer, the prompts in full."""
    timing = job.timing
    facts: dict[str, Any] = {
        "reply": job.id,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
        "host_tokens": job.host_tokens,
        "disk_tokens": job.disk_tokens,
        "completion_tokens": job.completion_tokens,
        "queue_s": _rounded(job.queued_s),
        "finish": ",".join(dict.fromkeys(s.finish or "cut" for s in job.sequences)),
    }
    if timing.submitted is not None and timing.first is not None and timing.last is not None:
        facts["ttft_s"] = _rounded(timing.first - timing.submitted)
        if timing.last > timing.first:
            num_later = job.completion_tokens - len(job.sequences)
            facts["tokens_per_s"] = round(num_later / (timing.last - timing.first), 1)
    if tokenizer is not None:
        facts["prompts"] = [_text(prompt.tokens, tokenizer) for prompt in job.prompts]
    return facts


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _text(tokens: list[int], tokenizer: Tokenizer) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
