"""API keys: read from files, compared in constant time, and which are admins. Shows none."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import Scope

from pippin.api.http.http_errors import AdminOnly
from pippin.config import ServerConfig
from pippin.errors import LoadError


class ApiKeys:
    """Keys, known by their digests: comparing takes equally long for every key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = list(dict.fromkeys(_digest(key.encode()) for key in keys))

    def __len__(self) -> int:
        return len(self._digests)

    def owners(self) -> list[bytes]:
        return list(self._digests)

    def __contains__(self, owner: bytes) -> bool:
        same = [hmac.compare_digest(owner, digest) for digest in self._digests]
        return any(same)

    def owner(self, key: str) -> bytes | None:
        """The digest of a known key, from a header as starlette decodes it."""
        given = _digest(key.strip().encode("latin-1"))
        return given if given in self else None


def owner_of(scope: Scope) -> bytes:
    """Whose request it is. Without keys all are one."""
    owner: bytes = scope["state"].get("owner", b"")
    return owner


def network_of(host: str) -> str:
    """A client's address, or the first 64 bits of one of IPv6, whose others it chooses itself."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def client_of(scope: Scope) -> bytes | str:
    """Who may have a share of what all clients use: the owner of a key, or else an address."""
    return owner_of(scope) or network_of((scope.get("client") or ("",))[0])


def known_keys(config: ServerConfig) -> ApiKeys:
    """API and admin keys: each is an owner."""
    return ApiKeys((*config.api_key, *config.admin_key))


def key_in(headers: Mapping[str, str]) -> str:
    """The key that a request carries, as OpenAI's or as Anthropic's clients send it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def read_key_file(path: str) -> tuple[str, ...]:
    """One key a line, except empty lines and those that begin with #."""
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


class Admins:
    """Without API keys every client is one; with keys, those that have an admin key.

    The only API key of a server without an admin key is one.
    """

    def __init__(self, config: ServerConfig) -> None:
        alone = () if len(known_keys(config)) > 1 else config.api_key
        self._keys = ApiKeys(config.admin_key or alone)
        self._open = not config.api_key

    def admit(self, scope: Scope) -> bool:
        return self._open or owner_of(scope) in self._keys

    def check(self, scope: Scope) -> None:
        if self.admit(scope):
            return
        if len(self._keys):
            raise AdminOnly("this needs the admin key of this server (--admin-key), not an API key")
        raise AdminOnly(
            "this needs an admin key, and this server has several API keys and no admin key: set "
            "one with --admin-key-file, --admin-key or PIPPIN_ADMIN_KEY, and send it as the key"
        )
