"""Prefill in one engine and decode in another: roles, addresses and keys."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from pippin.amounts import parse_bytes
from pippin.errors import ConfigError

ADDRESS = re.compile(r"(tcp|tls)://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):(\d{1,5})")


@dataclass(frozen=True)
class PeerAddress:
    host: str
    port: int
    is_tls: bool

    @classmethod
    def parse(cls, option: str, text: str) -> PeerAddress:
        found = ADDRESS.fullmatch(text)
        if found is None or int(found[3]) > 65535:
            raise ConfigError(
                f"{option} is {text!r}: use tcp://127.0.0.1:PORT on this machine, or "
                "tls://HOST:PORT"
            )
        address = cls(found[2].strip("[]"), int(found[3]), found[1] == "tls")
        if not address.is_tls and not address.is_loopback:
            raise ConfigError(
                f"{option} is {text!r}: connections to other machines have to be encrypted; use "
                f"tls://{found[2]}:{found[3]}, which requires --peer-secret-file and certificates"
            )
        return address

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.is_tls else 'tcp'}://{host}:{self.port}"


@dataclass(frozen=True)
class PeersConfig:
    role: Literal["alone", "prefill", "decode", "both"] = "alone"
    """Whose prompts this engine computes. `prefill`: also those of decode engines, which connect to
    --peer-listen. `decode`: its own, but it asks the engines at --peer for long ones first, and
    computes them if they do not arrive. `both`: both. `alone`: its own."""

    peer: tuple[str, ...] = ()
    """Address of a prefill engine, its --peer-listen; may be given several times.
    tcp://127.0.0.1:PORT on this machine, tls://HOST:PORT on another one."""

    peer_listen: str | None = None
    """Address at which decode engines connect: tcp://127.0.0.1:PORT for this machine alone, or
    tls://HOST:PORT."""

    peer_secret_file: str | None = None
    """File with a secret that both ends prove to know. Required by tls:// addresses."""

    peer_cert: str | None = None
    """File with the TLS certificate for --peer-listen tls://…, in PEM format."""

    peer_key: str | None = None
    """File with the private key of --peer-cert, in PEM format."""

    peer_ca: str | None = None
    """File with the certificates that --peer tls://… is checked against, in PEM format. Default:
    those of the system."""

    peer_memory: str = "1GB"
    """Host memory for prompts that arrive from prefill engines, until they are loaded."""

    def __post_init__(self) -> None:
        parse_bytes("peer_memory", self.peer_memory)
        if self.listens != (self.peer_listen is not None):
            raise ConfigError(
                f"the role is {self.role}, and there is no address at which decode engines "
                "connect: add --peer-listen tcp://127.0.0.1:7000"
                if self.listens
                else f"peer_listen is {self.peer_listen}, and the role is {self.role}, which "
                "computes no prompts for others: add --role prefill, or remove --peer-listen"
            )
        if self.asks != bool(self.peer):
            raise ConfigError(
                f"the role is {self.role}, and no prefill engine is named: add --peer with its "
                "address, such as tcp://127.0.0.1:7000"
                if self.asks
                else f"peer is {', '.join(self.peer)}, and the role is {self.role}, which computes "
                "its prompts alone: add --role decode, or remove --peer"
            )
        if (self.peer_cert is None) != (self.peer_key is None):
            raise ConfigError("peer_cert and peer_key require each other: give both files")
        uses_tls = any(one.is_tls for one in (*self.addresses, *self.listen_addresses))
        if uses_tls and self.peer_secret_file is None:
            raise ConfigError("tls:// addresses require a secret: give --peer-secret-file")
        if any(one.is_tls for one in self.listen_addresses) and self.peer_cert is None:
            raise ConfigError(f"peer_listen is {self.peer_listen}: give --peer-cert and --peer-key")

    @property
    def listens(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def asks(self) -> bool:
        return self.role in ("decode", "both")

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """Of prefill engines."""
        return tuple(PeerAddress.parse("peer", text) for text in self.peer)

    @property
    def listen_addresses(self) -> tuple[PeerAddress, ...]:
        """One or none."""
        if self.peer_listen is None:
            return ()
        return (PeerAddress.parse("peer_listen", self.peer_listen),)
