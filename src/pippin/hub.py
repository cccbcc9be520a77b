"""Models in the Hugging Face hub's cache: downloaded, listed, deleted, by the hub's own library.

A download may be stopped at any time, in a process of its own. The hub's threads cannot be stopped,
and its library waits for them: a signal deletes what this process has written of unfinished files,
and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from pippin.amounts import show_bytes
from pippin.errors import LoadError, NotFound, PippinError
from pippin.startup.server_file import RunningServer, running_servers

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo


class ByteCount:
    """The most bytes that any bar of one download has counted: files are counted as they arrive
    from the network and as they are written, and what was received may be compressed."""

    def __init__(self) -> None:
        self._bars: list[_Bar] = []

    @property
    def completed(self) -> int:
        return int(max((bar.n for bar in self._bars), default=0))

    def bar(self, *_: Any, unit: str = "it", **options: Any) -> _Bar:
        """For the hub's `tqdm_class`."""
        bar = _Bar(options.get("total"), options.get("initial") or 0)
        if unit == "B":
            self._bars.append(bar)
        return bar


class _Bar:
    """What the hub calls of a tqdm."""

    def __init__(self, total: int | None, n: int) -> None:
        self.total, self.n = total, n
        self.format_dict: dict[str, Any] = {}
        self._lock = Lock()  # several threads download

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        with self._lock:
            self.n += int(n or 0)

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass

    def set_description(self, *_: Any, **__: Any) -> None:
        pass

    set_description_str = set_postfix_str = set_description


# What is read, and nothing else: no code, no second copy of the weights in another layout.
HUB_FILES = ["model*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
HUB_FOLDERS = ["*/*"]
FILTERS: dict[str, Any] = {"allow_patterns": HUB_FILES, "ignore_patterns": HUB_FOLDERS}
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
WEIGHTS = re.compile(r"model.*\.safetensors")
SPARE_BYTES = 1_000_000_000  # that a download leaves free on the disk


def download(name: str, revision: str | None = None, **options: Any) -> Path:
    """The directory of a model's files. `options` are of the hub's `snapshot_download`."""
    from huggingface_hub import snapshot_download

    with _explained(name, revision):
        return Path(snapshot_download(name, revision=revision, **FILTERS, **options))


def plan_download(name: str, revision: str | None = None) -> tuple[str, int]:
    """The commit, and the bytes that `download` would transfer.

    Raises if the hub cannot be reached, also if the model is in the cache, if it has no weights
    that can be read, or if it does not fit the disk.
    """
    from huggingface_hub import constants, snapshot_download

    if not HUB_ID.fullmatch(name):
        raise LoadError(
            f"{name!r} is not a Hugging Face id: use owner/name, such as Qwen/Qwen3.5-0.8B"
        )
    with _explained(name, revision):
        silent: Any = ByteCount().bar
        files = snapshot_download(
            name, revision=revision, dry_run=True, tqdm_class=silent, **FILTERS
        )
    if not any(WEIGHTS.fullmatch(file.filename) for file in files):
        raise LoadError(
            f"model {name!r} has no model*.safetensors: Pippin loads no other format of weights"
        )
    needed = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if needed + SPARE_BYTES > free:
        raise LoadError(
            f"model {name!r} needs {show_bytes(needed)} more on the disk, and {cache} has "
            f"{show_bytes(free)} free, of which {show_bytes(SPARE_BYTES)} are not used: delete "
            "models with `pippin rm`, or set HF_HUB_CACHE to a directory on another disk"
        )
    return files[0].commit_hash, needed


@contextlib.contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """The hub's errors, with what to do."""
    from httpx2 import TransportError
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"https://huggingface.co/{name}"
    offline = (
        "is neither a directory nor in the local cache, and the Hugging Face hub cannot be "
        "reached: check the network and HF_HUB_OFFLINE, or give a directory"
    )
    remedies: dict[type[Exception], str] = {  # the first that an error is an instance of
        GatedRepoError: (
            f"is gated: request access at {page}, then run `hf auth login` or set HF_TOKEN"
        ),
        RevisionNotFoundError: (
            f"has no revision {revision!r}: see the branches and tags at {page}/tree/main"
        ),
        RepositoryNotFoundError: (
            "was not found: there is no such directory, and on the Hugging Face hub it does not "
            "exist or is private (then run `hf auth login`)"
        ),
        LocalEntryNotFoundError: offline,
        HFValidationError: "is not a valid Hugging Face id: use owner/name",
        OfflineModeIsEnabled: "cannot be downloaded, since HF_HUB_OFFLINE is set",
        TransportError: (
            "cannot be downloaded: this machine is offline, or the Hugging Face hub cannot be "
            "reached (check the network, and HF_ENDPOINT if it is set)"
        ),
    }
    kinds: tuple[type[Exception], ...] = (*remedies, HfHubHTTPError, OSError)
    try:
        yield
    except kinds as error:
        for cause in (error, error.__cause__):  # a dry run has its error as the cause
            for kind, remedy in remedies.items():
                if isinstance(cause, kind):
                    raise LoadError(f"model {name!r} {remedy}") from error
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise LoadError(f"model {name!r} could not be downloaded: {reason}") from error


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
                raise PippinError(progress["error"], code="download_failed")
            yield progress
        if status := await process.wait():
            raise PippinError(
                f"the download of {name!r} failed: exit status {status}", code="download_failed"
            )
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
        commit, total = plan_download(name, revision)
        count = ByteCount()

        def report() -> None:
            sizes = {"digest": commit, "total": total, "completed": min(total, count.completed)}
            _print_line({"status": f"pulling {commit[:12]}", **sizes})

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


@contextlib.contextmanager
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


@contextlib.contextmanager
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


@dataclass(frozen=True)
class CachedModel:
    name: str
    path: Path  # of all its revisions
    snapshot: Path | None  # of the revision that is served by default; None: only named ones
    nbytes: int
    used_s: float  # since the epoch, of its weights: listing models reads their other files
    revisions: tuple[str, ...]  # commits

    def server(self) -> RunningServer | None:
        """A server of this user that serves it."""
        for server in running_servers():
            if any(self.path in Path(checkpoint).parents for checkpoint in server.checkpoints):
                return server
        return None


def cached_models() -> list[CachedModel]:
    """The one that was used last is first."""
    cache = _scan()
    models = [_model(repo) for repo in (cache.repos if cache else ()) if repo.repo_type == "model"]
    return sorted(models, key=lambda model: (-model.used_s, model.name))


def find_cached_model(name: str) -> CachedModel:
    models = cached_models()
    for model in models:
        if model.name.lower() == name.lower():  # as the hub reads it
            return model
    listed = ", ".join(model.name for model in models) or "none"
    raise NotFound(f"no model {name!r} is in the Hugging Face hub's cache; it contains {listed}")


def delete_cached_model(model: CachedModel) -> int:
    """The bytes that were freed. Raises if a server of this user serves the model."""
    if (server := model.server()) is not None:
        raise LoadError(
            f"model {model.name!r} is served at {server.url} (process {server.pid}): stop that "
            "server first"
        )
    cache = _scan()
    if cache is None:
        return 0
    # Copies of a model have the same commits, and the hub's library finds revisions by commit.
    alone = frozenset(repo for repo in cache.repos if Path(repo.repo_path) == model.path)
    deletion = replace(cache, repos=alone).delete_revisions(*model.revisions)
    deletion.execute()
    return int(deletion.expected_freed_size)


def _scan() -> HFCacheInfo | None:
    """None: nothing was ever downloaded."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _model(repo: CachedRepoInfo) -> CachedModel:
    main = repo.refs.get("main")
    files = [file for revision in repo.revisions for file in revision.files]
    weights = [file for file in files if WEIGHTS.fullmatch(file.file_name)]
    return CachedModel(
        name=repo.repo_id,
        path=Path(repo.repo_path),
        snapshot=None if main is None else Path(main.snapshot_path),
        nbytes=repo.size_on_disk,
        used_s=max((file.blob_last_accessed for file in weights), default=repo.last_modified),
        revisions=tuple(sorted(revision.commit_hash for revision in repo.revisions)),
    )
