"""What a server does between its model's load and its first request."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

from pippin.config import ServerConfig
from pippin.startup.launch import Entrance


def test_no_collection_looks_at_what_was_made_before_the_first_request() -> None:
    app: Any = SimpleNamespace(resume_batches=lambda: None)

    async def load() -> Any:
        return app

    before = gc.get_freeze_count()
    try:
        asyncio.run(Entrance(ServerConfig()).open_with(load()))
        assert gc.get_freeze_count() > before
        assert app not in gc.get_objects()
    finally:
        gc.unfreeze()
