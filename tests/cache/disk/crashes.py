"""A disk that remembers every change, so that a crash after any of them can be played."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disk_builders import Unsynced

from pippin.cache.entries import Bytes


@dataclass(frozen=True)
class Change:
    """One call to the system that changed a file."""

    verb: str  # create, write, truncate, rename, remove
    path: Path
    at: int = 0
    content: bytes = b""
    target: Path | None = None


class RecordingDisk(Unsynced):
    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._paths: dict[int, Path] = {}

    def create(self, path: Path) -> int:
        self.changes.append(Change("create", path))
        return self._opened(super().create(path), path)

    def open(self, path: Path, *, read_only: bool) -> int:
        return self._opened(super().open(path, read_only=read_only), path)

    def write(self, file: int, at: int, parts: Sequence[Bytes | bytes]) -> None:
        content = b"".join(bytes(part) for part in parts)
        self.changes.append(Change("write", self._paths[file], at, content))
        super().write(file, at, parts)

    def truncate(self, file: int, size: int) -> None:
        self.changes.append(Change("truncate", self._paths[file], size))
        super().truncate(file, size)

    def rename(self, old: Path, new: Path) -> None:
        self.changes.append(Change("rename", old, target=new))
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        if path.exists():
            self.changes.append(Change("remove", path))
        super().remove(path)

    def _opened(self, file: int, path: Path) -> int:
        self._paths[file] = path
        return file


class Replay:
    """What a directory held after each change, in a directory of its own."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._files: dict[Path, bytearray] = {}

    def apply(self, change: Change, num_bytes: int | None = None) -> None:
        """One more change; of a write only the first `num_bytes`, if so."""
        path = change.path.relative_to(self._source)
        match change.verb:
            case "create":
                self._files[path] = bytearray()
            case "write":
                file = self._files[path]
                content = change.content[:num_bytes]
                file.extend(bytes(max(0, change.at - len(file))))
                file[change.at : change.at + len(content)] = content
            case "truncate":
                file = self._files[path]
                del file[change.at :]
                file.extend(bytes(change.at - len(file)))
            case "rename":
                assert change.target is not None
                self._files[change.target.relative_to(self._source)] = self._files.pop(path)
            case "remove":
                del self._files[path]

    def torn(self, change: Change, num_bytes: int) -> Replay:
        """The same, after a part of one more write."""
        other = Replay(self._source)
        other._files = {path: bytearray(content) for path, content in self._files.items()}
        other.apply(change, num_bytes)
        return other

    def save(self, directory: Path) -> None:
        for path, content in self._files.items():
            target = directory / path
            os.makedirs(target.parent, exist_ok=True)
            target.write_bytes(content)
