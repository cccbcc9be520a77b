"""The models in the hub's cache, by the hub's own library: listed, deleted. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pippin.errors import LoadError, NotFound
from pippin.hub.pull import WEIGHTS
from pippin.startup.server_file import RunningServer, running_servers

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo


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
        servers = running_servers()
        return next((s for s in servers if any(map(self._contains, s.checkpoints))), None)

    def _contains(self, checkpoint: str) -> bool:
        return self.path in Path(checkpoint).parents


def cached_models() -> list[CachedModel]:
    """The one that was used last is first."""
    cache = _scan()
    models = [_model(repo) for repo in cache.repos if repo.repo_type == "model"] if cache else []
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
