"""Pippin: the public API. Importing it loads no model library: `LLM` and `AsyncLLM` are imported on
first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pippin.types import SamplingParams
from pippin.version import __version__

if TYPE_CHECKING:
    from pippin.offline.async_llm import AsyncLLM
    from pippin.offline.llm import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pippin.offline.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from pippin.offline.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
