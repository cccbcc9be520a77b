"""Coroutines that succeed or are cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_or_none(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently; if one fails, or this call is cancelled, the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
