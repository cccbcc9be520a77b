"""API keys: where they come from and how they are compared. Never shows one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from pippin.config import ServerConfig
from pippin.errors import LoadError


class ApiKeys:
    """Keys, known by their digests: comparing takes as long whichever is right, or none."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = list(dict.fromkeys(_digest(key.encode()) for key in keys))

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, owner: bytes) -> bool:
        """Whether one of them has this digest."""
        same = [hmac.compare_digest(owner, digest) for digest in self._digests]
        return any(same)

    def owner(self, key: str) -> bytes | None:
        """Whose key this is, from a header as starlette decodes it: its digest, if it is known."""
        given = _digest(key.strip().encode("latin-1"))
        return given if given in self else None


def known_keys(config: ServerConfig) -> ApiKeys:
    """All that requests may carry: each stands for an owner."""
    return ApiKeys((*config.api_key, *config.admin_key))


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request carries, as OpenAI's or as Anthropic's clients send it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def read_key_file(path: str) -> tuple[str, ...]:
    """One key a line; empty lines and those that begin with # are not."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read the file of keys {path}: {error}") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise LoadError(f"the file of keys {path} is empty: write one key per line")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
