"""Runs a job and has a dialect write its reply: events, or one object. Knows no dialect, no HTTP.

Both ways fold the same pieces; closing them aborts what the engine still runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pippin.api.dialects.dialect import Dialect
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice, run_sequences
from pippin.engine.engine_client import Engine


async def whole_reply(job: Job, dialect: Dialect, engine: Engine) -> dict[str, Any]:
    folded = [FoldedChoice(sequence.index) for sequence in job.sequences]
    async with aclosing(run_sequences(engine, job)) as pieces:
        async for piece in pieces:
            folded[piece.index].add(piece)
    return dialect.whole(folded)


async def reply_events(job: Job, dialect: Dialect, engine: Engine) -> AsyncGenerator[bytes, None]:
    opened = False
    async with aclosing(run_sequences(engine, job)) as pieces:
        async for piece in pieces:
            # Not before: an error that comes first is a status.
            events = dialect.events(piece) if opened else dialect.open() + dialect.events(piece)
            opened = True
            if events:
                yield events
    yield dialect.close()
