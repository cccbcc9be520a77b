"""Works of an event loop that succeed together. Knows none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All side by side; if one fails, or nobody waits any more, the others are stopped."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
