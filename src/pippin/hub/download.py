"""Downloads a model from the Hugging Face hub into its cache. Knows no server and no terminal."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.amounts import show_bytes
from pippin.errors import LoadError
from pippin.hub.byte_count import ByteCount

# What is read, and nothing else: no code, no second copy of the weights in another layout.
HUB_FILES = ["model*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
HUB_FOLDERS = ["*/*"]
FILTERS: dict[str, Any] = {"allow_patterns": HUB_FILES, "ignore_patterns": HUB_FOLDERS}
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
WEIGHTS = re.compile(r"model.*\.safetensors")
SPARE_BYTES = 1_000_000_000  # that a download leaves free on the disk


@dataclass(frozen=True)
class DownloadPlan:
    commit: str
    nbytes: int  # of the files that are not in the cache


def download(name: str, revision: str | None = None, **options: Any) -> Path:
    """The directory of a model's files. `options` are of the hub's `snapshot_download`."""
    from huggingface_hub import snapshot_download

    with _explained(name, revision):
        return Path(snapshot_download(name, revision=revision, **FILTERS, **options))


def plan_download(name: str, revision: str | None = None) -> DownloadPlan:
    """What `download` would transfer. Raises if the hub cannot be reached, also if the model is in
    the cache, if it has no weights that can be read, or if it does not fit the disk."""
    from huggingface_hub import constants, snapshot_download

    check_hub_id(name)
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
    return DownloadPlan(files[0].commit_hash, needed)


def check_hub_id(name: str) -> None:
    if not HUB_ID.fullmatch(name):
        raise LoadError(
            f"{name!r} is not a Hugging Face id: use owner/name, such as Qwen/Qwen3.5-0.8B"
        )


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
