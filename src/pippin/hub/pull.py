"""One download in a process of its own, which may be stopped at any time. Knows no server.

The hub's threads cannot be stopped, and its library waits for them: a signal deletes what this
process has written of unfinished files, and ends it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

from pippin.errors import LoadError
from pippin.hub.byte_count import ByteCount
from pippin.hub.download import download, plan_download

REPORT_SECONDS = 0.1
BROKEN_PIPE = 128 + signal.SIGPIPE


def pull(name: str, revision: str | None) -> Path:
    """Download a model with the hub's progress bars."""
    plan_download(name, revision)
    with _stopping_at_signals(name):
        return download(name, revision)


def pull_as_lines(name: str, revision: str | None) -> int:
    """Print the progress as Ollama's `/api/pull` has it, a JSON object a line; the exit status."""
    try:
        _print_line({"status": "pulling manifest"})
        plan = plan_download(name, revision)
        count = ByteCount()

        def report() -> None:
            completed = min(plan.nbytes, count.completed)
            sizes = {"digest": plan.commit, "total": plan.nbytes, "completed": completed}
            _print_line({"status": f"pulling {plan.commit[:12]}", **sizes})

        with _stopping_at_signals(name) as unfinished, _repeated(report, unfinished):
            download(name, revision, tqdm_class=count.bar)
    except LoadError as error:
        _print_line({"error": error.message})
        return 1
    for status in ("verifying sha256 digest", "writing manifest", "success"):
        _print_line({"status": status})
    return 0


def _print_line(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


@contextmanager
def _repeated(report: Callable[[], None], unfinished: Unfinished) -> Iterator[None]:
    """Also once at the end."""
    done = Event()

    def repeat() -> None:
        try:
            while not done.wait(REPORT_SECONDS):
                report()
        except BrokenPipeError:  # the server that reads the lines has exited
            unfinished.delete_and_exit(BROKEN_PIPE)

    thread = Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    report()


@contextmanager
def _stopping_at_signals(name: str) -> Iterator[Unfinished]:
    unfinished = Unfinished(name)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda given, _: unfinished.delete_and_exit(128 + given))
        for number in numbers
    }
    try:
        yield unfinished
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Unfinished:
    """Files of a model that have appeared since and are not whole."""

    def __init__(self, name: str) -> None:
        from huggingface_hub import constants

        self._folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
        self._others = self._files()

    def delete_and_exit(self, status: int) -> NoReturn:
        for path in self._files() - self._others:
            path.unlink(missing_ok=True)
        os._exit(status)

    def _files(self) -> set[Path]:
        return set(self._folder.glob("*.incomplete"))
