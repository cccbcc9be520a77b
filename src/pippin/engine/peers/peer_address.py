"""Addresses of peers, and which of them are accepted. Opens no connection."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from pippin.config import PeersConfig
from pippin.errors import ConfigError

LEAST_SECRET_BYTES = 16


@dataclass(frozen=True)
class PeerKeys:
    """What both ends need to trust each other."""

    secret: bytes  # b"": none
    server: ssl.SSLContext | None  # None: there is no certificate
    client: ssl.SSLContext


def read_keys(config: PeersConfig) -> PeerKeys:
    """Raises ConfigError for files that cannot be used."""
    secret = b"" if config.peer_secret_file is None else _read_secret(config.peer_secret_file)
    server = None
    if config.peer_cert is not None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            server.load_cert_chain(config.peer_cert, config.peer_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"peer_cert {config.peer_cert} cannot be used with peer_key {config.peer_key}: "
                f"{error}"
            ) from error
    try:
        client = ssl.create_default_context(cafile=config.peer_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"peer_ca {config.peer_ca} cannot be used: {error}") from error
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    return PeerKeys(secret, server, client)


def _read_secret(name: str) -> bytes:
    try:
        secret = Path(name).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"peer_secret_file {name} cannot be read: {error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"the secret in peer_secret_file {name} has {len(secret)} bytes: use at least "
            f"{LEAST_SECRET_BYTES}, such as the output of `openssl rand -hex 32`"
        )
    return secret
