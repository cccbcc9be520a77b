"""Puts batches together: lines go to the same endpoints as requests. Knows no field of any."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from starlette.applications import Starlette

from pippin.api.batches.batch_engine import BatchEngine
from pippin.api.batches.batch_metrics import BatchMetrics
from pippin.api.batches.batches import Batches, Storage
from pippin.api.batches.input_lines import LineRules
from pippin.api.batches.line_client import LineClient
from pippin.api.batches.runner import BatchRunner
from pippin.api.dialects.responses.response_store import ResponseStores
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.generation import Generation
from pippin.api.http.access_control import separates_owners
from pippin.api.http.http_errors import ERROR_HANDLERS
from pippin.api.http.keys import known_keys

NOT_STORED = ResponseStores(0, 0)  # thousands of lines would evict what live requests stored


def create_batches(state: AppState, metrics: BatchMetrics) -> Batches:
    """Their replies are not timed: those times are of live requests."""
    config = state.config
    num_lines = config.batch_running or 1
    places = asyncio.Semaphore(num_lines)
    lines = replace(
        state,
        # A line waits for live requests: only its own timeout ends it, or that of the batch.
        limits=replace(state.limits, request_timeout=None),
        use=lambda _, engine: BatchEngine(engine, places),
    )
    app = Starlette(
        routes=Generation(lines, NOT_STORED).routes(), exception_handlers=ERROR_HANDLERS
    )
    line_rules = LineRules(state.limits.max_body_bytes, state.models.check_name)
    runner = BatchRunner(LineClient(app), line_rules, num_lines, metrics)
    directory = config.batch_dir if config.batch_bytes else None
    storage = Storage(
        directory=None if directory is None else Path(directory).expanduser(),
        owners=tuple(known_keys(config).owners()),
        separates=separates_owners(config),
        max_bytes=config.batch_bytes,
        max_file_bytes=config.batch_file_bytes,
    )
    return Batches(storage, runner)
