"""Runs `pippin pull` as a child process, and stops it when its lines are no longer read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from pippin.errors import DownloadFailed

STOP_SECONDS = 5.0


async def pull_progress(name: str, revision: str | None) -> AsyncGenerator[dict[str, Any], None]:
    """The progress of one download, as Ollama's `/api/pull` has it. Closing it stops the download
    and deletes the files that are not whole."""
    options = [] if revision is None else [f"--revision={revision}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pippin", "pull", "--json", *options, "--", name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            progress = msgspec.json.decode(line)
            if "error" in progress:
                raise DownloadFailed(progress["error"])
            yield progress
        if status := await process.wait():
            raise DownloadFailed(f"the download of {name!r} failed: exit status {status}")
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
